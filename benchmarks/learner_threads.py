"""Threads of a small learner: env steps per second by `optim.threads`, with free cores and with busy ones.

    python benchmarks/learner_threads.py --json benchmarks/results/learner_threads.json

The runs take turns. Beside half of them as many processes compute as there are cores, as on a machine that is shared.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import tyro

from embodied.bench.settings import show_and_write
from embodied.reporting.metrics import read

BUSY = "import numpy\na = numpy.ones((500, 500))\nwhile True: a @ a"


@dataclass(frozen=True)
class Arguments:
    """Env steps per second of a configuration by the threads of its learner."""

    config: str = "reach"
    """Configuration, run inline."""
    rounds: int = 3
    """Runs of each number of threads, in turn."""
    iterations: int = 20
    """Iterations of a run; the first is not counted."""
    json: Path | None = None
    """Write the result to this file."""


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """A block beside which so many processes compute, of one thread each."""
    one = os.environ | {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1"}
    running = [subprocess.Popen([sys.executable, "-c", BUSY], env=one) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


def measure(config: str, threads: int, iterations: int) -> float:
    """Env steps per second after the first iteration; 0 threads: the default."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "embodied.cli", "train", config, "--name", "run", "--runs-dir", folder]
        command += ["--runtime.mode", "inline", "--iterations", str(iterations), "--optim.threads", str(threads)]
        command += ["--eval.episodes", "1", "--eval.videos", "0"]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        rows = read(Path(folder) / "run")
    return (rows[-1]["env_steps"] - rows[0]["env_steps"]) / (rows[-1]["wall_s"] - rows[0]["wall_s"])


def main() -> None:
    arguments, cores = tyro.cli(Arguments), len(os.sched_getaffinity(0))
    ways = {"default": 0, "one thread": 1, "all cores": cores}
    found: dict[str, list[float]] = {}
    for _ in range(arguments.rounds):
        for beside in (0, cores):
            for way, threads in ways.items():
                with busy(beside):
                    rate = measure(arguments.config, threads, arguments.iterations)
                found.setdefault(f"{way}, {'busy' if beside else 'free'} cores", []).append(rate)
    result = {"config": arguments.config, "env_steps_per_s": {name: median(rates) for name, rates in found.items()}}
    show_and_write({**result, "runs": found}, arguments.json)


if __name__ == "__main__":
    main()
