"""Cost of serving a policy: time of an evaluation of a run, and of the same run behind `embodied serve`.

    python benchmarks/serving.py RUN --json benchmarks/results/serving.json

The run's configuration says task, environments and policy. The two evaluations take turns, on the same cores, which the
server has too. A round's ratio is that of two neighbours, which have written the same episodes, line for line.
"""

from __future__ import annotations

import json
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import tyro

from embodied.config.files import save_config
from embodied.config.schema import PolicyConfig
from embodied.run.saved_settings import recorded_settings
from embodied_bench.settings import show_and_write

COMMAND = str(Path(sys.executable).parent / "embodied")


@dataclass(frozen=True)
class Arguments:
    """Time of an evaluation of a run, and of the run served."""

    run: tyro.conf.Positional[Path]
    """Folder of the run."""
    rounds: int = 5
    """Evaluations of each sort, in turn."""
    episodes: int = 50
    """Episodes of each task."""
    mode: Literal["ray", "inline"] = "ray"
    """`runtime.mode` of both evaluations."""
    json: Path | None = None
    """Write the result to this file."""


@contextmanager
def serving(run: Path) -> Iterator[str]:
    """The address of the run's policy, served by a process of its own."""
    command = [COMMAND, "serve", str(run), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "ws://" in line, line
            yield line[line.index("ws://") :].partition(";")[0]
        finally:
            process.send_signal(signal.SIGINT)


def evaluated(folder: Path, named: str, args: Arguments) -> tuple[float, str]:
    """Seconds in which an evaluation ran its episodes, without what it builds before (farm and, for itself, the policy,
    which the server has built already), and its lines."""
    how = ["--folder", str(folder), "--eval.episodes", str(args.episodes), "--eval.videos", "0"]
    how += ["--runtime.mode", args.mode]
    subprocess.run([COMMAND, "eval", named, *how], check=True, stdout=subprocess.DEVNULL)
    return json.loads((folder / "eval.json").read_text())["decisions"]["wall_s"], (
        folder / "episodes.jsonl"
    ).read_text()


def main(args: Arguments) -> None:
    """Measure, show and write."""
    config = recorded_settings(args.run)
    own, served, latencies, episodes = [], [], [], 0
    with serving(args.run) as address, tempfile.TemporaryDirectory() as name:
        folder, policy = Path(name), config.policy
        asking = PolicyConfig(kind="remote", chunk=policy.chunk, reads=policy.reads, options={"address": address})
        save_config(config.model_copy(update={"policy": asking}), folder / "remote.yaml")
        for turn in range(args.rounds):
            seconds, lines = evaluated(folder / f"own{turn}", str(args.run), args)
            own.append(seconds)
            seconds, same = evaluated(folder / f"served{turn}", str(folder / "remote.yaml"), args)
            served.append(seconds)
            assert lines == same, "the served policy's episodes differ from its own"
            latencies.append(json.loads((folder / f"served{turn}" / "eval.json").read_text())["decisions"])
            episodes = lines.count("\n")
    ratios = [theirs / ours for theirs, ours in zip(served, own, strict=True)]
    result: dict[str, Any] = {
        "policy": config.policy.kind,
        "task": config.env.task,
        "episodes": episodes,
        "own_wall_s": statistics.median(own),
        "served_wall_s": statistics.median(served),
        "ratio_to_own": statistics.median(ratios),
        "ratios": ratios,
        "decision_latency_p50_s": statistics.median(each["latency_p50_s"] for each in latencies),
        "decision_latency_p99_s": statistics.median(each["latency_p99_s"] for each in latencies),
    }
    show_and_write(result, args.json)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
