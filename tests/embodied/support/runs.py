"""Runs of three iterations by an assignment, with what was gathered kept beside them by an estimator of our own."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from embodied.algorithms.estimators import gae, group_relative
from embodied.algorithms.samples import Estimate
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.execution.assignment import HERE, Assignment, FarmAssignment
from embodied.execution.iteration import Iteration, start_run
from embodied.execution.roles import LearnerRole
from embodied.execution.session import Session
from embodied.trajectories.batch import Trajectories
from embodied.workflows.recipes import GRPO, PPO
from embodied.workflows.run_spec import RunSpec

ITERATIONS = 3
CORES = sorted(os.sched_getaffinity(0))


def kept_in(folder: Path, config: Config) -> Config:
    """The configuration, whose name tells `keep` the folder: without its slash, for a run's name is no path from it."""
    return config.model_copy(update={"name": str(folder).removeprefix("/")})


def keep(batch: Trajectories, config: Config) -> None:
    """Write the trajectories where the test that gave the run its name finds them."""
    assert config.name is not None
    folder = Path("/", config.name)
    named = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    named |= {f"trace.{key}": value for key, value in batch.trace.items()}
    named |= {f"frames.{key}": value for key, value in batch.inputs.frames.items()}
    for key in ("state", "proprio"):
        if getattr(batch.inputs, key) is not None:
            named[key] = getattr(batch.inputs, key)
    named["version"] = torch.tensor(batch.version)
    save_file({k: v.contiguous() for k, v in named.items()}, folder / f"{len(list(folder.iterdir())):03d}.safetensors")


def kept_gae(batch: Trajectories, config: Config) -> Estimate:
    keep(batch, config)
    return gae(batch, config)


def kept_group_relative(batch: Trajectories, config: Config) -> Estimate:
    keep(batch, config)
    return group_relative(batch, config)


KEPT_PPO = replace(PPO, estimator=kept_gae)
KEPT_GRPO = replace(GRPO, estimator=kept_group_relative)

STATES: dict[str, Any] = {
    "workflow": f"{__name__}:KEPT_PPO",
    "seed": 3,
    "iterations": ITERATIONS,
    "env": {"task": "tabletop/reach", "num_envs": 4, "max_episode_steps": 9, "init_states": "seeds:6"},
    "policy": {"chunk": 2, "options": {"widths": [32, 32], "initial_log_std": 0.5}},
    "rollout": {"decisions": 12},
    "optim": {"epochs": 2, "minibatch": 16, "policy_lr": 3e-3, "value_lr": 3e-3},
    "runtime": {"deadline_s": 120},
}
IMAGES: dict[str, Any] = {
    **STATES,
    "env": {**STATES["env"], "cameras": 1, "image_size": 32},
    "policy": {
        "kind": "flow",
        "reads": ["proprio", "images"],
        "chunk": 2,
        "options": {"encoder": "cnn", "features": 16, "widths": [16], "critic_widths": [16]},
    },
    "rollout": {"decisions": 6},
}
GROUPS: dict[str, Any] = {
    **STATES,
    "workflow": f"{__name__}:KEPT_GRPO",
    "rollout": {"episode_group": 2, "episodes_per_env": 2},
    "advantage": {"outcome": "return"},
    "optim": {**STATES["optim"], "epochs": 1, "minibatch": 0, "value_lr": 3e-4},
}
MANISKILL: dict[str, Any] = {
    **STATES,
    "env": {"task": "maniskill/PushCube-v1", "num_envs": 4, "max_episode_steps": 9, "init_states": "seeds:6"},
}
LIBERO: dict[str, Any] = {
    **IMAGES,
    "env": {
        "task": "libero/libero_spatial/0", "num_envs": 2, "max_episode_steps": 6, "cameras": 1, "image_size": 64,
        "init_states": 50,
    },
    "rollout": {"decisions": 4}, "optim": {**STATES["optim"], "minibatch": 4},
    }  # fmt: skip


def cores(*numbers: int) -> tuple[int, ...]:
    """Cores of this machine by their number, begun anew where there are fewer."""
    return tuple(dict.fromkeys(CORES[number % len(CORES)] for number in numbers))


def assigned(
    mode: str = "collocated", groups: int = 1, physics: tuple[int, ...] = (0,), render: tuple[int, ...] = (),
    policy: tuple[int, ...] = (0, 1), learner: tuple[int, ...] = (0, 1), one_process: bool = True, ahead: int = 0,
) -> Assignment:  # fmt: skip
    farm = FarmAssignment(
        groups,
        tuple(CORES[core % len(CORES)] for core in physics), (HERE,) * len(physics),
        tuple(CORES[core % len(CORES)] for core in render),
    )  # fmt: skip
    components = {"policy": (Affinity(cores(*policy)),), "learner": (Affinity(cores(*learner)),)}
    return Assignment(mode, (farm,), components, (0,) if one_process else (), ahead)


def inline(like: Assignment) -> Assignment:
    """The same batches without processes, cores or a shared policy."""
    free = (None,)
    farms = tuple(
        replace(farm, physics=free * len(farm.physics), render=free * len(farm.render)) for farm in like.farms
    )
    components = {name: (Affinity(),) for name in like.components}
    return replace(like, mode="inline", farms=farms, components=components, hosts=(), unload=False)


@dataclass(frozen=True)
class Run:
    iterations: list[Iteration]
    gathered: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]

    @property
    def episodes(self) -> list[list[tuple[int, bool, int]]]:
        return [[(e.env, e.success, e.length) for e in one.summary.episodes] for one in self.iterations]

    @property
    def returns(self) -> list[float]:
        return [e.total_reward for one in self.iterations for e in one.summary.episodes]


def run(
    settings: dict[str, Any], session: Session, assignment: Assignment, folder: Path, drains: tuple[int, ...] = (),
) -> Run:  # fmt: skip
    """Three iterations by the assignment; `drains`: those after which no rollout is ahead."""
    (folder / "gathered").mkdir(parents=True)
    config = kept_in(folder / "gathered", parse_config(settings, "test"))
    with start_run(RunSpec.of(config), folder, session, assignment) as workers:
        workers.begin(None, 0)
        iterations = [workers.iterate(i, drain=i in drains or i == ITERATIONS - 1) for i in range(ITERATIONS)]
        if assignment.unload:
            workers.learner.call(LearnerRole.load_back)
        parameters = {name: tensor.clone() for name, tensor in workers.learner.call(LearnerRole.weights).items()}
    return Run(iterations, [load_file(path) for path in sorted((folder / "gathered").iterdir())], parameters)


def assert_equal(found: Run, expected: Run, tolerance: float = 0.0) -> None:
    """The same episodes, trajectories and parameters: to the last bit, or within the tolerance of every number. A pixel
    is rounded to a whole number, so that with a tolerance one in a thousand may be the next one."""
    assert found.episodes == expected.episodes
    assert found.returns == (pytest.approx(expected.returns, abs=tolerance) if tolerance else expected.returns)
    assert len(found.gathered) == len(expected.gathered)
    for part, (tensors, others) in enumerate(zip(found.gathered, expected.gathered, strict=True)):
        assert tensors.keys() == others.keys()
        for name, tensor in others.items():
            assert_near(tensors[name], tensor, tolerance, f"part {part}: {name}")
    for name, tensor in expected.parameters.items():
        assert_near(found.parameters[name], tensor, tolerance, name)


def assert_near(found: Tensor, expected: Tensor, tolerance: float, name: str) -> None:
    assert found.shape == expected.shape, name
    if tolerance and expected.is_floating_point():
        worst = float((found - expected).abs().max())
        assert worst <= tolerance, f"{name} differs by {worst:.1e}"
    elif tolerance and expected.dtype == torch.uint8:
        apart = (found.int() - expected.int()).abs()
        assert apart.max() <= 1, f"{name}: a pixel differs by {apart.max()}"
        assert apart.count_nonzero() <= apart.numel() / 1000, f"{name}: {apart.count_nonzero()} pixels differ"
    else:
        assert torch.equal(found, expected), name


def assert_was_a_test(run: Run) -> None:
    """Episodes ended, some of them solved, and something was learned in every iteration."""
    assert len(run.iterations) == ITERATIONS <= len(run.gathered)
    assert run.returns
    assert all(one.learned["learner/steps"] > 0 and one.learned["learner/grad_norm"] > 0 for one in run.iterations)
    assert not any(one.learned["learner/skipped_steps"] for one in run.iterations)
    assert all(not torch.equal(run.gathered[0]["log_prob"], later["log_prob"]) for later in run.gathered[1:])


def lags(run: Run) -> list[int]:
    """Updates that the acting policy had missed, iteration by iteration; every part of one is equally old."""
    parts = len(run.gathered) // ITERATIONS
    found = [number // parts - int(part["version"]) for number, part in enumerate(run.gathered)]
    assert found == [i - one.summary.version for i, one in enumerate(run.iterations) for _ in range(parts)]
    return found[::parts]
