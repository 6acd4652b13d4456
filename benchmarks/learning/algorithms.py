"""Every policy with every algorithm: a short run of each, begun from the same demonstrations.

python benchmarks/learning/algorithms.py --json benchmarks/results/learning_algorithms.json

Each policy learns 100 recorded episodes of `tabletop/reach_red` for a few steps, and goes on from there by each
algorithm for ten iterations. The table shows that a pair runs, that its learner computes the log-probs which the
rollout recorded, and which way success goes; ten iterations are too few to tell algorithms apart. Every run is one of
`embodied train`.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich import get_console
from rich.table import Table

from embodied.commands.record import record_run
from embodied.commands.sft import sft_run
from embodied.commands.train import train_run
from embodied.config.files import load_config, with_settings
from embodied.config.schema import Config
from embodied.devices import hardware
from embodied.reporting.metrics import read

ENDS = 3
"""Iterations at a run's beginning and end that its table row averages."""
BASE = {
    "iterations": 10, "keep_checkpoints": 1,
    "env.task": "tabletop/reach_red", "env.num_envs": 16, "env.max_episode_steps": 16, "extra_tasks": (),
    "farm.groups": 1, "runtime.mode": "inline",
    "rollout.decisions": 16, "rollout.episode_group": 8, "rollout.episodes_per_env": 2,
    "loss.value_clip": None, "advantage.gamma": 0.9, "advantage.lam": 0.9,
    "optim.epochs": 2, "optim.minibatch": 128,
    "optim.policy_lr": 3e-4, "optim.value_lr": 1e-3, "optim.critic_warmup": 0, "optim.lr_schedule": None,
    "sft.batch": 64, "sft.lr": 1e-3, "eval.tasks": (), "eval.episodes": 20, "eval.videos": 0,
}  # fmt: skip


@dataclass(frozen=True)
class WarmStart:
    """A policy, and how it learns from the demonstrations."""

    config: str
    settings: dict[str, Any]


POLICIES = {
    "gaussian_mlp, states": WarmStart("reach", {"sft.steps": 180}),
    "flow, states": WarmStart(
        "reach", {"policy.kind": "flow", "policy.chunk": 4, "policy.options": {"steps": 4}, "sft.steps": 70}
    ),
    "flow, pictures": WarmStart(
        "reach",
        {
            "policy.kind": "flow", "policy.chunk": 4, "policy.reads": ["proprio", "images"],
            "policy.options": {"encoder": "cnn", "steps": 4}, "env.cameras": 1, "env.image_size": 56, "sft.steps": 250,
        },
    ),
    "openvla": WarmStart("openvla_small", {"sft.steps": 25}),
    "openvla_oft": WarmStart(
        "openvla_oft_small_grpo", {"workflow": "ppo", "advantage.scale": "group", "sft.steps": 100}
    ),
}  # fmt: skip
ALGORITHMS: dict[str, dict[str, Any]] = {
    "PPO": {},
    "PPO, rollout ahead (decoupled)": {"runtime.mode": "ray", "plan.mode": "disaggregated", "plan.ahead": True},
    "PPO, KL in the loss": {"workflow": "ppo_reference", "loss.reference_kl": 0.01},
    "GRPO": {"workflow": "grpo"},
    "GRPO, KL in the loss": {"workflow": "grpo_reference", "loss.reference_kl": 0.01},
    "DAPO": {
        "workflow": "grpo", "advantage.scale": "batch", "advantage.overlong": 4, "loss.clip_high": 0.28,
        "rollout.max_episodes_per_env": 4,
    },
    "REINFORCE++, group baseline": {"workflow": "reinforce", "advantage.baseline": "group"},
}  # fmt: skip


@dataclass(frozen=True)
class Arguments:
    """Run every policy with every algorithm."""

    out: Path = Path("runs/algorithms")
    """Folder of the runs."""
    only: tuple[str, ...] = ()
    """Of these policies alone."""
    json: Path | None = None


def main(args: Arguments) -> dict[str, Any]:
    """Run the pairs and return what they came to."""
    demonstrations = _record(args.out)
    found: dict[str, dict[str, Any]] = {}
    for policy, warm_start in POLICIES.items():
        if args.only and policy not in args.only:
            continue
        base = with_settings(load_config(warm_start.config), {**BASE, **warm_start.settings}, policy)
        warm = f"{_slug(policy)}-warm"
        if not (args.out / warm).exists():
            sft_run(with_settings(base, {"sft.data": (demonstrations,), "name": warm}, policy), policy, args.out, False)
        found[policy] = {
            name: _run(base, {**settings, "policy.init": args.out / warm}, f"{policy} {name}", args.out)
            for name, settings in ALGORITHMS.items()
        }
    result = {
        "command": "python benchmarks/learning/algorithms.py",
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "policies": found,
    }
    _show(found)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _record(out: Path) -> Path:
    folder = out / "demonstrations"
    if not folder.exists():
        script = with_settings(load_config("tabletop_scripted"), {"env.task": "tabletop/reach_red"}, "script")
        record_run("tabletop_scripted", script, None, folder, 100, False, out)
    return folder


def _run(base: Config, settings: dict[str, Any], title: str, out: Path) -> dict[str, Any]:
    """One pair."""
    name = _slug(title)
    train_run(with_settings(base, {**settings, "name": name}, title), title, out, True)
    rows = read(out / name)
    return {
        "success_first": _mean(rows[:ENDS], "env/success_once"),
        "success_last": _mean(rows[-ENDS:], "env/success_once"),
        "first_ratio_error": max(_known(rows, "learner/first_ratio_error"), default=None),
        "approx_kl": _mean(rows, "learner/approx_kl"),
        "update_s": _mean(rows, "learner/update_s"),
        "env_steps": rows[-1]["env_steps"],
        "lag": max(row["lag/updates"] for row in rows),
    }


def _mean(rows: list[dict[str, Any]], key: str) -> float | None:
    known = _known(rows, key)
    return float(np.mean(known)) if known else None


def _known(rows: list[dict[str, Any]], key: str) -> list[float]:
    """Without the iterations in which no episode group taught anything."""
    return [row[key] for row in rows if row[key] is not None]


def _slug(title: str) -> str:
    """A name for a folder: no slash, no space."""
    return re.sub(r"\W+", "-", title.lower())


def _show(found: dict[str, dict[str, Any]]) -> None:
    """Sampled success of the first and the last iterations."""
    table = Table("algorithm", *found)
    for name in ALGORITHMS:
        cells = [own[name] for own in found.values()]
        table.add_row(name, *(f"{cell['success_first']:.0%} > {cell['success_last']:.0%}" for cell in cells))
    get_console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
