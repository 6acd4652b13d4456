"""The tabletop tasks that have a script: to bring the gripper to a place, straight. Metres."""

from __future__ import annotations

import numpy as np

from policies.contract import PolicyError
from policies.scripted.instructions import meant
from policies.scripted.scene import Vector

ACTION_DIM = 3
"""[dx, dy, dz]."""
METRES = 0.03
"""Distance by which an action of 1 moves the gripper's set point, in m."""
GAIN = 2.5
"""Set point ahead of the gripper, in units of the remaining way: it covers a part of it in an env step."""
STATE_DIM = 16
"""State size of the tasks without a cube. Its last three numbers are the vector to the goal."""
INSTRUCTIONS = (
    "move the gripper to the green ball",
    "move the gripper to the red ball",
    "move the gripper to the blue ball",
)


def act(state: Vector, instruction: str) -> Vector:
    """[3] in [-1, 1]: at full speed along each axis until it is near; at rest without an instruction.

    Raises `PolicyError` for an instruction or a state of another task.
    """
    if not instruction:
        return np.zeros(ACTION_DIM)
    meant(instruction, INSTRUCTIONS)
    if len(state) != STATE_DIM:
        raise PolicyError(f"the script for {instruction!r} reads a state of {STATE_DIM} numbers, got {len(state)}")
    return np.clip(GAIN * state[-ACTION_DIM:] / METRES, -1.0, 1.0)
