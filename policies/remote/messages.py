"""Messages of openpi's policy servers: msgpack, in which an array is a map of its bytes, dtype and shape.

A client opens a websocket. The server sends a map, its metadata. The client then sends a map for each observation, and
the server answers with a map that has `actions`, or with a text where something went wrong.

What is read is data: numbers, texts, lists, maps and arrays of numbers; one of texts is read as texts. No pickle, no
array of objects or structures.

Source of the format: packages/openpi-client/src/openpi_client/msgpack_numpy.py of Physical-Intelligence/openpi.
"""

from __future__ import annotations

import math
import re
from typing import Any

import msgpack
import numpy as np

from policies.errors import PolicyError, shown

ARRAY, SCALAR = b"__ndarray__", b"__npgeneric__"
NUMBERS = re.compile(r"[<>|=]?(b1|[iu][1248]|f[248])")
"""Dtypes that are read: truth values, whole numbers, real numbers."""
TEXTS = re.compile(r"[<>=|]?U[1-9][0-9]{0,5}")
"""Dtypes of texts, as NumPy has an instruction."""
LARGEST = 2**28
"""Bytes of the largest message: 256 MiB, some hundred observations of two large pictures."""


def pack(message: Any) -> bytes:
    """The message as bytes. Raises `PolicyError` for what the format has no place for."""
    try:
        packed = msgpack.packb(message, default=_packed)
        assert isinstance(packed, bytes)
        return packed
    except (TypeError, ValueError, OverflowError) as error:
        raise PolicyError(f"a message to or from a policy server cannot be packed: {error}") from error


def unpack(data: bytes) -> Any:
    """The message that the bytes are; arrays can be read, not written. Raises `PolicyError` for bytes that are none."""
    try:
        return msgpack.unpackb(data, object_hook=_unpacked, strict_map_key=False)
    except PolicyError:
        raise
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, msgpack.UnpackException) as error:
        raise PolicyError(f"no message of openpi's protocol ({type(error).__name__}: {str(error)[:200]})") from error


def _packed(value: Any) -> Any:
    if isinstance(value, (np.ndarray, np.generic)) and NUMBERS.fullmatch(value.dtype.str):
        if isinstance(value, np.generic):
            return {SCALAR: True, b"data": value.item(), b"dtype": value.dtype.str}
        return {ARRAY: True, b"data": value.tobytes(), b"dtype": value.dtype.str, b"shape": value.shape}
    raise TypeError(f"no place for {type(value).__name__} {shown(getattr(value, 'dtype', value))}")


def _unpacked(found: dict[Any, Any]) -> Any:
    if ARRAY not in found and SCALAR not in found:
        return found
    name, data = found[b"dtype"], found[b"data"]
    if not isinstance(name, str) or not (NUMBERS.fullmatch(name) or TEXTS.fullmatch(name)):
        raise PolicyError(f"an array of the dtype {shown(name)}: arrays are of numbers")
    dtype = np.dtype(name)
    if SCALAR in found:
        return dtype.type(data)
    shape = found[b"shape"]
    sizes = isinstance(shape, list) and all(type(size) is int and size >= 0 for size in shape)
    if not sizes or not isinstance(data, bytes) or math.prod(shape) * dtype.itemsize != len(data):
        raise PolicyError(f"an array whose bytes are not those of the shape {shown(shape)} and dtype {name}")
    array = np.frombuffer(data, dtype).reshape(shape)
    if dtype.kind != "U":
        return array
    for text in array.flat:
        str(text).encode()  # a surrogate is no text
    return array.tolist()
