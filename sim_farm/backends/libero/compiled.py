"""The simulation steps of a control step, compiled: MuJoCo's C functions and robosuite's controller between them.

numba, which robosuite brings, compiles one function that runs them without the interpreter and without its lock. What
robosuite itself compiles with numba is called as it is. What robosuite leaves to NumPy is written out in the same
order: sums and products one by one, matrix times vector by the BLAS that NumPy has loaded, with NumPy's arguments.
That the states are equal bit for bit, with every set of BLAS kernels, is a test.

This module is imported when `package.prepare` has been called.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import ctypes
import importlib
from typing import Any, NamedTuple

import llvmlite.binding as llvm
import numba
import numpy as np
import numpy.typing as npt
from numba.core import types
from numba.core.dispatcher import Dispatcher
from numba.core.errors import NumbaError

from sim_farm.backends.libero.control import Control, NotCompiled
from sim_farm.backends.mujoco_gl import mujoco

ROBOSUITE, KINDS = "1.4.0", ("OperationalSpaceController", "PandaGripper")
"""What is compiled: that version's controller and gripper."""
Array = npt.NDArray[Any]

_robosuite: Any = importlib.import_module("robosuite.utils.control_utils")
opspace_matrices, nullspace_torques = _robosuite.opspace_matrices, _robosuite.nullspace_torques
orientation_error = _robosuite.orientation_error

BY_ROWS, BY_COLUMNS, PLAIN = 101, 102, 111
"""CblasRowMajor, CblasColMajor, CblasNoTrans."""


def _function(module: str, symbol: str, *arguments: Any) -> Any:
    """A C function of a module, or of a library that it is linked with, for compiled code. Compiled code holds the name
    and not the address, so it can be kept on disk.

    Raises `AttributeError` where there is none of that name.
    """
    entry = getattr(ctypes.CDLL(importlib.import_module(module).__file__), symbol)
    name = f"embodied_{symbol}"
    llvm.add_symbol(name, ctypes.cast(entry, ctypes.c_void_p).value)
    return types.ExternalFunction(name, types.void(*arguments))


_pointer, _long, _int, _double = types.uintp, types.int64, types.int32, types.float64
mj_step1 = _function("mujoco._functions", "mj_step1", _pointer, _pointer)
mj_step2 = _function("mujoco._functions", "mj_step2", _pointer, _pointer)
mj_jacSite = _function("mujoco._functions", "mj_jacSite", _pointer, _pointer, _pointer, _pointer, _int)
mj_fullM = _function("mujoco._functions", "mj_fullM", _pointer, _pointer, _pointer)
dgemv = _function(
    *("numpy._core._multiarray_umath", "scipy_cblas_dgemv64_", _int, _int, _long, _long, _double),
    *(_pointer, _long, _pointer, _long, _double, _pointer, _long),
)


class Robot(NamedTuple):
    """One environment's model, data and robot, as compiled code takes them."""

    model: int
    """Address of the `mjModel`, and of the `mjData`."""
    data: int
    site: int
    """The hand's."""
    qpos: Array
    """The data's arrays, in MuJoCo's own memory; the last two are the hand's position [3] and rotation [3, 3]."""
    qvel: Array
    qM: Array
    qfrc_bias: Array
    ctrl: Array
    position: Array
    rotation: Array
    positions: Array
    """Places of the arm's n joints in `qpos`, `qvel` and `ctrl`; the least and greatest torques [n, 2]."""
    velocities: Array
    actuators: Array
    limits: Array
    fingers: Array
    """Places of the two fingers in `ctrl`; the middle and half of the range of each; travel in a simulation step."""
    middle: Array
    half: Array
    speed: float


def robot_of(env: Any) -> Robot:
    robot = env.robots[0]
    controller, model, data = robot.controller, env.sim.model._model, env.sim.data._data
    site = env.sim.model.site_name2id(controller.eef_name)
    actuators, fingers = map(np.array, (robot._ref_joint_actuator_indexes, robot._ref_joint_gripper_actuator_indexes))
    low, high = model.actuator_ctrlrange.T
    return Robot(
        model=model._address,
        data=data._address,
        site=site,
        qpos=data.qpos,
        qvel=data.qvel,
        qM=data.qM,
        qfrc_bias=data.qfrc_bias,
        ctrl=data.ctrl,
        position=data.site_xpos[site],
        rotation=data.site_xmat[site].reshape(3, 3),
        positions=np.array(controller.qpos_index, np.int64),
        velocities=np.array(controller.qvel_index, np.int64),
        actuators=actuators.astype(np.int64),
        limits=np.ascontiguousarray(model.actuator_ctrlrange[actuators]),
        fingers=fingers.astype(np.int64),
        middle=0.5 * (high[fingers] + low[fingers]),
        half=0.5 * (high[fingers] - low[fingers]),
        speed=robot.gripper.speed,
    )


class Goal(NamedTuple):
    """Where robosuite's controller brings the hand (position [3], rotation [3, 3]), its gains [6], and the posture [n]
    that it prefers for the arm."""

    position: Array
    rotation: Array
    kp: Array
    kd: Array
    posture: Array


@numba.njit(cache=True, nogil=True)
def product(matrix: Array, vector: Array, order: int) -> Array:
    """`np.dot` of a matrix that lies `BY_ROWS` or `BY_COLUMNS`, and a vector."""
    rows, columns = matrix.shape
    result, leading = np.zeros(rows), columns if order == BY_ROWS else rows
    dgemv(
        *(order, PLAIN, rows, columns, 1.0, matrix.ctypes.data, leading),
        *(vector.ctypes.data, 1, 0.0, result.ctypes.data, 1),
    )
    return result


@numba.njit(cache=True, nogil=True)
def simulate(robot: Robot, goal: Goal, grip: Array, close: float, steps: int, begun: bool, before: Array) -> None:
    """Run that many simulation steps; if `begun`, the first one's `mj_step1` is done.

    `grip` [2] is the gripper's action, which moves by the sign of `close`. The joint positions before the last step are
    written into `before`. Raises `LinAlgError` where robosuite's controller does.
    """
    nv, n = len(robot.qvel), len(robot.velocities)
    site_pos, site_ori, inertia = np.empty((3, nv)), np.empty((3, nv)), np.empty((nv, nv))
    # These lie column by column when they are transposed, as robosuite's do: linear algebra rounds by the layout.
    mass, j_full, j_pos, j_ori = np.empty((n, n)), np.empty((n, 6)), np.empty((n, 3)), np.empty((n, 3))
    joint_pos, joint_vel, force, wrench = np.empty(n), np.empty(n), np.empty(3), np.empty(6)
    for step in range(steps):
        if step == steps - 1:
            before[:] = robot.qpos
        if step > 0 or not begun:
            mj_step1(robot.model, robot.data)
        mj_jacSite(robot.model, robot.data, site_pos.ctypes.data, site_ori.ctypes.data, robot.site)
        mj_fullM(robot.model, inertia.ctypes.data, robot.qM.ctypes.data)
        for i in range(n):
            dof = robot.velocities[i]
            joint_pos[i], joint_vel[i] = robot.qpos[robot.positions[i]], robot.qvel[dof]
            for j in range(n):
                mass[i, j] = inertia[robot.velocities[j], dof]
            for j in range(3):
                j_full[i, j] = j_pos[i, j] = site_pos[j, dof]
                j_full[i, 3 + j] = j_ori[i, j] = site_ori[j, dof]
        speed, spin = product(site_pos, robot.qvel, BY_ROWS), product(site_ori, robot.qvel, BY_ROWS)
        _, lambda_pos, lambda_ori, nullspace = opspace_matrices(mass.T, j_full.T, j_pos.T, j_ori.T)
        error = orientation_error(goal.rotation, robot.rotation)
        for i in range(3):
            force[i] = (goal.position[i] - robot.position[i]) * goal.kp[i] + -speed[i] * goal.kd[i]
        wrench[:3] = product(lambda_pos, force, BY_COLUMNS)
        for i in range(3):
            force[i] = error[i] * goal.kp[3 + i] + -spin[i] * goal.kd[3 + i]
        wrench[3:] = product(lambda_ori, force, BY_COLUMNS)
        torques = product(j_full, wrench, BY_ROWS)
        resting = nullspace_torques(mass.T, nullspace, goal.posture, joint_pos, joint_vel)
        for i in range(n):
            torque = torques[i] + robot.qfrc_bias[robot.velocities[i]] + resting[i]
            robot.ctrl[robot.actuators[i]] = min(max(torque, robot.limits[i, 0]), robot.limits[i, 1])
        for i in range(2):
            moved = grip[i] + (-1.0 if i == 0 else 1.0) * robot.speed * np.sign(close)
            grip[i] = min(max(moved, -1.0), 1.0)
            robot.ctrl[robot.fingers[i]] = robot.middle[i] + robot.half[i] * grip[i]
        mj_step2(robot.model, robot.data)


class CompiledControl(Control):
    """The same control with its simulation steps compiled.

    robosuite's own controller still sets the goal. It also runs the first simulation step after a reset, which uses the
    positions and Jacobians that the reset has left in it.
    """

    def __init__(self, env: Any) -> None:
        """Raises `NotCompiled`."""
        _check(env)
        super().__init__(env)
        self._robot = robot_of(env)
        self._from_reset = False
        """True if the next simulation step is robosuite's own."""
        try:
            self._simulate(np.zeros(7), 0)  # compiled, or loaded, while a failure leaves nothing half done
        except NumbaError as error:
            raise NotCompiled(f"numba cannot compile them ({error})") from error

    def aim(self, action: npt.NDArray[np.float64]) -> None:
        controller = self._controller
        self._from_reset = not controller.new_update
        if self._from_reset:
            super().aim(action)
            return
        mujoco.mj_step1(self.model, self.data)
        # All that a goal is set from.
        controller.ee_pos, controller.ee_ori_mat = self._robot.position.copy(), self._robot.rotation.copy()
        controller.new_update = False
        controller.set_goal(action[:6])
        controller.new_update = True
        self._begun = True

    def simulate(self, action: npt.NDArray[np.float64], steps: int) -> npt.NDArray[np.float64]:
        if self._from_reset:
            self._from_reset = False
            before = super().simulate(action, 1)
            return before if steps == 1 else self._simulate(action, steps - 1)
        return self._simulate(action, steps)

    def _simulate(self, action: npt.NDArray[np.float64], steps: int) -> npt.NDArray[np.float64]:
        controller, gripper, before = self._controller, self._gripper, np.empty_like(self.data.qpos)
        grip = gripper.current_action.copy()
        goal = Goal(controller.goal_pos, controller.goal_ori, controller.kp, controller.kd, controller.initial_joint)
        simulate(self._robot, goal, grip, action[6], steps, self._begun, before)
        if steps:
            gripper.current_action, self._begun = grip, False
        return before


def _check(env: Any) -> None:
    """Raises `NotCompiled` where this module does not know the environment's control."""
    package, controller, gripper = importlib.import_module("robosuite"), env.robots[0].controller, env.robots[0].gripper
    kinds = type(controller).__name__, type(gripper).__name__
    if package.__version__ != ROBOSUITE:
        raise NotCompiled(f"the compiled ones are robosuite {ROBOSUITE}'s, and {package.__version__} is installed")
    if not isinstance(opspace_matrices, Dispatcher):
        raise NotCompiled("numba is switched off (NUMBA_DISABLE_JIT, or robosuite's ENABLE_NUMBA)")
    if kinds != KINDS:
        raise NotCompiled(f"the compiled ones are for {' and '.join(KINDS)}, and the robot has {' and '.join(kinds)}")
    if not controller.uncoupling or controller.interpolator_pos is not None or controller.interpolator_ori is not None:
        raise NotCompiled("the controller couples position and orientation, or interpolates its goals")
