"""Fault injection: lets a worker die, hang, raise or be late at a chosen point. Off unless a file is named.

The environment variable EMBODIED_FAULTS names a JSON file with a list of faults:

    [{"worker": "learner", "phase": "finish", "kind": "kill", "nth": 3}]

`worker` is the worker's name in messages (`learner`, `policy 1`, `physics 0`). `phase` is, of a physics or render
worker, what it begins (`layout.PHASES`); of any other worker, the method that is called, `make` for its making.
`nth` counts from 1, per process. A fault fires once: it leaves the file FILE.fired-N, N being its place in the list.
"""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

VARIABLE = "EMBODIED_FAULTS"
Kind = Literal["kill", "stop", "raise", "delay"]


class InjectedFault(Exception):
    """What a fault of kind `raise` raises."""


@dataclass(frozen=True)
class Fault:
    """What happens to a worker, and where. Raises `ValueError` for an unknown kind and for numbers out of range."""

    worker: str
    phase: str
    kind: Kind
    nth: int = 1
    seconds: float = 1.0
    """Of a delay."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind):
            raise ValueError(f"a fault is one of {', '.join(get_args(Kind))}, got {self.kind!r}")
        if self.nth < 1 or not 0 <= self.seconds < float("inf"):
            raise ValueError(f"a fault needs nth >= 1 and a finite time, got {self.nth} and {self.seconds} s")


_seen: Counter[tuple[str, str]] = Counter()


def point(worker: str, phase: str) -> None:
    """A point at which a fault may strike the process. Does nothing unless EMBODIED_FAULTS names a file.

    Raises `InjectedFault` where that is the fault.
    """
    named = os.environ.get(VARIABLE)
    if not named:
        return
    _seen[worker, phase] += 1
    for number, fault in enumerate(read(Path(named))):
        here = (fault.worker, fault.phase, fault.nth) == (worker, phase, _seen[worker, phase])
        if here and _first(Path(f"{named}.fired-{number}")):
            _strike(fault)


def read(path: Path) -> list[Fault]:
    """The faults of a file. Raises `ValueError` for what is not a list of faults."""
    try:
        return [Fault(**entry) for entry in json.loads(path.read_text())]
    except (OSError, TypeError, ValueError) as error:
        raise ValueError(f"{VARIABLE}={path} is not a list of faults: {error}") from error


def _first(mark: Path) -> bool:
    """Whether nobody has left this mark before; it is there now."""
    try:
        mark.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True


def _strike(fault: Fault) -> None:
    if fault.kind == "raise":
        raise InjectedFault(f"a fault was injected into {fault.worker} at {fault.phase!r}")
    if fault.kind == "delay":
        time.sleep(fault.seconds)
    else:
        os.kill(os.getpid(), signal.SIGKILL if fault.kind == "kill" else signal.SIGSTOP)
