"""LIBERO's scripted controller and its tasks. Lengths in m; offsets in the frames of LIBERO's assets."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from policies.contract import PolicyError
from policies.registry import nearest
from policies.scripted.scene import XYZ, Layout, Scene, Vector, turn_between
from policies.scripted.steps import OPEN, Aim, Approach, Grasp, PickAndPlace, Pull, Step, Turn


@dataclass(frozen=True)
class Script:
    """Layout of a task's state, and the steps that solve it, in order."""

    layout: Layout
    steps: tuple[Step, ...]


_CABINET, _STOVE = ("wooden_cabinet_1", 3), ("flat_stove_1", 1)
_GOAL = Layout(
    ("akita_black_bowl_1", "cream_cheese_1", "wine_bottle_1", "plate_1"), (_CABINET, _STOVE, ("wine_rack_1", 0))
)
_RIM = Grasp("akita_black_bowl_1", (0.046, 0.0, 0.035))
"""The bowl's rim, on the side to which the fingers open."""
_RIM_IN_DRAWER = Grasp("akita_black_bowl_1", (0.0, 0.046, 0.035), Approach((0.5**0.5, 0.5**0.5, 0.0, 0.0)))
"""The rim on the left: the hand is turned by a right angle, since its fingers would not fit in front of the bowl."""
_ALONG_Y = Approach((0.8192, 0.0, 0.0, 0.5736), direction=(0.0, 0.9397, 0.3420), narrow=0.005, wide=0.03)
"""The hand points along the world's -y and 20 degrees downwards, so that its lower finger passes the handle below."""
_MIDDLE_HANDLE = Grasp("wooden_cabinet_1", (-0.003, -0.102, 0.1125), _ALONG_Y)


def _bowl_to(onto: str, offset: XYZ, carry: float, grasp: Grasp = _RIM) -> tuple[Step, ...]:
    return (PickAndPlace(grasp, onto, offset, carry),)


_GOAL_STEPS: dict[str, tuple[Step, ...]] = {
    "open the middle drawer of the cabinet": (Pull(_MIDDLE_HANDLE, joint=1, axis=(0.0, 1.0, 0.0), goal=-0.155),),
    "put the bowl on the stove": _bowl_to("flat_stove_1", (0.15, 0.0, 0.035), carry=1.0),
    "put the wine bottle on top of the cabinet": (
        PickAndPlace(Grasp("wine_bottle_1", (0.0, 0.0, 0.135)), "wooden_cabinet_1", (0.0, 0.015, 0.24), carry=1.2),
    ),
    "put the bowl on top of the cabinet": _bowl_to("wooden_cabinet_1", (0.0, 0.015, 0.235), carry=1.2),
    "push the plate to the front of the stove": (
        PickAndPlace(Grasp("plate_1", (0.062, 0.0, 0.010)), "flat_stove_1", (0.36, 0.0, 0.01), carry=0.97),
    ),
    "put the cream cheese in the bowl": (
        PickAndPlace(Grasp("cream_cheese_1"), "akita_black_bowl_1", (0.0, 0.0, 0.06), carry=1.0),
    ),
    "turn on the stove": (Turn(Grasp("flat_stove_1", (0.0, 0.001, 0.038)), joint=0, goal=1.0),),
    "put the bowl on the plate": _bowl_to("plate_1", (0.0, 0.0, 0.015), carry=1.0),
    "put the wine bottle on the rack": (
        PickAndPlace(Grasp("wine_bottle_1", (0.0, 0.0, 0.135)), "wine_rack_1", (0.0, -0.08, 0.22), carry=1.25),
    ),
}

_SPATIAL = Layout(
    ("akita_black_bowl_1", "akita_black_bowl_2", "cookies_1", "glazed_rim_porcelain_ramekin_1", "plate_1"),
    (_CABINET, _STOVE),
)
_SPATIAL_BOWLS = {
    "between the plate and the ramekin": (0.98, _RIM),
    "next to the ramekin": (0.98, _RIM),
    "from table center": (0.98, _RIM),
    "on the cookie box": (0.98, _RIM),
    "in the top drawer of the wooden cabinet": (1.16, _RIM_IN_DRAWER),
    "on the ramekin": (1.0, _RIM),
    "next to the cookie box": (0.98, _RIM),
    "on the stove": (0.98, _RIM),
    "next to the plate": (0.98, _RIM),
    "on the wooden cabinet": (1.16, _RIM),
}
"""The bowl's place, the height at which it clears its surroundings, and its grasp. Not higher: above the
plate the arm is nearly straight."""


@dataclass(frozen=True)
class _Grip:
    """Point where the fingers close on an object."""

    offset: XYZ
    """In the object's frame."""
    above: float
    """Height of that point above the frame's origin while the object stands or lies."""


_TALL, _CAN, _FLAT = _Grip((0.0, 0.045, 0.0), 0.045), _Grip((0.0, 0.012, 0.0), 0.012), _Grip((0.0, 0.0, 0.0), 0.0)
_BOTTLE = _Grip((0.0, 0.0, 0.03), 0.03)
_FLAT_END = _Grip((0.03, 0.0, 0.0), 0.0)
"""Away from what stands close by: the hand is 0.2 wide."""

_GROCERIES: dict[str, tuple[_Grip, tuple[str, ...]]] = {
    "alphabet soup": (_CAN, ("salad_dressing", "cream_cheese", "milk", "tomato_sauce", "butter")),
    "cream cheese": (_FLAT_END, ("alphabet_soup", "milk", "tomato_sauce", "butter", "orange_juice")),
    "salad dressing": (_TALL, ("ketchup", "alphabet_soup", "cream_cheese", "milk", "tomato_sauce")),
    "bbq sauce": (_BOTTLE, ("chocolate_pudding", "ketchup", "salad_dressing", "alphabet_soup", "cream_cheese")),
    "ketchup": (_TALL, ("bbq_sauce", "salad_dressing", "alphabet_soup", "cream_cheese", "milk")),
    "tomato sauce": (_CAN, ("milk", "butter", "orange_juice", "chocolate_pudding", "bbq_sauce")),
    "butter": (_FLAT, ("tomato_sauce", "orange_juice", "chocolate_pudding", "bbq_sauce", "ketchup")),
    "milk": (_TALL, ("cream_cheese", "tomato_sauce", "butter", "orange_juice", "chocolate_pudding")),
    "chocolate pudding": (_FLAT, ("orange_juice", "bbq_sauce", "ketchup", "salad_dressing", "alphabet_soup")),
    "orange juice": (_TALL, ("butter", "chocolate_pudding", "bbq_sauce", "ketchup", "salad_dressing")),
}
"""Grasp of an object of libero_object, and the task's movables after the object and the basket."""


def _into_basket(name: str, grip: _Grip, others: tuple[str, ...]) -> Script:
    """Hold the hand above the basket's walls, which are 0.15 high, and let the object drop."""
    layout = Layout(tuple(f"{movable}_1" for movable in (name.replace(" ", "_"), "basket", *others)))
    grasp = Grasp(layout.movables[0], grip.offset, Approach(clearance=0.15))
    return Script(layout, (PickAndPlace(grasp, "basket_1", (0.0, 0.0, 0.16 - grip.above), carry=0.24),))


SCRIPTS: dict[str, Script] = {
    **{name: Script(_GOAL, steps) for name, steps in _GOAL_STEPS.items()},
    **{
        f"pick up the black bowl {where} and place it on the plate": Script(
            _SPATIAL, _bowl_to("plate_1", (0.0, 0.0, 0.015), carry, grasp)
        )
        for where, (carry, grasp) in _SPATIAL_BOWLS.items()
    },
    **{
        f"pick up the {name} and place it in the basket": _into_basket(name, grip, others)
        for name, (grip, others) in _GROCERIES.items()
    },
}
"""Instruction, in lower case, to script."""


# --- the controller: the next step is read off the state, and the hand moves there

ACTION_DIM = 7
"""LIBERO's actions: position 3, axis-angle 3, gripper."""
REST = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, OPEN)
METRES, RADIANS = 0.05, 0.5
"""Distance by which an action of 1 moves the hand's goal, in m (robosuite's OSC_POSE)."""
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
