"""Callbacks: functions of a user's own that see each iteration of a training run.

def stop_when_slow(iteration: IterationEnd) -> None:
    if iteration.row["farm/env_steps_per_s"] < 10:
        iteration.stop("too slow")

embodied.train("pushcube", callbacks=[stop_when_slow])
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from embodied.config.schema import Config


@dataclass
class IterationEnd:
    """An iteration that has just ended, before its metrics are recorded."""

    config: Config
    run_dir: Path
    iteration: int
    """Number of iterations that are complete, this one included."""
    env_steps: int
    row: dict[str, float]
    """The iteration's metrics by name (docs/metrics.md)."""
    stopping: str | None = field(default=None, init=False)
    """Reason of `stop`; None: the run continues."""
    saving: bool = field(default=False, init=False)
    """True after `save`."""

    def log(self, name: str, value: float) -> None:
        """Record your own metric, in metrics.jsonl and in every tracker of the run. Raises `ValueError` for the
        name of an existing metric."""
        if name in self.row:
            raise ValueError(f"the metric {name} is there already: choose another name, my/{name} for example")
        self.row[name] = float(value)

    def stop(self, reason: str) -> None:
        """End the run after this iteration, as `stop_at` does: with a checkpoint and its evaluation."""
        self.stopping = reason

    def save(self) -> None:
        """Write a checkpoint. Where rollouts run ahead of the learner, that of the next iteration is written."""
        self.saving = True


Callback = Callable[[IterationEnd], None]
"""Called after each iteration; an error that it raises ends the run."""
