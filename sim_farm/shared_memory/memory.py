"""Named arrays in one block of shared memory, or in ordinary memory when everything is in one process.

The creator owns the block and removes it; if the creator is killed, Python's resource tracker does. Others
attach by name. Every byte is reserved when the block is made: else tmpfs would kill the process that first writes to a
page that does not fit.
"""

from __future__ import annotations

import mmap
import os
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from multiprocessing import resource_tracker
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sim_farm.contract import FarmError

FOLDER = Path("/dev/shm")  # noqa: S108 - files in it are made new, for this user alone
PREFIX = "embodied-"
MAGIC = 0xA5
"""Every byte of a fresh block. A frame that was not drawn shows as uniform grey-violet (165, 165, 165)."""
_ALIGN = 64


@dataclass(frozen=True)
class Field:
    """One array of the block."""

    shape: tuple[int, ...]
    dtype: str
    fill: float | None = None
    """Initial value; None leaves the magic bytes."""

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(self.dtype).itemsize


class Block:
    """The arrays of `fields`, as attributes of `arrays`, in one block called `name` (None: process memory)."""

    def __init__(self, fields: Mapping[str, Field], name: str | None, buffer: Any, owner: bool) -> None:
        self.name = name
        self.fields = dict(fields)
        self._buffer = buffer
        self._owner = owner
        self.arrays: dict[str, npt.NDArray[Any]] = {}
        offset = 0
        for key, field in fields.items():
            count = int(np.prod(field.shape, dtype=np.int64))
            array = np.frombuffer(buffer, field.dtype, count, offset).reshape(field.shape)
            self.arrays[key] = array
            offset += -(-field.nbytes // _ALIGN) * _ALIGN

    @classmethod
    def create(cls, fields: Mapping[str, Field], shared: bool, what: str = "a block", name: str | None = None) -> Block:
        """A new block, filled; `name`: one that no block has.

        Raises `FarmError`, which names `what` needs it, if it does not fit into /dev/shm.
        """
        size = size_of(fields)
        if shared:
            name = name or f"{PREFIX}{uuid.uuid4().hex[:12]}"
            require({what: size})
            block = cls(fields, name, _create(name, size, what), owner=True)
        else:
            block = cls(fields, None, bytearray(size), owner=True)
        for key, field in fields.items():
            if field.fill is None:
                block.arrays[key].view(np.uint8)[...] = MAGIC
            else:
                block.arrays[key][...] = field.fill
        return block

    @classmethod
    def attach(cls, fields: Mapping[str, Field], name: str, private: bool = False) -> Block:
        """The block that another process created with the same fields; `private`: other processes do not see
        this one's writes."""
        descriptor = os.open(FOLDER / name, os.O_RDWR)
        access = mmap.ACCESS_COPY if private else mmap.ACCESS_DEFAULT
        try:
            return cls(fields, name, mmap.mmap(descriptor, size_of(fields), access=access), owner=False)
        finally:
            os.close(descriptor)

    @property
    def whole(self) -> npt.NDArray[np.uint8]:
        """Every byte of it, in the order of the fields."""
        return np.frombuffer(self._buffer, np.uint8)

    def close(self) -> None:
        """Forget the arrays; the owner also removes the block's name, and the memory goes with its last user."""
        self.arrays = {}
        if self._owner and self.name is not None:
            (FOLDER / self.name).unlink(missing_ok=True)
            resource_tracker.unregister(f"/{self.name}", "shared_memory")
            self._owner = False


def adopt(name: str) -> None:
    """Remove the block of that name when this process ends, in whatever way, even if another process makes the block;
    until `remove`."""
    resource_tracker.register(f"/{name}", "shared_memory")


def remove(name: str) -> None:
    """Remove the block of an adopted name, if there is one."""
    (FOLDER / name).unlink(missing_ok=True)
    resource_tracker.unregister(f"/{name}", "shared_memory")


def size_of(fields: Mapping[str, Field]) -> int:
    """Bytes of a block of these fields."""
    return max(_ALIGN, sum(-(-field.nbytes // _ALIGN) * _ALIGN for field in fields.values()))


def require(needs: Mapping[str, int]) -> None:
    """Raise `FarmError` if the bytes that are needed for each purpose do not fit into /dev/shm together."""
    if sum(needs.values()) > _free():
        raise _full(needs)


def _create(name: str, size: int, what: str) -> mmap.mmap:
    """A new file of shared memory, every byte of it reserved."""
    path = FOLDER / name
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        resource_tracker.register(f"/{name}", "shared_memory")
        try:
            os.posix_fallocate(descriptor, 0, size)
        except OSError as error:
            path.unlink()
            resource_tracker.unregister(f"/{name}", "shared_memory")
            raise _full({what: size}) from error
        return mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)


def _free() -> int:
    return os.statvfs(FOLDER).f_bavail * os.statvfs(FOLDER).f_frsize


def _full(needs: Mapping[str, int]) -> FarmError:
    parts = " and ".join(f"{what} needs {size / 2**20:,.1f} MiB" for what, size in needs.items())
    return FarmError(
        f"{parts} of shared memory and {FOLDER} has {_free() / 2**20:,.1f} MiB free: "
        "use fewer environments or smaller frames, or enlarge it "
        f"(mount -o remount,size=8g {FOLDER}; in a container: docker run --shm-size=8g)"
    )
