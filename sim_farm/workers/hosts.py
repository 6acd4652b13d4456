"""Hosts make the workers of a farm, in this process or in others. The farm calls them through handles."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sim_farm.contract import TaskInfo, TaskSpec
from sim_farm.registry import make_physics
from sim_farm.shared_memory.slot_layout import WorkerMemory
from sim_farm.workers.physics_worker import PhysicsWorker
from sim_farm.workers.render_worker import RenderWorker
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
    """Hosts start workers: in this process, or in Ray actors."""

    shared: bool
    """True if what the workers read and write must be in shared memory."""

    def describe(self, task: TaskSpec) -> TaskInfo:
        """The task's sizes, from a simulator."""
        ...

    def launch(self, setup: WorkerSetup, memory: WorkerMemory) -> WorkerHandle:
        """Start the worker. `memory` is what `setup.memory` leads to in another process."""
        ...


class InProcess:
    """Workers in the caller's process: a ring runs them, in order. For debugging and for small things."""

    shared = False

    def describe(self, task: TaskSpec) -> TaskInfo:
        physics = make_physics(task)
        try:
            return physics.info
        finally:
            physics.close()

    def launch(self, setup: WorkerSetup, memory: WorkerMemory) -> WorkerHandle:
        worker = make_worker(setup, memory)
        worker.build()
        return _LocalHandle(worker)


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
