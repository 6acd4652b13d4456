"""Success over delays: small flow policies, taught by demonstrations, under every delay and method.

    python benchmarks/latency.py --json benchmarks/results/latency_reach.json

The script reaches its ball within about six env steps. With chunks of eight the first one, which has no delay, decides
an episode; with chunks of two, delays of one and two count. What is there already in --out is gone on with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import tyro

from embodied.commands.evaluate import evaluate_run
from embodied.commands.record import record_run
from embodied.commands.sft import sft_run
from embodied.config.files import load_config, with_settings
from embodied.config.schema import Config
from embodied.devices import hardware

TASKS = ("tabletop/reach_red", "tabletop/reach_blue")


@dataclass
class Arguments:
    configs: tuple[str, ...] = ("pi0_small", "smolvla_small")
    demonstrations: int = 100
    """Demonstrations of each task."""
    steps: int = 150
    """Steps of supervised learning."""
    horizon: int = 16
    chunks: tuple[int, ...] = (2, 8)
    """Numbers of executed actions. The policies are evaluated with each."""
    episodes: tuple[int, ...] = (50, 20)
    """Trials of each task under each delay and method, for each of `chunks`."""
    out: Path = Path("runs/latency")
    json: Path | None = None


def main(args: Arguments) -> dict[str, Any]:
    out = args.out.resolve()
    pairs = list(zip(args.chunks, args.episodes, strict=True))
    results = {
        name: [_result(chunk, _evaluated(name, chunk, episodes, args, out)) for chunk, episodes in pairs]
        for name in args.configs
    }
    numbers = {"chunks": args.chunks, "episodes": args.episodes}
    typed = " ".join(f"--{name} {' '.join(map(str, values))}" for name, values in numbers.items())
    result = {
        "command": f"python benchmarks/latency.py --configs {' '.join(args.configs)} {typed}",
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "demonstrations": args.demonstrations,
        "steps": args.steps,
        "horizon": args.horizon,
        "policies": results,
    }
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _result(chunk: int, found: dict[str, Any]) -> dict[str, Any]:
    kept = ("episodes", "success_rate", "success_low", "success_high", "conditions")
    return {"chunk": chunk, "protocol": found["protocol_line"], **{name: found[name] for name in kept}}


def _evaluated(name: str, chunk: int, episodes: int, args: Arguments, out: Path) -> dict[str, Any]:
    """The policy's result under the protocol `latency`, once every episode is in its folder."""
    settings = {
        "env.num_envs": 20, "policy.horizon": args.horizon, "farm.physics_workers": 1, "runtime.mode": "inline",
        "eval.episodes": 20, "eval.videos": 0, "sft.steps": args.steps,
    }  # fmt: skip
    config = with_settings(load_config(name), settings, name)
    folders = _demonstrations(config, args, out)
    if not (out / name / "eval.json").is_file():
        learned = {"sft.data": folders, "name": name}
        sft_run(with_settings(config, learned, name), name, out, (out / name).exists())
    folder = out / "evaluations" / f"{name}-{chunk}"
    if not (folder / "eval.json").is_file():
        late = {"eval.protocol": "latency", "eval.episodes": episodes, "policy.chunk": chunk}
        evaluate_run(str(out / name), with_settings(config, late, name), None, out, folder, folder.exists())
    return json.loads((folder / "eval.json").read_text())


def _demonstrations(config: Config, args: Arguments, out: Path) -> tuple[Path, ...]:
    folders = tuple(out / "demonstrations" / task.replace("/", "_") for task in TASKS)
    for task, folder in zip(TASKS, folders, strict=True):
        if not folder.exists():
            script = {"env.task": task, "env.cameras": config.env.cameras, "runtime.mode": "inline"}
            scripted = with_settings(load_config("tabletop_scripted"), script, "script")
            record_run("tabletop_scripted", scripted, None, folder, args.demonstrations, False, out)
    return folders


if __name__ == "__main__":
    main(tyro.cli(Arguments))
