"""One control step of a LIBERO environment: the arithmetic of robosuite's, and nothing beside it.

robosuite runs 25 simulation steps per control step, and in each of them `mj_forward` twice (once for the
environment, once for the controller) and then `mj_step`, which does the same again. `mj_step` is
`mj_step1` (positions, velocities) followed by `mj_step2` (forces, integration), and all that the controller reads
is there after `mj_step1`: one pass is enough. robosuite's own controller does the rest. Names are looked up once,
observables that are not read are not computed. That the states are equal bit for bit is a test.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import types
from typing import Any

import numpy as np
import numpy.typing as npt

from sim_farm.backends.mujoco_gl import mujoco

SIMULATION_STEPS = 25
TIMESTEP = 0.002
PERIOD = 1.0 / 20


class ObservationClock:
    """When robosuite samples its observations: within a control step, not at its end.

    Each observable adds up the time in floating point and samples once per period; the sum's rounding decides
    in which simulation step. The sums are made here in the same order.
    """

    def __init__(self) -> None:
        self._time, self._sampled = 0.0, False

    def reset(self) -> None:
        self._time = 0.0

    def tick(self, force: bool = False) -> bool:
        """After a simulation step (or a forced update): whether the observation is taken now."""
        self._time += TIMESTEP
        take = force or (not self._sampled and self._time <= PERIOD)
        self._sampled |= take
        if self._time >= PERIOD:
            self._time %= PERIOD
            self._sampled = False
        return take


class Control:
    """The robot of one environment, between two resets."""

    def __init__(self, env: Any) -> None:
        robot = env.robots[0]
        self.model, self.data = env.sim.model._model, env.sim.data._data
        self._controller, self._gripper = robot.controller, robot.gripper
        self._joints = robot._ref_joint_actuator_indexes
        self._fingers = robot._ref_joint_gripper_actuator_indexes
        limits = self.model.actuator_ctrlrange
        self._low, self._high = limits[self._joints, 0], limits[self._joints, 1]
        self._bias = 0.5 * (limits[self._fingers, 1] + limits[self._fingers, 0])
        self._weight = 0.5 * (limits[self._fingers, 1] - limits[self._fingers, 0])
        self._controller.update = types.MethodType(_lean_update(env), self._controller)

    def begin(self, action: npt.NDArray[np.float64]) -> None:
        """The first simulation step of a control step: also sets the controller's goal."""
        mujoco.mj_step1(self.model, self.data)
        self._controller.set_goal(action[:6])
        self._finish(action)

    def go_on(self, action: npt.NDArray[np.float64]) -> None:
        """Each of the others."""
        mujoco.mj_step1(self.model, self.data)
        self._finish(action)

    def _finish(self, action: npt.NDArray[np.float64]) -> None:
        torques = self._controller.run_controller()
        ctrl = self.data.ctrl
        ctrl[self._fingers] = self._bias + self._weight * self._gripper.format_action(action[6:])
        ctrl[self._joints] = np.clip(torques, self._low, self._high)
        mujoco.mj_step2(self.model, self.data)


def _lean_update(env: Any) -> Any:
    """The computation of robosuite's `Controller.update`, from data that are up to date already.

    The arrays have the memory layout (column by column) that theirs have: the linear algebra behind rounds
    differently in another.
    """
    robot = env.robots[0]
    model, data = env.sim.model._model, env.sim.data._data
    site = env.sim.model.site_name2id(robot.controller.eef_name)
    qpos, qvel = list(robot.controller.qpos_index), list(robot.controller.qvel_index)
    contiguous = qvel == list(range(qvel[0], qvel[-1] + 1))
    dofs: Any = slice(qvel[0], qvel[-1] + 1) if contiguous else qvel
    position, rotation = np.zeros((3, model.nv)), np.zeros((3, model.nv))
    mass = np.zeros((model.nv, model.nv))
    # MuJoCo's own memory: it stays where it is.
    velocities = data.qvel

    def update(self: Any, force: bool = False) -> None:
        if not (self.new_update or force):
            return
        mujoco.mj_jacSite(model, data, position, rotation, site)
        mujoco.mj_fullM(model, mass, data.qM)
        self.ee_pos = data.site_xpos[site].copy()
        self.ee_ori_mat = data.site_xmat[site].reshape(3, 3).copy()
        self.ee_pos_vel = np.dot(position, velocities)
        self.ee_ori_vel = np.dot(rotation, velocities)
        self.joint_pos = data.qpos[qpos]
        self.joint_vel = velocities[dofs].copy()
        self.J_pos = np.asfortranarray(position[:, dofs])
        self.J_ori = np.asfortranarray(rotation[:, dofs])
        self.J_full = np.asfortranarray(np.vstack([self.J_pos, self.J_ori]))
        self.mass_matrix = np.asfortranarray(mass[:, dofs][dofs])
        self.new_update = False

    return update
