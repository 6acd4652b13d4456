"""Short runs on episodes in groups, their parts, and a policy that solves some of them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from embodied.algorithms.estimators import group_relative
from embodied.algorithms.samples import Estimate
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.execution.assignment import configured
from embodied.execution.iteration import Iteration, OnPolicy, start_run
from embodied.execution.roles import LearnerRole, RolloutRole
from embodied.execution.session import open_session
from embodied.learning.learner import Learner
from embodied.rollout.rollout_summary import EpisodePart
from embodied.run.checkpoint import RunState
from embodied.trajectories.batch import Trajectories
from embodied.workflows.context import make_policy
from embodied.workflows.recipes import GRPO
from embodied.workflows.run_spec import RunSpec
from policies.contract import Policy, PolicySpec
from tests.embodied.support.copied_out import copied_out

ENVS, SIZE, CHUNK, LIMIT = 8, 4, 2, 19
"""An episode that is truncated ends in the middle of a chunk."""
SETTINGS: dict[str, Any] = {
    "workflow": "grpo",
    "seed": 6,
    "iterations": 3,
    "checkpoint_every": 1,
    "env": {"task": "tabletop/reach", "num_envs": ENVS, "max_episode_steps": LIMIT},
    "farm": {"groups": 2},
    "policy": {"chunk": CHUNK, "options": {"widths": [32, 32], "initial_log_std": -1.0}},
    "rollout": {"episode_group": SIZE, "episodes_per_env": 3},
    "advantage": {"outcome": "return"},
    "optim": {"epochs": 1, "minibatch": 0, "policy_lr": 1e-2, "max_grad_norm": 1e9},
    "runtime": {"mode": "inline"},
}


def config_of(**changes: Any) -> Config:
    """The settings with changes, section by section: `rollout={"episodes_per_env": 1}`."""
    return parse_config(
        {
            **SETTINGS,
            **{k: {**SETTINGS.get(k, {}), **v} if isinstance(v, dict) else v for k, v in changes.items()},
        },
        "test",
    )


@contextmanager
def begun(config: Config, folder: Path, policy: Path | None = None) -> Iterator[OnPolicy]:
    """The run's workers; the policy is new, or from a checkpoint."""
    with (
        open_session(config) as session,
        start_run(RunSpec.of(config), folder, session, configured(RunSpec.of(config), session.cores)) as workers,
    ):
        if policy is not None:
            workers.load(policy)
        workers.begin(None, 0)
        yield workers


@pytest.fixture(scope="module")
def skilled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoint of a policy that solves some episodes early, and others not: a new one hardly solves any."""
    config = config_of(env={"num_envs": 32}, rollout={"episodes_per_env": 1}, iterations=8)
    root = tmp_path_factory.mktemp("skilled")
    with begun(config, root) as workers:
        done = [workers.iterate(number) for number in range(config.iterations)]
        workers.save(root, RunState(0, 0, 0.0, ()), done[-1].environments)
    (folder,) = root.glob("0*")
    return folder


def iterations_of(
    config: Config, folder: Path, policy: Path | None = None
) -> tuple[list[Iteration], dict[str, Tensor]]:
    with begun(config, folder, policy) as workers:
        done = [workers.iterate(number) for number in range(config.iterations)]
        return done, {k: v.clone() for k, v in workers.learner.call(LearnerRole.weights).items()}


def part_of(number: int) -> EpisodePart:
    """Episode `number` of every environment."""
    return EpisodePart(number * ENVS, (number + 1) * ENVS)


def roll(workers: OnPolicy, number: int, limit: int) -> Trajectories:
    """Episode `number` of every environment, of which each may end `limit`."""
    workers.rollout_worker.call(RolloutRole.rollout_episodes, part_of(number), limit, 60.0)
    return copied_out(workers.rollout_worker.call(RolloutRole.trajectories))


def episodes_in_parts(config: Config, folder: Path, policy: Path | None = None) -> list[Trajectories]:
    """One iteration's trajectories, before anything is learned."""
    with begun(config, folder, policy) as workers:
        episodes = config.rollout.episodes_per_env
        return [roll(workers, number, episodes) for number in range(episodes)]


def policy_of(config: Config) -> Policy:
    return make_policy(config, PolicySpec(action_dim=3, chunk=CHUNK, state_dim=16))


def learner_of(config: Config, folder: Path, policy: Path | None = None) -> Learner:
    learner = Learner(policy_of(config), RunSpec.of(config), folder)
    if policy is not None:
        learner.load(policy)
    return learner


def gradients(learner: Learner) -> dict[str, Tensor]:
    return {n: p.grad.clone() for n, p in learner.policy.named_parameters() if p.grad is not None}


def assert_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.fixture(scope="module")
def parts(skilled: Path, tmp_path_factory: pytest.TempPathFactory) -> list[Trajectories]:
    return episodes_in_parts(config_of(), tmp_path_factory.mktemp("parts"), skilled)


SEEN: list[Trajectories] = []
"""The parts that the workflow `NOTING` was asked about, until somebody clears it."""


def noting(batch: Trajectories, config: Config) -> Estimate:
    SEEN.append(copied_out(batch))
    return group_relative(batch, config)


NOTED = replace(GRPO, estimator=noting)
NOTING = f"{__name__}:NOTED"
