"""The alarm of a case, and the timeout of the test around it: a process has one alarm for both."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest

from tests.fuzzing import law


@pytest.fixture
def timeouts() -> Iterator[None]:
    """pytest's own timeout is put aside for the test."""
    left, before = signal.setitimer(signal.ITIMER_REAL, 0), signal.getsignal(signal.SIGALRM)
    yield
    signal.signal(signal.SIGALRM, before)
    signal.setitimer(signal.ITIMER_REAL, *left)


def test_a_case_that_does_not_end_is_one_that_broke_the_law(
    timeouts: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(law, "LONGEST_S", 0.01)
    found = law.tally(range(2), lambda rng: tmp_path, lambda path: time.sleep(600), ())
    assert found.cases == 2 and all(what.startswith("Hangs at ") for what in found.broken)


def test_the_timeout_of_the_test_holds_over_its_cases(timeouts: None, tmp_path: Path) -> None:
    def ring(_signal: int, _frame: FrameType | None) -> None:
        pytest.fail("timeout")

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.1)
    with pytest.raises(pytest.fail.Exception, match="timeout"):
        law.tally(range(100_000), lambda rng: tmp_path, lambda path: None, ())
