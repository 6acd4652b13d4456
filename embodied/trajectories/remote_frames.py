"""Frames of a trajectory memory on another machine: each is fetched when it is needed first, once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from embodied.runtime.remote import CALL_BYTES, slices


class FrameReader(Protocol):
    """Reads frames of a memory on another machine."""

    def read(self, rows: Tensor) -> Tensor:
        """uint8 [n, cameras, H, W, 3] at the flat rows int64 [n], in memory of the caller's own."""
        ...


@dataclass(frozen=True)
class FrameShape:
    """Cameras and sizes of the frames of one observation."""

    cameras: tuple[str, ...]
    """The policy's names, in the order of the frames."""
    picture: tuple[int, ...]
    """(H, W, 3) of each."""

    @property
    def nbytes(self) -> int:
        return len(self.cameras) * torch.Size(self.picture).numel()


class FarFrames:
    """Frames of M decisions by their flat rows, int64 [M]. Fetched frames are kept as long as this object is."""

    def __init__(self, reader: FrameReader, shape: FrameShape, rows: Tensor) -> None:
        self._reader, self._shape, self._rows = reader, shape, rows
        self._kept: dict[int, Tensor] = {}
        """[cameras, H, W, 3] by the flat row."""

    @classmethod
    def joined(cls, parts: Sequence[FarFrames]) -> FarFrames:
        """The frames of all parts of one iteration, one after the other, with those that each has fetched."""
        whole = cls(parts[0]._reader, parts[0]._shape, torch.cat([part._rows for part in parts]))
        for part in parts:
            whole._kept |= part._kept
        return whole

    def at(self, index: Tensor) -> dict[str, Tensor]:
        """uint8 [n, H, W, 3] of each camera, of the decisions `index` (int64 [n])."""
        rows = self._rows[index].tolist()
        self._fetch([row for row in dict.fromkeys(rows) if row not in self._kept])
        found = {}
        for number, name in enumerate(self._shape.cameras):
            found[name] = torch.empty(len(rows), *self._shape.picture, dtype=torch.uint8)
            for place, row in enumerate(rows):
                found[name][place] = self._kept[row][number]
        return found

    def _fetch(self, rows: Sequence[int]) -> None:
        """In one call, or in several where one would be too large."""
        for part in slices(len(rows), self._shape.nbytes, CALL_BYTES):
            piece = rows[part]
            self._kept.update(zip(piece, self._reader.read(torch.tensor(piece)), strict=True))
