"""Success of policies under perturbations: before and after reinforcement, and after training with randomisation.

    python benchmarks/generalisation.py --config reach --json benchmarks/results/generalisation_reach.json
    python benchmarks/generalisation.py --config pi0_small --episodes 50 --json FILE

A policy learns from a script's demonstrations (`before`); from it reinforcement goes on, seed by seed, in the task as
it is (`after`) and with `env.randomise` at the levels 1 and 2 of the given axes (`randomised`). Each is evaluated on
the same episodes: unperturbed, and repeated on every axis at the given levels, of which 3 and more are held out from
the randomisation. What is there already in --out is gone on with.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import tyro
from rich import get_console
from rich.table import Table

from embodied.commands.evaluate import evaluate_run
from embodied.commands.record import record_run
from embodied.commands.sft import sft_run
from embodied.commands.train import train_run
from embodied.config.files import load_config, with_settings
from embodied.config.schema import Config
from embodied.devices import hardware
from embodied.evaluation.conditions import Condition, by_condition, difference, unperturbed
from embodied.evaluation.folder import EvalFolder, read_folder
from embodied.run.folder import with_init
from embodied.statistics import mean_interval, seeds_interval

EVALUATED_SEED = 1_000
"""Seed of all evaluations, so that every policy faces the same episodes."""


@dataclass(frozen=True)
class Study:
    """A configuration, what it is taught with, and the axes by which its training is randomised."""

    tasks: tuple[str, ...]
    episodes: int
    """Demonstrations of each task."""
    steps: int
    """Steps of supervised learning: it is to leave something to learn."""
    randomise: tuple[str, ...]
    axes: tuple[str, ...] = ()
    """Axes of the evaluation; (): all that there are."""


PICTURES = ("camera", "start", "objects", "noise")
BOTH = ("tabletop/reach_red", "tabletop/reach_blue")
STUDIES = {
    "reach": Study(("tabletop/reach",), episodes=20, steps=60, randomise=("start", "objects")),
    "openvla_small": Study(BOTH, episodes=25, steps=50, randomise=PICTURES),
    # Reworded instructions are longer than the 16 tokens that this checkpoint reads.
    "pi0_small": Study(BOTH, episodes=100, steps=150, randomise=PICTURES, axes=(*PICTURES, "brightness")),
}


@dataclass(frozen=True)
class Arguments:
    """Measure a policy under perturbations, before and after reinforcement."""

    config: Literal["reach", "openvla_small", "pi0_small"] = "reach"
    out: Path = Path("runs/generalisation")
    """Folder of the runs and evaluations."""
    seeds: tuple[int, ...] = (1, 2, 3)
    episodes: int = 100
    """Trials of each task under each perturbation."""
    levels: str = "1-5"
    iterations: int | None = None
    """Iterations of reinforcement; None: the configuration's."""
    json: Path | None = None


def main(args: Arguments) -> dict[str, Any]:
    """Train, evaluate, and return what came of it."""
    out, study = args.out / args.config, STUDIES[args.config]
    base = {"runtime.mode": "inline", "eval.videos": 0, "eval.episodes": 4}
    if args.iterations is not None:
        base["iterations"] = args.iterations
    config = with_settings(load_config(args.config), base, args.config)
    _teach(config, study, out)
    variants: dict[str, dict[str, Any]] = {
        "after": {},
        "randomised": {"env.randomise": tuple(f"{axis}:1,2" for axis in study.randomise)},
    }
    evaluated = {"before": [_evaluated("before", config, args, out)]}
    for kind, settings in variants.items():
        for seed in args.seeds:
            name = f"{kind}-{seed}"
            own = {**settings, "name": name, "seed": seed, "policy.init": out / "before"}
            variant = with_init(with_settings(config, own, name), out, required=True)
            if not (out / name / "eval.json").is_file():
                train_run(variant, args.config, out, (out / name).exists())
            evaluated.setdefault(kind, []).append(_evaluated(name, config, args, out))
    result = {
        "command": f"python benchmarks/generalisation.py --config {args.config} --episodes {args.episodes}",
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "seeds": list(args.seeds),
        "iterations": config.iterations,
        "trained_levels": [1, 2],
        "protocol": evaluated["before"][0].identity.protocol.line(),
        "conditions": _rows(evaluated),
    }
    _show(result["conditions"])
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _teach(config: Config, study: Study, out: Path) -> None:
    """Record demonstrations of each task and learn from them, once."""
    folders = [out / "demonstrations" / task.replace("/", "_") for task in study.tasks]
    for task, folder in zip(study.tasks, folders, strict=True):
        if not folder.exists():
            script = {"env.task": task, "env.cameras": config.env.cameras, "runtime.mode": "inline"}
            with_script = with_settings(load_config("tabletop_scripted"), script, "script")
            record_run("tabletop_scripted", with_script, None, folder, study.episodes, False, out)
    if not (out / "before" / "eval.json").is_file():
        learned = {"sft.data": tuple(folders), "sft.steps": study.steps, "name": "before"}
        sft_run(with_settings(config, learned, "before"), "before", out, (out / "before").exists())


def _evaluated(name: str, config: Config, args: Arguments, out: Path) -> EvalFolder:
    """The run's evaluation, once every episode is in its folder."""
    settings = {
        "seed": EVALUATED_SEED, "eval.protocol": "generalisation", "eval.episodes": args.episodes,
        "eval.axes": tuple(f"{axis}:{args.levels}" for axis in STUDIES[args.config].axes),
    }  # fmt: skip
    folder = out / "evaluations" / name
    if not (folder / "eval.json").is_file():
        evaluate_run(str(out / name), with_settings(config, settings, name), None, out, folder, folder.exists())
    return read_folder(folder)


def _rows(evaluated: dict[str, list[EvalFolder]]) -> list[dict[str, Any]]:
    """For the unperturbed episodes and each condition: success of each kind of policy, its difference from `before` on
    the same episodes, and what the perturbation costs it."""
    before = evaluated["before"][0]
    protocol = before.identity.protocol
    keys: list[Condition | None] = [None, *by_condition(protocol, before.in_order())]
    plain = {kind: [_rate(folder, None) for folder in folders] for kind, folders in evaluated.items()}
    rows = []
    for key in keys:
        row: dict[str, Any] = {"axis": "unperturbed" if key is None else key[0], "level": 0 if key is None else key[1]}
        for kind, folders in evaluated.items():
            rates, counts = [_rate(folder, key) for folder in folders], [len(_members(f, key)) for f in folders]
            own: dict[str, Any] = {"success_rates": rates, **_interval("success", seeds_interval(rates, counts))}
            own |= _interval("lost", mean_interval([a - b for a, b in zip(plain[kind], rates, strict=True)]))
            if kind != "before":
                pairs = [list(zip(_members(f, key), _members(before, key), strict=True)) for f in folders]
                own["against_before"] = [difference(one) for one in pairs]
            row[kind] = own
        rows.append(row)
    return rows


def _members(folder: EvalFolder, key: Condition | None) -> Sequence[Any]:
    protocol, outcomes = folder.identity.protocol, folder.in_order()
    return unperturbed(protocol, outcomes) if key is None else by_condition(protocol, outcomes)[key]


def _rate(folder: EvalFolder, key: Condition | None) -> float:
    members = _members(folder, key)
    return sum(bool(one.success) for one in members) / len(members)


def _interval(name: str, found: tuple[float, float, float]) -> dict[str, float]:
    mean, low, high = found
    return {name: mean, f"{name}_low": low, f"{name}_high": high}


def _show(rows: Sequence[dict[str, Any]]) -> None:
    """Success of each kind of policy by condition, and in brackets what the perturbation costs it, in points."""
    kinds = [kind for kind in rows[0] if kind not in ("axis", "level")]
    table = Table("perturbed by", *kinds)
    for row in rows:
        cells = []
        for kind in kinds:
            lost = "" if row["axis"] == "unperturbed" else f" ({0.0 - 100 * row[kind]['lost']:+.1f})"
            cells.append(f"{row[kind]['success']:.1%}{lost}")
        table.add_row(f"{row['axis']} {row['level']}" if row["level"] else row["axis"], *cells)
    get_console().print(table)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
