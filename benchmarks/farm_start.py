"""What do a farm's workers cost before their first observation, and hold? `python benchmarks/farm_start.py`.

Starts a farm, waits for the first observation of every environment, then kills a worker and waits for its successor.
CPU time is that of all processes but this one. Memory is PSS: a page that several processes share counts in parts.
"""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import tyro

from embodied_bench.settings import show_and_write
from sim_farm.client.farm import Farm
from sim_farm.contract import TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.processes import Processes

DEADLINE_S = 600.0


@dataclass(frozen=True)
class FarmStart:
    """The start of a farm's workers, and of a successor."""

    task: str = "libero/libero_spatial/0"
    cameras: int = 0
    num_envs: int = 2
    workers: int = 2
    render_workers: int = 0
    """None: workers draw what they simulate."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class Started:
    observed_s: float
    """Until the first observations."""
    observed_cpu_s: float
    replaced_s: float
    """From the death of a worker until its successor serves."""
    replaced_cpu_s: float
    pss_mb: float
    """Of all processes but this one."""
    largest_private_mb: float
    """Of the process with the most pages of its own."""


def measure(config: FarmStart) -> Started:
    task = TaskSpec(config.task, cameras=config.cameras)
    spec = FarmSpec(
        task,
        EndlessEpisodes(config.num_envs),
        config.num_envs,
        physics_workers=config.workers,
        render_workers=config.render_workers,
    )
    begin = time.perf_counter()
    with closing(Processes(DEADLINE_S, DEADLINE_S)) as host, closing(Farm.create(spec, host)) as farm:
        farm.reset(0)
        farm.collect(0, DEADLINE_S)
        observed_s, observed_cpu_s = time.perf_counter() - begin, _cpu_s()
        held = [process.memory_full_info() for process in psutil.Process().children(recursive=True)]
        begin = time.perf_counter()
        os.kill(host.pids()[0], signal.SIGKILL)
        while not host.take_replaced():
            host.watch()
            time.sleep(0.01)
        replaced_s, replaced_cpu_s = time.perf_counter() - begin, _cpu_s() - observed_cpu_s
    pss, private = sum(one.pss for one in held), max(one.uss for one in held)
    return Started(observed_s, observed_cpu_s, replaced_s, replaced_cpu_s, pss / 1e6, private / 1e6)


def _cpu_s() -> float:
    """CPU seconds of all that this process has started; what has ended counts in its parent."""
    here, seconds = psutil.Process(), 0.0
    for process in (here, *here.children(recursive=True)):
        times = process.cpu_times()
        seconds += times.children_user + times.children_system
        if process != here:
            seconds += times.user + times.system
    return seconds


if __name__ == "__main__":
    config = tyro.cli(FarmStart, description=__doc__)
    show_and_write({**asdict(config), "json": None, **asdict(measure(config))}, config.json)
