"""The frame memory of a farm: frames are drawn where they will be read, and a row that is not drawn yet is recognised.

Row r holds the frames of one observation, one picture of each camera. The client chooses the row of each observation
(`Farm.submit(..., rows=...)`), so the memory may be a trajectory [T, B] that a learner maps too:

    farm.frames.address  -->  FrameMemory.attach(address).frames[row]
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim_farm.contract import UInt8
from sim_farm.shared_memory.memory import MAGIC, Block, Field, size_of

Int = npt.NDArray[np.int64]

MAGIC_ROWS = (0, -1)
"""Pixel rows of a frame that are stamped before it is drawn and checked after; see `stamp`."""


@dataclass(frozen=True)
class FrameAddress:
    """Address of a frame memory for another process of this machine: `FrameMemory.attach`."""

    rows: int
    cameras: int
    size: int
    memory: str


class FrameMemory:
    """`frames` uint8 [R, cameras, H, W, 3] and `frames_of` int64 [R, 2]: episode and env step that a row shows.

    Every byte has the magic value, and every `frames_of` is -1, until a row is drawn.
    """

    def __init__(self, rows: int, cameras: int, size: int, block: Block) -> None:
        self.rows, self.cameras, self.size = rows, cameras, size
        self._block = block
        self.copies = 0
        """Rows that `copy` has copied out of the memory so far, all cameras of a row counted as one."""

    @classmethod
    def create(cls, rows: int, cameras: int, size: int, shared: bool) -> FrameMemory:
        """Create a frame memory, either shared or private to this process. Raises `FarmError` if it does not fit."""
        what = f"the frame memory, {rows:,} rows of {cameras} x {size} x {size} pixels,"
        return cls(rows, cameras, size, Block.create(_fields(rows, cameras, size), shared, what))

    @classmethod
    def attach(cls, address: FrameAddress) -> FrameMemory:
        """The memory that another process created."""
        rows, cameras, size = address.rows, address.cameras, address.size
        return cls(rows, cameras, size, Block.attach(_fields(rows, cameras, size), address.memory))

    @property
    def address(self) -> FrameAddress:
        assert self._block.name is not None, "a frame memory of this process alone has no address"
        return FrameAddress(self.rows, self.cameras, self.size, self._block.name)

    @property
    def frames(self) -> UInt8:
        return self._block.arrays["frames"]

    @property
    def frames_of(self) -> Int:
        return self._block.arrays["frames_of"]

    def view(self, rows: Int) -> UInt8 | None:
        """The frames uint8 [K, cameras, H, W, 3] of `rows` [K] where they lie; None unless each row follows the one
        before."""
        if not len(rows):
            return self.frames[:0]
        if (rows[1:] - rows[:-1] == 1).all():
            return self.frames[rows[0] : rows[0] + len(rows)]
        return None

    def copy(self, rows: Int) -> UInt8:
        """A copy of the frames uint8 [N, cameras, H, W, 3] of `rows` [N], or [B, K, cameras, H, W, 3] of [B, K]; it is
        counted."""
        self.copies += rows.size
        return self.frames[rows]

    def close(self) -> None:
        """Forget the memory; the creator also removes its name, and it goes with its last user."""
        self._block.close()


def nbytes_of(rows: int, cameras: int, size: int) -> int:
    """Size of a frame memory of `rows` rows, in bytes."""
    return size_of(_fields(rows, cameras, size))


def _fields(rows: int, cameras: int, size: int) -> dict[str, Field]:
    return {
        "frames": Field((rows, cameras, size, size, 3), "uint8"),
        "frames_of": Field((rows, 2), "int64", -1),
    }


def stamp(frames: UInt8) -> None:
    """Mark frames [cameras, H, W, 3] as not drawn: their first and last pixel rows take the magic value."""
    for row in MAGIC_ROWS:
        frames[:, row] = MAGIC


def is_stamped(frames: UInt8) -> bool:
    """True if any of the frames [..., H, W, 3] still carries the stamp of `stamp`, or the memory's first filling."""
    return any(bool((frames[..., row, :, :] == MAGIC).all((-2, -1)).any()) for row in MAGIC_ROWS)
