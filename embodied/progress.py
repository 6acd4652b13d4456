"""Reports of progress in long work. A worker that reports progress is not late, however long its work takes.

    for micro_batch in micro_batches:
        ...
        progress.report()

The runtime installs the receiver of reports. Without one, as inline, reports are dropped.
"""

from __future__ import annotations

from collections.abc import Callable


def _nowhere() -> None:
    """No process waits for this one."""


_write: Callable[[], None] = _nowhere


def report() -> None:
    """Report progress of the current work. Costs about a microsecond: report each decision and each micro-batch."""
    _write()


def install(write: Callable[[], None]) -> None:
    """Have every `report` of this process call `write`."""
    global _write
    _write = write
