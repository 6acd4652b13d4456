"""Progress towards a LIBERO task's goal, from which its dense reward is made.

LIBERO's own reward is success alone. Its goals are conjunctions of a few predicates (`libero.envs.predicates`): an
object is on or in something, a joint of a fixture is open, closed, turned on or off. This module defines the progress
of each.
"""

# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

NEAR = 0.15
"""Metres over which coming nearer counts; most of a task's distances are 0.1 to 0.4."""
REACH, HELD, PLACE = 0.2, 0.2, 0.5
"""Progress of an object to be moved: the hand at it, between the fingers, at its target. Less than one in sum:
the rest is for the predicate itself."""
HANDLE, TRAVEL = 0.3, 0.6
"""Progress of a joint to be moved: the hand at its part, the share of its way."""
RANGES = {
    "open": "default_open_ranges",
    "close": "default_close_ranges",
    "turnon": "default_turnon_ranges",
    "turnoff": "default_turnoff_ranges",
}
"""Attribute in which LIBERO keeps the positions at which a predicate about a joint holds."""

Term = Callable[[], float]


class Progress:
    """The progress of one environment's goal, from where its objects and joints are now."""

    def __init__(self, env: Any) -> None:
        self._terms: Sequence[Term] = [_term(env, predicate) for predicate in env.parsed_problem["goal_state"]]

    def __call__(self) -> float:
        """In [0, 1], the mean over the goal's predicates; 1 where all hold."""
        return sum(term() for term in self._terms) / len(self._terms)


def near(one: npt.NDArray[np.float64], two: npt.NDArray[np.float64]) -> float:
    """1 where the two points [3] are the same, 0.24 at 15 cm, towards 0 far away."""
    return 1.0 - math.tanh(math.dist(one, two) / NEAR)


def _term(env: Any, predicate: list[str]) -> Term:
    name, *parts = predicate
    states = [env.object_states_dict[part] for part in parts]
    return _placing(env, predicate, *states) if len(parts) == 2 else _moving(env, states[0], RANGES[name.lower()])


def _placing(env: Any, predicate: list[str], moved: Any, target: Any) -> Term:
    """`on`, `in`: the hand comes to the object, holds it, and brings it to the target."""
    data = env.sim.data._data
    site, body = env.robots[0].eef_site_id, env.obj_body_id[moved.object_name]
    gripper, thing = env.robots[0].gripper, env.get_object(moved.object_name)

    def progress() -> float:
        if env._eval_predicate(predicate):
            return 1.0
        position = data.xpos[body]
        reach, place = near(data.site_xpos[site], position), near(position, target.get_geom_state()["pos"])
        return REACH * reach + HELD * env._check_grasp(gripper, thing) + PLACE * place

    return progress


def _moving(env: Any, part: Any, ranges: str) -> Term:
    """A predicate about joints: the hand comes to what the joint moves, and moves it into the range."""
    model, data = env.sim.model._model, env.sim.data._data
    site = env.robots[0].eef_site_id
    on_site = part.object_state_type == "site"
    owner = env.get_object(part.parent_name if on_site else part.object_name)
    joints = (env.object_sites_dict[part.object_name] if on_site else owner).joints
    low, high = (f(owner.object_properties["articulation"][ranges]) for f in (min, max))
    ways = [_Way(model.joint(name), low, high) for name in joints]
    # LIBERO calls a part open or on where one of its joints is, closed or off where all are.
    overall = max if ranges in (RANGES["open"], RANGES["turnon"]) else min

    def progress() -> float:
        shares = [way.share(data.qpos) for way in ways]
        share = overall(shares)
        if share == 1.0:
            return 1.0
        return HANDLE * near(data.site_xpos[site], data.xipos[ways[shares.index(share)].body]) + TRAVEL * share

    return progress


class _Way:
    """Progress of a joint into a range, 0 to 1."""

    def __init__(self, joint: Any, low: float, high: float) -> None:
        self.body = int(joint.bodyid[0])
        self._address = int(joint.qposadr[0])
        self._low, self._high = low, high
        self._length = float(joint.range[1] - joint.range[0])

    def share(self, qpos: npt.NDArray[np.float64]) -> float:
        """1 within the range, 0 a whole travel of the joint away from it."""
        position = float(qpos[self._address])
        away = max(self._low - position, position - self._high, 0.0)
        return max(0.0, 1.0 - away / self._length)
