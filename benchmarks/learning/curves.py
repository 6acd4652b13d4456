"""Results of runs with several seeds, as one file: the success of the untouched base, of the supervised policy and of
each run on the same episodes, and each run's curve.

embodied eval CONFIG --folder runs/base
embodied eval runs/further-seed1 --seed 0       (and each of the others)
python benchmarks/learning/curves.py runs/base runs/warm runs/further-seed1 runs/further-seed2 --json FILE

The first is the evaluation of the base, the second the supervised run that the others began with. A run that has no
evaluation of the base's protocol, and so of its episodes, is refused.
"""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from embodied.reporting.metrics import read
from embodied.statistics import seeds_interval
from embodied_bench.settings import show_and_write

CURVE = (
    "env_steps", "wall_s", "env/success_once", "env/success_recent", "learner/approx_kl", "learner/entropy",
)  # fmt: skip
EVALUATION = ("success_rate", "success_low", "success_high", "episodes")


@dataclass(frozen=True)
class Arguments:
    """Gather the results and curves of a base, a supervised run and the runs that went on from it. The interval of the
    mean is over seeds (`embodied.statistics.seeds_interval`)."""

    base: tyro.conf.Positional[Path]
    """Folder of the evaluation of the untouched base."""
    runs: tyro.conf.Positional[tuple[Path, ...]]
    """Folders of runs, the supervised one first."""
    note: str = ""
    """What a reader should know: other work on the machine, interruptions."""
    json: Path | None = None
    """Write the result to this file."""


def result(path: Path) -> dict[str, Any]:
    found = json.loads(path.read_text())
    tasks = {task["task"]: task["success_rate"] for task in found["tasks"]}
    return {key: found[key] for key in EVALUATION} | {"tasks": tasks, "protocol": found["protocol"]}


def evaluated(run: Path, protocol: dict[str, Any]) -> dict[str, Any]:
    """The run's newest evaluation by this protocol; the one at its end lies in the run, later ones below `evals`."""
    paths = [run / "eval.json", *sorted((run / "evals").glob("*/eval.json"))]
    found = [result(path) for path in paths if path.is_file()]
    # Its hash, which the machine's processor and cores are no part of.
    same = [each for each in found if each.pop("protocol")["sha256"] == protocol["sha256"]]
    if not same:
        sys.exit(f"{run} lacks an evaluation on the base's episodes: embodied eval {run} --seed {protocol['seed']}")
    return same[-1]


def gathered(run: Path, protocol: dict[str, Any]) -> dict[str, Any]:
    """The run's evaluation, its length, when its training episodes were at 90%, and its curve."""
    rows = read(run)
    solved = next((row["wall_s"] for row in rows if (row.get("env/success_recent") or 0.0) >= 0.9), None)
    return {
        "run": run.name,
        **evaluated(run, protocol),
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
    base = result(args.base / "eval.json")
    protocol = base.pop("protocol")
    runs = [gathered(run, protocol) for run in others]
    mean, low, high = seeds_interval([run["success_rate"] for run in runs], [run["episodes"] for run in runs])
    found = {
        "note": args.note,
        "base": base,
        "supervised": {"run": first.name, **evaluated(first, protocol)},
        "success_rate": mean,
        "success_low": low,
        "success_high": high,
        "runs": runs,
    }
    show_and_write(found, args.json)
    return found


if __name__ == "__main__":
    main(tyro.cli(Arguments))
