"""Train from Python: PPO on the built-in scene, in this process.

    python examples/train.py

Prints the success over 20 unseen episodes and the folder of the run, which has a report, checkpoints and metrics.
"""

from __future__ import annotations

from typing import Any

import embodied
from embodied.config.schema import Config

CONFIG = Config.model_validate(
    {
        "name": "example-train",
        "iterations": 10,
        "env": {"task": "tabletop/reach", "num_envs": 8},
        "policy": {"options": {"widths": [64, 64], "initial_log_std": -1.0}},
        "rollout": {"decisions": 64},
        "advantage": {"gamma": 0.9, "lam": 0.9},
        "loss": {"value_clip": None},
        "optim": {"epochs": 8, "minibatch": 128, "policy_lr": 1e-3, "value_lr": 1e-3, "threads": 1},
        "eval": {"episodes": 20, "videos": 0},
        "runtime": {"mode": "inline"},  # "ray", the default, gives every worker a process of its own
    }
)
"""Settings that differ from the defaults (docs/settings.md). `embodied.load_config("reach")` reads a shipped file."""


def main(config: Config = CONFIG) -> dict[str, Any]:
    result = embodied.train(config, runs_dir="runs")
    print(f"success {result['success_rate']:.0%} of {result['episodes']} episodes; report: {result['run']}/report.html")
    return result


if __name__ == "__main__":
    main()
