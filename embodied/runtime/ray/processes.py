"""Ray's own processes on this machine: whether they live, and ending them where they do not answer."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil  # type: ignore[import-untyped]

NEEDED = ("gcs_server", "raylet")
"""What must live for an actor to be started or found: the store of the cluster's state, and the node's manager."""
STOPPED_S = 3.0
"""How long one may be stopped by a signal: a terminal stops and continues all processes of a run, one by one."""
END_S = 10.0
"""Longest wait for the end of processes that were killed."""


@dataclass
class RayProcesses:
    """What `ray.init` has started from this process; none where it has joined a cluster."""

    started: tuple[psutil.Process, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    """Of those that are needed, by process id."""
    _stopped: dict[int, float] = field(default_factory=dict)
    """Since when which is seen to be stopped."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Take for Ray's what this process starts in the block."""
        before = set(psutil.Process().children())
        yield
        self.started = tuple(set(psutil.Process().children()) - before)
        self.names = {one.pid: one.name() for one in self.started if one.name() in NEEDED}
        self._stopped.clear()

    def lost(self, stopped_s: float = STOPPED_S) -> str | None:
        """Which of them died, or was stopped for so long, in words; None where all live."""
        missing = [name for name in NEEDED if name not in self.names.values()]
        if self.started and missing:  # it died, and was reaped, before it could be noted
            return f"Ray's {missing[0]} died"
        for process in self.started:
            name, now = self.names.get(process.pid), time.monotonic()
            if name is None:
                continue
            status = _status(process)
            if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return f"Ray's {name} died"
            if status != psutil.STATUS_STOPPED:
                self._stopped.pop(process.pid, None)
            elif now - self._stopped.setdefault(process.pid, now) >= stopped_s:
                return f"Ray's {name} has been stopped for {now - self._stopped[process.pid]:.1f} s"
        return None

    def end(self) -> None:
        """End them, with all that they have started, however they are."""
        every = set(self.started)
        for process in self.started:
            try:
                every |= set(process.children(recursive=True))
            except psutil.NoSuchProcess:
                continue
        for process in every:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(every, timeout=END_S)
        self.started, self.names = (), {}


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)
