"""Handing trajectories over: the ranks of the decider's machine map the rows, those of others are sent them.

A rank on another machine is sent, once per part, all of the rows but their frames, and fetches the frames of those that
it evaluates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from embodied.data.trajectory_memory import TrajectoryMemory
from embodied.execution.assignment import Assignment
from embodied.execution.session import Session
from embodied.runtime.groups import WorkerGroup
from embodied.workers.frame_source import CalledSource, FrameSource
from embodied.workers.roles import Decider, Trainer
from sim_farm.farm import Farm


@dataclass(frozen=True)
class RowDelivery:
    """From a decider to a trainer."""

    decider: WorkerGroup[Decider]
    trainer: WorkerGroup[Trainer]
    far: tuple[bool, ...]
    """Of each rank, whether it is on another machine than the decider."""
    source: WorkerGroup[FrameSource] | None = None
    """By which such ranks fetch frames, where there are any."""

    @property
    def helpers(self) -> tuple[WorkerGroup[Any], ...]:
        """Workers that it has for itself."""
        return () if self.source is None else (self.source,)

    @property
    def path(self) -> str:
        """How trajectories travel, in words: only the flat rows of decisions are sent to who maps the memory."""
        path = f"trajectory memory, rows {self.trainer.path_from(self.decider)}"
        return path if self.source is None else f"{path}; frames fetched where they are evaluated"

    def use(self, memory: TrajectoryMemory) -> None:
        """Fetch frames from this memory."""
        if self.source is not None:
            self.source.call(FrameSource.use, memory)

    def send(self, source: WorkerGroup[Any], produce: Any, iteration: int) -> Any:
        """Start `Trainer.collect` on every rank, of what `produce` makes on the source; references."""
        if not any(self.far):
            return self.trainer.pipe(Trainer.collect, source, produce, iteration)
        made = source.submit(produce)
        reader = None if self.source is None else CalledSource(self.source.handles[0].caller())
        carried = self.decider.submit(Decider.carried, made, reader)
        each = [(carried if away else made, iteration) for away in self.far]
        return self.trainer.submit_scattered(Trainer.collect, each)


def place_delivery(
    session: Session,
    assignment: Assignment,
    decider: WorkerGroup[Decider],
    trainer: WorkerGroup[Trainer],
    farm: Farm,
) -> RowDelivery:
    """The way of trajectories, with a worker for it where frames have to leave the machine."""
    far = tuple(bool(place.node) for place in assignment.components[trainer.name][: trainer.size])
    source = None
    if any(far) and farm.frames is not None:
        source = session.runtime.place_called(f"frame source of {trainer.name}", FrameSource, sum(far))
    return RowDelivery(decider, trainer, far, source)
