"""Progress of long work: a worker reports it, and whoever waits for the worker does not give up on it.

    for micro_batch in micro_batches:
        ...
        progress.report()

The process's host installs where reports go. Where nobody waits from outside, as inline, they go nowhere.
"""

from __future__ import annotations

from collections.abc import Callable


def _nowhere() -> None:
    """Nobody waits for this process."""


_write: Callable[[], None] = _nowhere


def report() -> None:
    """Say that the work under way goes on. Costs about a microsecond: report each decision, each micro-batch."""
    _write()


def install(write: Callable[[], None]) -> None:
    """Have every `report` of this process call `write`."""
    global _write
    _write = write
