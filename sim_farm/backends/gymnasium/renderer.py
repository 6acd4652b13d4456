"""Hands out the pictures that Gymnasium's environments have drawn, or observed, themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from sim_farm.backends.gymnasium.environment import open_environment
from sim_farm.contract import TaskSpec, UInt8, new_frames


class GymnasiumRenderer:
    """Copies frames from scenes; a scene is its cameras' pictures [cameras, size, size, 3]."""

    def __init__(self, spec: TaskSpec) -> None:
        opened = open_environment(spec)
        opened.instance.close()
        self.info = opened.info

    def render(
        self, scenes: Sequence[UInt8], cameras: Sequence[str], out: Mapping[str, UInt8] | None = None
    ) -> Mapping[str, UInt8]:
        size = self.info.spec.image_size
        frames = new_frames(len(scenes), cameras, size) if out is None else out
        for name in cameras:
            place = self.info.cameras.index(name)
            for index, scene in enumerate(scenes):
                frames[name][index] = scene.reshape(-1, size, size, 3)[place]
        return frames

    def close(self) -> None:
        pass
