"""A run that unlearns what it had learned says so, with what usually explains it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from embodied.statistics import wilson

PATIENCE = 5
"""Iterations in a row for which success must be below what it was."""
EXPLAINS = ("approx_kl", "clip_fraction", "entropy", "grad_norm", "explained_variance")
"""Metrics of the learner that are told beside it."""


@dataclass
class CollapseWatch:
    """Compares the success of the last training episodes with the best that it has been.

    It has fallen where the 95% Wilson intervals of the two do not meet.
    """

    episodes: int
    """That a rate is over."""
    best: float = 0.0
    best_iteration: int = 0
    _below: int = 0
    _said: bool = field(default=False, repr=False)

    def see(self, row: Mapping[str, Any]) -> str | None:
        """Look at an iteration's row of metrics. What to say, once for each fall."""
        recent = row["env/success_recent"]
        if recent is None or recent != recent:
            return None
        if recent >= self.best:
            self.best, self.best_iteration = recent, int(row["iteration"])
            self._below, self._said = 0, False
            return None
        low, high = self._interval(recent)
        best_low, best_high = self._interval(self.best)
        self._below = self._below + 1 if high < best_low else 0
        if self._below < PATIENCE or self._said:
            return None
        self._said = True
        told = {name: row.get(f"learner/{name}") for name in EXPLAINS}
        beside = ", ".join(f"{name} {value:.3g}" for name, value in told.items() if value is not None)
        return (
            f"success has fallen: {recent:.0%} ({low:.0%} to {high:.0%}) of the last {self.episodes} episodes, for "
            f"{PATIENCE} iterations, and {self.best:.0%} ({best_low:.0%} to {best_high:.0%}) at iteration "
            f"{self.best_iteration}; {beside}. A smaller optim.policy_lr or optim.target_kl is the usual way on, "
            "from a checkpoint of that time (--policy.init RUN/checkpoints/NNNNNN)"
        )

    def _interval(self, rate: float) -> tuple[float, float]:
        return wilson(round(rate * self.episodes), self.episodes)
