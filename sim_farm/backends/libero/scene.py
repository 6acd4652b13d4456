"""The scene of a LIBERO task, as bytes: all that its picture depends on.

These are joint positions, and the model's fields that change.

The rest of MuJoCo's data follows from them by `mj_kinematics`, `mj_comPos` and `mj_camlight`, the functions
that `mj_step` itself calls, so a replica that is given these numbers draws the same picture to the last bit.
robosuite draws within the control step, from what `mj_step` computed before it integrated: the positions are
those of that moment.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sim_farm.backends.libero.environment import ModelUser, SharedModel
from sim_farm.backends.mujoco_gl import mujoco
from sim_farm.contract import UInt8


class SceneLayout:
    """Layout of the bytes of a task's scenes."""

    def __init__(self, shared: SharedModel) -> None:
        self._shared = shared
        model = shared.model
        self._nq = model.nq
        self._floats = model.nq + 7 * model.nbody
        self.nbytes = 8 * self._floats + 4 * 4 * model.nsite

    def pack(self, qpos: npt.NDArray[np.float64]) -> UInt8:
        """The scene of these positions and the model as it is now."""
        model = self._shared.model
        floats = np.concatenate((qpos, model.body_pos.ravel(), model.body_quat.ravel()))
        return np.concatenate((floats.view(np.uint8), model.site_rgba.ravel().view(np.uint8)))

    def unpack(self, scene: UInt8, user: ModelUser, data: mujoco.MjData) -> None:
        """Put the user's model and `data` into the scene, up to all that a picture needs."""
        model = self._shared.model
        raw = np.ascontiguousarray(scene)
        floats = np.frombuffer(raw[: 8 * self._floats].tobytes(), np.float64)
        user.take()
        poses = floats[self._nq :].reshape(-1)
        model.body_pos[...] = poses[: 3 * model.nbody].reshape(-1, 3)
        model.body_quat[...] = poses[3 * model.nbody :].reshape(-1, 4)
        model.site_rgba[...] = np.frombuffer(raw[8 * self._floats :].tobytes(), np.float32).reshape(-1, 4)
        data.qpos[:] = floats[: self._nq]
        mujoco.mj_kinematics(model, data)
        mujoco.mj_comPos(model, data)
        mujoco.mj_camlight(model, data)
