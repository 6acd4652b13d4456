"""How much memory a worker's process may hold by itself. One that grows beyond it is replaced."""

from __future__ import annotations

from dataclasses import dataclass

from embodied.errors import UserError
from sim_farm.farm import WorkerFailed
from sim_farm.private_memory import private_bytes

FRESH_S = 60.0
"""A process that has too much so soon after its start is not one that grows: another one would have as much."""
GB = 1e9


class WorkerTooLarge(WorkerFailed):
    """A worker has grown beyond its budget, and is to be replaced."""


class BudgetTooSmall(UserError):
    """A new worker needs more than its budget."""


@dataclass(frozen=True)
class MemoryBudget:
    """Of each worker's process; None: as much as it takes."""

    gb: float | None

    def exceeded(self, who: str, pid: int, age_s: float) -> WorkerTooLarge | BudgetTooSmall | None:
        """What is wrong with a process of this machine that has served for `age_s` seconds; not raised here. None where
        nothing is, and where the process has not begun (`pid` 0)."""
        if self.gb is None or not pid:
            return None
        has = private_bytes(pid) / GB
        if has <= self.gb:
            return None
        said = f"{who} has {has:.2f} GB in memory by itself, and runtime.worker_gb is {self.gb:g}"
        if age_s > FRESH_S:
            return WorkerTooLarge(said)
        return BudgetTooSmall(f"{said}; it is new, and another would have as much: set runtime.worker_gb higher")
