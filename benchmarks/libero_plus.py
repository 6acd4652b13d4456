"""LIBERO-Plus's variants beside LIBERO's own episodes: env steps for each second of a core.

    python benchmarks/libero_plus.py --json benchmarks/results/libero_plus.json

The scripted policy solves one episode of a task unperturbed and one under a variant, in turn, in one process and
without pictures; variants are spread over the task's in LIBERO-Plus's order. Time is the process's own
(`time.process_time`), so that what else the machine does counts for nothing. A reset, and for displaced objects another
environment, belong to an episode.
"""

from __future__ import annotations

import json
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro


@dataclass(frozen=True)
class Arguments:
    """LIBERO-Plus beside LIBERO."""

    task: str = "libero/libero_goal/9"
    """A task of LIBERO for which there is a script."""
    pairs: int = 60
    """Episodes of each kind."""
    json: Path | None = None
    """Write the result to this file."""


def main(arguments: Arguments) -> dict[str, Any]:
    from policies.scripted.libero import act
    from sim_farm.catalogue import suites_of
    from sim_farm.contract import EpisodeSpec, TaskSpec
    from sim_farm.registry import make_physics

    axes = ("camera", "start", "noise", "objects")
    table = suites_of(arguments.task)["libero-plus"].table(arguments.task, "intended", axes, range(1, 6))
    physics = make_physics(TaskSpec(arguments.task, settle_steps=10, perturbations=table))
    steps: defaultdict[str, int] = defaultdict(int)
    seconds: defaultdict[str, float] = defaultdict(float)
    solved: defaultdict[str, int] = defaultdict(int)

    def episode(kind: str, perturbation: int | None) -> None:
        begin = time.process_time()
        result = physics.reset(EpisodeSpec(7, 0, perturbation=perturbation))
        while not result.ended:
            result = physics.step(act(result.state.astype(np.float64), result.instruction)[None].astype(np.float32))
            steps[kind] += 1
        seconds[kind] += time.process_time() - begin
        solved[kind] += bool(result.success[-1])

    episode("warm", None)
    for pair in range(arguments.pairs):
        index = pair * len(table) // arguments.pairs
        episode("unperturbed", None)
        episode(table[index].axis, index)
    rates = {kind: steps[kind] / seconds[kind] for kind in steps if kind != "warm"}
    perturbed = sum(steps[axis] for axis in axes) / sum(seconds[axis] for axis in axes)
    return {
        "task": arguments.task,
        "pairs": arguments.pairs,
        "env_steps_per_core_s": rates,
        "perturbed_env_steps_per_core_s": perturbed,
        "ratio_to_unperturbed": perturbed / rates["unperturbed"],
        "solved": {kind: solved[kind] for kind in rates},
        "env_steps": {kind: steps[kind] for kind in rates},
    }


if __name__ == "__main__":
    arguments = tyro.cli(Arguments)
    result = main(arguments)
    text = json.dumps(result, indent=1)
    print(text)
    if arguments.json is not None:
        arguments.json.write_text(text + "\n")
