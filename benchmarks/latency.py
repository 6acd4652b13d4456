"""Success over delays: small policies, taught by demonstrations, under every delay and method.

    python benchmarks/latency.py --json benchmarks/results/latency_curves.json

Policies of several training seeds face the same episodes. The script reaches its ball within about six env steps. With
chunks of eight the first one, which has no delay, decides an episode; with chunks of two, delays of one and two count.
What is there already in --out is gone on with, and --json is written after each evaluation.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import tyro
from rich import get_console
from rich.table import Table

from embodied.commands.evaluate import evaluate_run
from embodied.commands.record import record_run
from embodied.commands.sft import sft_run
from embodied.config.files import load_config, with_settings
from embodied.config.schema import Config
from embodied.devices import hardware
from embodied.evaluation.conditions import by_condition, difference, unperturbed
from embodied.evaluation.folder import EvalFolder, read_folder
from embodied.rollout.evaluator import EpisodeOutcome
from embodied.statistics import mean_interval, seeds_interval

TASKS = ("tabletop/reach_red", "tabletop/reach_blue")
EVALUATED_SEED = 1_000
"""Seed of all evaluations, so that every policy faces the same episodes."""


@dataclass(frozen=True)
class Curve:
    """Executed actions of a decision, and the delays that its policy has room for."""

    chunk: int
    delays: tuple[int, ...]


@dataclass(frozen=True)
class Taught:
    """Settings by which a configuration's policy predicts, and the curves of its evaluation."""

    settings: dict[str, Any]
    curves: tuple[Curve, ...]


FLOW = Taught({"policy.horizon": 16}, (Curve(2, (1, 2)), Curve(8, (1, 2, 4, 8))))
POLICIES = {"smolvla_small": FLOW, "openvla_oft_small": Taught({}, (Curve(8, (1, 2, 4)),)), "pi0_small": FLOW}


@dataclass(frozen=True)
class Arguments:
    """Teach policies, and evaluate them under delays."""

    configs: tuple[str, ...] = tuple(POLICIES)
    seeds: tuple[int, ...] = (1, 2, 3)
    """Seeds of the supervised learning."""
    demonstrations: int = 300
    """Demonstrations of each task."""
    steps: int = 150
    """Steps of supervised learning."""
    episodes: int = 50
    """Trials of each task under each delay and method."""
    out: Path = Path("runs/latency")
    """Folder of the runs and evaluations."""
    json: Path | None = None
    """Write the result to this file."""


def main(args: Arguments) -> None:
    result: dict[str, Any] = {
        "command": f"python benchmarks/latency.py --configs {' '.join(args.configs)} --seeds "
        f"{' '.join(map(str, args.seeds))} --demonstrations {args.demonstrations} --episodes {args.episodes}",
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "tasks": TASKS,
        "demonstrations": args.demonstrations,
        "steps": args.steps,
        "policies": {},
    }
    evaluated: dict[tuple[str, Curve], list[EvalFolder]] = {}
    for seed in args.seeds:
        for name in args.configs:
            for curve in POLICIES[name].curves:
                folders = evaluated.setdefault((name, curve), [])
                folders.append(_evaluated(name, curve, seed, args))
                result["policies"].setdefault(name, {})[f"chunk {curve.chunk}"] = _rows(folders)
                if args.json is not None:
                    args.json.write_text(json.dumps(result, indent=1) + "\n")
    _show(result["policies"])


def _evaluated(name: str, curve: Curve, seed: int, args: Arguments) -> EvalFolder:
    """The evaluation of one policy, once every episode is in its folder."""
    settings = {
        "env.num_envs": 25, "farm.physics_workers": 1, "runtime.mode": "inline", "eval.videos": 0,
        "eval.episodes": 20, "sft.steps": args.steps,
    }  # fmt: skip
    # A policy without a horizon learns as many actions as it will execute.
    longest = {"policy.chunk": max(one.chunk for one in POLICIES[name].curves)}
    config = with_settings(load_config(name), settings | longest | POLICIES[name].settings, name)
    out, run = args.out.resolve(), f"{name}-{seed}"
    if not (out / run / "eval.json").is_file():
        learned = {"sft.data": _demonstrations(config, args, out), "name": run, "seed": seed}
        sft_run(with_settings(config, learned, run), name, out, (out / run).exists())
    folder = out / "evaluations" / f"{run}-{curve.chunk}"
    if not (folder / "eval.json").is_file():
        late = {
            "eval.protocol": "latency", "eval.delay": tuple(map(str, curve.delays)), "eval.episodes": args.episodes,
            "policy.chunk": curve.chunk, "seed": EVALUATED_SEED,
        }  # fmt: skip
        evaluate_run(str(out / run), with_settings(config, late, run), None, out, folder, folder.exists())
    return read_folder(folder)


def _demonstrations(config: Config, args: Arguments, out: Path) -> tuple[Path, ...]:
    folders = tuple(out / "demonstrations" / task.replace("/", "_") for task in TASKS)
    for task, folder in zip(TASKS, folders, strict=True):
        if not folder.exists():
            script = {"env.task": task, "env.cameras": config.env.cameras, "runtime.mode": "inline"}
            scripted = with_settings(load_config("tabletop_scripted"), script, "script")
            record_run("tabletop_scripted", scripted, None, folder, args.demonstrations, False, out)
    return folders


def _rows(folders: Sequence[EvalFolder]) -> list[dict[str, Any]]:
    """Success of the policies that differ in their seeds: without a delay, then by method and delay with the
    difference, which is of the same policies and episodes."""
    plain = [unperturbed(folder.identity.protocol, folder.in_order()) for folder in folders]
    late = [by_condition(folder.identity.protocol, folder.in_order()) for folder in folders]
    rows: list[dict[str, Any]] = [{"method": "wait", "delay": 0, **_success(plain)}]
    for method, delay, step in late[0]:
        members = [found[method, delay, step] for found in late]
        pairs = [difference(list(zip(ours, theirs, strict=True))) for ours, theirs in zip(members, plain, strict=True)]
        rows.append({"method": method, "delay": delay, **_success(members), **_mean(pairs), "differences": pairs})
    return rows


def _mean(pairs: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The difference, its mean over several seeds with Student's t interval; of one seed with Tango's."""
    if len(pairs) == 1:
        return {name: pairs[0][name] for name in ("difference", "difference_low", "difference_high")}
    return _interval("difference", mean_interval([pair["difference"] for pair in pairs]))


def _success(members: Sequence[Sequence[EpisodeOutcome]]) -> dict[str, Any]:
    rates = [sum(bool(one.success) for one in each) / len(each) for each in members]
    return {"success_rates": rates, **_interval("success", seeds_interval(rates, [*map(len, members)]))}


def _interval(name: str, found: tuple[float, float, float]) -> dict[str, float]:
    mean, low, high = found
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def _show(policies: dict[str, dict[str, list[dict[str, Any]]]]) -> None:
    table = Table("policy", "executes", "method", "delay", "success", "difference, points")
    for name, curves in policies.items():
        for chunk, rows in curves.items():
            for row in rows:
                success = f"{row['success']:.1%} ({row['success_low']:.1%} to {row['success_high']:.1%})"
                ends = [100 * row.get(f"difference{end}", 0.0) for end in ("", "_low", "_high")]
                change = "{:+.1f} ({:+.1f} to {:+.1f})".format(*ends) if "difference" in row else ""
                table.add_row(name, chunk, row["method"], str(row["delay"]), success, change)
    get_console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
