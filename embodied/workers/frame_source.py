"""Frames for ranks on other machines than the trajectory memory: a worker at home, which they call.

    learner rank --flat rows--> frame source        of a micro-batch, those that it has not fetched yet
    learner rank <---frames---- frame source        uint8, read out of the trajectory memory

It reads what ranks at home would: rows stay as they are until the update is over.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from embodied import progress
from embodied.data.trajectory_memory import TrajectoryMemory
from embodied.workers.caller import Caller


class FrameSource:
    """Maps the trajectory memory. Its callers are served side by side."""

    def __init__(self) -> None:
        self._memory: TrajectoryMemory | None = None

    def use(self, memory: TrajectoryMemory) -> None:
        """Read this memory from now on."""
        self._memory = memory

    def frames(self, rows: np.ndarray) -> np.ndarray:
        """A copy of the frames uint8 [n, cameras, H, W, 3] at flat rows [n]."""
        assert self._memory is not None and self._memory.frames is not None, "it has no frames"
        found: np.ndarray = self._memory.frames.frames[rows]
        return found


@dataclass(frozen=True)
class CalledSource:
    """`FrameReader` of whoever is sent it, through the frame source. Raises what `Caller` raises."""

    source: Caller

    def read(self, rows: Tensor) -> Tensor:
        found = self.source.call(FrameSource.frames, rows.numpy())
        progress.report()
        return torch.tensor(found)  # a copy: what has arrived cannot be written, and fills Ray's store
