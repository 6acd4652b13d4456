"""What Ray costs: one training iteration of PushCube as Ray actors and in one process, doing the same work.

    python benchmarks/ray_overhead.py --json benchmarks/results/ray_overhead.json

Both have one physics worker and one group of environments, so that nothing overlaps and both do the same work in the
same order. The runs take turns; iterations are read from their traces. Ray's default (a worker per core, two groups) is
measured beside them, to show what the processes are for.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

from embodied.run.trace import ITERATIONS, load
from embodied_bench.settings import show_and_write

ONE_BY_ONE = ("--farm.physics-workers", "1", "--farm.groups", "1")
WAYS = {
    "inline": ("--runtime.mode", "inline", *ONE_BY_ONE),
    "ray": ("--runtime.mode", "ray", *ONE_BY_ONE),
    "ray_default": ("--runtime.mode", "ray"),
}


@dataclass(frozen=True)
class Arguments:
    """Overhead of Ray against inline in one training iteration of PushCube."""

    rounds: int = 3
    """Runs of each way, in turn."""
    iterations: int = 8
    """Iterations of a run; the first is not counted."""
    json: Path | None = None
    """Write the result to this file."""


def measure(way: str, iterations: int) -> list[float]:
    """Seconds of each complete iteration but the first, from the trace of a run."""
    with tempfile.TemporaryDirectory() as folder:
        command = [str(Path(sys.executable).parent / "embodied"), "train", "pushcube", "--name", way, *WAYS[way]]
        command += ["--runs-dir", folder, "--iterations", str(iterations), "--eval.episodes", "1", "--eval.videos", "0"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        spans = [span for span in load(Path(folder) / way / "trace.json") if span.track == ITERATIONS]
    return [(span.end_ns - span.start_ns) / 1e9 for span in spans if span.args["complete"] and span.args["iteration"]]


def main() -> None:
    arguments = tyro.cli(Arguments)
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    for _ in range(arguments.rounds):
        for way in WAYS:
            seconds[way] += measure(way, arguments.iterations)
    median = {way: float(np.median(values)) for way, values in seconds.items()}
    figures: dict[str, Any] = {
        "iteration_s": median,
        "ray_overhead": median["ray"] / median["inline"] - 1,
        "speedup_of_default": median["inline"] / median["ray_default"],
        "iterations": seconds,
    }
    show_and_write(figures, arguments.json)


if __name__ == "__main__":
    main()
