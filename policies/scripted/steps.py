"""The steps that scripts are made of. A step looks at the scene alone and says where the hand should go next.

None of them remembers anything: what has been done already is read off the scene (is the object between the
fingers? is it where it should be?), so a step that fails half way is tried again from where things are.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np

from policies.scripted.scene import XYZ, Pose, Scene, Vector, rotated, turn_between, turned

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
    """m."""
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
