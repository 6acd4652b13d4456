"""LIBERO in the farm: throughput beside LIBERO's and gymnasium's vector environments, physics step, reset.

    python benchmarks/libero_farm.py --json benchmarks/results/libero_farm.json

Two cameras of 128 x 128, chunks of 8 random actions, software rendering unless there is a GPU. Everything is measured
in one run, in turn: the farm fused (physics workers draw) and split (one render worker for all physics workers),
the peers stepped action by action on the same cores and renderer, and, in this process, a control step and a
reset of stock robosuite beside ours. The peers are not reset while they are measured, the farm is.
"""

from __future__ import annotations

import gc
import os
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tyro

TASK = "libero/libero_spatial/0"
STEPS = 200


@dataclass(frozen=True)
class Arguments:
    """LIBERO in the farm, beside its peers."""

    task: str = TASK
    """A task of LIBERO."""
    num_envs: int = 8
    """Environments of the farm."""
    seconds: float = 20.0
    """Duration of each throughput measurement; there are three of each."""
    json: Path | None = None
    """Write the result to this file."""


def throughput(arguments: Arguments, render_workers: int) -> dict[str, Any]:
    """`embodied bench farm` on the task; the peers are measured beside the fused farm."""
    from embodied_bench.farm import bench_farm
    from embodied_bench.settings import BenchFarm

    return bench_farm(
        BenchFarm(
            task=arguments.task,
            cameras=2,
            size=128,
            chunk=8,
            num_envs=arguments.num_envs,
            render_workers=render_workers,
            seconds=arguments.seconds,
            peer=render_workers == 0,
        )
    )


def physics(task: str) -> dict[str, float]:
    """Milliseconds of a control step and of a reset, stock and ours, in turn; medians. States are compared."""
    from sim_farm.backends.libero.tasks import find_task, initial_states
    from sim_farm.contract import EpisodeSpec, TaskSpec
    from sim_farm.registry import make_physics
    from tests.sim_farm import libero_stock as stock

    env: Any = stock.stock_environment(task)
    state = initial_states(find_task(task))[0]
    actions = np.random.default_rng(0).uniform(-1, 1, (STEPS, 7)).astype(np.float32)
    with closing(make_physics(TaskSpec(task))) as ours:
        ours.reset(EpisodeSpec(0, 0))
        resets = [_timed(lambda i=i: ours.reset(EpisodeSpec(i, i))) for i in range(20)]
        stock_resets = []
        for seed in range(5):
            env.seed(seed)
            stock_resets.append(_timed(lambda: (env.reset(), env.set_init_state(state))))
        env = stock.stock_environment(task)  # as new: see tests/sim_farm/test_libero.py
        stock.begin(env, task, 0, 0)
        ours.reset(EpisodeSpec(0, 0))
        times: dict[str, list[float]] = {"stock": [], "ours": []}
        gc.disable()
        for action in actions:
            times["stock"].append(_timed(lambda a=action: env.step(a)))
            times["ours"].append(_timed(lambda a=action: ours.step(a[None])))
        gc.enable()
        equal = ours.backend._env.sim.data.qpos.tobytes() == env.sim.data.qpos.tobytes()  # type: ignore[attr-defined]
    step = {name: float(np.median(values)) for name, values in times.items()}
    return {
        "control_step_ms": step["ours"],
        "stock_control_step_ms": step["stock"],
        "control_step_ratio": step["ours"] / step["stock"],
        "states_bit_equal": equal,
        "reset_ms": float(np.median(resets)),
        "stock_reset_ms": float(np.median(stock_resets)),
    }


def _timed(call: Callable[[], object]) -> float:
    begin = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - begin)


def main() -> None:
    arguments = tyro.cli(Arguments)
    os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", LP_NUM_THREADS="1")
    sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
    from embodied_bench.settings import show_and_write

    fused, split = throughput(arguments, 0), throughput(arguments, 1)
    figures = {
        "fused": fused,
        "split": split,
        "split_to_fused": split["env_steps_per_s"] / fused["env_steps_per_s"],
        **physics(arguments.task),
    }
    show_and_write(figures, arguments.json)


if __name__ == "__main__":
    main()
