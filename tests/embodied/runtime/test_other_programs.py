"""CPU time of other programs, without that of the run and its processes."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import pytest

from embodied import other_programs
from embodied.other_programs import OtherPrograms, in_words


class Times(NamedTuple):
    """CPU seconds of a core, as psutil has them."""

    user: float
    idle: float
    iowait: float
    steal: float


def sampled(monkeypatch: pytest.MonkeyPatch, own: Sequence[float], *cores: Sequence[Times]) -> float | None:
    """The share between two samples, given each core's times and this run's CPU seconds."""
    looks: Iterator[Any] = iter(zip(*cores, strict=True))
    seconds, clock = iter(own), iter([0.0, 10.0, 10.0])
    monkeypatch.setattr(other_programs.psutil, "cpu_times", lambda percpu: list(next(looks)))
    monkeypatch.setattr(other_programs, "_own_seconds", lambda: next(seconds))
    monkeypatch.setattr(other_programs.time, "monotonic", lambda: next(clock))
    return OtherPrograms(cores=(0,)).share()


def test_what_is_neither_idle_nor_ours_is_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Times(100, 50, 5, 1), Times(106, 52, 6, 2)  # 7 of 10 seconds busy, 1 of them stolen
    elsewhere = Times(0, 0, 0, 0), Times(99, 0, 0, 0)  # a core that is not ours
    assert sampled(monkeypatch, [20.0, 23.0], (first, second), elsewhere) == pytest.approx(0.4)


def test_a_share_is_of_zero_to_one(monkeypatch: pytest.MonkeyPatch) -> None:
    still, run = Times(0, 0, 0, 0), Times(5, 5, 0, 0)
    assert sampled(monkeypatch, [0.0, 9.0], (still, run)) == 0.0, "our time is known a little sooner than the core's"
    assert sampled(monkeypatch, [0.0, 0.0], (still, still)) is None


def test_processes_that_were_started_here_are_ours_also_when_they_have_ended() -> None:
    before = other_programs._own_seconds()
    subprocess.run([sys.executable, "-c", "sum(range(6_000_000))"], check=True)
    assert other_programs._own_seconds() > before


def test_too_soon_there_is_no_share_and_only_what_counts_is_said() -> None:
    assert OtherPrograms().share() is None
    assert in_words(None) == in_words(0.01) == "" and "45%" in in_words(0.45)
