"""Poses of moved cameras, whatever axes a simulator gives its cameras."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sim_farm.perturbations import CameraOrbit

Vector = npt.NDArray[np.float64]
VERTICAL = np.array([0.0, 0.0, 1.0])
MAX_ELEVATION = 85.0
"""Degrees above the horizontal: nearer to the vertical, an orbit has no side."""


@dataclass(frozen=True)
class CameraAxes:
    """A simulator's convention: directions [3] in the frame of one of its cameras."""

    forward: tuple[float, float, float]
    right: tuple[float, float, float]
    up: tuple[float, float, float]


MUJOCO = CameraAxes(forward=(0, 0, -1), right=(1, 0, 0), up=(0, 1, 0))
SAPIEN = CameraAxes(forward=(1, 0, 0), right=(0, -1, 0), up=(0, 0, 1))


def orbited(
    position: Vector, rotation: Vector, axes: CameraAxes, orbit: CameraOrbit, draw: np.random.Generator
) -> tuple[Vector, Vector]:
    """Position [3] and rotation [3, 3] (camera to world) of a camera after the orbit."""
    # Drawn first and always, so that the side is that of the seed, whatever else the orbit has.
    side = -1.0 if draw.integers(2) and orbit.either_side else 1.0
    pivot = _looked_at(position, rotation @ axes.forward)
    turned = _turn(VERTICAL, side * orbit.azimuth)
    arm, rotation = turned @ (position - pivot), turned @ rotation
    # Upwards is a turn about the right axis that goes down in front: the camera goes on looking at the pivot.
    above = math.degrees(math.asin(np.clip(arm[2] / np.linalg.norm(arm), -1.0, 1.0)))
    raised = _turn(rotation @ axes.right, -min(orbit.elevation, max(0.0, MAX_ELEVATION - above)))
    arm, rotation = raised @ arm, raised @ rotation
    own = _turn(rotation @ axes.up, side * orbit.pan)
    rotation = own @ rotation
    rotation = _turn(rotation @ axes.right, orbit.tilt) @ rotation
    return pivot + orbit.distance * arm, rotation


def _looked_at(position: Vector, forward: Vector) -> Vector:
    """The point of the optical axis that is nearest to the vertical through the world's origin, where tasks have their
    workspace; in front of the camera."""
    flat = forward[:2] @ forward[:2]
    along = -(position[:2] @ forward[:2]) / flat if flat > 1e-6 else 0.0
    return position + (along if along > 0 else float(np.linalg.norm(position))) * forward


def _turn(axis: Vector, degrees: float) -> Vector:
    """[3, 3] the rotation about a unit axis [3], by Rodrigues' formula."""
    angle = math.radians(degrees)
    x, y, z = axis
    cross = np.array([[0.0, -z, y], [z, 0.0, -x], [-y, x, 0.0]])
    return np.eye(3) + math.sin(angle) * cross + (1.0 - math.cos(angle)) * (cross @ cross)
