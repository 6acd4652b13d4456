"""The tasks: how an episode begins, how far it has come, and when it is solved.

Metres, radians; z = 0 is the table's surface. `q` is MuJoCo's qpos as a list: q[0:3] the tool centre point,
q[3:5] how far each finger is from the middle, and, in tasks that have one, q[5:8] the cube's centre and
q[8:12] its quaternion (w, x, y, z).
"""

# MuJoCo fills its name space from compiled modules, which pyright cannot see.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from sim_farm.backends.mujoco_gl import mujoco
from sim_farm.contract import FarmError, TaskInfo, TaskSpec

SCENES = Path(__file__).parent / "scenes"
"""A link to `assets/tabletop` in the source tree, a copy of it in an installed package."""
CAMERAS = ("front", "wrist", "side")
CONTROL_MODES = ("ee_delta_pos",)
CONTROL_HZ = 20.0
JOINTS = 3
"""Joints of the arm, which slide; the fingers' follow."""

CUBE_HALF = 0.02
REACH_TOLERANCE = 0.03
BALL_RADIUS = 0.03
PUSH_TOLERANCE = 0.03
PLACE_TOLERANCE = 0.03
PLACE_HEIGHT_TOLERANCE = 0.01
PEDESTAL_HEIGHT = 0.04

Vec3 = tuple[float, float, float]
Marks = tuple[Vec3, ...]
"""Positions of the scene's marks, in the order of its file. The task's goal is one of them."""
Start = tuple[list[float], Marks]
"""Initial qpos and the marks."""


@dataclass(frozen=True)
class Task:
    """One task: a scene and the functions that make it a task."""

    name: str
    scene: str
    """Name of its file in `SCENES`."""
    instruction: str
    max_episode_steps: int
    action_dim: int
    """3: [dx, dy, dz], the fingers stay closed; 4: the last one is the gripper, -1 closed, 1 open."""
    has_cube: bool
    begin: Callable[[np.random.Generator], Start]
    """Draws an episode's beginning, unsolved, within the robot's reach."""
    progress: Callable[[list[float], Vec3], float]
    """`(q, goal)`: in [0, 1], rising towards the solution. Its differences are the dense reward."""
    solved: Callable[[list[float], Vec3], bool]
    """`(q, goal)`: whether the task is done."""
    goal: int = 0
    """Index of the mark that the instruction means. If `solved` holds for another mark, the episode has failed."""
    marks: int = 1
    """Number of marks in the scene."""


def describe(spec: TaskSpec) -> tuple[Task, TaskInfo]:
    """The task asked for and all its sizes; raises `FarmError` if there is no such task, mode or camera."""
    task = TASKS.get(spec.name.removeprefix("tabletop/"))
    if task is None:
        raise FarmError(f"tabletop has no task {spec.name!r}; valid: {', '.join(TASKS)}")
    mode = CONTROL_MODES[0] if spec.control_mode is None else spec.control_mode
    if mode not in CONTROL_MODES:
        raise FarmError(f"{spec.name} has no control mode {mode!r}; valid: {', '.join(CONTROL_MODES)}")
    if spec.reward not in ("dense", "sparse"):
        raise FarmError(f"{spec.name} has no reward {spec.reward!r}; valid: dense, sparse")
    limit = task.max_episode_steps if spec.max_episode_steps is None else spec.max_episode_steps
    cameras = _cameras(spec)
    nq, nv = (12, 11) if task.has_cube else (5, 5)
    info = TaskInfo(
        spec=replace(spec, control_mode=mode, max_episode_steps=limit, cameras=cameras),
        action_dim=task.action_dim,
        action_low=(-1.0,) * task.action_dim,
        action_high=(1.0,) * task.action_dim,
        proprio_dim=10,
        state_dim=nq + nv + (12 if task.has_cube else 6),
        scene_bytes=8 * (nq + 3 * task.marks),
        cameras=cameras,
        max_episode_steps=limit,
        control_hz=CONTROL_HZ,
        rest_action=(0.0, 0.0, 0.0, 1.0)[: task.action_dim],
    )
    return task, info


def load_model(task: Task) -> mujoco.MjModel:
    """A new model of the task's scene."""
    return mujoco.MjModel.from_xml_path(str(SCENES / f"{task.scene}.xml"))


def _cameras(spec: TaskSpec) -> tuple[str, ...]:
    if isinstance(spec.cameras, int):
        if not 0 <= spec.cameras <= len(CAMERAS):
            raise FarmError(f"{spec.name} has no {spec.cameras} cameras, only {', '.join(CAMERAS)}")
        return CAMERAS[: spec.cameras]
    for name in spec.cameras:
        if name not in CAMERAS:
            raise FarmError(f"{spec.name} has no camera {name!r}; valid: {', '.join(CAMERAS)}")
    return tuple(spec.cameras)


def _near(distance: float, scale: float) -> float:
    """1 at distance 0, falling in a straight line to 0 at `scale`: each centimetre gained counts the same."""
    return max(0.0, 1.0 - distance / scale)


def _cube(x: float, y: float, yaw: float) -> list[float]:
    return [x, y, CUBE_HALF, math.cos(yaw / 2), 0.0, 0.0, math.sin(yaw / 2)]


# --- reach: bring the tool centre point into the ball


def _reach_begin(rng: np.random.Generator) -> Start:
    tcp = rng.uniform((-0.10, -0.10, 0.10), (0.10, 0.10, 0.20)).tolist()
    while True:
        x, y, z = rng.uniform((-0.16, -0.20, 0.05), (0.16, 0.20, 0.24)).tolist()
        if math.dist(tcp, (x, y, z)) > 0.10:
            return [*tcp, 0.0, 0.0], ((x, y, z),)


def _reach_progress(q: list[float], goal: Vec3) -> float:
    return _near(math.dist(q[:3], goal), 0.5)


def _reach_solved(q: list[float], goal: Vec3) -> bool:
    return math.dist(q[:3], goal) < REACH_TOLERANCE


# --- reach red, reach blue: of two balls on the table, the one that the instruction names


def _two_balls_begin(rng: np.random.Generator) -> Start:
    tcp = rng.uniform((-0.06, -0.06, 0.12), (0.06, 0.06, 0.18)).tolist()
    while True:
        red, blue = ((x, y, BALL_RADIUS) for x, y in rng.uniform((-0.14, -0.18), (0.14, 0.18), (2, 2)).tolist())
        # A straight way to one of them does not touch the other.
        if math.dist(red, blue) > 0.14:
            return [*tcp, 0.0, 0.0], (red, blue)


# --- push: shove the cube onto the disc, which lies beyond it as the robot sees it


def _push_begin(rng: np.random.Generator) -> Start:
    x, y, yaw = rng.uniform((-0.08, -0.10, -math.pi / 4), (0.02, 0.10, math.pi / 4)).tolist()
    distance, angle = rng.uniform((0.09, -math.pi / 5), (0.15, math.pi / 5)).tolist()
    goal = (x + distance * math.cos(angle), y + distance * math.sin(angle), 0.0)
    tcp = rng.uniform((-0.20, -0.08, 0.03), (-0.16, 0.08, 0.08)).tolist()
    return [*tcp, 0.0, 0.0, *_cube(x, y, yaw)], (goal,)


def _push_progress(q: list[float], goal: Vec3) -> float:
    x, y = q[5], q[6]
    left = math.dist((x, y), goal[:2])
    # The pusher belongs behind the cube, on the line that leads to the goal.
    behind = 0.035 / max(left, 1e-6)
    place = (x - behind * (goal[0] - x), y - behind * (goal[1] - y), CUBE_HALF)
    return 0.3 * _near(math.dist(q[:3], place), 0.4) + 0.7 * _near(left, 0.2)


def _push_solved(q: list[float], goal: Vec3) -> bool:
    return math.dist(q[5:7], goal[:2]) < PUSH_TOLERANCE


# --- pick and place: put the cube on the pedestal and let go of it


def _place_begin(rng: np.random.Generator) -> Start:
    tcp = rng.uniform((-0.06, -0.06, 0.14), (0.06, 0.06, 0.20)).tolist()
    x, y, yaw = rng.uniform((-0.14, -0.18, -math.pi / 8), (0.14, 0.18, math.pi / 8)).tolist()
    while True:
        goal_x, goal_y = rng.uniform((-0.14, -0.18), (0.14, 0.18)).tolist()
        # Room for the open fingers between cube and pedestal.
        if math.dist((x, y), (goal_x, goal_y)) > 0.15:
            break
    return [*tcp, 0.04, 0.04, *_cube(x, y, yaw)], ((goal_x, goal_y, PEDESTAL_HEIGHT + CUBE_HALF),)


def _holds(q: list[float]) -> bool:
    """True if the fingers are closed on the cube, from positions alone: it is between them and stops them."""
    return math.dist(q[:3], q[5:8]) < CUBE_HALF and 0.030 < q[3] + q[4] < 0.046


def _place_progress(q: list[float], goal: Vec3) -> float:
    aside = math.dist(q[5:7], goal[:2])
    # On its way the cube belongs above the pedestal's edge, and only over the pedestal down on it.
    height = goal[2] + (0.03 if aside > PLACE_TOLERANCE else 0.0)
    carried = _near(aside + abs(q[7] - height), 0.5)
    return 0.25 * _near(math.dist(q[:3], q[5:8]), 0.4) + 0.25 * _holds(q) + 0.5 * carried


def _place_solved(q: list[float], goal: Vec3) -> bool:
    return (
        math.dist(q[5:7], goal[:2]) < PLACE_TOLERANCE
        and abs(q[7] - goal[2]) < PLACE_HEIGHT_TOLERANCE
        and q[3] + q[4] > 0.050
    )


TASKS = {
    task.name: task
    for task in (
        Task(
            "reach", "reach", "move the gripper to the green ball", 50, 3, False,
            _reach_begin, _reach_progress, _reach_solved,
        ),
        Task(
            "reach_red", "two_balls", "move the gripper to the red ball", 30, 3, False,
            _two_balls_begin, _reach_progress, _reach_solved, goal=0, marks=2,
        ),
        Task(
            "reach_blue", "two_balls", "move the gripper to the blue ball", 30, 3, False,
            _two_balls_begin, _reach_progress, _reach_solved, goal=1, marks=2,
        ),
        Task(
            "push", "push", "push the red cube onto the green target", 50, 3, True,
            _push_begin, _push_progress, _push_solved,
        ),
        Task(
            "pick_and_place", "pick_and_place", "pick up the red cube and place it on the blue block", 80, 4, True,
            _place_begin, _place_progress, _place_solved,
        ),
    )
}  # fmt: skip
