"""LIBERO's hand, by a script: what to do next is read off the state, and the hand goes there."""

from __future__ import annotations

import numpy as np

from policies.contract import PolicyError
from policies.registry import nearest
from policies.waypoints.libero import SCRIPTS, Script
from policies.waypoints.scene import Scene, Vector, turn_between
from policies.waypoints.steps import OPEN, Aim

ACTION_DIM = 7
"""LIBERO's actions: position 3, axis-angle 3, gripper."""
REST = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, OPEN)
METRES, RADIANS = 0.05, 0.5
"""How far an action of 1 moves the hand's goal (robosuite's OSC_POSE)."""
LINEAR_GAIN, ANGULAR_GAIN = 2.5, 1.0
"""Goal ahead of the hand, in units of the remaining way. The hand covers a fraction of the goal's distance in an
env step, so that a gain above 1 makes it fast; the robot's own damping keeps it from overshooting."""


def act(state: Vector, instruction: str) -> Vector:
    """[7] in [-1, 1]. Without an instruction, and when all is done, the hand opens and rests.

    Raises `PolicyError` for an instruction without a script, or a state of another task.
    """
    if not instruction:
        return np.array(REST)
    script = find_script(instruction)
    if script.layout.size != len(state):
        raise PolicyError(
            f"the script for {instruction!r} reads a state of {script.layout.size} numbers, this task has "
            f"{len(state)}: it is another task of the same words, for which there is no script"
        )
    scene = Scene(state, script.layout)
    aims = (step.aim(scene) for step in script.steps if not step.done(scene))
    aim = next(aims, None)
    return np.array(REST) if aim is None else towards(scene, aim)


def find_script(instruction: str) -> Script:
    """The script for an instruction, whatever its case. Raises `PolicyError` with the nearest there is."""
    text = instruction.strip().lower()
    if text not in SCRIPTS:
        raise PolicyError(
            f"no script for {instruction!r}{nearest(text, list(SCRIPTS))} (docs/scripted-policies.md lists the "
            "tasks that have one and says how to write another)"
        )
    return SCRIPTS[text]


def towards(scene: Scene, aim: Aim) -> Vector:
    """[7] in [-1, 1]: the action that brings the hand nearer to its aim, both motions in straight lines."""
    way = LINEAR_GAIN * (aim.position - scene.hand.position) / METRES
    turn = ANGULAR_GAIN * turn_between(scene.hand.quaternion, aim.quaternion) / RADIANS
    return np.concatenate((_at_most_one(way), _at_most_one(turn), [aim.gripper]))


def _at_most_one(vector: Vector) -> Vector:
    """The vector, shortened to a largest element of 1 if it is longer."""
    return vector / max(1.0, float(np.abs(vector).max()))
