"""One control step of a LIBERO environment: the arithmetic of robosuite's, and nothing beside it.

robosuite runs 25 simulation steps per control step, and in each of them `mj_forward` twice (once for the
environment, once for the controller) and then `mj_step`, which does the same again. `mj_step` is
`mj_step1` (positions, velocities) followed by `mj_step2` (forces, integration), and all that the controller reads
is there after `mj_step1`: one pass is enough. robosuite's own controller does the rest, in compiled form where that is
known (`compiled.py`). Names are looked up once, observables that are not read are not computed. That the states are
equal bit for bit is a test. Why: docs/decisions/0214-libero-compiled.md.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import functools
import importlib
import types
import warnings
from typing import Any

import numpy as np
import numpy.typing as npt

from sim_farm.backends.mujoco_gl import mujoco

SIMULATION_STEPS = 25
TIMESTEP = 0.002
PERIOD = 1.0 / 20
COMPILED = "sim_farm.backends.libero.compiled"
"""Imported when LIBERO is used: numba reads its settings as it is imported, and `package` makes some."""


class ObservationClock:
    """When robosuite samples its observations: within a control step, not at its end.

    Each observable adds up the time in floating point and samples once per period; the sum's rounding decides
    in which simulation step. The sums are made here in the same order.
    """

    def __init__(self) -> None:
        self._time, self._sampled = 0.0, False

    def reset(self) -> None:
        self._time = 0.0

    def samples(self, steps: int) -> list[int]:
        """Those of the next simulation steps after which the observation is taken."""
        return [step for step in range(steps) if self.tick()]

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
        self._begun = False
        """True if the next simulation step's `mj_step1` is done."""
        self._controller.update = types.MethodType(_lean_update(env), self._controller)

    def aim(self, action: npt.NDArray[np.float64]) -> None:
        """Begin a control step: set the controller's goal, from where the first simulation step sees the robot."""
        mujoco.mj_step1(self.model, self.data)
        self._controller.set_goal(action[:6])
        self._begun = True

    def simulate(self, action: npt.NDArray[np.float64], steps: int) -> npt.NDArray[np.float64]:
        """Run that many simulation steps; the joint positions before the last of them."""
        before = self.data.qpos
        for step in range(steps):
            if step == steps - 1:
                before = self.data.qpos.copy()
            if not self._begun:
                mujoco.mj_step1(self.model, self.data)
            self._begun = False
            torques = self._controller.run_controller()
            ctrl = self.data.ctrl
            ctrl[self._fingers] = self._bias + self._weight * self._gripper.format_action(action[6:])
            ctrl[self._joints] = np.clip(torques, self._low, self._high)
            mujoco.mj_step2(self.model, self.data)
        return before


class NotCompiled(Exception):
    """The environment's control has no compiled form, for the reason that the message says."""


def control_of(env: Any) -> Control:
    """The robot's control: compiled where that is known to compute the same, else robosuite's, of which a warning says
    once why."""
    try:
        return importlib.import_module(COMPILED).CompiledControl(env)
    except (NotCompiled, ImportError, AttributeError, OSError) as error:
        _say(str(error))
    return Control(env)


@functools.cache
def _say(reason: str) -> None:
    warnings.warn(
        f"LIBERO's simulation steps run in Python, with the same states and about 1.6 times slower: {reason}",
        stacklevel=2,
    )


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
