"""Less Python around the same MuJoCo calls, bit for bit.

MuJoCo takes a sixth of stock's env step of `push-v3`. Three fifths are spared here: two searches among the contacts,
the check of one rotation matrix, arrays of one number. `tests/stock_examples.py` compares whole episodes of all 50
tasks with stock environments. Nothing changes outside `quick_functions`, or for an environment not given to `speed_up`.
"""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import MethodType
from typing import Any

import numpy as np
import numpy.typing as npt
from scipy.spatial.transform import Rotation

from sim_farm.backends.mujoco_gl import mujoco

from metaworld.utils import reward_utils  # isort: skip

Array = npt.NDArray[np.float64]

OFF_DIAGONAL, DIAGONAL = 1e-13, 1e-6
"""Products of a matrix's rows up to which it is a rotation here. SciPy's own limits are ten times as wide; beyond them
it makes the matrix orthogonal first."""
AT_MARGIN = 0.1
"""Value of `tolerance` at the margin, unless another is given."""
LONG_TAIL = float(np.sqrt(1 / AT_MARGIN - 1))
stock_tolerance = reward_utils.tolerance


def speed_up(env: Any) -> None:
    """Install the quicker equivalents on one environment."""
    env.step = MethodType(_step, env)
    env.touching_object = MethodType(_touching_object, env)
    env._get_curr_obs_combined_no_goal = MethodType(_observation_without_goal, env)


@contextmanager
def quick_functions(task: type[Any]) -> Iterator[None]:
    """Within the block the module of the task's class computes quaternions by `quaternion`, and rewards by
    `tolerance`, if both round as what they stand for: compilers of some processors fuse operations."""
    if not _equal_here():
        yield
        return
    module: Any = sys.modules[task.__module__]
    stock = getattr(module, "Rotation", None)
    if stock is not None:
        module.Rotation = _Rotation
    reward_utils.tolerance = tolerance
    try:
        yield
    finally:
        reward_utils.tolerance = stock_tolerance
        if stock is not None:
            module.Rotation = stock


def tolerance(
    x: float,
    bounds: tuple[float, float] = (0.0, 0.0),
    margin: float = 0.0,
    sigmoid: str = "gaussian",
    value_at_margin: float = AT_MARGIN,
) -> float:
    """Meta-World's `tolerance` of one number with a long tail, without arrays; any other is its own."""
    lower, upper = bounds
    one_number = type(x) is float or type(x) is np.float64
    if sigmoid != "long_tail" or value_at_margin != AT_MARGIN or not (one_number and lower <= upper and margin > 0):
        return stock_tolerance(x, bounds, margin, sigmoid, value_at_margin)
    x, margin = float(x), float(margin)
    if lower <= x <= upper:
        return 1.0
    distance = (lower - x if x < lower else x - upper) / margin
    return 1.0 / ((distance * LONG_TAIL) ** 2 + 1.0)


def quaternion(matrix: Array) -> Array:
    """The quaternion (x, y, z, w) of a rotation matrix [3, 3], by Markley's method (Journal of Guidance, Control, and
    Dynamics 31.2, 2008) in the order of operations of SciPy's `Rotation.from_matrix(matrix).as_quat()`, which computes
    that of any other matrix."""
    (a, b, c), (d, e, f), (g, h, i) = matrix.tolist()
    squares = a * a + b * b + c * c, d * d + e * e + f * f, g * g + h * h + i * i
    products = a * d + b * e + c * f, a * g + b * h + c * i, d * g + e * h + f * i
    orthogonal = all(abs(x - 1.0) < DIAGONAL for x in squares) and all(abs(x) < OFF_DIAGONAL for x in products)
    if not orthogonal or a * (e * i - f * h) - b * (d * i - f * g) + c * (d * h - e * g) <= 0.0:
        return Rotation.from_matrix(matrix).as_quat()
    trace = a + e + i
    greatest = max(a, e, i, trace)
    if greatest == a:
        x, y, z, w = 1.0 - trace + 2.0 * a, d + b, g + c, h - f
    elif greatest == e:
        x, y, z, w = d + b, 1.0 - trace + 2.0 * e, h + f, c - g
    elif greatest == i:
        x, y, z, w = g + c, h + f, 1.0 - trace + 2.0 * i, d - b
    else:
        x, y, z, w = h - f, c - g, d - b, 1.0 + trace
    norm = math.sqrt(x * x + y * y + z * z + w * w)
    return np.array((x / norm, y / norm, z / norm, w / norm))


class _Rotation:
    """As much of SciPy's `Rotation` as Meta-World's tasks use."""

    def __init__(self, matrix: Array) -> None:
        self._matrix = matrix

    @classmethod
    def from_matrix(cls, matrix: Array) -> _Rotation:
        return cls(matrix)

    def as_quat(self) -> Array:
        return quaternion(self._matrix)


@functools.cache
def _equal_here() -> bool:
    """True where `quaternion` and `tolerance` give, bit for bit, what SciPy and Meta-World give."""
    draw = np.random.default_rng(0)
    matrices = Rotation.from_quat(draw.normal(size=(100, 4))).as_matrix()
    numbers = [(x, (0.1, 0.2), margin, "long_tail") for x, margin in draw.uniform(0.01, 1.0, size=(100, 2))]
    return all(np.array_equal(quaternion(each), Rotation.from_matrix(each).as_quat()) for each in matrices) and all(
        tolerance(*each) == stock_tolerance(*each) for each in numbers
    )


def _step(env: Any, action: Array) -> tuple[Array, float, bool, bool, dict[str, Any]]:
    """An env step of an action [4] within [-1, 1]. The marks, which the forward pass places again, are not placed
    before it, and forces that nothing reads are not computed."""
    model, data, space = env.model, env.data, env.sawyer_observation_space
    position = data.mocap_pos + action[:3] * env.action_scale
    position[0] = np.minimum(np.maximum(position[0], env.mocap_low), env.mocap_high)
    data.mocap_pos[:], data.mocap_quat[:] = position, (1, 0, 1, 0)
    data.ctrl[:] = action[3], -action[3]
    mujoco.mj_step(model, data, nstep=env.frame_skip)
    mujoco.mj_forward(model, data)
    env.curr_path_length += 1
    observation = np.minimum(np.maximum(env._get_obs(), space.low), space.high)
    reward, info = env.evaluate_state(observation, action)
    return observation, reward, False, env.curr_path_length == env.max_path_length, info


def _touching_object(env: Any, object_geom_id: int) -> bool:
    """True if both pads of the gripper press on the geom."""
    data = env.data
    forces = dict.fromkeys((data.geom("leftpad_geom").id, data.geom("rightpad_geom").id), 0.0)
    for contact, geoms in enumerate(data.contact.geom.tolist()):
        if object_geom_id in geoms:
            for pad in forces:
                if pad in geoms:
                    forces[pad] += float(data.efc_force[data.contact.efc_address[contact]])
    return all(force > 0 for force in forces.values())


def _observation_without_goal(env: Any) -> Array:
    """[18]: the hand's position, how far the gripper is open, and each object's position and quaternion."""
    data = env.data
    positions, quaternions = env._get_pos_objects().reshape(-1, 3), env._get_quat_objects().reshape(-1, 4)
    count = len(positions)
    seen = np.zeros(4 + env._obs_obj_max_len)
    seen[:3] = env.get_endeff_pos()
    seen[3] = min(np.linalg.norm(data.body("rightclaw").xpos - data.body("leftclaw").xpos) / 0.1, 1.0)
    objects = seen[4 : 4 + 7 * count].reshape(count, 7)
    objects[:, :3], objects[:, 3:] = positions, quaternions
    return seen
