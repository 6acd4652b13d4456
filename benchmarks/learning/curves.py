"""What came of runs with several seeds, as one file: success before and after with intervals, and each curve.

python benchmarks/learning/curves.py runs/warm runs/further-seed1 runs/further-seed2 --json FILE

The first run is the supervised one that the others began with.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from embodied.bench.settings import show_and_write
from embodied.reporting.metrics import read
from embodied.statistics import seeds_interval

CURVE = (
    "env_steps", "wall_s", "env/success_once", "env/success_recent", "learner/approx_kl", "learner/entropy",
)  # fmt: skip
EVALUATION = ("success_rate", "success_low", "success_high", "episodes")


@dataclass(frozen=True)
class Arguments:
    """Gather the results and curves of a supervised run and of the runs that went on from it. The interval of the mean
    is over seeds (`embodied.statistics.seeds_interval`)."""

    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, the supervised one first."""
    note: str = ""
    """What a reader should know: other work on the machine, interruptions."""
    json: Path | None = None
    """Write the result to this file."""


def evaluated(run: Path) -> dict[str, Any]:
    """What the evaluation at the run's end found."""
    found = json.loads((run / "eval.json").read_text())
    tasks = {task["task"]: task["success_rate"] for task in found["tasks"]}
    return {key: found[key] for key in EVALUATION} | {"tasks": tasks}


def gathered(run: Path) -> dict[str, Any]:
    """The run's evaluation, its length, when its training episodes were at 90%, and its curve."""
    rows = read(run)
    solved = next((row["wall_s"] for row in rows if (row.get("env/success_recent") or 0.0) >= 0.9), None)
    return {
        "run": run.name,
        **evaluated(run),
        "wall_s": rows[-1]["wall_s"],
        "env_steps": rows[-1]["env_steps"],
        "recent_90_wall_s": solved,
        "curve": [{key: row.get(key) for key in CURVE} for row in rows],
    }


def main(args: Arguments) -> dict[str, Any]:
    unfinished = [str(run) for run in args.runs if not (run / "eval.json").is_file()]
    if len(args.runs) < 2 or unfinished:
        raise SystemExit(
            "give the folder of a supervised run and of at least one that went on from it, evaluated to their end; "
            f"{', '.join(unfinished) or 'one'} is not enough"
        )
    first, *others = args.runs
    runs = [gathered(run) for run in others]
    mean, low, high = seeds_interval([run["success_rate"] for run in runs], [run["episodes"] for run in runs])
    result = {
        "note": args.note,
        "supervised": {"run": first.name, **evaluated(first)},
        "success_rate": mean,
        "success_low": low,
        "success_high": high,
        "runs": runs,
    }
    show_and_write(result, args.json)
    return result


if __name__ == "__main__":
    main(tyro.cli(Arguments))
