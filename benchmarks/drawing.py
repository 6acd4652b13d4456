"""What a picture of a ManiSkill task costs with SAPIEN's shader and with its rewritten one, in turn.

    python benchmarks/drawing.py --json benchmarks/results/drawing.json

Time is that of the processor, all threads of the process together: the median of the rounds' medians. The same scenes
are drawn by both; that the pixels are equal is checked.
"""

from __future__ import annotations

import hashlib
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import tyro

from embodied.bench.results import show_and_write
from sim_farm.backends import maniskill
from sim_farm.contract import EpisodeSpec, TaskSpec, UInt8

UNMEASURED = 5
"""Pictures at the start of a round, in which shaders are compiled and meshes loaded."""


@dataclass(frozen=True)
class Arguments:
    """Time of the processor for a picture, SAPIEN's shader beside ours."""

    tasks: tuple[str, ...] = ("PushCube-v1", "PickCube-v1", "PegInsertionSide-v1")
    """ManiSkill's names."""
    size: int = 128
    """Pixels of a side."""
    pictures: int = 60
    """In a round."""
    rounds: int = 3
    json: Path | None = None
    """Write the result to this file."""


def scenes_of(spec: TaskSpec, count: int) -> list[UInt8]:
    """Those of an episode of random actions."""
    physics, rng = maniskill.ManiSkillPhysics(spec), np.random.default_rng(0)
    scenes = [physics.reset(EpisodeSpec(seed=0)).scene]
    while len(scenes) < count:
        scenes.append(physics.step(rng.uniform(-1, 1, (1, physics.info.action_dim)).astype(np.float32)).scene)
    physics.close()
    return scenes


def draw(spec: TaskSpec, scenes: list[UInt8]) -> tuple[float, str]:
    """Milliseconds of a picture, and a hash of all of them."""
    renderer, digest, spent = maniskill.ManiSkillRenderer(spec), hashlib.sha256(), list[float]()
    for scene in scenes:
        begin = time.process_time()
        frames = renderer.render([scene], renderer.info.cameras)
        spent.append(time.process_time() - begin)
        for frame in frames.values():
            digest.update(frame.tobytes())
    renderer.close()
    return 1000 * float(np.median(spent[UNMEASURED:])), digest.hexdigest()


def main() -> None:
    arguments = tyro.cli(Arguments)
    found = {}
    for task in arguments.tasks:
        count = UNMEASURED + arguments.pictures
        spec = TaskSpec(f"maniskill/{task}", cameras=1, image_size=arguments.size, max_episode_steps=count)
        scenes, ours, stock, hashes = scenes_of(spec, count), list[float](), list[float](), set[str]()
        for _ in range(arguments.rounds):
            with mock.patch.object(maniskill, "light_cameras", nullcontext):
                ms, digest = draw(spec, scenes)
            stock.append(ms)
            hashes.add(digest)
            ms, digest = draw(spec, scenes)
            ours.append(ms)
            hashes.add(digest)
        if len(hashes) != 1:
            raise SystemExit(f"{task}: the pictures differ")
        found[task] = {
            "ours_ms": float(np.median(ours)),
            "stock_ms": float(np.median(stock)),
            "ratio": float(np.median(ours) / np.median(stock)),
            "rounds_ms": {"ours": ours, "stock": stock},
        }
    show_and_write({"size": arguments.size, "pictures": arguments.pictures, "tasks": found}, arguments.json)


if __name__ == "__main__":
    main()
