"""How long is waited for whom, and what counts as late.

    a call of a worker (runtime.deadline_s)  >  what that worker waits for: its farm  >  a physics or render worker

Whoever waits for somebody who waits gives him less time than he has himself. So the message that ends a wait names
the one that is really late, and a worker of the farm that hangs is replaced before anybody gives up on the farm.

A deadline is the longest time without progress, not the longest time: work that reports progress is not late.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from embodied.errors import UserError
from sim_farm.farm import WorkerFailed
from sim_farm.private_memory import private_bytes

SHARE = 0.5
"""Of a wait, the time that is left to whom the awaited worker waits for. The other half is for replacing what was
late: starting a process, importing a simulator, and replaying the episodes."""


@dataclass(frozen=True)
class Deadline:
    """The longest time without progress, in seconds. Raises `ValueError` unless it is positive."""

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"a deadline is a positive number of seconds, got {self.seconds}")

    def inner(self) -> Deadline:
        """The deadline for what the awaited worker itself waits for."""
        return Deadline(self.seconds * SHARE)


def _never_ns() -> int:
    """The last progress of what reports none."""
    return 0


@dataclass
class Wait:
    """A wait that begins now. `last_ns` gives the time (`time.monotonic_ns`) of the last progress; 0 is never."""

    deadline: Deadline
    last_ns: Callable[[], int] = _never_ns
    begin_ns: int = field(default_factory=time.monotonic_ns)

    def silent_s(self) -> float:
        """Seconds since the last progress, or since the wait began where there was none after that."""
        return (time.monotonic_ns() - max(self.begin_ns, self.last_ns())) / 1e9

    def late(self) -> bool:
        """Whether there was no progress for longer than the deadline."""
        return self.silent_s() > self.deadline.seconds


# --- The state of a supervised worker: a pure machine of states and events, which starts and ends nothing.


FRUITLESS = 5
"""Losses in a row, with nothing done between them that had not been done before, after which a worker is given up.
Three came by chance, where Ray took ten seconds to start again and every ten seconds something else was lost."""
OFTEN, WITHIN_S = 10, 60.0
"""So many losses within so many seconds are no accident either."""


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
    """What the worker had done: a number that grows with its work, and not with work that is done again."""


@dataclass(frozen=True)
class Supervised:
    """A worker as its supervisor knows it. Times are seconds of a clock that only goes forward."""

    state: State = State.HEALTHY
    losses: tuple[Loss, ...] = ()
    """The newest `OFTEN`, oldest first."""
    down_s: float | None = None
    """From the last loss until the worker served again. None: it was never lost, or does not serve yet."""

    @property
    def serves(self) -> bool:
        """Whether work may be given to it."""
        return self.state in (State.HEALTHY, State.SUSPECT)

    @property
    def hopeless(self) -> bool:
        """Whether another successor is of no use."""
        last, often = self.losses[-FRUITLESS:], self.losses[-OFTEN:]
        fruitless = len(last) == FRUITLESS and last[-1].done <= last[0].done
        return fruitless or (len(often) == OFTEN and often[-1].at_s - often[0].at_s < WITHIN_S)

    def lost(self, at_s: float, done: int) -> Supervised:
        """After its loss, in any state: also a successor may be lost before it serves."""
        return Supervised(State.DEAD, (*self.losses, Loss(at_s, done))[-OFTEN:])

    def after(self, event: Event, at_s: float) -> Supervised:
        """After the event. Raises `ValueError` for one that cannot follow its state."""
        state = _NEXT.get((self.state, event))
        if state is None:
            raise ValueError(f"of a worker that is {self.state.value} it cannot be said that {event.value}")
        back = event is Event.CURRENT
        return replace(self, state=state, down_s=at_s - self.losses[-1].at_s if back else self.down_s)


@dataclass(frozen=True)
class Replaced:
    """A worker that was lost and has been replaced."""

    worker: str
    why: str
    down_s: float
    """From the moment in which the loss was seen until its successor served, or until there was no farm to serve."""


# --- How much memory a worker's process may hold by itself. One that grows beyond it is replaced.


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
