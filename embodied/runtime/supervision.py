"""The state of a supervised worker: a pure machine of states and events, which starts and ends nothing.

    HEALTHY ──late──► SUSPECT ──lost──► DEAD ──started──► RESTARTING ──built──► STALE ──current──► HEALTHY
       ▲                 │                │
       └────progress─────┘                └── any state, when the worker is lost

A worker is SUSPECT when it has been silent for half of its deadline. It is lost when it has been for all of it, or when
its process died. A successor is STALE until it has what its predecessor had: the episodes of a physics worker, the
current weights of a policy worker. It serves only then.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace

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
