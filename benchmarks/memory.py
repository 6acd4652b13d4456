"""Does a process of a run grow? `python benchmarks/memory.py --task tabletop/reach --json FILE`.

Trains on Ray until so many episodes have ended, and notes once a second what memory every process of the run has to
itself (Linux's USS) and how many descriptors it has open. Growth is the mean step between the means of `BLOCKS` equal
parts, without the first third, in which caches fill. It is none where zero is in its 95% interval.

Steps, and not a line through the parts: memory is the sum of what was taken and given back, so its parts depend on each
other, and a line's interval would be too narrow. A leak's steps are alike, and so their interval is narrow.
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import defaultdict
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import tyro

from embodied.config.files import parse_config
from embodied.execution.session import open_session
from embodied.run.folder import prepare_run
from embodied.runtime.ray.runtime import RayRuntime
from embodied.statistics import mean_interval
from embodied.training.loop import train
from embodied.workflows.run_spec import RunSpec
from embodied_bench.settings import show_and_write

BLOCKS = 12
EVERY_S = 1.0
WARM = 1 / 3
"""Of a run, the part that is left out."""


@dataclass(frozen=True)
class Memory:
    """Memory of each process over many episodes."""

    task: str = "tabletop/reach"
    episodes: int = 10_000
    steps: int = 50
    """Of an episode, at most."""
    num_envs: int = 32
    cameras: int = 0
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class Sample:
    at_s: float
    uss_mb: float
    descriptors: int


@dataclass
class Sampler:
    """Notes the memory of this process and all that it has started, from a thread."""

    runtime: RayRuntime
    samples: dict[tuple[int, str], list[Sample]] = field(default_factory=lambda: defaultdict(list))
    _end: threading.Event = field(default_factory=threading.Event)

    def __enter__(self) -> Sampler:
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join()

    def _run(self) -> None:
        me = psutil.Process()
        while not self._end.wait(EVERY_S):
            now = time.monotonic()
            names = {pid: " and ".join(workers) for pid, workers in self.runtime.workers_by_process().items()}
            for process in (me, *me.children(recursive=True)):
                try:
                    title = "driver" if process == me else names.get(process.pid) or _title(process)
                    sample = Sample(now, process.memory_full_info().uss / 2**20, process.num_fds())
                except psutil.Error:  # it has ended
                    continue
                self.samples[process.pid, title].append(sample)


def _title(process: psutil.Process) -> str:
    words: list[str] = process.cmdline()
    # Ray's titles change with what a process does: `ray::_FarmActor`, `ray::_FarmActor.serve`.
    return next((word.partition(".")[0] for word in words if word.startswith("ray::")), process.name())


def growth(samples: list[Sample], begin_s: float, end_s: float, episodes: int) -> dict[str, Any] | None:
    """What a process that lived through the run has grown by, per thousand episodes; None for one that did not."""
    first = begin_s + WARM * (end_s - begin_s)
    kept = [sample for sample in samples if first <= sample.at_s <= end_s]
    if len(kept) < 2 * BLOCKS or samples[0].at_s > first:
        return None
    done = np.array([(sample.at_s - begin_s) / (end_s - begin_s) * episodes / 1000 for sample in kept])
    memory = np.array([sample.uss_mb for sample in kept])
    parts = np.array_split(np.arange(len(kept)), BLOCKS)
    means = np.array([memory[part].mean() for part in parts])
    steps = np.diff(means) / np.diff([done[part].mean() for part in parts])
    mean, low, high = mean_interval(steps.tolist())
    return {
        "uss_mb": float(memory[-1]),
        "mb_per_1000_episodes": mean,
        "interval": [low, high],
        "grows": low > 0,
        "parts_mb": np.round(means, 2).tolist(),
        "descriptors": [kept[0].descriptors, kept[-1].descriptors],
    }


def main(settings: Memory) -> None:
    decisions = settings.steps
    pictures = {"kind": "flow", "reads": ["proprio", "images"], "options": {"encoder": "cnn", "features": 16}}
    data = {
        "iterations": -(-settings.episodes // settings.num_envs),
        "checkpoint_every": 100,
        "keep_checkpoints": 2,
        "env": {
            "task": settings.task, "num_envs": settings.num_envs, "max_episode_steps": settings.steps,
            "cameras": settings.cameras, "image_size": 64,
        },
        "farm": {"physics_workers": 2, "groups": 2, **({"render_workers": 1} if settings.cameras else {})},
        "policy": {**(pictures if settings.cameras else {}), "chunk": 1},
        "rollout": {"decisions": decisions},
        "optim": {"epochs": 1, "minibatch": decisions * settings.num_envs},
        "runtime": {"mode": "ray"},
    }  # fmt: skip
    config = parse_config(data, "benchmarks/memory.py")
    with tempfile.TemporaryDirectory() as folder, open_session(config) as session:
        assert isinstance(session.runtime, RayRuntime)
        run = Path(folder) / "run"
        prepare_run(config, run, False)
        with Sampler(session.runtime) as sampler:
            result = train(RunSpec.of(config), run, session, None)
            end_s = time.monotonic()
    episodes = -(-settings.episodes // settings.num_envs) * settings.num_envs
    begin_s = end_s - result["wall_s"]
    processes = {
        f"{title} ({pid})": found
        for (pid, title), samples in sampler.samples.items()
        if (found := growth(samples, begin_s, end_s, episodes)) is not None
    }
    figures: dict[str, Any] = {
        **asdict(settings),
        "episodes_at_least": episodes,
        "wall_s": result["wall_s"],
        "grow": [name for name, found in processes.items() if found["grows"]],
        "processes": processes,
    }
    show_and_write({**figures, "json": None}, settings.json)


if __name__ == "__main__":
    main(tyro.cli(Memory, description=__doc__))
