"""The frame writer fills the slots' frames; and the stamp by which a frame that nobody has drawn is known."""

from __future__ import annotations

import time

import numpy as np

from sim_farm import layout
from sim_farm.contract import TaskSpec
from sim_farm.memory import MAGIC
from sim_farm.registry import make_renderer

MAGIC_ROWS = (0, -1)
"""Rows of a frame that are stamped before it is drawn and checked after; see `stamp`."""


class FrameWriter:
    """Draws a slot's frames: the present observation, and the ended episode's last one where it is wanted."""

    def __init__(self, task: TaskSpec, slots: dict[str, np.ndarray]) -> None:
        """Make the renderer and let it draw once, so that what cannot start fails, or hangs, here."""
        self._renderer = make_renderer(task)
        self._slots = slots
        self._renderer.render([], self._renderer.info.cameras)

    def close(self) -> None:
        """Free the renderer with its scene replicas. From the thread that made it: OpenGL's contexts are its own."""
        self._renderer.close()

    def draw(self, env: int) -> None:
        slots = self._slots
        times = slots["times_ns"][env]
        times[layout.RENDER_START] = time.monotonic_ns()
        if slots["draw_final"][env]:
            self._write(slots["final_scene"][env], slots["final_frames"][env])
        if slots["active"][env]:
            self._write(slots["scene"][env], slots["frames"][env])
            slots["frames_of"][env] = slots["episode"][env], slots["episode_step"][env]
        times[layout.RENDER_END] = time.monotonic_ns()

    def _write(self, scene: np.ndarray, target: np.ndarray) -> None:
        stamp(target)
        cameras = self._renderer.info.cameras
        pictures = self._renderer.render([scene], cameras)
        for i, name in enumerate(cameras):
            target[i] = pictures[name][0]


def stamp(frames: np.ndarray) -> None:
    """Mark frames [cameras, H, W, 3] as not drawn: their first and last rows take the magic value."""
    for row in MAGIC_ROWS:
        frames[:, row] = MAGIC


def is_stamped(frames: np.ndarray) -> bool:
    """Whether any of the frames [..., H, W, 3] still carries the stamp of `stamp`, or the block's first filling."""
    return any(bool((frames[..., row, :, :] == MAGIC).all((-2, -1)).any()) for row in MAGIC_ROWS)
