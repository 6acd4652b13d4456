"""Recovery of a run or an evaluation that has lost a worker: it continues, or it ends with the reason.

A run continues from its newest checkpoint, an evaluation with the remaining episodes. All workers outside the farm are
supervised as one (`sim_farm.workers.supervision`): they are rebuilt together, and serve once they have the checkpoint's
weights. The recomputed results equal the lost ones, bit for bit. Each loss is a line of faults.jsonl, also the loss of
a farm's worker, which the runtime replaces.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from embodied.errors import PeerFailed, UserError
from embodied.execution.session import Session
from embodied.files import Lines
from embodied.reporting.live import tell
from embodied.runtime.api import Runtime, RuntimeLost
from policies.errors import PolicyError
from sim_farm.client.farm import WorkerFailed, WorkerTimeout
from sim_farm.contract import FarmError
from sim_farm.workers.supervision import Event, State, Supervised

R = TypeVar("R")

FILE = "faults.jsonl"


@dataclass
class Recovery:
    """Counts the losses of one run or evaluation, and decides whether it continues after a loss."""

    folder: Path
    counted: str = "iteration"
    """Unit of the work, as in faults.jsonl."""
    clock: Callable[[], float] = time.monotonic
    workers: Supervised = field(default_factory=Supervised)
    recoveries: int = 0
    """Losses after which the run has gone on."""
    replaced: int = 0
    """Farm workers that were replaced meanwhile."""
    _errors: set[tuple[int, str]] = field(default_factory=set)

    @contextmanager
    def attempt(
        self, session: Session, done: Callable[[], int], go_back: Callable[[Exception], None]
    ) -> Iterator[None]:
        """In the block, build the workers and do the work. If the run continues after a loss, the block ends silently,
        without workers, after a call of `go_back`; attempt it again then. `done` returns the number of finished
        iterations, or of other finished units.

        Raises the error that ends the run (`goes_on`). In one process that is every error, since no other process can
        be lost.
        """
        self.started()
        try:
            yield
        except Exception as error:  # a loss of a worker may arrive as any error; `goes_on` decides
            self.note_replaced(session.runtime, done(), tell)
            if session.config.runtime.mode == "inline" or not self.goes_on(error, done()):
                raise
            session.runtime.end_workers()
            go_back(error)

    def goes_on(self, error: Exception, done: int) -> bool:
        """Record the loss after `done` iterations (or other units). True if the run continues after it.

        The run ends on the user's mistakes, which another try would only repeat; on an error that came before at the
        same `done`, unless no worker can have caused it; and after too many losses in a row.
        """
        if not _is_loss(error):
            return False
        self.workers = self.workers.lost(self.clock(), done)
        text = f"{type(error).__name__}: {error}"
        again = (done, text) in self._errors and not isinstance(error, RuntimeLost)
        ends = again or self.workers.hopeless
        self._errors.add((done, text))
        self.recoveries += not ends
        self._write(done, "the run ends" if ends else "the run goes on", error=text)
        return not ends

    def started(self) -> None:
        """Workers are being placed; call this also where none was lost."""
        self._note(State.DEAD, Event.STARTED)

    def built(self) -> None:
        """Workers were placed."""
        self._note(State.RESTARTING, Event.BUILT)

    def current(self, done: int) -> None:
        """Record that all policy workers have the current weights, with so much work done."""
        if self._note(State.STALE, Event.CURRENT):
            self._write(done, "the run is back", down_s=self.workers.down_s)

    def serving(self, done: int) -> None:
        """Workers were placed that have the current weights from the beginning."""
        self.built()
        self.current(done)

    def note_replaced(self, runtime: Runtime, done: int, say: Callable[[str], None]) -> None:
        """Note the farm's workers that the runtime has replaced since the last call, and print each with `say`."""
        for lost in runtime.host.take_replaced():
            self.replaced += 1
            why = f"{lost.worker} was lost: {lost.why}"
            self._write(done, "it was replaced", error=why, down_s=lost.down_s)
            say(f"{why}; replaced within {lost.down_s:.1f} s")

    def _note(self, state: State, event: Event) -> bool:
        if self.workers.state is not state:
            return False
        self.workers = self.workers.after(event, self.clock())
        return True

    def _write(self, done: int, outcome: str, **more: Any) -> None:
        row = {"time": time.time(), self.counted: done, "outcome": outcome, **more}
        with suppress(OSError), Lines(self.folder / FILE) as lines:  # without room the loss itself is what counts
            lines.append(json.dumps(row))


def until_done(work: Callable[[], R], recovery: Recovery, session: Session, done: Callable[[], int]) -> R:
    """Do the work; after each loss what is left of it, on workers that are built anew. `done` counts what is done.

    Raises the error that ends it, as `Recovery.attempt` does.
    """

    def tell_loss(error: Exception) -> None:
        tell(f"lost: {error}\nwhat is left is done again; see {recovery.folder / FILE}")

    while True:
        with recovery.attempt(session, done, tell_loss):
            return work()


def _is_loss(error: Exception) -> bool:
    """True if a worker was lost, or failed for a reason other than a mistake in the configuration."""
    if isinstance(error, WorkerFailed | WorkerTimeout | PeerFailed):
        return True
    return not isinstance(error, UserError | PolicyError | FarmError)
