"""ManiSkill's table with two cubes: go behind the one that the task wants and push it forward. Metres.

Control mode `pd_ee_delta_pos`. The state begins with the arm's 9 joint positions and 9 velocities; then come the
gripper's pose, the wanted cube's goal, the wanted cube's pose and the other's.
"""

from __future__ import annotations

import numpy as np

from policies.contract import PolicyError
from policies.scripted.instructions import meant
from policies.scripted.scene import Vector

ACTION_DIM = 4
"""[dx, dy, dz, gripper], which stays closed: -1."""
METRES = 0.1
"""Distance by which an action of 1 moves the gripper's set point, in m."""
GAIN = 2.0
"""Set point ahead of the gripper, in units of the remaining way: it covers a part of it in an env step."""
STATE_DIM = 42
GRIPPER, CUBE, OTHER = slice(18, 21), slice(28, 31), slice(35, 38)
INSTRUCTIONS = ("push the red cube to the goal", "push the green cube to the goal")

BEHIND = 0.06
"""The gripper comes down so far behind the cube's centre."""
LOW, HIGH = 0.02, 0.11
"""Heights of the gripper: while it pushes, and while it goes over the table."""
ASIDE = 0.015
"""A gripper that is less beside the cube pushes it straight."""
NEAR = 0.03
"""Distance to the place behind the cube, in m, at which the gripper descends."""


def act(state: Vector, instruction: str) -> Vector:
    """[4] in [-1, 1]: what brings the gripper straight to its next place; at rest without an instruction.

    Raises `PolicyError` for an instruction or a state of another task.
    """
    if not instruction:
        return np.array((0.0, 0.0, 0.0, -1.0))
    meant(instruction, INSTRUCTIONS)
    if len(state) != STATE_DIM:
        raise PolicyError(f"the script for {instruction!r} reads a state of {STATE_DIM} numbers, got {len(state)}")
    gripper = state[GRIPPER]
    way = GAIN * (_next_place(gripper, state[CUBE]) - gripper) / METRES
    return np.append(way / max(1.0, float(np.abs(way).max())), -1.0)


def _next_place(gripper: Vector, cube: Vector) -> Vector:
    """Above the place behind the cube, at the place, or ahead of where the gripper pushes."""
    x, y = cube[0] - BEHIND, cube[1]
    ready = abs(gripper[1] - y) < ASIDE and gripper[0] < x + NEAR and gripper[2] < LOW + NEAR
    if ready:
        return np.array((gripper[0] + METRES, y, LOW))
    return np.array((x, y, LOW if np.hypot(x - gripper[0], y - gripper[1]) < NEAR else HIGH))
