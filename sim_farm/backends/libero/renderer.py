"""Draws pictures of LIBERO scenes; never steps."""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sim_farm.backends.libero.environment import ModelUser, SceneLayout, shared_model
from sim_farm.backends.libero.physics import describe
from sim_farm.backends.libero.tasks import find_task
from sim_farm.backends.mujoco_gl import Canvas, MovedCameras, mujoco
from sim_farm.contract import CameraChange, TaskSpec, UInt8, new_frames

MAX_GEOMS = 1000
COLLISION_GROUP = 0
"""Geoms of this group are collision shapes, which robosuite does not draw."""


class LiberoRenderer:
    """Frames of one task's scenes, from one replica of its data; the model is the process's.

    The OpenGL context is made by the first `render`, and belongs to the thread that called it: later calls,
    and `close`, come from the same one.
    """

    def __init__(self, spec: TaskSpec) -> None:
        task = find_task(spec.name)
        shared = shared_model(task)
        self.info = describe(spec, task, shared)
        self._user = ModelUser(shared)
        self._layout = SceneLayout(shared)
        self._data = mujoco.MjData(shared.model)
        self._cameras = MovedCameras(shared.model)
        self._canvas: Canvas | None = None

    def aim(self, changes: Sequence[CameraChange], draw: np.random.Generator) -> None:
        self._cameras.aim(changes, draw)

    def render(
        self, scenes: Sequence[UInt8], cameras: Sequence[str], out: Mapping[str, UInt8] | None = None
    ) -> Mapping[str, UInt8]:
        size, model = self.info.spec.image_size, self._user.shared.model
        if self._canvas is None:
            self._user.take()
            self._canvas = Canvas(model, size, MAX_GEOMS, hidden_groups=(COLLISION_GROUP,))
        frames = new_frames(len(scenes), cameras, size) if out is None else out
        self._canvas.make_current()
        for index, scene in enumerate(scenes):
            with self._cameras.there():
                self._layout.unpack(scene, self._user, self._data)
            for name in cameras:
                self._canvas.draw(self._data, model.camera(name).id, frames[name][index])
        return frames

    def close(self) -> None:
        if self._canvas is not None:
            self._canvas.close()
            self._canvas = None
