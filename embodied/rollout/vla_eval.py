"""Messages of vla-evaluation-harness (the package vla-eval), converted to and from the policy server's.

Its client opens a websocket at the path `/vla-eval`, says `hello`, and then for each episode `episode_start`, an
`observation` before every env step, and `episode_end`. The server answers `hello`, and each observation with an
`action`: of a chunk one env step after the other, as that harness's own servers do, and anew with each episode.

A message is a msgpack map of `type`, `payload`, `seq` and `timestamp`; an array is a map of its bytes, dtype and shape,
a picture is a map of a PNG's or JPEG's bytes. Three entries of an observation are read: `images` (in the order of the
policy's cameras), `states` (as `proprio`) and `task_description` (as the instruction).

Its hello names the benchmark. Those of LIBERO's robot show pictures `rotated`, and take the gripper as the simulator
does: both are converted from what a policy of LIBERO was trained under (`conversion`).

Source of the format: vla_eval/protocol, connection.py, specs.py and benchmarks/libero of vla-eval 0.8.0.
"""

from __future__ import annotations

import io
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import msgpack
import numpy as np
from PIL import Image

from embodied.config.schema import Config
from embodied.errors import UserError, shown
from policies.remote.keys import CAMERA
from policies.remote.messages import NUMBERS
from sim_farm.catalogue import CATALOGUE
from sim_farm.contract import Float32, Gripper
from sim_farm.conventions import turns, with_own_gripper

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


# --- a client's conventions, beside those of the policy


LIBERO = re.compile(r"vla_eval\.benchmarks\.(libero|libero_plus|libero_pro|libero_mem|robocerebra)\.")
"""Benchmarks of LIBERO's robot, by the module that a client's hello names."""
OWN = "vla_eval.benchmarks."
"""Begins the names of all benchmarks that are vla-eval's own."""
PICTURES = {"agentview": "agentview", "robot0_eye_in_hand": "wrist"}
"""Names of the pictures of those benchmarks, by LIBERO's cameras."""
ACTION_SPEC = {
    "position": {"name": "position", "dims": 3, "format": "delta_xyz", "range": [-1, 1]},
    "rotation": {"name": "rotation", "dims": 3, "format": "axis_angle", "range": [-3.15, 3.15]},
    "gripper": {"name": "gripper", "dims": 1, "format": "binary_close_positive", "range": [-1, 1]},
}
"""Format of the actions of LIBERO's policies, in the terms by which vla-eval compares a server with a benchmark."""
SEEN = {"name": "image", "dims": 0, "format": "rgb_hwc_uint8"}
STATE = {"name": "state", "dims": 8, "format": "eef_pos3_axisangle3_gripper2"}


@dataclass(frozen=True)
class Conversion:
    """From the conventions of a client's benchmark to those of the policy's training, and back."""

    turn: tuple[int, int] = (1, 1)
    """Steps over the rows and columns of a client's pictures that give them as the policy sees them."""
    gripper: Gripper = "simulator"
    """Convention of the policy's actions; the client takes the simulator's own."""
    pictures: Mapping[str, str] = field(default_factory=dict)
    """Names of the client's pictures by the policy's cameras; empty: they come in the cameras' order."""
    shows: Mapping[str, Any] = field(default_factory=dict)
    """Observations that the benchmark is asked to send."""
    specs: Mapping[str, Any] = field(default_factory=dict)
    """Entries of the answer to hello by which the client compares both."""
    note: str = ""
    """Sentence about what is not known of the client."""

    def executed(self, actions: Float32) -> Float32:
        """The policy's actions [C, A] as the client takes them."""
        return with_own_gripper(actions, self.gripper)


def conversion(benchmark: Any, config: Config, cameras: Sequence[str]) -> Conversion:
    """The conversion between a client of the `benchmark` (None: it names none, and is taken to be of the policy's
    simulator) and a policy that was trained so and sees these cameras. Raises `UserError` where there is none."""
    simulator, reads = config.env.task.partition("/")[0].rpartition(":")[2], config.policy.reads
    named = benchmark if isinstance(benchmark, str) else ""
    is_libero = LIBERO.match(named) is not None
    if (is_libero and simulator != "libero" and simulator in CATALOGUE) or (
        simulator == "libero" and named.startswith(OWN) and not is_libero
    ):
        raise UserError(
            f"the policy was trained in {config.env.task}, and the client evaluates {shown(named)}, whose robot, "
            "gripper and pictures are others: serve a policy of that robot"
        )
    hidden = [name for name in ("state", "episode") if name in reads]
    if hidden:
        raise UserError(
            f"the policy reads {hidden[0]}, which no client of vla-eval shows: serve one without (policy.reads)"
        )
    shows: dict[str, Any] = {"send_wrist_image": len(cameras) > 1, "send_state": "proprio" in reads}
    unseen = [camera for camera in cameras if camera not in PICTURES]
    in_order = f"its pictures are taken for those of {', '.join(cameras)}, in their order" if cameras else ""
    if simulator != "libero":
        orientation = f" and {config.env.orientation}; " if cameras else ""
        client = f"a client that evaluates {named}" if named else "a client that names no benchmark"
        note = (
            f"nothing is known here of the conventions of {client}: "
            f"{in_order}{orientation}actions are answered as {simulator} takes them"
        )
        return Conversion(gripper=config.env.gripper, shows=shows, note=note)
    shows["send_wrist_image"] |= "robot0_eye_in_hand" in cameras
    if shows["send_state"]:
        shows["quat_no_antipodal"] = True  # robosuite's axis-angle, as LIBERO's backend here has it
    theirs, ours = turns("rotated", True), turns(config.env.orientation, True)
    seen = {
        "agentview": SEEN,
        **({"wrist": SEEN} if shows["send_wrist_image"] else {}),
        **({"state": STATE} if shows["send_state"] else {}),
    }
    return Conversion(
        turn=(theirs[0] * ours[0], theirs[1] * ours[1]),
        gripper=config.env.gripper,
        pictures={} if unseen else {camera: PICTURES[camera] for camera in cameras},
        shows=shows,
        specs={"action_spec": ACTION_SPEC, "observation_spec": seen},
        note=f"vla-eval's LIBERO does not show {', '.join(unseen)}: {in_order}" if unseen else "",
    )


def observation(payload: Mapping[str, Any], keys: Mapping[str, str], convert: Conversion) -> dict[str, Any]:
    """The observation with the policy server's keys, which are given by name. What a policy does not read may lack."""
    said: dict[str, Any] = {"proprio": payload.get("states"), "instruction": payload.get("task_description")}
    pictures = payload.get("images")
    if isinstance(pictures, Mapping):
        cameras = [name for name in keys if name.startswith(CAMERA)]
        if convert.pictures and PICTURES["agentview"] in pictures:
            named = [convert.pictures.get(name.removeprefix(CAMERA)) for name in cameras]
            said |= {camera: pictures.get(name) for camera, name in zip(cameras, named, strict=True)}
        else:
            said |= dict(zip(cameras, pictures.values(), strict=False))
    return {keys[name]: value for name, value in said.items() if value is not None}


def hello(kind: str, convert: Conversion, metadata: Mapping[str, Any]) -> dict[str, Any]:
    """Answer to a client's hello; `metadata` is the server's own."""
    return {
        "harness_version": "embodied",
        "protocol_version": VERSION,
        "model_server": kind,
        "capabilities": {},
        "observation_params": dict(convert.shows),
        **convert.specs,
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
