"""The share of this machine's CPU time that other programs use: a run beside them takes longer than its plan says."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

import psutil

WORTH_SAYING = 0.05
"""Share below which other programs do not explain why a time is not the predicted one."""
SHORTEST_S = 2.0
"""Seconds that a sample takes at least: the system counts in hundredths."""


class OtherPrograms:
    """Samples the share, since the last sample, of the time of `cores` that was used neither by this process nor by the
    processes that it has started, its workers among them. What a hypervisor gives to others counts as theirs. Takes a
    few milliseconds a sample."""

    def __init__(self, cores: Iterable[int] | None = None) -> None:
        self._cores = frozenset(os.sched_getaffinity(0) if cores is None else cores)
        self._began_s, self._before = time.monotonic(), self._now()

    def share(self) -> float | None:
        """The share, from 0 to 1; None within two seconds of the last sample."""
        if time.monotonic() - self._began_s < SHORTEST_S:
            return None
        before, now = self._before, self._now()
        self._began_s, self._before = time.monotonic(), now
        whole, busy, own = (after - earlier for earlier, after in zip(before, now, strict=True))
        return min(max((busy - own) / whole, 0.0), 1.0) if whole > 0 else None

    def _now(self) -> tuple[float, float, float]:
        """Seconds since the machine's start: all cores' time, their busy time, and the CPU time of this run."""
        every = [times for core, times in enumerate(psutil.cpu_times(percpu=True)) if core in self._cores]
        # Time of guests is counted as the user's too.
        whole = sum(sum(times) - getattr(times, "guest", 0.0) - getattr(times, "guest_nice", 0.0) for times in every)
        idle = sum(times.idle + getattr(times, "iowait", 0.0) for times in every)
        return whole, whole - idle, _own_seconds()


def in_words(share: float | None) -> str:
    """A sentence for beside a measured time; empty where other programs used next to nothing, or nobody knows."""
    if share is None or share < WORTH_SAYING:
        return ""
    return f"Other programs used {share:.0%} of the cores' time meanwhile: what was measured is longer than alone."


def _own_seconds() -> float:
    """CPU seconds of this process and its descendants; ended ones count through their parents."""
    here = psutil.Process()
    seconds = 0.0
    for process in (here, *here.children(recursive=True)):
        try:
            times = process.cpu_times()
        except psutil.Error:  # it has ended meanwhile
            continue
        seconds += times.user + times.system + times.children_user + times.children_system
    return seconds
