"""A training run in a process of its own, which is killed at a given moment."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from embodied.config.files import parse_config
from embodied.execution.session import open_session
from embodied.run.folder import open_run_folder
from embodied.training.imitator import STAGE
from embodied.training.loop import train
from embodied.training.sft import imitate
from embodied.workflows.run_spec import RunSpec, task_spec
from sim_farm.workers.hosts import InProcess

EVENTS = ("open", "os.mkdir", "os.rename", "os.remove", "shutil.rmtree")
"""What of a save is counted, wherever a path says that it is of a checkpoint that is begun, replaced or removed."""


@dataclass(frozen=True)
class Killed:
    """The moment: none, or one of the two."""

    cpu_s: float = 0.0
    """So much CPU time after the run has begun, whatever it is doing."""
    event: int = 0
    """At so many events within saves."""


@dataclass(frozen=True)
class Moments:
    """Of a run that nobody killed: how long it took, and how many events its saves had."""

    cpu_s: float
    events: int


def run(settings: dict[str, Any], folder: Path, killed: Killed = Killed()) -> Moments | None:
    """Begin the run in the folder, or go on with it. None: it was killed."""
    context = multiprocessing.get_context("forkserver")  # imports once, and has no threads
    context.set_forkserver_preload([__name__])
    process = context.Process(target=_trained, args=(settings, folder, killed))
    process.start()
    process.join(300)
    code, report = process.exitcode, folder.parent / f"{folder.name}.json"
    if code in (-signal.SIGKILL, -signal.SIGPROF):
        return None
    assert code == 0, f"it ended with {code}"
    return Moments(**json.loads(report.read_text()))


def _trained(settings: dict[str, Any], folder: Path, killed: Killed) -> None:
    torch.set_num_threads(1)
    seen, begin = 0, time.process_time()

    def count(event: str, arguments: tuple[object, ...]) -> None:
        nonlocal seen
        if event in EVENTS and "checkpoints/." in str(arguments[0]):
            seen += 1
            if seen == killed.event:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    if killed.cpu_s:
        # The system ends the process, as by SIGKILL: nobody handles the signal.
        signal.signal(signal.SIGPROF, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_PROF, killed.cpu_s)
    config = parse_config({**settings, "name": folder.name}, "test")
    stage = STAGE if config.sft.data else "rl"
    with open_run_folder(config, "test", folder.parent, True, stage) as (run_dir, found):
        if stage == STAGE:
            imitate(config, InProcess().describe(task_spec(config)), run_dir, found)
        else:
            with open_session(config) as session:
                train(RunSpec.of(config), run_dir, session, found)
    signal.setitimer(signal.ITIMER_PROF, 0)
    moments = {"cpu_s": time.process_time() - begin, "events": seen}
    (folder.parent / f"{folder.name}.json").write_text(json.dumps(moments))
