"""LIBERO's scripted controller: the steps that scripts are made of, and the script of each task.

A step looks at the scene alone and says where the hand should go next. None of them remembers anything: what has been
done already is read off the scene (is the object between the fingers? is it where it should be?), so a step that fails
half way is tried again from where things are. Lengths in m; offsets in the frames of LIBERO's assets.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from policies.contract import PolicyError
from policies.scripted.instructions import meant
from policies.scripted.scene import XYZ, Layout, Pose, Scene, Vector, rotated, turn_between, turned

# --- the steps that scripts are made of

OPEN, CLOSE = -1.0, 1.0
"""LIBERO's gripper actions."""
DOWN: tuple[float, float, float, float] = (1.0, 0.0, 0.0, 0.0)
"""The hand's orientation at an episode's beginning: it points down, and the fingers open along the world's y."""

FULLY_OPEN = 0.07
"""m; fingers that are further apart hold nothing."""
AT_REST = 0.01
"""m/s; fingers that close more slowly are closed, or have met something."""


@dataclass(frozen=True)
class Aim:
    """Target of the hand, and command of the fingers on the way."""

    position: Vector
    """[3] m."""
    quaternion: Vector
    """[4] x, y, z, w."""
    gripper: float


class Step(Protocol):
    """One thing to be done. Equal scenes give equal answers."""

    def done(self, scene: Scene) -> bool:
        """True if nothing is left to do."""
        ...

    def aim(self, scene: Scene) -> Aim:
        """The next aim; None when nothing is left to do."""
        ...


@dataclass(frozen=True)
class Approach:
    """Approach of the hand to a point: over a waypoint `clearance` before it, then straight along `direction`."""

    quaternion: tuple[float, float, float, float] = DOWN
    """The hand's orientation, x, y, z, w."""
    direction: XYZ = (0.0, 0.0, 1.0)
    """Unit vector in the world's frame from the point to the waypoint."""
    clearance: float = 0.10
    """Distance in m from the waypoint to the point."""
    narrow: float = 0.01
    """m beside the line within which the hand goes all the way to the point."""
    wide: float = 0.04
    """m beside the line from which the hand keeps the whole clearance. In between it follows the funnel."""

    def towards(self, hand: Pose, point: Vector) -> Vector:
        """[3] m: where to go next on the way to the point."""
        out = np.array(self.direction)
        height = float((hand.position - point) @ out)
        beside = hand.position - point - height * out
        far = float(np.linalg.norm(beside))
        turn = float(np.linalg.norm(turn_between(hand.quaternion, np.array(self.quaternion))))
        share = np.clip((far - self.narrow) / (self.wide - self.narrow), 0, 1) if turn < 0.2 else 1.0
        wanted = float(share) * self.clearance
        # Lower than the funnel allows: out first, then sideways.
        slow = np.clip(1 - (wanted - height) / 0.03, 0, 1)
        return point + wanted * out + (1 - float(slow)) * beside


@dataclass(frozen=True)
class Grasp:
    """Taking hold of a point of an entity."""

    entity: str
    offset: XYZ = (0.0, 0.0, 0.0)
    """m, the point between the fingertips in the entity's frame."""
    approach: Approach = Approach()
    near: float = 0.012
    """m from the point within which the fingers begin to close."""
    loose: float = 0.03
    """m from the point beyond which closed fingers hold nothing."""

    def holds(self, scene: Scene, point: Vector) -> bool:
        """True if the fingers have closed around the point."""
        stopped = scene.opening < FULLY_OPEN and scene.closing_speed < AT_REST
        return stopped and float(np.linalg.norm(scene.hand.position - point)) < self.loose

    def aim(self, scene: Scene, point: Vector) -> Aim:
        """Approach and close."""
        far = float(np.linalg.norm(scene.hand.position - point))
        if far < (self.near if scene.opening > FULLY_OPEN else self.loose):
            return Aim(point, np.array(self.approach.quaternion), CLOSE)
        return Aim(self.approach.towards(scene.hand, point), np.array(self.approach.quaternion), OPEN)


@dataclass(frozen=True)
class PickAndPlace:
    """Carry an object to a place above another entity and let go of it."""

    grasp: Grasp
    onto: str
    offset: XYZ
    """m, where the object's frame should be when it is released, in the frame of `onto`."""
    carry: float
    """m, height in the world's frame at which the object's frame travels."""
    near: float = 0.01
    """m beside the place, and above it, within which the fingers open."""

    def done(self, scene: Scene) -> bool:
        return self._there(scene) and scene.opening > FULLY_OPEN

    def aim(self, scene: Scene) -> Aim:
        thing = scene.pose(self.grasp.entity)
        point = thing.point(self.grasp.offset)
        down = np.array(self.grasp.approach.quaternion)
        if self._there(scene):
            return Aim(scene.hand.position, down, OPEN)
        if not self.grasp.holds(scene, point):
            return self.grasp.aim(scene, point)
        return Aim(scene.hand.position + self._way(thing, scene), down, CLOSE)

    def _there(self, scene: Scene) -> bool:
        missing = scene.pose(self.onto).point(self.offset) - scene.pose(self.grasp.entity).position
        return float(np.hypot(missing[0], missing[1])) < 2 * self.near and missing[2] > -self.near

    def _way(self, thing: Pose, scene: Scene) -> Vector:
        """[3] m: how the object should move: up to the height of travel, across, and down over the place."""
        missing = scene.pose(self.onto).point(self.offset) - thing.position
        far = float(np.hypot(missing[0], missing[1]))
        low = self.carry - float(thing.position[2])
        if far > 3 * self.near:
            across = float(np.clip(1 - (low - 0.02) / 0.03, 0, 1))
            return np.array([missing[0] * across, missing[1] * across, low])
        # The nearer, the lower: an arm that cannot come quite above the place gets down to it nevertheless.
        share = float(np.clip((3 * self.near - far) / (2 * self.near), 0, 1))
        return np.array([missing[0], missing[1], share * missing[2]])


@dataclass(frozen=True)
class Pull:
    """Pull by a handle until a sliding joint has moved."""

    grasp: Grasp
    """Its offset is that of the handle when the joint is at zero."""
    joint: int
    axis: XYZ
    """Unit vector in the fixture's frame along which the handle moves when the joint grows."""
    goal: float
    """m, the joint's position to reach; its sign is the direction."""

    def done(self, scene: Scene) -> bool:
        position = scene.joint(self.grasp.entity, self.joint)
        return position <= self.goal if self.goal < 0 else position >= self.goal

    def aim(self, scene: Scene) -> Aim:
        cabinet = scene.pose(self.grasp.entity)
        along = rotated(cabinet.quaternion, np.array(self.axis))
        handle = cabinet.point(self.grasp.offset) + scene.joint(self.grasp.entity, self.joint) * along
        if not self.grasp.holds(scene, handle):
            return self.grasp.aim(scene, handle)
        ahead = 0.05 * np.sign(self.goal) * along
        return Aim(handle + ahead, np.array(self.grasp.approach.quaternion), CLOSE)


@dataclass(frozen=True)
class Turn:
    """Turn a knob about the vertical axis through the point where it is held."""

    grasp: Grasp
    joint: int
    goal: float
    """rad, the joint's position to reach; positive."""

    def done(self, scene: Scene) -> bool:
        return scene.joint(self.grasp.entity, self.joint) >= self.goal

    def aim(self, scene: Scene) -> Aim:
        point = scene.pose(self.grasp.entity).point(self.grasp.offset)
        if not self.grasp.holds(scene, point):
            return self.grasp.aim(scene, point)
        angle = scene.joint(self.grasp.entity, self.joint) + 0.5
        return Aim(point, turned(np.array(self.grasp.approach.quaternion), angle), CLOSE)


# --- the tasks


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
    """The script for an instruction. Raises `PolicyError` with the nearest there is."""
    remedy = " (docs/scripted-policies.md lists the tasks that have one and says how to write another)"
    return SCRIPTS[meant(instruction, SCRIPTS, remedy)]


def towards(scene: Scene, aim: Aim) -> Vector:
    """[7] in [-1, 1]: the action that brings the hand nearer to its aim, both motions in straight lines."""
    way = LINEAR_GAIN * (aim.position - scene.hand.position) / METRES
    turn = ANGULAR_GAIN * turn_between(scene.hand.quaternion, aim.quaternion) / RADIANS
    return np.concatenate((_at_most_one(way), _at_most_one(turn), [aim.gripper]))


def _at_most_one(vector: Vector) -> Vector:
    """The vector, shortened to a largest element of 1 if it is longer."""
    return vector / max(1.0, float(np.abs(vector).max()))
