"""Delivery of trajectories to the learner's ranks, on this machine or another.

Ranks on the rollout worker's machine map the trajectory memory and are sent flat rows. Ranks on other machines are sent
the trajectories, and call for the frames of each micro-batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied import progress
from embodied.execution.assignment import Assignment
from embodied.execution.roles import LearnerRole, RolloutRole
from embodied.execution.session import Session
from embodied.runtime.handles import Caller, WorkerGroup
from embodied.trajectories.memory import TrajectoryMemory
from sim_farm.client.farm import Farm


@dataclass(frozen=True)
class TrajectoryDelivery:
    """Delivery of trajectories from the rollout worker to the learner."""

    rollout_worker: WorkerGroup[RolloutRole]
    learner: WorkerGroup[LearnerRole]
    far: tuple[bool, ...]
    """For each rank, true if it is on another machine than the rollout worker."""
    source: WorkerGroup[FrameSource] | None = None
    """Worker from which such ranks fetch frames; None: there are no frames to fetch."""

    @property
    def helpers(self) -> tuple[WorkerGroup[Any], ...]:
        """Workers that it has for itself."""
        return () if self.source is None else (self.source,)

    @property
    def path(self) -> str:
        """Path of the trajectories, in words: ranks that map the memory are sent flat rows, numbers and outcomes."""
        path = f"trajectory memory, rows {self.learner.path_from(self.rollout_worker)}"
        return path if self.source is None else f"{path}; frames fetched where they are evaluated"

    def use(self, memory: TrajectoryMemory) -> None:
        """Fetch frames from this memory."""
        if self.source is not None:
            self.source.call(FrameSource.use, memory)

    def send(self, source: WorkerGroup[Any], produce: Any, iteration: int) -> Any:
        """Start `LearnerRole.receive` on every rank, of what `produce` makes on the source; references."""
        if not any(self.far):
            return self.learner.pipe(LearnerRole.receive, source, produce, iteration)
        made = source.submit(produce)
        reader = None if self.source is None else FrameSourceReader(self.source.handles[0].caller())
        remote = self.rollout_worker.submit(RolloutRole.without_memory, made, reader)
        each = [(remote if away else made, iteration) for away in self.far]
        return self.learner.submit_scattered(LearnerRole.receive, each)


def start_delivery(
    session: Session,
    assignment: Assignment,
    rollout_worker: WorkerGroup[RolloutRole],
    learner: WorkerGroup[LearnerRole],
    farm: Farm,
) -> TrajectoryDelivery:
    """The delivery of trajectories, with a worker if frames have to leave the machine."""
    far = tuple(bool(place.node) for place in assignment.components[learner.name][: learner.size])
    source = None
    if any(far) and farm.frames is not None:
        source = session.runtime.start_called(f"frame source of {learner.name}", FrameSource, sum(far))
    return TrajectoryDelivery(rollout_worker, learner, far, source)


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
        frames: np.ndarray = self._memory.frames.frames[rows]
        return frames


@dataclass(frozen=True)
class FrameSourceReader:
    """`FrameReader` of a rank on another machine, through the frame source. Raises as `Caller` does."""

    source: Caller

    def read(self, rows: Tensor) -> Tensor:
        frames = self.source.call(FrameSource.frames, rows.numpy())
        progress.report()
        return torch.tensor(frames)  # a copy: what has arrived cannot be written, and fills Ray's store
