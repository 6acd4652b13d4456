"""Your own scorer: a worker between rollout and learner that charges for every env step.

    python examples/own_scorer.py

A reward judged from frames needs no class: `workflow: ppo_reward` with `reward.model: package.module:NAME`.
"""

from __future__ import annotations

from dataclasses import replace

import embodied
from embodied.config.schema import Config
from embodied.learning.scorers import Scorer
from embodied.trajectories.batch import Trajectories
from embodied.workflows import PPO, WorkflowComponent, passing
from embodied.workflows.context import WorkerContext


class StepCost(Scorer):
    """Takes 0.01 off the reward for every env step that a decision took."""

    @classmethod
    def make(cls, context: WorkerContext) -> StepCost:
        return cls(context.affinity)

    def work(self, batch: Trajectories) -> Trajectories:
        """New trajectories; the tensors of `batch` are shared and must not be written to."""
        return replace(batch, reward=batch.reward - 0.01 * batch.executed)  # [T, B] both


STEP_COST = WorkflowComponent("step_cost", "charges for env steps", "own_scorer:StepCost")
PPO_STEP_COST = passing(PPO, STEP_COST, "ppo_step_cost")
CONFIG = Config.model_validate(
    {
        "name": "example-scorer",
        "workflow": "own_scorer:PPO_STEP_COST",  # importable in every process: here, the folder of the script
        "iterations": 10,
        "env": {"task": "tabletop/reach", "num_envs": 8},
        "policy": {"options": {"widths": [64, 64]}},
        "advantage": {"gamma": 0.9, "lam": 0.9},
        "optim": {"epochs": 8, "minibatch": 128, "policy_lr": 1e-3, "value_lr": 1e-3},
        "eval": {"episodes": 20, "videos": 0},
        "runtime": {"mode": "inline"},
    }
)

if __name__ == "__main__":
    embodied.train(CONFIG, runs_dir="runs")
