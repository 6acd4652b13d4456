"""Whether a worker is hung, read from the slots: a worker that runs notes the time at least every second.

Nobody needs to be asked: a process that is stopped, or that hangs inside a simulator, notes nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy.typing as npt

from sim_farm import layout

Slots = Mapping[str, npt.NDArray[Any]]

WATCHED = (layout.BUILDING, layout.WAITING, layout.WORKING, layout.CLOSING)
"""Phases in which a worker notes its progress. The start of a renderer has a limit of its own."""


def hung(slots: Slots, worker: int, deadline_s: float) -> str | None:
    """What the worker has been doing, if it has made no progress for `deadline_s` seconds; else None."""
    phase = int(slots["phase"][worker])
    still_s = (time.monotonic_ns() - int(slots["since_ns"][worker])) / 1e9
    if phase not in WATCHED or still_s <= deadline_s:
        return None
    return f"worker {worker} has been {layout.PHASES[phase]} for {still_s:.1f} s without progress"


def restarted(slots: Slots, worker: int) -> None:
    """To be called by whoever replaces a worker: its successor is given time of its own from now on."""
    slots["since_ns"][worker] = time.monotonic_ns()
    slots["phase"][worker] = layout.STARTING
