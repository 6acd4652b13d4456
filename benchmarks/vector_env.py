"""Env steps per second of `sim_farm.vector_env`, beside Gymnasium's AsyncVectorEnv over the simulator's own
environments, in the same run.

    python benchmarks/vector_env.py --json benchmarks/results/vector_env.json
    python benchmarks/vector_env.py --cameras 1 --num-envs 8 --json FILE

Both are stepped by the same loop with the same random actions, and reset ended episodes in the next step.
AsyncVectorEnv has a process for each environment and is measured with `shared_memory` and without. How its processes
are started (its `context`) makes no difference to a step: they are spawned, because PhysX and OpenGL do not survive a
fork. Each of the peer's settings is measured in turn with the farm. Figures are medians, and a ratio is the median of
those of measurements that followed each other; the peer is the setting with the lower one.

Env steps per second of CPU time, of all processes of each, are given too: on a machine that is shared with other work,
sixteen processes get more of it than two.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import tyro

WARM_UP = 60
"""Steps before the first measurement: more than an episode of PushCube, so that resets are warm too."""


@dataclass(frozen=True)
class Arguments:
    """Env steps per second of `sim_farm.vector_env`, beside Gymnasium's AsyncVectorEnv."""

    task: str = "maniskill/PushCube-v1"
    """One of ManiSkill or LIBERO."""
    num_envs: int = 16
    """Environments of each."""
    workers: int = 2
    """The farm's processes."""
    cameras: int = 0
    """Cameras drawn at every step; 0 observes states."""
    size: int = 128
    """Height and width of a frame."""
    seconds: float = 10.0
    """Duration of each measurement."""
    rounds: int = 3
    """Measurements of each."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class Rates:
    """Env steps per second, and per second of CPU time."""

    wall: float
    cpu: float


@dataclass(frozen=True)
class Pair:
    """Two measurements, one after the other."""

    farm: Rates
    peer: Rates


def cpu_s() -> float:
    """CPU time of this process and those that it has started. Of two that are measured in turn, one rests."""
    me = psutil.Process()
    times = [process.cpu_times() for process in (me, *me.children(recursive=True))]
    return sum(each.user + each.system for each in times)


def stepper(envs: Any) -> Callable[[float], Rates]:
    """Steps the environments with random actions for so many seconds."""
    shape = envs.action_space.shape
    actions = np.random.default_rng(0).uniform(-1, 1, (512, *shape)).astype(np.float32)
    envs.reset(seed=0)
    turn = 0

    def run(seconds: float, least: int = 1) -> Rates:
        nonlocal turn
        begun, cpu_begin, begin = turn, cpu_s(), time.perf_counter()
        while turn - begun < least or time.perf_counter() - begin < seconds:
            envs.step(actions[turn % len(actions)])
            turn += 1
        wall_s = time.perf_counter() - begin
        steps = (turn - begun) * shape[0]
        return Rates(steps / wall_s, steps / (cpu_s() - cpu_begin))

    run(0.0, WARM_UP)
    return run


def median(pairs: list[Pair], of: Callable[[Pair], float]) -> float:
    return float(np.median([of(pair) for pair in pairs]))


def main(arguments: Arguments) -> None:
    # One thread for each process, also of the peer: they share the cores.
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LP_NUM_THREADS": "1"}
    from gymnasium.vector import AsyncVectorEnv

    import sim_farm
    from embodied_bench.farm_peers import PeerSpec, peer_env
    from embodied_bench.settings import show_and_write

    task, count = arguments.task, arguments.num_envs
    pairs: dict[bool, list[Pair]] = {True: [], False: []}
    make = partial(peer_env, PeerSpec(task, arguments.cameras, arguments.size))
    farm = sim_farm.vector_env(
        task, count, workers=arguments.workers, cameras=arguments.cameras, image_size=arguments.size
    )
    with closing(farm):
        run_farm = stepper(farm)
        for shared, found in pairs.items():
            with closing(AsyncVectorEnv([make] * count, shared_memory=shared, context="spawn")) as peer:
                run_peer = stepper(peer)
                for _ in range(arguments.rounds):
                    found.append(Pair(run_farm(arguments.seconds), run_peer(arguments.seconds)))
    best = min(pairs, key=lambda shared: median(pairs[shared], lambda pair: pair.farm.wall / pair.peer.wall))
    figures: dict[str, Any] = {
        "task": task,
        "observed": f"{arguments.cameras} cameras, {arguments.size} pixels" if arguments.cameras else "state",
        "num_envs": count,
        "workers": arguments.workers,
        "peer": f"gymnasium's AsyncVectorEnv, {count} processes, shared_memory={best}",
    }
    found = pairs[best]
    figures |= {
        "env_steps_per_s": median(found, lambda pair: pair.farm.wall),
        "peer_env_steps_per_s": median(found, lambda pair: pair.peer.wall),
        "ratio_to_peer": median(found, lambda pair: pair.farm.wall / pair.peer.wall),
        "env_steps_per_cpu_s": median(found, lambda pair: pair.farm.cpu),
        "peer_env_steps_per_cpu_s": median(found, lambda pair: pair.peer.cpu),
        "ratio_to_peer_by_cpu_time": median(found, lambda pair: pair.farm.cpu / pair.peer.cpu),
        "runs": {f"shared_memory={shared}": [asdict(pair) for pair in each] for shared, each in pairs.items()},
    }
    show_and_write(figures, arguments.json)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
