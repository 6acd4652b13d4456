"""How long is waited for whom, and what counts as late.

    a call of a worker (runtime.deadline_s)  >  what that worker waits for: its farm  >  a physics or render worker

Whoever waits for somebody who waits gives him less time than he has himself. So the message that ends a wait names
the one that is really late, and a worker of the farm that hangs is replaced before anybody gives up on the farm.

A deadline is the longest time without progress, not the longest time: work that reports progress is not late.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field

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
