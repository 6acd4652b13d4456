"""What each setting that makes learning reliable does: the same runs without it and with it.

python benchmarks/learning/controls.py --json benchmarks/results/learning_controls.json

A small policy on `tabletop/reach` from states, 30 iterations of 512 env steps, three seeds each. Where the setting is
meant for a policy that has learned already, the runs begin from one that 20 demonstrations have taught a tenth of the
task. Every run is one of `embodied train`; its folder and a page for each setting stay in --out.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import tyro
from rich import get_console
from rich.table import Table

from embodied.commands.record import record_run
from embodied.commands.sft import sft_run
from embodied.commands.train import train_variants
from embodied.config.files import load_config, with_settings
from embodied.config.schema import Config
from embodied.devices import hardware
from embodied.reporting.metrics import read
from embodied.statistics import seeds_interval

WARM = "warm"


@dataclass(frozen=True)
class Arguments:
    """Measure the settings."""

    out: Path = Path("runs/controls")
    """Folder of the runs."""
    seeds: tuple[int, ...] = (1, 2, 3)
    only: tuple[str, ...] = ()
    """Of these settings alone."""
    json: Path | None = None


@dataclass(frozen=True)
class Case:
    """A setting, what is the same in all its runs, and the metric that shows what it does."""

    key: str
    value: Any
    """With it; without, the setting has its default."""
    shows: str
    same: dict[str, Any] = field(default_factory=dict)
    warm: bool = False
    """Begin from a policy that has learned from demonstrations."""


CASES = (
    Case("optim.lr_warmup", 5, "learner/approx_kl", {"optim.policy_lr": 3e-3}, warm=True),
    Case("optim.critic_warmup", 3, "learner/explained_variance", warm=True),
    Case("advantage.normalise_returns", True, "learner/explained_variance", {"optim.value_lr": 1e-4}),
)  # fmt: skip


def main(args: Arguments) -> dict[str, Any]:
    """Run the cases and return what they came to."""
    cases = [case for case in CASES if not args.only or case.key in args.only]
    if any(case.warm for case in cases):
        _teach(args.out)
    found = {case.key: _run(case, args) for case in cases}
    result = {
        "command": "python benchmarks/learning/controls.py",
        "date": date.today().isoformat(),
        "hardware": hardware(),
        "seeds": list(args.seeds),
        "settings": found,
    }
    _show(found)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n")
    return result


def _base() -> Config:
    alone = {"runtime.mode": "inline", "farm.groups": 1, "eval.videos": 0}
    return with_settings(load_config("reach"), alone, "reach")


def _teach(out: Path) -> None:
    """Record demonstrations and learn from them, once."""
    demonstrations = out / "demonstrations"
    if not demonstrations.exists():
        script = with_settings(
            load_config("tabletop_scripted"), {"env.task": "tabletop/reach", "env.cameras": 0}, "script"
        )
        record_run("tabletop_scripted", script, None, demonstrations, 20, False, out)
    if not (out / WARM).exists():
        data = {"sft.data": (demonstrations,), "sft.steps": 60, "name": WARM}
        sft_run(with_settings(_base(), data, WARM), "reach", out, False)


def _run(case: Case, args: Arguments) -> dict[str, Any]:
    """The case without its setting and with it."""
    found = {}
    for name, value in (("without", {}), ("with", {case.key: case.value})):
        settings = {**case.same, **value, "name": f"{case.key.rpartition('.')[2]}-{name}"}
        if case.warm:
            settings["policy.init"] = args.out / WARM
        config = with_settings(_base(), settings, case.key)
        results = train_variants(config, "reach", args.out, True, args.seeds, ())
        rows = [read(args.out / f"{config.name}-seed{seed}") for seed in args.seeds]
        mean, low, high = seeds_interval(
            [run["success_rate"] for run in results["runs"]], [run["episodes"] for run in results["runs"]]
        )
        found[name] = {
            "success_rates": [run["success_rate"] for run in results["runs"]],
            "success_rate": mean,
            "success_low": low,
            "success_high": high,
            "env_steps": [row["env_steps"] for row in rows[0]],
            "success_once": _mean(rows, "env/success_once"),
            case.shows: _mean(rows, case.shows),
        }
    return {"value": case.value, "same": case.same, "from_demonstrations": case.warm, "shows": case.shows, **found}


def _mean(runs: list[list[dict[str, Any]]], key: str) -> list[float | None]:
    """Over the runs, iteration by iteration."""
    columns = zip(*([row[key] for row in rows] for rows in runs), strict=True)
    known = [[value for value in column if value is not None] for column in columns]
    return [float(np.mean(values)) if values else None for values in known]


def _show(found: dict[str, Any]) -> None:
    """Means of the first and the last five iterations of the metric that shows what a setting does."""
    table = Table("setting", "", "success at the end", "metric", "first 5", "last 5")
    for key, case in found.items():
        for name in ("without", "with"):
            own = case[name]
            between = f"{own['success_rate']:.1%} ({own['success_low']:.1%} to {own['success_high']:.1%})"
            metric = own[case["shows"]]
            shown = case["shows"].rpartition("/")[2]
            table.add_row(key, name, between, shown, f"{_known(metric[:5]):.3g}", f"{_known(metric[-5:]):.3g}")
    get_console().print(table)


def _known(values: list[float | None]) -> float:
    known = [value for value in values if value is not None]
    return float(np.mean(known)) if known else math.nan


if __name__ == "__main__":
    main(tyro.cli(Arguments))
