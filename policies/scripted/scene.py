"""The scene of a scripted controller: one row of the state, read by name."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Vector = npt.NDArray[np.float64]
XYZ = tuple[float, float, float]

ROBOT_NUMBERS = 25
"""Hand position 3 and quaternion 4, finger positions 2, arm positions 7 and velocities 7, finger velocities 2."""
POSE_NUMBERS = 7
"""Position 3 in m, quaternion 4 in the order x, y, z, w."""


@dataclass(frozen=True)
class Layout:
    """Entities that the state of a LIBERO task lists after the robot's numbers, in this order."""

    movables: tuple[str, ...]
    """Objects: a pose each."""
    fixtures: tuple[tuple[str, int], ...] = ()
    """Furniture and its number of joints: the state has a pose and the joint positions of each."""

    @property
    def size(self) -> int:
        """S, the length of such a state."""
        joints = sum(count for _, count in self.fixtures)
        return ROBOT_NUMBERS + POSE_NUMBERS * (len(self.movables) + len(self.fixtures)) + joints

    def start(self, entity: str) -> int:
        """Index of the entity's first number."""
        at = ROBOT_NUMBERS
        for name, joints in (*((name, 0) for name in self.movables), *self.fixtures):
            if name == entity:
                return at
            at += POSE_NUMBERS + joints
        raise KeyError(entity)


@dataclass(frozen=True)
class Pose:
    """Position of an entity, in the world's frame."""

    position: Vector
    """[3] m."""
    quaternion: Vector
    """[4] x, y, z, w of unit length."""

    def point(self, offset: XYZ) -> Vector:
        """[3] m: the point `offset` of the entity's frame."""
        return self.position + rotated(self.quaternion, np.array(offset))


@dataclass(frozen=True)
class Scene:
    """One row of the state and the names of what is in it."""

    state: Vector
    """[S] as the layout says."""
    layout: Layout

    @property
    def hand(self) -> Pose:
        """The point between the fingertips, and the hand's orientation."""
        return Pose(self.state[:3], self.state[3:7])

    @property
    def opening(self) -> float:
        """m between the fingers; the Panda's are 0.08 apart when open."""
        return float(self.state[7] - self.state[8])

    @property
    def closing_speed(self) -> float:
        """m/s at which the fingers approach each other; negative while they open."""
        return float(self.state[24] - self.state[23])

    def pose(self, entity: str) -> Pose:
        at = self.layout.start(entity)
        return Pose(self.state[at : at + 3], self.state[at + 3 : at + POSE_NUMBERS])

    def joint(self, fixture: str, index: int) -> float:
        """Position of the fixture's joint in m or rad."""
        return float(self.state[self.layout.start(fixture) + POSE_NUMBERS + index])


def rotated(quaternion: Vector, vector: Vector) -> Vector:
    """[3]: the vector turned by the unit quaternion: v + 2 u x (u x v + w v), with u the quaternion's x, y, z."""
    u, w = quaternion[:3], quaternion[3]
    return vector + 2 * np.cross(u, np.cross(u, vector) + w * vector)


def turn_between(start: Vector, end: Vector) -> Vector:
    """[3] rad: the shortest rotation, as axis times angle in the world's frame, from one quaternion to the other."""
    # The product end * conjugate(start); its sign is chosen so that the angle is at most pi.
    u = start[3] * end[:3] - end[3] * start[:3] - np.cross(end[:3], start[:3])
    w = float(end @ start)
    if w < 0:
        u, w = -u, -w
    length = float(np.linalg.norm(u))
    return u * (2 * np.arctan2(length, w) / length) if length > 1e-9 else 2 * u


def turned(quaternion: Vector, angle: float) -> Vector:
    """[4]: the orientation turned by `angle` rad about the world's vertical axis."""
    c, s = np.cos(angle / 2), np.sin(angle / 2)
    x, y, z, w = quaternion
    return np.array([c * x - s * y, c * y + s * x, c * z + s * w, c * w - s * z])
