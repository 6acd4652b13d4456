"""Messages of vla-evaluation-harness (the package vla-eval) and what they say in the policy server's words.

Its client opens a websocket at the path `/vla-eval`, says `hello`, and then for each episode `episode_start`, an
`observation` before every env step, and `episode_end`. The server answers `hello`, and each observation with an
`action`: of a chunk one env step after the other, as that harness's own servers do, and anew with each episode.

A message is a msgpack map of `type`, `payload`, `seq` and `timestamp`; an array is a map of its bytes, dtype and shape,
a picture one of a PNG's or JPEG's bytes. Of an observation are read `images` (in their order those of the policy's
cameras), `states` (as `proprio`) and `task_description` (as the instruction).

Source of the format: vla_eval/protocol, connection.py and benchmarks/libero of vla-eval 0.8.0.
"""

from __future__ import annotations

import io
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import msgpack
import numpy as np
from PIL import Image

from embodied.errors import UserError, shown
from policies.remote.keys import CAMERA
from policies.remote.messages import NUMBERS

PATH = "/vla-eval"
VERSION = 1
"""Version of the protocol."""
MALFORMED = (ValueError, TypeError, KeyError, OSError, OverflowError, RecursionError)
"""Errors of msgpack, Pillow and NumPy for bytes that are not what they say."""
ARRAY, PICTURE = "__ndarray__", "__image__"
FORMATS = ("PNG", "JPEG")
LARGEST_SIDE = 8192
"""Pixels of a picture that is decoded."""

Type = Literal["hello", "observation", "action", "episode_start", "episode_end", "error"]


@dataclass(frozen=True)
class Message:
    type: str
    payload: Mapping[str, Any]
    seq: int
    """Number that the answer repeats."""
    data: bytes
    """The message as it came."""


def pack(type_: Type, payload: Mapping[str, Any], seq: int) -> bytes:
    """An answer as bytes."""
    message = {"type": type_, "payload": payload, "seq": seq, "timestamp": time.time()}
    packed = msgpack.packb(message, default=_packed)
    assert isinstance(packed, bytes)
    return packed


def unpack(data: str | bytes) -> Message:
    """The message that the bytes are. Raises `UserError` for bytes that are none."""
    if isinstance(data, str):
        raise UserError(f"a message of vla-eval is packed by msgpack, got the text {shown(data)}")
    try:
        found = msgpack.unpackb(data, object_hook=_unpacked)
    except (*MALFORMED, Image.DecompressionBombError, msgpack.UnpackException) as error:
        raise UserError(f"no message of vla-eval's protocol ({type(error).__name__}: {str(error)[:200]})") from error
    if not isinstance(found, Mapping) or not isinstance(found.get("payload"), Mapping):
        raise UserError(f"a message of vla-eval is a map of type, payload and seq, got {shown(found)}")
    if type(seq := found.get("seq", 0)) is not int:
        raise UserError(f"seq of a message is a whole number, got {shown(seq)}")
    return Message(str(found.get("type")), found["payload"], seq, data)


def observation(payload: Mapping[str, Any], keys: Mapping[str, str]) -> dict[str, Any]:
    """The observation with the policy server's keys, which are given by name. What a policy does not read may lack."""
    said: dict[str, Any] = {"proprio": payload.get("states"), "instruction": payload.get("task_description")}
    pictures = payload.get("images")
    if isinstance(pictures, Mapping):
        cameras = [name for name in keys if name.startswith(CAMERA)]
        said |= dict(zip(cameras, pictures.values(), strict=False))
    return {keys[name]: value for name, value in said.items() if value is not None}


def hello(kind: str, reads: Mapping[str, Any], metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Answer to a client's hello: `reads` is what its benchmark is to show, `metadata` the server's own."""
    return {
        "harness_version": "embodied",
        "protocol_version": VERSION,
        "model_server": kind,
        "capabilities": {},
        "observation_params": dict(reads),
        **metadata,
    }


def _packed(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return {ARRAY: True, "data": value.tobytes(), "dtype": value.dtype.str, "shape": list(value.shape)}
    raise TypeError(f"no place for {type(value).__name__}")


def _unpacked(found: dict[Any, Any]) -> Any:
    if PICTURE in found and found.get("format") != "raw":
        with Image.open(io.BytesIO(found["data"]), formats=FORMATS) as picture:
            if max(picture.size) > LARGEST_SIDE:
                raise UserError(f"a picture of {picture.size} pixels: a side has at most {LARGEST_SIDE}")
            return np.array(picture)
    if ARRAY not in found and PICTURE not in found:
        return found
    name, shape = found["dtype"], found["shape"]
    if not isinstance(name, str) or not NUMBERS.fullmatch(name):
        raise UserError(f"an array of the dtype {shown(name)}: arrays are of numbers")
    return np.frombuffer(found["data"], np.dtype(name)).reshape(shape)
