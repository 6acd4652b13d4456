"""Evaluation beside a run: by a process on a core, and with a GPU where policies compute on one, that the run leaves
free."""

from __future__ import annotations

import multiprocessing
import os
import sys
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from embodied.config.schema import Config
from embodied.devices import CPU
from embodied.execution.assignment import HERE, Assignment
from embodied.execution.session import Session, open_session

VISIBLE_GPUS = "CUDA_VISIBLE_DEVICES"
Work = Callable[[Session], dict[str, Any]]


@dataclass(frozen=True)
class Room:
    """What a run leaves free of this machine."""

    core: int
    gpu: int | None = None
    """By this process's count; None: policies compute on the CPU."""

    def applied(self, config: Config) -> Config:
        """The configuration in one process of this machine. What an evaluation is identified by stays."""
        runtime = config.runtime.model_copy(update={"mode": "inline"})
        # Its one GPU is the first that it sees.
        devices = config.farm.devices
        if self.gpu is not None and devices and devices != "cpu":
            devices = (0,)
        farm = config.farm.model_copy(update={"nodes": (), "devices": devices})
        return config.model_copy(update={"runtime": runtime, "farm": farm})

    def enter(self) -> None:
        """Confine this process to the core and the GPU, before it has used any."""
        os.sched_setaffinity(0, {self.core})
        if self.gpu is not None:
            visible = os.environ.get(VISIBLE_GPUS, "")
            os.environ[VISIBLE_GPUS] = visible.split(",")[self.gpu] if visible else str(self.gpu)


def room_beside(assignment: Assignment, cores: Sequence[int], gpus: Sequence[torch.device]) -> Room | None:
    """A core that no worker of the run is pinned to and no thread of it needs, and one of the GPUs that none uses
    (where there are any); None where the run leaves no such thing.

    Workers that the system places say nothing of cores: a run whose simulators are not pinned leaves none, and a
    component on the CPU without cores of its own needs as many as it has threads. A GPU on which frames are drawn is
    taken, and without a name it is the first.
    """
    physics = [
        core for farm in assignment.farms for core, node in zip(farm.physics, farm.physics_nodes, strict=True)
        if node == HERE
    ]  # fmt: skip
    if None in physics:
        return None
    computing = [place for places in assignment.components.values() for place in places if place.node == HERE]
    used = {core for core in physics if core is not None}
    used |= {core for farm in assignment.farms for core in farm.render if core is not None}
    used |= {core for place in computing for core in place.cores}
    on_cpu = [place for place in computing if not gpus or place.device == str(CPU)]
    threads = max((place.threads for place in on_cpu if not place.cores), default=0)
    spare = [core for core in cores if core not in used]
    if not spare or threads >= len(cores):
        return None
    if not gpus:
        return Room(spare[-1])
    taken = {place.device or str(gpus[0]) for place in computing}
    drawing = [device for farm in assignment.farms for device in farm.devices or (gpus[0].index,)]
    taken |= {f"cuda:{device}" for device in drawing}
    free = [gpu.index for gpu in gpus if str(gpu) not in taken]
    return Room(spare[-1], free[0]) if free else None


class BesideError(Exception):
    """The process ended before its work was done."""


class BesideProcess:
    """A process in a room of its own, which does one piece of work at a time. It ends with this one, whatever ends
    that."""

    def __init__(self, config: Config, room: Room, log: Path) -> None:
        """`config` is of its session. What it prints, and would disturb a live table, goes to `log`."""
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, config, room, log), daemon=True)
        self._process.start()
        theirs.close()

    def begin(self, work: Work) -> None:
        """Have `work`, which is pickled, done in the process's session. Its result is taken before the next begins.

        Raises `BesideError` where the process is gone.
        """
        try:
            self._ours.send(work)
        except OSError as error:  # a broken pipe
            raise self._gone() from error

    def result(self, block: bool) -> dict[str, Any] | None:
        """What came of the work; None where it is not done yet and nobody is to wait.

        Raises what the work raised, and `BesideError` where the process is gone.
        """
        try:
            if not block and not self._ours.poll():
                return None
            found = self._ours.recv()
        except (EOFError, OSError) as error:
            raise self._gone() from error
        if isinstance(found, BaseException):
            raise found
        return found

    def _gone(self) -> BesideError:
        self._process.join(1)
        return BesideError(f"the process ended with exit status {self._process.exitcode}")

    def close(self) -> None:
        """End the process, and what it is doing."""
        self._process.kill()
        self._process.join()
        self._ours.close()


def _serve(requests: Connection, config: Config, room: Room, log: Path) -> None:
    room.enter()
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("a", buffering=1) as text:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
            os.dup2(text.fileno(), stream.fileno())
        threading.Thread(target=_end_with_parent, daemon=True).start()
        with open_session(config) as session:
            while True:
                try:
                    work: Work = requests.recv()
                except EOFError:
                    return
                try:
                    requests.send(work(session))
                except Exception as error:  # it is raised again where the result is waited for
                    requests.send(error)


def _end_with_parent() -> None:
    """A run that was killed has nobody left to end its processes."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)
