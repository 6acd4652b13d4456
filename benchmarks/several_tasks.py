"""Two tasks in one run beside the same tasks one after the other: `python benchmarks/several_tasks.py --json FILE`.

PushCube and LIBERO from images, one policy for both. One after the other is each task in a run of its own: their
iterations' times add up. Both are placed as configured, a physics worker of each task on every core. The three
arrangements are measured in turn, so that what the machine does meanwhile falls on all of them.
"""

from __future__ import annotations

import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import tyro

from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.execution.assignment import configured
from embodied.execution.iteration import OnPolicy, start_run
from embodied.execution.session import open_session
from embodied.workflows.run_spec import RunSpec
from embodied_bench.settings import show_and_write

PUSH = {
    "task": "maniskill/PushCube-v1",
    "control_mode": "pd_ee_delta_pose",
    "num_envs": 8,
    "settle_steps": 0,
    "init_states": 0,
}
LIBERO = {"task": "libero/libero_spatial/0", "settle_steps": 10, "init_states": 50, "num_envs": 4}
SHARED: dict[str, Any] = {"cameras": 1, "image_size": 128, "max_episode_steps": 80}


@dataclass(frozen=True)
class Settings:
    """How often."""

    rounds: int = 4
    """Iterations of each arrangement, in turn, after one that warms up."""
    json: Path | None = None
    """Write the result to this file."""


def config_of(first: dict[str, Any], *others: dict[str, Any]) -> Config:
    return parse_config(
        {
            "seed": 1,
            "env": {**SHARED, **first},
            "extra_tasks": [{**SHARED, **other} for other in others],
            "policy": {
                "kind": "flow",
                "reads": ["images"],
                "chunk": 8,
                "options": {"encoder": "cnn", "steps": 4, "noise_level": 0.5, "start_std": 0.1},
            },
            "rollout": {"decisions": 6},
            "advantage": {"gamma": 0.95},
            "loss": {"value_clip": None},
            "optim": {"epochs": 2, "minibatch": 24},
        },
        "benchmark",
    )


def main(settings: Settings) -> None:
    configs = {
        "together": config_of(LIBERO, PUSH),
        "LIBERO alone": config_of({**LIBERO, "control_mode": None}),
        "PushCube alone": config_of(PUSH),
    }
    seconds: dict[str, list[float]] = {name: [] for name in configs}
    with open_session(configs["together"]) as session, ExitStack() as stack:
        running: dict[str, OnPolicy] = {}
        for name, config in configs.items():
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
            place = configured(RunSpec.of(config), session.cores)
            running[name] = stack.enter_context(start_run(RunSpec.of(config), folder, session, place))
            running[name].begin(None, 0)
            running[name].iterate(0)
        for number in range(1, settings.rounds + 1):
            for name, workers in running.items():
                seconds[name].append(workers.iterate(number).wall_s)
    middle = {name: median(values) for name, values in seconds.items()}
    apart = middle["LIBERO alone"] + middle["PushCube alone"]
    result = {
        "iteration_s": middle,
        "one_after_the_other_s": apart,
        "ratio_to_one_after_the_other": middle["together"] / apart,
        "each_s": seconds,
    }
    show_and_write(result, settings.json)


if __name__ == "__main__":
    main(tyro.cli(Settings))
