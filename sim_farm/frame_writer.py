"""The frame writer draws what a slot asks for into the rows of the frame memory that the slot names."""

from __future__ import annotations

import time

import numpy as np

from sim_farm import layout
from sim_farm.contract import TaskSpec
from sim_farm.frame_memory import FrameMemory, stamp
from sim_farm.registry import make_renderer


class FrameWriter:
    """Draws a slot's frames: the present observation, and the ended episode's last one where it is wanted."""

    def __init__(self, task: TaskSpec, slots: dict[str, np.ndarray], memory: FrameMemory) -> None:
        """Make the renderer and let it draw once, so that what cannot start fails, or hangs, here."""
        self._renderer = make_renderer(task)
        self._slots, self._memory = slots, memory
        self._renderer.render([], self._renderer.info.cameras)

    def close(self) -> None:
        """Free the renderer with its scene replicas. From the thread that made it: OpenGL's contexts are its own."""
        self._renderer.close()

    def draw(self, env: int) -> None:
        """Draw the environment's observation into its `frame_row`, and a wanted final one into its `final_row`. The
        row of an environment that rests is filled with zeros."""
        slots = self._slots
        times = slots["times_ns"][env]
        times[layout.RENDER_START] = time.monotonic_ns()
        episode, row = int(slots["episode"][env]), int(slots["frame_row"][env])
        if slots["draw_final"][env]:
            last = int(slots["base_step"][env]) + int(slots["steps"][env])
            self._write(slots["final_scene"][env], int(slots["final_row"][env]), episode - 1, last)
        if slots["active"][env]:
            self._write(slots["scene"][env], row, episode, int(slots["episode_step"][env]))
        else:
            self._memory.frames[row] = 0
        times[layout.RENDER_END] = time.monotonic_ns()

    def _write(self, scene: np.ndarray, row: int, episode: int, step: int) -> None:
        memory, cameras = self._memory, self._renderer.info.cameras
        stamp(memory.frames[row])
        places = {name: memory.frames[row : row + 1, i] for i, name in enumerate(cameras)}
        frames = self._renderer.render([scene], cameras, places)
        for name, place in places.items():
            if frames[name] is not place:  # a renderer that cannot draw into a given array
                place[...] = frames[name]
        memory.frames_of[row] = episode, step
