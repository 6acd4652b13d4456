"""Cost of LIBERO's meshes and textures: memory of a process that simulates and draws one task, and processor time.

    python benchmarks/libero_assets.py libero/libero_spatial/0

A folder of others, named as `assets` in LIBERO's settings file (`LIBERO_CONFIG_PATH`), is compared by a second call.
Two cameras of 128 x 128. Times are of the processor, so that other processes do not count.
"""

from __future__ import annotations

import json
import os
import time

import numpy as np
import psutil
import tyro

CAMERAS = ("agentview", "robot0_eye_in_hand")
PICTURES = 40


def main(task: str = "libero/libero_spatial/0", /) -> None:
    """Memory (MB) and processor time of one LIBERO task in one process.

    Args:
        task: A task of LIBERO.
    """
    from sim_farm.contract import EpisodeSpec, TaskSpec
    from sim_farm.registry import make_physics, make_renderer

    spec = TaskSpec(task, cameras=CAMERAS, image_size=128)
    found: dict[str, float] = {}
    begun = time.process_time()
    physics = make_physics(spec)
    first = physics.reset(EpisodeSpec(0, 0)).scene
    found["physics_cpu_s"], found["physics_mb"] = time.process_time() - begun, _megabytes()
    renderer = make_renderer(spec)
    assert first is not None
    begun = time.process_time()
    renderer.render([first], CAMERAS)
    found["first_picture_cpu_s"], found["with_renderer_mb"] = time.process_time() - begun, _megabytes()
    actions = np.random.default_rng(0).uniform(-1, 1, (PICTURES, 1, 7)).astype(np.float32)
    scenes = [scene for action in actions if (scene := physics.step(action).scene) is not None]
    begun = time.process_time()
    for scene in scenes:
        renderer.render([scene], CAMERAS)
    found["two_pictures_cpu_ms"] = (time.process_time() - begun) / len(scenes) * 1e3
    print(json.dumps({"task": task} | {name: round(value, 2) for name, value in found.items()}))
    renderer.close()
    physics.close()


def _megabytes() -> float:
    return psutil.Process(os.getpid()).memory_info().rss / 2**20


if __name__ == "__main__":
    tyro.cli(main)
