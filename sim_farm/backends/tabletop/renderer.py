"""Draws pictures of tabletop scenes; never steps."""

# MuJoCo fills its name space from compiled modules, which pyright cannot see.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from sim_farm.backends.mujoco_gl import Canvas, MovedCameras, mujoco
from sim_farm.backends.tabletop.tasks import describe, load_model
from sim_farm.contract import CameraChange, TaskSpec, UInt8, new_frames


class TabletopRenderer:
    """Frames of one task's scenes, from one replica of its model.

    The OpenGL context is made by the first `render`, and belongs to the thread that called it: later calls,
    and `close`, come from the same one.
    """

    def __init__(self, spec: TaskSpec):
        task, self.info = describe(spec)
        self._model = load_model(task)
        self._data = mujoco.MjData(self._model)
        self._cameras = MovedCameras(self._model)
        self._canvas: Canvas | None = None

    def aim(self, changes: Sequence[CameraChange], draw: np.random.Generator) -> None:
        self._cameras.aim(changes, draw)

    def render(
        self, scenes: Sequence[UInt8], cameras: Sequence[str], out: Mapping[str, UInt8] | None = None
    ) -> Mapping[str, UInt8]:
        size = self.info.spec.image_size
        if self._canvas is None:
            self._canvas = Canvas(self._model, size)
        frames = new_frames(len(scenes), cameras, size) if out is None else out
        ids = [self._model.camera(name).id for name in cameras]
        self._canvas.make_current()
        for index, scene in enumerate(scenes):
            self._pose(scene)
            for name, camera in zip(cameras, ids, strict=True):
                self._canvas.draw(self._data, camera, frames[name][index])
        return frames

    def close(self) -> None:
        if self._canvas is not None:
            self._canvas.close()
            self._canvas = None

    def _pose(self, scene: UInt8) -> None:
        """Put the replica into the scene: positions and what follows from them, no dynamics."""
        values = np.frombuffer(scene.tobytes(), np.float64)
        self._data.qpos[:] = values[: self._model.nq]
        self._data.mocap_pos[:] = values[self._model.nq :].reshape(-1, 3)
        mujoco.mj_kinematics(self._model, self._data)
        with self._cameras.there():
            mujoco.mj_camlight(self._model, self._data)
