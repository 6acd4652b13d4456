"""Train from Python, watch each iteration, and act with the policy that was learned.

    python examples/train.py

Prints the success over 20 unseen episodes and the folder of the run, which has a report, checkpoints and metrics.
"""

from __future__ import annotations

from typing import Any

import numpy as np

import embodied
from embodied.reporting.results import TrainingResult
from embodied.training.callbacks import IterationEnd

SETTINGS: dict[str, Any] = {
    "name": "example-train",
    "iterations": 10,
    "optim.policy_lr": 1e-3,
    "eval.episodes": 20,
    "runtime.mode": "inline",  # "ray", the default, gives every worker a process of its own
}
"""Settings that differ from those of configs/reach.yaml, by their keys (docs/settings.md)."""


def watch(iteration: IterationEnd) -> None:
    """Record a metric of one's own; end the run when it is good enough."""
    iteration.log("my/reward_per_step", iteration.row["env/return"] / max(iteration.row["env/episode_len"], 1))
    if iteration.row["env/success_recent"] > 0.9:
        iteration.stop("good enough")


def main(settings: dict[str, Any] = SETTINGS) -> TrainingResult:
    result = embodied.train("reach", settings, callbacks=[watch])
    found = result.evaluation
    print(f"success {found.success_rate:.0%} of {found.episodes} episodes; report: {result.report}")

    policy = embodied.load_policy(result.run)
    state = np.zeros(policy.spec.state_dim, np.float32)  # one observation; a batch has a dimension more
    print(f"action chunk in that state: {policy.act({'state': state})}")
    return result


if __name__ == "__main__":
    main()
