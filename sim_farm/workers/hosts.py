"""Hosts make the workers of a farm, in this process or in others (`processes.Processes`). The farm calls them through
handles."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from sim_farm.client.episode_replay import Filmer, FilmRequest
from sim_farm.contract import TaskInfo, TaskSpec, UInt8
from sim_farm.registry import make_physics
from sim_farm.render_devices import RenderDevice
from sim_farm.shared_memory.slot_layout import WorkerMemory
from sim_farm.workers.physics_worker import PhysicsWorker
from sim_farm.workers.render_worker import RenderWorker
from sim_farm.workers.supervision import Replaced
from sim_farm.workers.worker import Worker, WorkerSetup


class WorkerHandle(Protocol):
    """A worker, wherever it is."""

    def ring(self) -> None:
        """Tell it that there is work."""
        ...

    def close(self, deadline_s: float) -> None:
        """Wait for its end, at most `deadline_s`, then end it."""
        ...


class Host(Protocol):
    """Hosts start workers, and replace those that are lost."""

    shared: bool
    """True if what the workers read and write must be in shared memory."""

    def prepare(self, processes: Sequence[tuple[TaskSpec, RenderDevice | None]]) -> None:
        """Start a process for each entry (`FarmSpec.processes`), as far as no idle one may serve. They import their
        simulators and describe their tasks meanwhile."""
        ...

    def describe(self, task: TaskSpec) -> TaskInfo:
        """The task's sizes, from a simulator."""
        ...

    def launch(self, setup: WorkerSetup, memory: WorkerMemory) -> WorkerHandle:
        """Start the worker. `memory` is what `setup.memory` leads to in another process."""
        ...

    def films(self, requests: Sequence[FilmRequest], processes: int) -> Iterator[list[UInt8]]:
        """The frames of each request, in order (`Replayer.film`), drawn by at most `processes` processes at once. No
        farm serves meanwhile. Raises `FarmError` with the message of what went wrong in a simulator."""
        ...

    def watch(self) -> None:
        """Replace workers that died or hang; call it while you wait for a farm. Raises `WorkerFailed` for one that is
        given up."""
        ...

    def take_replaced(self) -> list[Replaced]:
        """Workers that were lost and serve again, since the last call."""
        ...

    def close(self) -> None:
        """End whatever was started."""
        ...


class InProcess:
    """Workers in the caller's process: a ring runs them, in order. For debugging and for small things."""

    shared = False

    def __init__(self) -> None:
        self._described: dict[TaskSpec, TaskInfo] = {}

    def prepare(self, processes: Sequence[tuple[TaskSpec, RenderDevice | None]]) -> None:
        """Everything is imported here anyway."""

    def describe(self, task: TaskSpec) -> TaskInfo:
        if task not in self._described:
            with closing(make_physics(task)) as physics:
                self._described[task] = physics.info
        return self._described[task]

    def launch(self, setup: WorkerSetup, memory: WorkerMemory) -> WorkerHandle:
        worker = make_worker(setup, memory)
        worker.build()
        return _LocalHandle(worker)

    def films(self, requests: Sequence[FilmRequest], processes: int) -> Iterator[list[UInt8]]:
        with closing(Filmer()) as filmer:
            yield from map(filmer.film, requests)

    def watch(self) -> None:
        """No worker dies apart from this process."""

    def take_replaced(self) -> list[Replaced]:
        return []

    def close(self) -> None:
        """Workers end with their farm."""


@dataclass(frozen=True)
class _LocalHandle:
    worker: Worker

    def ring(self) -> None:
        self.worker.run_pending()

    def close(self, deadline_s: float) -> None:
        self.worker.close()


def make_worker(setup: WorkerSetup, memory: WorkerMemory | None = None) -> Worker:
    """The worker that the setup describes, not yet built."""
    return (PhysicsWorker if setup.is_physics else RenderWorker)(setup, memory)
