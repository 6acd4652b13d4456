"""Success over delays: small flow policies, taught by slow demonstrations, under every delay and method.

    python benchmarks/latency.py --configs pi0_small smolvla_small --json benchmarks/results/latency_reach.json

The tabletop's script reaches its ball within six env steps, into which no delay of eight fits: the demonstrations are
of the same script at a fifth of its speed. What is there already in --out is gone on with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import tyro

from embodied.commands.evaluate import evaluate_run
from embodied.commands.record import record_run
from embodied.commands.sft import sft_run
from embodied.config.files import load_config, with_settings
from embodied.config.schema import Config
from embodied.devices import hardware
from policies.contract import Action, Inputs
from policies.policy_kind import PolicyKind
from policies.scripted.policy import Scripted

SPEED = 0.2
"""Share of the script's speed."""
TASKS = ("tabletop/reach_red", "tabletop/reach_blue")


class SlowScript(Scripted):
    """The script at a share of its speed."""

    def act(self, inputs: Inputs, noise: torch.Tensor | None) -> Action:
        action = super().act(inputs, noise)
        return replace(action, chunk=action.chunk * SPEED)


SLOW = PolicyKind(SlowScript, trainable=False)


@dataclass
class Arguments:
    configs: tuple[str, ...] = ("pi0_small", "smolvla_small")
    demonstrations: int = 60
    """Of each task."""
    steps: int = 300
    """Of supervised learning."""
    chunk: int = 8
    horizon: int = 16
    episodes: int = 20
    """Trials of each task under each delay and method."""
    out: Path = Path("runs/latency")
    json: Path | None = None


def main(args: Arguments) -> dict[str, Any]:
    out = args.out.resolve()
    results = {name: _evaluated(name, args, out) for name in args.configs}
    result = {
        "command": f"python benchmarks/latency.py --configs {' '.join(args.configs)} --episodes {args.episodes}",
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "demonstrations": args.demonstrations,
        "steps": args.steps,
        "chunk": args.chunk,
        "horizon": args.horizon,
        "policies": {
            name: {
                "protocol": found["protocol_line"],
                **{key: found[key] for key in ("episodes", "success_rate", "success_low", "success_high")},
                "conditions": found["conditions"],
            }
            for name, found in results.items()
        },
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _evaluated(name: str, args: Arguments, out: Path) -> dict[str, Any]:
    """The result of the policy under the protocol `latency`, all of which is on the disk."""
    settings = {
        "env.max_episode_steps": 60, "env.num_envs": 20, "policy.chunk": args.chunk, "policy.horizon": args.horizon,
        "farm.physics_workers": 1, "runtime.mode": "inline", "eval.episodes": args.episodes, "eval.videos": 0,
        "sft.steps": args.steps,
    }  # fmt: skip
    config = with_settings(load_config(name), settings, name)
    folders = _demonstrations(config, args, out)
    if not (out / name / "eval.json").is_file():
        learned = {"sft.data": folders, "name": name}
        sft_run(with_settings(config, learned, name), name, out, (out / name).exists())
    folder = out / "evaluations" / name
    if not (folder / "eval.json").is_file():
        late = with_settings(config, {"eval.protocol": "latency"}, name)
        evaluate_run(str(out / name), late, None, out, folder, folder.exists())
    return json.loads((folder / "eval.json").read_text())


def _demonstrations(config: Config, args: Arguments, out: Path) -> tuple[Path, ...]:
    folders = tuple(out / "demonstrations" / task.replace("/", "_") for task in TASKS)
    for task, folder in zip(TASKS, folders, strict=True):
        if not folder.exists():
            script = {
                "env.task": task, "env.cameras": config.env.cameras, "env.max_episode_steps": 60,
                "policy.kind": "benchmarks.latency:SLOW", "runtime.mode": "inline",
            }  # fmt: skip
            slow = with_settings(load_config("tabletop_scripted"), script, "script")
            record_run("tabletop_scripted", slow, None, folder, args.demonstrations, False, out)
    return folders


if __name__ == "__main__":
    main(tyro.cli(Arguments))
