"""How much memory a worker's process may hold by itself. One that grows beyond it is replaced."""

from __future__ import annotations

from dataclasses import dataclass

from embodied.errors import UserError
from sim_farm.client.farm import WorkerFailed
from sim_farm.shared_memory.private_memory import private_bytes

GB = 1e9


class WorkerTooLarge(WorkerFailed):
    """A worker has grown beyond its budget, and is to be replaced."""


class BudgetTooSmall(UserError):
    """A new worker needs more than its budget."""


@dataclass
class Watched:
    """A process of this machine, as often as it is looked at."""

    settles: int
    """Looks at a new process in which it may still grow to what it needs: a learner's optimiser comes with the first
    update."""
    within: int = 0
    """Looks at which it had no more than it may."""


@dataclass(frozen=True)
class MemoryBudget:
    """Of each worker's process; None: as much as it takes."""

    gb: float | None

    def exceeded(self, who: str, pid: int, watched: Watched) -> WorkerTooLarge | BudgetTooSmall | None:
        """Look at a process; what is wrong with it, which is not raised here. None where nothing is, and where it has
        not begun (`pid` 0).

        A process that has settled within its budget, and now has more, has grown. Another one has as much as any new
        one would have.
        """
        if self.gb is None or not pid:
            return None
        has = private_bytes(pid) / GB
        if has <= self.gb:
            watched.within += 1
            return None
        said = f"{who} has {has:.2f} GB in memory by itself, and runtime.worker_gb is {self.gb:g}"
        if watched.within >= watched.settles:
            return WorkerTooLarge(said)
        return BudgetTooSmall(f"{said}; it is new, and another would have as much: set runtime.worker_gb higher")
