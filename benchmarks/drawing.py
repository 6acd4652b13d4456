"""What a picture of a ManiSkill task costs as SAPIEN draws it and as this project does, in turn.

    python benchmarks/drawing.py --json benchmarks/results/drawing.json

Time is that of the processor, all threads of the process together, medians over the pictures. Each scene is drawn by
both, one after the other; that the pixels are equal is checked.
"""

from __future__ import annotations

import time
from contextlib import closing, nullcontext
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

import numpy as np
import tyro

from embodied_bench.settings import show_and_write
from sim_farm.backends.maniskill import simulator
from sim_farm.contract import EpisodeSpec, Renderer, TaskSpec, UInt8

UNMEASURED = 5
"""Pictures at the start of a round, in which shaders are compiled and meshes loaded."""


@dataclass(frozen=True)
class Arguments:
    """Time of the processor for a picture, SAPIEN's shader and all triangles beside ours."""

    tasks: tuple[str, ...] = ("PushCube-v1", "PickCube-v1", "PegInsertionSide-v1")
    """ManiSkill's names."""
    size: int = 128
    """Pixels of a side."""
    pictures: int = 100
    json: Path | None = None
    """Write the result to this file."""


def scenes_of(spec: TaskSpec, count: int) -> list[UInt8]:
    """Those of an episode of random actions."""
    physics, rng = simulator.ManiSkillPhysics(spec), np.random.default_rng(0)
    scenes = [physics.reset(EpisodeSpec(seed=0)).scene]
    while len(scenes) < count:
        scenes.append(physics.step(rng.uniform(-1, 1, (1, physics.info.action_dim)).astype(np.float32)).scene)
    physics.close()
    return scenes


def draw(renderer: Renderer, scene: UInt8) -> tuple[float, bytes]:
    """Milliseconds of a picture, and its pixels."""
    begin = time.process_time()
    frames = renderer.render([scene], renderer.info.cameras)
    spent = time.process_time() - begin
    return 1000 * spent, b"".join(frame.tobytes() for frame in frames.values())


def measure(spec: TaskSpec, scenes: list[UInt8]) -> dict[str, float]:
    """Each scene by both, one after the other. Raises `SystemExit` where their pixels differ."""
    as_sapien_does = mock.patch.multiple(simulator, light_cameras=nullcontext, draws_in_software=lambda: False)
    with as_sapien_does:
        stock = simulator.ManiSkillRenderer(spec)
    pairs = []
    with closing(simulator.ManiSkillRenderer(spec)) as ours, closing(stock):
        for scene in scenes:
            mine = draw(ours, scene)
            with as_sapien_does:  # a task that draws its geometry makes cameras for it
                pairs.append((mine, draw(stock, scene)))
    if any(mine[1] != theirs[1] for mine, theirs in pairs):
        raise SystemExit(f"{spec.name}: the pictures differ")
    ours_ms, stock_ms = np.array([[mine[0], theirs[0]] for mine, theirs in pairs[UNMEASURED:]]).T
    return {
        "ours_ms": float(np.median(ours_ms)),
        "stock_ms": float(np.median(stock_ms)),
        "ratio": float(np.median(ours_ms / stock_ms)),
    }


def main() -> None:
    arguments = tyro.cli(Arguments)
    found = {}
    for task in arguments.tasks:
        count = UNMEASURED + arguments.pictures
        spec = TaskSpec(f"maniskill/{task}", cameras=1, image_size=arguments.size, max_episode_steps=count)
        found[task] = measure(spec, scenes_of(spec, count))
    show_and_write({"size": arguments.size, "pictures": arguments.pictures, "tasks": found}, arguments.json)


if __name__ == "__main__":
    main()
