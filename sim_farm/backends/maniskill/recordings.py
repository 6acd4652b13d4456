"""States of ManiSkill's own recordings (`RecordEpisode`): `actors/NAME` and `articulations/NAME`, float32.

An actor's state is position, quaternion (w first), linear and angular velocity. An articulation's is that of its root,
then positions and velocities of its joints. States of controllers (`controller/...`) are left alone: at an episode's
beginning they follow from the robot's.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from sim_farm.backends.maniskill.speed import controllers
from sim_farm.contract import FarmError, SimulatorState

POSE = 7
"""Leading elements of a state that are a position and a quaternion."""
ROOT = 13
"""Elements before those of the joints."""


def put_state(env: Any, start: SimulatorState) -> None:
    """Put the bodies into the recorded state. Those that are in it already, bit for bit, are left alone: PhysX rounds
    what it is given. Raises `FarmError` for bodies that the scene has not, or that the recording lacks."""
    now = _states(env)
    recorded = {name: row for name, row in start.items() if not name.startswith("controller/")}
    if not recorded:
        return
    if set(recorded) != set(now):
        raise FarmError(
            f"the recorded scene is another one: it has {_only(recorded, now)}, which the task's has not, and lacks "
            f"{_only(now, recorded)}"
        )
    for name, row in recorded.items():
        if row.shape != now[name].shape:
            raise FarmError(f"the recorded state of {name} has {row.size} numbers, the task's {now[name].size}")
    changed = {name: row for name, row in recorded.items() if not np.array_equal(row, now[name])}
    if not changed:
        return
    state: dict[str, dict[str, npt.NDArray[np.float32]]] = {}
    for name, row in changed.items():
        kind, _, body = name.partition("/")
        state.setdefault(kind, {})[body] = row.astype(np.float32)[None]
    env.set_state_dict(state)
    for controller in controllers(env):
        controller.reset()


def state_deviation(env: Any, recorded: SimulatorState) -> float:
    """See `sim_farm.contract.RecordedPhysics.deviation`. Names that the scene has not are not compared."""
    now, furthest = _states(env), 0.0
    for name, row in recorded.items():
        own = now.get(name)
        if own is None or row.shape != own.shape or np.array_equal(row, own):
            continue
        joints = (len(own) - ROOT) // 2
        where = np.r_[0:POSE, ROOT : ROOT + joints]
        # Velocities alone may differ in their last bit, which is no equality either.
        away = float(np.abs(row.astype(np.float32)[where] - own[where]).max())
        furthest = max(furthest, away, float(np.finfo(np.float32).tiny))
    return furthest


def _states(env: Any) -> dict[str, npt.NDArray[np.float32]]:
    kinds = env.scene.get_sim_state()
    return {f"{kind}/{name}": row[0].numpy() for kind, rows in kinds.items() for name, row in rows.items()}


def _only(one: Any, other: Any) -> str:
    return ", ".join(sorted(set(one) - set(other))[:5]) or "nothing"
