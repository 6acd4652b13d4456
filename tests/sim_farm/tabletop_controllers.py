"""Controllers that solve tabletop's tasks: they see the state, and choose one action at a time."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

Controller = Callable[[np.ndarray], np.ndarray]

STEP = 0.03
OPEN, CLOSED = 1.0, -1.0


def reach(state: np.ndarray) -> np.ndarray:
    return state[13:16] / STEP


def push(state: np.ndarray) -> np.ndarray:
    """Over the cube to the point behind it, down, and forward along the line through cube and goal."""
    tcp, cube, goal = state[:3], state[5:8], state[23:26]
    ahead = (goal - cube)[:2] / np.linalg.norm((goal - cube)[:2])
    offset = (tcp - cube)[:2]
    along = offset @ ahead
    aside = offset - along * ahead
    if along < -0.02 and np.linalg.norm(aside) < 0.012:
        target = [*(tcp[:2] + 0.02 * ahead - aside), 0.02]
    else:
        arrived = np.linalg.norm(offset + 0.05 * ahead) < 0.02
        target = [*(cube[:2] - 0.05 * ahead), 0.02 if arrived else 0.07]
    return (target - tcp) / STEP


def pick_and_place(state: np.ndarray) -> np.ndarray:
    """Over the cube, down, close, up, over the pedestal, down, open."""
    tcp, fingers, cube, goal = state[:3], state[3] + state[4], state[5:8], state[23:26]
    if fingers < 0.046 and np.linalg.norm(tcp - cube) < 0.02:
        dx, dy, dz = goal - cube
        if np.hypot(dx, dy) < 0.015:
            return np.array([dx, dy, dz, 0]) / STEP + [0, 0, 0, OPEN if dz > -0.004 else CLOSED]
        rise = 0.095 - cube[2]
        sideways = 0.0 if rise > 0.015 else 0.8
        return np.array([sideways * dx / STEP, sideways * dy / STEP, 0.8 * rise / STEP, CLOSED])
    dx, dy, dz = cube - tcp
    if np.hypot(dx, dy) > 0.01:
        dz = 0.09 - tcp[2]
    grip = CLOSED if np.linalg.norm((dx, dy, dz)) < 0.008 else OPEN
    return np.array([dx / STEP, dy / STEP, dz / STEP, grip])


CONTROLLERS: dict[str, Controller] = {
    "tabletop/reach": reach,
    "tabletop/reach_red": reach,
    "tabletop/reach_blue": reach,
    "tabletop/push": push,
    "tabletop/pick_and_place": pick_and_place,
}
