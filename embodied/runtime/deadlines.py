"""Deadlines of calls and of the waits within them.

Deadlines nest. The caller of a worker that itself waits for others gives them less time than the caller allows:

    a call of a worker (runtime.deadline_s)  >  the farm that this worker waits for  >  a physics or render worker

So the message that ends a wait names the worker that is really late, and a farm worker that hangs is replaced before
any wait for the farm ends. A deadline limits the time without progress, not the duration: work that reports progress
is not late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

SHARE = 0.5
"""Share of a wait that the awaited worker may itself spend waiting. The rest is for replacing a late worker: starting
a process, importing a simulator, and replaying the episodes."""


@dataclass(frozen=True)
class Deadline:
    """The longest time without progress, in seconds. Raises `ValueError` unless it is positive."""

    seconds: float

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"a deadline is a positive number of seconds, got {self.seconds}")

    def inner(self) -> Deadline:
        """The deadline for the waits of the awaited worker itself."""
        return Deadline(self.seconds * SHARE)


def _never_ns() -> int:
    """The last progress of work that reports none."""
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
        """True if there was no progress for longer than the deadline."""
        return self.silent_s() > self.deadline.seconds
