"""Draw a small picture of a task in this process, and print the device and the time. The doctor runs it as a program.

    python -m sim_farm.render_probe tabletop/reach cuda:0       # OpenGL by EGL (MuJoCo)
    python -m sim_farm.render_probe maniskill/PushCube-v1 cpu   # Vulkan (SAPIEN)

One line of JSON: `asked`, `name` (what the renderer calls itself), `identity` (its UUID by OpenGL, its PCI address by
Vulkan; null where it says none), `picture_s`. Exit status 1 with the message on standard error where nothing is drawn.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass

from sim_farm import render_devices
from sim_farm.contract import EpisodeSpec, FarmError, TaskSpec
from sim_farm.registry import make_physics, make_renderer, resolve
from sim_farm.render_devices import RenderDevice

SIZE, PICTURES = 128, 20


@dataclass(frozen=True)
class Drawn:
    """Device that drew."""

    asked: str
    name: str
    identity: str | None
    picture_s: float
    """Mean of some pictures, the first left out."""


def device_from(text: str) -> RenderDevice | None:
    """`cuda:1`, `cpu` or `auto`. Raises `FarmError` for anything else."""
    if text == "auto":
        return None
    if text == "cpu":
        return "cpu"
    kind, _, number = text.partition(":")
    if kind != "cuda" or not number.isdecimal():
        raise FarmError(f"a device that draws is auto, cpu or cuda:NUMBER, got {text!r}")
    return int(number)


def draw(task: str, device: RenderDevice | None) -> Drawn:
    """Draw the task's first observation some times. Raises `FarmError` where the device does not draw."""
    render_devices.ask(device)
    spec = TaskSpec(task, cameras=1, image_size=SIZE)
    physics, renderer = make_physics(spec), make_renderer(spec)
    try:
        scene, cameras = physics.reset(EpisodeSpec(0)).scene, renderer.info.cameras
        renderer.render([scene], cameras)
        begin = time.perf_counter()
        for _ in range(PICTURES):
            renderer.render([scene], cameras)
        picture_s = (time.perf_counter() - begin) / PICTURES
        name, identity = resolve(task)[0].drawn_by()
    finally:
        renderer.close()
        physics.close()
    return Drawn(render_devices.name_of(device), name, identity, picture_s)


def main() -> int:
    parser = argparse.ArgumentParser(description="draw a small picture and say on what")
    parser.add_argument("task", help="tabletop/reach draws by OpenGL, maniskill/PushCube-v1 by Vulkan")
    parser.add_argument("device", nargs="?", default="auto", help="auto, cpu or cuda:NUMBER (CUDA's number)")
    asked = parser.parse_args()
    try:
        print(json.dumps(asdict(draw(asked.task, device_from(asked.device)))))
    except FarmError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
