"""CPU time of an env step of ManiSkill, where a worker's environments share their Python and where each runs its own.

    python benchmarks/together.py --json benchmarks/results/together.json

Two farms in this process, each of one worker, execute the same random actions in turn, from states, one env step a
chunk. They differ in `Backend.make_batch` alone. Each pair of measurements gives one ratio; the median counts. CPU time
is compared, so that other work on the machine takes nothing from either.
"""

from __future__ import annotations

import os
import time
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}

import numpy as np
import tyro

from sim_farm.backends.maniskill.simulator import BACKEND
from sim_farm.client.farm import Farm
from sim_farm.contract import TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess

ALONE = replace(BACKEND, name="alone", make_batch=None)
"""ManiSkill, each environment by itself."""


@dataclass(frozen=True)
class Arguments:
    """CPU time of an env step of ManiSkill, with shared Python and without."""

    tasks: tuple[str, ...] = ("PushCube-v1", "PickCube-v1", "StackCube-v1", "PegInsertionSide-v1")
    num_envs: int = 8
    """Environments of the worker: sixteen on two cores have eight each."""
    steps: int = 50
    """Env steps of each environment in a measurement: an episode of PushCube, with a reset."""
    pairs: int = 7
    """Measurements of each."""
    json: Path | None = None
    """Write the result to this file."""


def stepper(task: str, count: int) -> tuple[Farm, Any]:
    """A farm, and what measures the CPU time of its env steps, in s."""
    spec = FarmSpec(TaskSpec(task), EndlessEpisodes(0), count, chunk=1, final_frames="never")
    farm = Farm.create(spec, InProcess())
    shape = (256, count, 1, farm.infos[0].action_dim)
    actions = np.random.default_rng(0).uniform(-1, 1, shape).astype(np.float32)
    farm.reset(0)
    farm.collect(0)
    turn = 0

    def run(steps: int) -> float:
        nonlocal turn
        begin = time.process_time()
        for _ in range(steps):
            farm.submit(0, actions[turn % len(actions)])
            farm.collect(0)
            turn += 1
        return (time.process_time() - begin) / (steps * count)

    return farm, run


def measured(task: str, arguments: Arguments) -> dict[str, Any]:
    shared, run_shared = stepper(f"maniskill/{task}", arguments.num_envs)
    alone, run_alone = stepper(f"benchmarks.together:ALONE/{task}", arguments.num_envs)
    with closing(shared), closing(alone):
        for run in (run_shared, run_alone):
            run(arguments.steps // 2)
        pairs = [(run_shared(arguments.steps), run_alone(arguments.steps)) for _ in range(arguments.pairs)]
    ratios = sorted(by_itself / together for together, by_itself in pairs)
    return {
        "shared_cpu_s": float(np.median([together for together, _ in pairs])),
        "alone_cpu_s": float(np.median([by_itself for _, by_itself in pairs])),
        "times_as_fast": float(np.median(ratios)),
        "least": ratios[0],
        "most": ratios[-1],
    }


def main(arguments: Arguments) -> None:
    from embodied_bench.settings import show_and_write

    figures: dict[str, Any] = {"num_envs": arguments.num_envs, "load": os.getloadavg()[0]}
    figures |= {task: measured(task, arguments) for task in arguments.tasks}
    show_and_write(figures, arguments.json)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
