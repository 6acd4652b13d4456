"""Where a farm's workers live. The farm speaks to handles; a host makes the workers behind them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from sim_farm.contract import TaskInfo, TaskSpec
from sim_farm.memory import Block
from sim_farm.registry import make_physics
from sim_farm.workers import PhysicsWorker, RenderWorker, Worker, WorkerSetup


class WorkerHandle(Protocol):
    """A worker, wherever it is."""

    def ring(self) -> None:
        """Tell it that there is work."""
        ...

    def close(self, deadline_s: float) -> None:
        """Wait for its end, at most `deadline_s`, then end it."""
        ...


class Host(Protocol):
    """Where workers live: in this process, or in Ray actors."""

    shared: bool
    """Whether the slots must be in shared memory."""

    def describe(self, task: TaskSpec) -> TaskInfo:
        """The task's sizes, from a simulator."""
        ...

    def launch(self, setup: WorkerSetup, block: Block) -> WorkerHandle: ...


class InProcess:
    """Workers in the caller's process: a ring runs them, in order. For debugging and for small things."""

    shared = False

    def describe(self, task: TaskSpec) -> TaskInfo:
        physics = make_physics(task)
        try:
            return physics.info
        finally:
            physics.close()

    def launch(self, setup: WorkerSetup, block: Block) -> WorkerHandle:
        worker = make_worker(setup, block)
        worker.build()
        return _LocalHandle(worker)


@dataclass(frozen=True)
class _LocalHandle:
    worker: Worker

    def ring(self) -> None:
        self.worker.run_pending()

    def close(self, deadline_s: float) -> None:
        self.worker.close()


def make_worker(setup: WorkerSetup, block: Block | None = None) -> Worker:
    """The worker that the setup describes, not yet built."""
    return (PhysicsWorker if setup.is_physics else RenderWorker)(setup, block)
