"""An advantage estimator of your own: RLOO, an episode's return less the mean of the others of its group.

    python examples/own_estimator.py

Ahmadian et al. 2024 (arXiv 2402.14740). The workflow is GRPO's with another estimator; docs/workflows.md has the rules.
"""

from __future__ import annotations

from dataclasses import replace

import torch

import embodied
from embodied.algorithms.advantages import group_means
from embodied.algorithms.estimators import outcomes
from embodied.algorithms.samples import Estimate
from embodied.config.schema import Config
from embodied.trajectories.batch import Trajectories
from embodied.workflows import GRPO


def leave_one_out(batch: Trajectories, config: Config) -> Estimate:
    """All [T, B]: column b is one episode, row t its decision t. A function of its arguments alone."""
    assert batch.episode_group is not None  # int64 [B]; None where a rollout is of decisions
    size = config.rollout.episode_group
    outcome = outcomes(batch, config.advantage)  # [B]: success or return, as advantage.outcome says
    mean, complete = group_means(outcome, batch.episode_group, size)
    advantage = (outcome - mean) * size / (size - 1)
    ones = torch.ones_like(batch.reward)
    return Estimate(
        advantage=ones * advantage,
        returns=torch.zeros_like(ones),  # the critic's target; this workflow has no critic
        keep=batch.mask & complete & (advantage != 0),  # the other decisions never reach the model
        weight=ones,
    )


RLOO = replace(GRPO, name="rloo", estimator=leave_one_out)
CONFIG = Config.model_validate(
    {
        "name": "example-estimator",
        "workflow": "own_estimator:RLOO",  # importable in every process: here, the folder of the script
        "iterations": 20,
        "env": {"task": "tabletop/reach", "num_envs": 32, "max_episode_steps": 20},
        "policy": {"chunk": 2, "options": {"widths": [32, 32], "initial_log_std": -1.0}},
        "rollout": {"episode_group": 4},
        "advantage": {"outcome": "return"},
        "optim": {"epochs": 1, "minibatch": 0, "policy_lr": 1e-2},
        "eval": {"episodes": 20, "videos": 0},
        "runtime": {"mode": "inline"},
    }
)

if __name__ == "__main__":
    embodied.train(CONFIG, runs_dir="runs")
