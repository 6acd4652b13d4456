"""Env steps per second of `sim_farm.vector_env`, beside Gymnasium's AsyncVectorEnv over the simulator's own
environments, in the same run.

    python benchmarks/vector_env.py --json benchmarks/results/vector_env.json
    python benchmarks/vector_env.py --cameras 1 --num-envs 8 --json FILE

Both are stepped by the same loop with the same random actions, and reset ended episodes in the next step.
AsyncVectorEnv has a process for each environment and is measured with `shared_memory` and without; the better one is
the peer. How its processes are started (its `context`) makes no difference to a step: they are spawned, because PhysX
and OpenGL do not survive a fork. Each of the peer's settings is measured in turn with the farm; figures are medians.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
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


def stepper(envs: Any) -> Callable[[float], float]:
    """Steps the environments with random actions for so many seconds; returns env steps per second."""
    shape = envs.action_space.shape
    actions = np.random.default_rng(0).uniform(-1, 1, (512, *shape)).astype(np.float32)
    envs.reset(seed=0)
    turn = 0

    def run(seconds: float, least: int = 1) -> float:
        nonlocal turn
        begun, begin = turn, time.perf_counter()
        while turn - begun < least or time.perf_counter() - begin < seconds:
            envs.step(actions[turn % len(actions)])
            turn += 1
        return (turn - begun) * shape[0] / (time.perf_counter() - begin)

    run(0.0, WARM_UP)
    return run


def main(arguments: Arguments) -> None:
    # One thread for each process, also of the peer: they share the cores.
    os.environ |= {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LP_NUM_THREADS": "1"}
    from gymnasium.vector import AsyncVectorEnv

    import sim_farm
    from embodied.bench.farm_peers import PeerSpec, peer_env
    from embodied.bench.settings import show_and_write

    task, count = arguments.task, arguments.num_envs
    ours: list[float] = []
    peers: dict[bool, list[float]] = {True: [], False: []}
    make = partial(peer_env, PeerSpec(task, arguments.cameras, arguments.size))
    farm = sim_farm.vector_env(
        task, count, workers=arguments.workers, cameras=arguments.cameras, image_size=arguments.size
    )
    with closing(farm):
        run_farm = stepper(farm)
        for shared, found in peers.items():
            with closing(AsyncVectorEnv([make] * count, shared_memory=shared, context="spawn")) as peer:
                run_peer = stepper(peer)
                for _ in range(arguments.rounds):
                    ours.append(run_farm(arguments.seconds))
                    found.append(run_peer(arguments.seconds))
    best = max(peers, key=lambda shared: float(np.median(peers[shared])))
    farm_steps, peer_steps = float(np.median(ours)), float(np.median(peers[best]))
    figures = {
        "task": task,
        "observed": f"{arguments.cameras} cameras of {arguments.size} x {arguments.size}"
        if arguments.cameras
        else "state",
        "num_envs": count,
        "workers": arguments.workers,
        "env_steps_per_s": farm_steps,
        "peer": f"gymnasium's AsyncVectorEnv, {count} processes, shared_memory={best}",
        "peer_env_steps_per_s": peer_steps,
        "ratio_to_peer": farm_steps / peer_steps,
        "runs": {"ours": ours, **{f"peer, shared_memory={shared}": found for shared, found in peers.items()}},
    }
    show_and_write(figures, arguments.json)


if __name__ == "__main__":
    main(tyro.cli(Arguments))
