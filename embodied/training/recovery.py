"""What becomes of a run that has lost a worker: it goes on from its newest checkpoint, or it ends and says why.

The run's workers but those of the farm are supervised as one (`embodied.runtime.supervision`): they are built again
together, and serve once they have the checkpoint's weights. What is computed again is the same, bit for bit, as what
was lost. A loss is a line of RUN/faults.jsonl, also that of a farm's worker, which the runtime has replaced by itself.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodied.errors import PeerFailed, UserError
from embodied.files import Lines
from embodied.runtime.supervision import Event, Replaced, State, Supervised
from sim_farm.contract import FarmError
from sim_farm.farm import WorkerFailed, WorkerTimeout

FILE = "faults.jsonl"


@dataclass
class Recovery:
    """The losses of one run, and whether it goes on after the next."""

    run_dir: Path
    clock: Callable[[], float] = time.monotonic
    workers: Supervised = field(default_factory=Supervised)
    recoveries: int = 0
    """Losses after which the run has gone on."""
    replaced: int = 0
    """Farm workers that were replaced meanwhile."""
    _errors: set[tuple[int, str]] = field(default_factory=set)

    def goes_on(self, error: Exception, iteration: int) -> bool:
        """Note the loss, with `iteration` iterations done; whether the run is to go on after it.

        It ends with the user's mistakes, which another try would only repeat; with an error that has come before at
        this iteration; and where too many losses follow on each other.
        """
        if not _is_loss(error):
            return False
        self.workers = self.workers.lost(self.clock(), iteration)
        found = (iteration, f"{type(error).__name__}: {error}")
        ends = found in self._errors or self.workers.hopeless
        self._errors.add(found)
        self.recoveries += not ends
        self._write(iteration, "the run ends" if ends else "the run goes on", error=found[1])
        return not ends

    def started(self) -> None:
        """Workers are being placed; call this also where none was lost."""
        self._note(State.DEAD, Event.STARTED)

    def built(self) -> None:
        """Workers were placed."""
        self._note(State.RESTARTING, Event.BUILT)

    def current(self, iteration: int) -> None:
        """All who act have the weights of this iteration."""
        if self._note(State.STALE, Event.CURRENT):
            self._write(iteration, "the run is back", down_s=self.workers.down_s)

    def note_replaced(self, found: Replaced, iteration: int) -> str:
        """Note a worker of the farm that was replaced; what to say of it."""
        self.replaced += 1
        why = f"{found.worker} was lost: {found.why}"
        self._write(iteration, "it was replaced", error=why, down_s=found.down_s)
        return f"{why}; replaced within {found.down_s:.1f} s"

    def _note(self, state: State, event: Event) -> bool:
        if self.workers.state is not state:
            return False
        self.workers = self.workers.after(event, self.clock())
        return True

    def _write(self, iteration: int, outcome: str, **more: Any) -> None:
        row = {"time": time.time(), "iteration": iteration, "outcome": outcome, **more}
        with suppress(OSError), Lines(self.run_dir / FILE) as lines:  # without room the loss itself is what counts
            lines.append(json.dumps(row))


def _is_loss(error: Exception) -> bool:
    """Whether a worker was lost, or failed by something that is nobody's mistake in the configuration."""
    if isinstance(error, WorkerFailed | WorkerTimeout | PeerFailed):
        return True
    return not isinstance(error, UserError | FarmError)
