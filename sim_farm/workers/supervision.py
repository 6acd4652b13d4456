"""Supervision of workers: their states, when a lost one is replaced and when it is given up, and limits of memory.

The state of a supervised worker is a pure machine of states and events, which starts and ends nothing:

    HEALTHY ──late──► SUSPECT ──lost──► DEAD ──started──► RESTARTING ──built──► STALE ──current──► HEALTHY
       ▲                 │                │
       └────progress─────┘                └── any state, when the worker is lost

A worker is SUSPECT after half of its deadline without progress. It is lost after all of it, or when its process died.
A successor is STALE until it has what its predecessor had: the episodes of a physics worker, the current weights of a
policy worker. Only then does it serve.
"""

from __future__ import annotations

import enum
import logging
import time
from dataclasses import dataclass, replace

from sim_farm.contract import FarmError
from sim_farm.workers.worker import private_bytes

_log = logging.getLogger(__name__)


class WorkerFailed(FarmError):
    """A worker met an error in its code and ended."""


# --- states

FRUITLESS = 5
"""Losses in a row, without new work done between them, after which a worker is given up. Three happened by chance,
where Ray took ten seconds to start again and every ten seconds something else was lost."""
OFTEN, WITHIN_S = 10, 60.0
"""Number of losses within `WITHIN_S` seconds after which a worker is given up too."""


class State(enum.Enum):
    HEALTHY = "healthy"
    SUSPECT = "suspect"
    DEAD = "dead"
    RESTARTING = "restarting"
    STALE = "stale"


class Event(enum.Enum):
    PROGRESS = "it has made progress"
    LATE = "it has been silent for half of its deadline"
    STARTED = "a process was started in its place"
    BUILT = "it is built"
    CURRENT = "it has what its predecessor had"


_NEXT = {
    (State.HEALTHY, Event.PROGRESS): State.HEALTHY,
    (State.HEALTHY, Event.LATE): State.SUSPECT,
    (State.SUSPECT, Event.LATE): State.SUSPECT,
    (State.SUSPECT, Event.PROGRESS): State.HEALTHY,
    (State.DEAD, Event.STARTED): State.RESTARTING,
    (State.RESTARTING, Event.PROGRESS): State.RESTARTING,
    (State.RESTARTING, Event.LATE): State.RESTARTING,
    (State.RESTARTING, Event.BUILT): State.STALE,
    (State.STALE, Event.PROGRESS): State.STALE,
    (State.STALE, Event.LATE): State.STALE,
    (State.STALE, Event.CURRENT): State.HEALTHY,
}


@dataclass(frozen=True)
class Loss:
    at_s: float
    done: int
    """Work done before the loss: a number that grows with new work, and not with work that is repeated."""


@dataclass(frozen=True)
class Supervised:
    """State and losses of one worker. Times are seconds of a clock that only goes forward."""

    state: State = State.HEALTHY
    losses: tuple[Loss, ...] = ()
    """The newest `OFTEN`, oldest first."""
    down_s: float | None = None
    """Time from the last loss until the worker served again. None: never lost, or not serving yet."""

    @property
    def serves(self) -> bool:
        """True if the worker accepts work."""
        return self.state in (State.HEALTHY, State.SUSPECT)

    @property
    def hopeless(self) -> bool:
        """True if another successor is of no use."""
        last, often = self.losses[-FRUITLESS:], self.losses[-OFTEN:]
        fruitless = len(last) == FRUITLESS and last[-1].done <= last[0].done
        return fruitless or (len(often) == OFTEN and often[-1].at_s - often[0].at_s < WITHIN_S)

    def lost(self, at_s: float, done: int) -> Supervised:
        """The worker after its loss, which may happen in any state: also a successor may be lost before it serves."""
        return Supervised(State.DEAD, (*self.losses, Loss(at_s, done))[-OFTEN:])

    def after(self, event: Event, at_s: float) -> Supervised:
        """The worker after the event. Raises `ValueError` for an event that cannot follow its state."""
        state = _NEXT.get((self.state, event))
        if state is None:
            raise ValueError(f"a worker that is {self.state.value} cannot have the event {event.value!r}")
        back = event is Event.CURRENT
        return replace(self, state=state, down_s=at_s - self.losses[-1].at_s if back else self.down_s)


@dataclass(frozen=True)
class Replaced:
    """A worker that was lost and has been replaced."""

    worker: str
    why: str
    down_s: float
    """Time from the moment in which the loss was seen until the successor served, or until its farm was closed."""


class Supervision:
    """A physics or render worker under the rule of replacement, which is the same on this machine and on others: one
    that is lost is replaced, until it is lost again and again without new work."""

    def __init__(self, name: str, replaced: list[Replaced]) -> None:
        """`replaced` receives each replacement, once the successor serves."""
        self.name, self.restarts = name, 0
        self._worker, self._replaced = Supervised(), replaced
        self._why: str | None = None
        """Reason of a loss whose successor does not serve yet."""

    @property
    def state(self) -> State:
        return self._worker.state

    def lost(self, why: str, done: int) -> None:
        """Note the loss, after so much work done, and log it; the caller starts a successor. Raises `WorkerFailed`
        where that is of no use."""
        self.restarts += 1
        self._worker = self._worker.lost(time.monotonic(), done)
        if self._worker.hopeless:
            raise WorkerFailed(
                f"{self.name} was lost {self.restarts} times, at last because {why}: see the system's log, and whether "
                "memory is short (use fewer workers or environments)"
            )
        _log.warning("%s", f"{self.name} was lost and is replaced: {why}")
        self._why = why
        self.note(Event.STARTED)

    def note(self, event: Event) -> None:
        self._worker = self._worker.after(event, time.monotonic())

    def serves_again(self) -> None:
        """Note that the successor, which is built, has the episodes of its predecessor."""
        self.note(Event.CURRENT)
        self._note_replaced(self._worker.down_s or 0.0)

    def end(self) -> None:
        """The worker leaves its farm, perhaps before the successor of a lost one has served."""
        if self._why is not None:
            self._note_replaced(time.monotonic() - self._worker.losses[-1].at_s)

    def _note_replaced(self, down_s: float) -> None:
        if self._why is None:  # it left its farm while its successor was built, in another thread
            return
        self._replaced.append(Replaced(self.name, self._why, down_s))
        self._why = None


# --- limits of memory

GB = 1e9


class WorkerTooLarge(WorkerFailed):
    """A worker has grown beyond its memory limit, and is to be replaced."""


class LimitTooSmall(FarmError):
    """A new worker needs more memory than its limit."""


@dataclass
class MemoryChecks:
    """Checks of one process's memory so far."""

    settles: int
    """Number of checks in which a new process may still grow to what it needs: a learner's optimiser comes with the
    first update."""
    within: int = 0
    """Number of checks that found no more than the limit."""


@dataclass(frozen=True)
class MemoryLimit:
    """Private memory that each worker's process may use; None: no limit."""

    gb: float | None
    setting: str = "worker_gb"
    """Name under which the limit is set, for messages."""

    def exceeded(self, worker: str, pid: int, checks: MemoryChecks) -> WorkerTooLarge | LimitTooSmall | None:
        """Check a process and return the error without raising it. None within the limit, and for `pid` 0, a process
        that is still to begin.

        A process that has settled within its limit, and now uses more, has grown. Any other uses as much as a new one
        would.
        """
        if self.gb is None or not pid:
            return None
        used = private_bytes(pid) / GB
        if used <= self.gb:
            checks.within += 1
            return None
        found = f"{worker} has {used:.2f} GB of private memory, and {self.setting} is {self.gb:g}"
        if checks.within >= checks.settles:
            return WorkerTooLarge(found)
        return LimitTooSmall(f"{found}; it is new, and another would have as much: set {self.setting} higher")


NO_LIMIT = MemoryLimit(None)
