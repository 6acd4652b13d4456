"""Fault injection: lets a worker die, hang, raise, be late or give wrong data at a chosen point. Off unless a file is
named.

The environment variable EMBODIED_FAULTS names a JSON file with a list of faults:

    [{"worker": "learner", "phase": "finish", "kind": "kill", "nth": 3}]

`worker` is a worker's name in messages (`learner`, `policy 1`, `physics 0`), or `driver`. `phase` is, of a physics or
render worker, `start`, `reset`, `step`, `state` (its data), `draw`, `open`, `close` or `replay`; of the driver `start`,
`rollout`, `update` or `save`; of any other worker the method that is called, and `make` for its making. `nth` counts
from 1, per process, since the file was written. A fault strikes once: it leaves the file FILE.fired-N, N being its
place in the list.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import numpy.typing as npt

VARIABLE = "EMBODIED_FAULTS"
Kind = Literal["kill", "stop", "raise", "delay", "corrupt"]


class InjectedFault(Exception):
    """Error that a fault of kind `raise` raises."""


@dataclass(frozen=True)
class Fault:
    """A fault: its kind, and the point where it happens to a worker.

    Raises `ValueError` for an unknown kind and for numbers out of range.
    """

    worker: str
    phase: str
    kind: Kind
    nth: int = 1
    seconds: float = 1.0
    """Seconds of a delay."""
    child: str = ""
    """Target of `kill` and `stop` instead of the worker: a process of this name that it has started (`raylet`,
    `gcs_server`)."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"a fault is one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if self.nth < 1 or not 0 <= self.seconds < float("inf"):
            raise ValueError(f"a fault needs nth >= 1 and a finite time, got {self.nth} and {self.seconds} s")


_seen: Counter[tuple[int, str, str]] = Counter()
"""Number of times a point was reached, since the version of the file with that time."""


def point(worker: str, phase: str, data: npt.NDArray[Any] | None = None) -> None:
    """A point at which a fault may strike the process, or the `data` at hand. Does nothing unless EMBODIED_FAULTS names
    a file.

    Raises `InjectedFault` where that is the fault.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return
    path = Path(named)
    here = (path.stat().st_mtime_ns, worker, phase)
    _seen[here] += 1
    for number, fault in enumerate(read(path)):
        meant = (fault.worker, fault.phase, fault.nth) == (worker, phase, _seen[here])
        if meant and _first(Path(f"{named}.fired-{number}")):
            _strike(fault, data)


def read(path: Path) -> list[Fault]:
    """The faults of a file. Raises `ValueError` for what is not a list of faults."""
    try:
        return [Fault(**entry) for entry in json.loads(path.read_text())]
    except (OSError, TypeError, ValueError, RecursionError) as error:
        raise ValueError(f"{VARIABLE}={path} is not a list of faults: {error}") from error


def _first(mark: Path) -> bool:
    """True if this mark did not exist yet; it exists now."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _strike(fault: Fault, data: npt.NDArray[Any] | None) -> None:
    if fault.kind == "raise":
        raise InjectedFault(f"a fault was injected into {fault.worker} at {fault.phase!r}")
    if fault.kind == "delay":
        time.sleep(fault.seconds)
    elif fault.kind == "corrupt":
        if data is None:
            raise ValueError(f"there is no data to corrupt at {fault.phase!r} of {fault.worker}")
        data[...] = np.nan
    else:
        os.kill(_victim(fault), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)


def _victim(fault: Fault) -> int:
    """The process that is killed or stopped: this one, or a child of it (Linux's /proc)."""
    if not fault.child:
        return os.getpid()
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            before, _, after = stat.read_text().rpartition(")")
        except OSError:  # it has ended meanwhile
            continue
        if before.partition("(")[2] == fault.child and int(after.split()[1]) == os.getpid():
            return int(stat.parent.name)
    raise ValueError(f"{fault.worker} has started no process {fault.child!r}")
