"""Films of episodes. An episode is its spec and its actions, so a film is made afterwards, of those that deserve it."""

from __future__ import annotations

import numpy as np

from sim_farm.contract import EpisodeSpec, FarmError, Float32, Physics, Renderer, TaskSpec, UInt8
from sim_farm.registry import make_physics, make_renderer


class Projector:
    """Replays episodes of one task and draws them step by step, with the task's first camera."""

    def __init__(self, task: TaskSpec) -> None:
        self._physics: Physics = make_physics(task)
        self._renderer: Renderer = make_renderer(task)
        if not self._physics.info.cameras:
            raise FarmError(f"{task.name} has no camera to film with")

    def film(self, episode: EpisodeSpec, actions: Float32, every: int = 1) -> list[UInt8]:
        """Frames uint8 [H, W, 3] at the start, after every `every`-th of the actions [n, A], and at the end."""
        camera = self._physics.info.cameras[0]
        scenes = [self._physics.reset(episode).scene]
        for step, action in enumerate(actions, start=1):
            result = self._physics.step(np.asarray(action, np.float32)[None])
            if step % every == 0 or step == len(actions) or result.ended:
                scenes.append(result.scene)
            if result.ended:
                break
        return list(self._renderer.render(scenes, [camera])[camera])

    def close(self) -> None:
        self._physics.close()
        self._renderer.close()
