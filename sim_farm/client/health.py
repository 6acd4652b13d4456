"""Detection of workers that hang, from the slots of their task.

A worker hangs if it has work and has made no progress for too long.

Progress is the time that a worker writes at every change of its phase and at every environment that it has built,
simulated or drawn, so work that makes progress is not late, however long it takes in all. A process that is stopped, or
that hangs inside a simulator, writes nothing, and is recognised without being asked.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from sim_farm.shared_memory import slot_layout

Slots = Mapping[str, npt.NDArray[Any]]

BUSY = (slot_layout.BUILDING, slot_layout.WORKING, slot_layout.OPENING, slot_layout.CLOSING, slot_layout.REPLAYING)
"""Phases in which a worker is expected to make progress, whatever is requested of it."""


def hung(slots: Slots, worker: int, deadline_s: float) -> str | None:
    """Description of the worker's phase if it has work and has made no progress for `deadline_s` seconds; else None.

    A worker without work is never hung, and one that met an error has ended with its message.
    """
    begin_ns = stuck_since_ns(slots, worker)
    late_s = 0.0 if begin_ns is None else (time.monotonic_ns() - begin_ns) / 1e9
    return f"{name_of(slots, worker)} {doing(slots, worker)}" if late_s > deadline_s else None


def stuck_since_ns(slots: Slots, worker: int) -> int | None:
    """Time of the worker's last progress or, if later, the time at which it got its waiting work, on the machine's
    monotonic clock. None without work."""
    phase, progress = int(slots["phase"][worker]), int(slots["since_ns"][worker])
    if phase == slot_layout.FAILED:
        return None
    waiting = _given_ns(slots, worker)
    if phase in BUSY:
        return progress
    return None if waiting is None else max(progress, waiting)


def doing(slots: Slots, worker: int) -> str:
    """Phase of the worker and the time without progress, as the rest of a sentence."""
    begin_ns = stuck_since_ns(slots, worker) or int(slots["since_ns"][worker])
    still_s = (time.monotonic_ns() - begin_ns) / 1e9 if begin_ns else 0.0
    phase = int(slots["phase"][worker])
    begun = "" if phase in BUSY else ", and has not begun what was requested"
    return f"has been {slot_layout.PHASES[phase]} for {still_s:.1f} s without progress{begun}"


def restarted(slots: Slots, worker: int) -> None:
    """Call this when a worker is replaced: the time of its successor begins now."""
    slots["since_ns"][worker] = time.monotonic_ns()
    slots["phase"][worker] = slot_layout.STARTING


def done_by(slots: Slots, worker: int) -> int:
    """Work that the worker has done for this farm: grows with every ticket that it serves for the first time."""
    simulated = slots["simulated"][slots["physics_of"] == worker].sum()
    return int(simulated + slots["drawn"][slots["renderer_of"] == worker].sum())


def name_of(slots: Slots, worker: int) -> str:
    """`physics 1` or `render 0`."""
    physics_workers = int(slots["physics_of"].max()) + 1
    return f"physics {worker}" if worker < physics_workers else f"render {worker - physics_workers}"


def _given_ns(slots: Slots, worker: int) -> int | None:
    """Time at which the worker got its oldest unfinished work; None without such work."""
    simulate = (slots["physics_of"] == worker) & (slots["requested"] > slots["simulated"])
    draw = (slots["renderer_of"] == worker) & (slots["simulated"] > slots["drawn"])
    given = [*slots["requested_ns"][simulate], *slots["times_ns"][draw, slot_layout.PHYSICS_END]]
    if slots["draws"][worker] and slots["left"][worker] != slots["away"][0]:
        given.append(slots["away_ns"][0])
    return int(np.min(given)) if given else None
