"""The law of every reader: what a file contains is accepted, or refused by one message that names the file.

No other error, no hang, no message that cannot be printed or read.
"""

from __future__ import annotations

import signal
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from types import FrameType

import pytest

LONGEST_S = 60
"""Of one case, before it counts as a hang: they take milliseconds, and a machine may be busy."""
MANY = 50
"""Cases, of which some are as good as whole."""
LONGEST_MESSAGE = 4000
"""Characters."""
ROOT = Path(__file__).parents[2]


def few_or_many(few: int, many: int = 1_000) -> pytest.MarkDecorator:
    """Parametrises a test by `cases`, the seeds of its damaged files: a few by default, and many if slow tests run.

    Ten thousand are for readers whose case takes a few milliseconds. A policy that is built for each takes 0.1 s.
    """
    slow = (pytest.mark.slow, pytest.mark.timeout(3600))
    return pytest.mark.parametrize("cases", [range(few), pytest.param(range(many), marks=slow)], ids=["few", "many"])


class Hangs(BaseException):
    """No reader may catch it."""


@dataclass
class Tally:
    """What became of the cases."""

    accepted: int = 0
    refused: int = 0
    broken: Counter[str] = field(default_factory=Counter)
    """By the error and the line of ours that it went through last."""
    first: dict[str, str] = field(default_factory=dict)
    """Seed and message of the first case of each."""

    @property
    def cases(self) -> int:
        return self.accepted + self.refused + sum(self.broken.values())

    def __str__(self) -> str:
        lines = [f"{self.cases} cases: {self.accepted} accepted, {self.refused} refused, "
                 f"{sum(self.broken.values())} broke the law"]  # fmt: skip
        lines += [f"{count} x {what} (first: {self.first[what]})" for what, count in self.broken.most_common()]
        return "\n  ".join(lines)

    def breaks(self, what: str, seed: int, message: str) -> None:
        self.broken[what] += 1
        self.first.setdefault(what, f"seed {seed}, {message[:200]!a}")


def tally(
    cases: range,
    make: Callable[[Random], Path],
    read: Callable[[Path], object],
    refuses: tuple[type[Exception], ...],
) -> Tally:
    """For each seed the file, or folder, that `make` damages is read; `refuses` are a user's mistakes, whose message
    must name it."""
    found = Tally()
    for seed in cases:
        path = make(Random(seed))
        try:
            with _alarm():
                read(path)
            found.accepted += 1
        except refuses as error:
            wrong = _unreadable(str(error), path)
            if wrong:
                found.breaks(wrong, seed, str(error))
            else:
                found.refused += 1
        except (KeyboardInterrupt, pytest.fail.Exception):  # the latter is pytest's timeout
            raise
        except BaseException as error:  # a hang, and a panic of a library in Rust, are no `Exception`
            found.breaks(_described(error), seed, str(error))
    return found


def holds(
    cases: range,
    make: Callable[[Random], Path],
    read: Callable[[Path], object],
    refuses: tuple[type[Exception], ...],
) -> None:
    """Fails with all that broke the law; or if no case was refused, or of many none accepted: that tests nothing."""
    found = tally(cases, make, read, refuses)
    print(found)
    assert not found.broken, str(found)
    assert found.refused and (found.accepted or found.cases < MANY), str(found)


@contextmanager
def _alarm() -> Iterator[None]:
    """Raises `Hangs` in a case that takes too long. The process has one alarm: what is left of the test's timeout goes
    on after the case."""

    def ring(_signal: int, _frame: FrameType | None) -> None:
        raise Hangs(f"took more than {LONGEST_S} s")

    left_s, begin = signal.setitimer(signal.ITIMER_REAL, 0)[0], time.monotonic()
    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, LONGEST_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
        if left_s:
            signal.setitimer(signal.ITIMER_REAL, max(left_s - (time.monotonic() - begin), 1e-6))


def _unreadable(message: str, path: Path) -> str | None:
    if str(path) not in message:
        return "the message does not name the file"
    if len(message) > LONGEST_MESSAGE:
        return "the message is too long"
    try:
        message.encode()
    except UnicodeEncodeError:
        return "the message cannot be printed"
    return None


def _described(error: BaseException) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if Path(f.filename).is_relative_to(ROOT)]
    ours = [f for f in frames if not Path(f.filename).is_relative_to(ROOT / "tests")]
    last = (ours or frames)[-1]
    where = f"{Path(last.filename).relative_to(ROOT)}:{last.lineno} {last.name}"
    return f"{type(error).__name__} at {where}"
