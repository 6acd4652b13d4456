"""Countdown from demonstrations to reinforcement: pass@1, pass@8 and a control of every recipe, with CPU and wall time.

    python benchmarks/reasoning.py --json benchmarks/results/reasoning.json

A stage whose folder is there is not repeated, so that an interrupted measurement goes on.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from embodied.devices import hardware
from embodied.run import RUNS
from embodied_bench.settings import show_and_write

DEMOS = 40000
PROBLEMS = 500
ATTEMPTS = 8


@dataclass(frozen=True)
class Arguments:
    """Success of the Countdown recipes on held-out problems."""

    algorithms: tuple[str, ...] = ("grpo", "ppo", "dapo", "reinforce")
    seeds: tuple[int, ...] = (0, 1, 2)
    """Seeds of reinforcement, which begins at one supervised policy."""
    minutes: float = 30.0
    """Wall time after which a training is interrupted; its newest checkpoint is evaluated."""
    threads: int = 1
    """Threads of every command."""
    runs_dir: Path = RUNS
    json: Path | None = None
    """Write the result to this file."""


def main(arguments: Arguments) -> None:
    runs, demos = arguments.runs_dir, arguments.runs_dir / "countdown-demonstrations"
    if not demos.exists():
        command(arguments, "record", "countdown_scripted", "--out", demos, "--episodes", DEMOS)
    begun = runs / "countdown-sft"
    rows = [stage(arguments, begun, "sft", "countdown_sft", 0, "--data", demos)]
    for seed in arguments.seeds:
        for name in arguments.algorithms:
            folder = runs / f"countdown-{name}-{seed}"
            rows.append(stage(arguments, folder, "train", f"countdown_{name}", seed, "--policy.init", begun))
    data: dict[str, Any] = {"hardware": hardware(), "problems": PROBLEMS, "rows": rows}
    print(
        f"{'recipe':24} {'greedy %':>20} {'pass@1 %':>20} {'pass@8 %':>20} {'control %':>10} {'CPU min':>8} {'min':>6}"
    )
    for row in rows:
        cells = (
            f"{100 * rate:.1f} ({100 * low:.1f} to {100 * high:.1f})" for rate, low, high in row["success"].values()
        )
        cpu, wall = row["cpu_s"] / 60, row["wall_s"] / 60
        print(
            f"{row['run']:24}",
            *(f"{cell:>20}" for cell in cells),
            f"{100 * row['control']:10.1f} {cpu:8.1f} {wall:6.1f}",
        )
    show_and_write(data, arguments.json)


def stage(arguments: Arguments, folder: Path, verb: str, config: str, seed: int, *more: Any) -> dict[str, Any]:
    """Train into the folder, and evaluate what was learned."""
    times = folder / "benchmark.json"
    if not times.exists():
        used = command(
            arguments, verb, config, "--seed", seed, "--name", folder.name, "--runs-dir", folder.parent, *more,
        )  # fmt: skip
        times.write_text(json.dumps(used | {"threads": arguments.threads}))
    greedy = evaluated(arguments, folder, "greedy")
    sampled = evaluated(arguments, folder, "sampled", "--eval.attempts", ATTEMPTS)
    control = evaluated(arguments, folder, "control", "--eval.tasks", "text/countdown_3_mismatched")
    rates = {
        "greedy": interval(greedy, "success_once"),
        "pass@1": interval(sampled, "pass@1"),
        f"pass@{ATTEMPTS}": interval(sampled, f"pass@{ATTEMPTS}"),
    }
    return {"run": folder.name, **json.loads(times.read_text()), "success": rates, "control": control["success_once"]}


def evaluated(arguments: Arguments, run: Path, name: str, *more: Any) -> dict[str, Any]:
    """The result of an evaluation of the run on `PROBLEMS` problems."""
    folder = run / f"evaluated-{name}"
    if not (folder / "eval.json").exists():
        command(arguments, "eval", run, "--eval.episodes", PROBLEMS, "--folder", folder, *more)
    return json.loads((folder / "eval.json").read_text())


def interval(result: dict[str, Any], name: str) -> tuple[float, float, float]:
    return result[name], result[f"{name}_low"], result[f"{name}_high"]


def command(arguments: Arguments, *words: Any) -> dict[str, float]:
    """Run `embodied WORDS`, and interrupt it when its time is over. Its CPU and wall time in seconds."""
    own = os.environ | {"OMP_NUM_THREADS": str(arguments.threads)}
    line = [sys.executable, "-m", "embodied.cli", *map(str, words), "--runtime.mode", "inline"]
    begin, before = time.monotonic(), resource.getrusage(resource.RUSAGE_CHILDREN)
    process = subprocess.Popen(line, env=own)
    try:
        code = process.wait(60 * arguments.minutes)
    except subprocess.TimeoutExpired:
        process.send_signal(2)  # a run keeps its newest iteration
        code = 0 if process.wait(600) >= 0 else 1
    if code:
        sys.exit(f"{' '.join(line)} ended with {code}")
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"cpu_s": round(cpu, 1), "wall_s": round(time.monotonic() - begin, 1)}


if __name__ == "__main__":
    main(tyro.cli(Arguments))
