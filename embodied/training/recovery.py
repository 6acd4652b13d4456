"""What becomes of a run that has lost a worker: it goes on from its newest checkpoint, or it ends and says why.

A loss is a line of RUN/faults.jsonl. What is computed again after it is the same, bit for bit, as what was lost.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from embodied.errors import PeerFailed, UserError
from embodied.files import Lines
from sim_farm.contract import FarmError
from sim_farm.farm import WorkerFailed, WorkerTimeout

FILE = "faults.jsonl"
WITHOUT_PROGRESS = 3
"""Losses in a row, without an iteration that was not reached before, after which the run ends."""
WITHIN_S = 60.0
AT_MOST = 10
"""Losses within `WITHIN_S` seconds after which the run ends: then it is not an accident."""


@dataclass(frozen=True)
class Loss:
    """Of a worker, while the run was at an iteration."""

    iteration: int
    """Iterations done, also those that no checkpoint holds."""
    error: str
    """Class and message."""
    at_s: float
    """By a clock that only goes forward."""


@dataclass
class Recovery:
    """The losses of one run, and whether it goes on after the next."""

    run_dir: Path
    clock: Callable[[], float] = time.monotonic
    losses: list[Loss] = field(default_factory=list)

    def goes_on(self, error: Exception, iteration: int) -> bool:
        """Note the loss; whether the run is to go on after it.

        It ends with the user's mistakes, which another try would only repeat; with an error that has come before at
        this iteration; and where too many losses follow on each other.
        """
        if not _is_loss(error):
            return False
        loss = Loss(iteration, f"{type(error).__name__}: {error}", self.clock())
        repeated = any(one.iteration == iteration and one.error == loss.error for one in self.losses)
        self.losses.append(loss)
        ends = repeated or self._stuck() or self._often()
        self._write(loss, "the run ends" if ends else "the run goes on")
        return not ends

    def _stuck(self) -> bool:
        last = self.losses[-WITHOUT_PROGRESS:]
        return len(last) == WITHOUT_PROGRESS and last[-1].iteration <= last[0].iteration

    def _often(self) -> bool:
        last = self.losses[-AT_MOST:]
        return len(last) == AT_MOST and last[-1].at_s - last[0].at_s < WITHIN_S

    def _write(self, loss: Loss, outcome: str) -> None:
        row = {"time": time.time(), "iteration": loss.iteration, "error": loss.error, "outcome": outcome}
        with suppress(OSError), Lines(self.run_dir / FILE) as lines:  # without room the loss itself is what counts
            lines.append(json.dumps(row))


def _is_loss(error: Exception) -> bool:
    """Whether a worker was lost, or failed by something that is nobody's mistake in the configuration."""
    if isinstance(error, WorkerFailed | WorkerTimeout | PeerFailed):
        return True
    return not isinstance(error, UserError | FarmError)
