"""Episodes after which something may be left behind in a simulator: solved, rich in contacts, left midway.

An episode is driven by what is seen and by its own seed, so that it is the same in any environment that is as new.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import numpy as np

from policies.scripted import libero, two_cubes
from policies.scripted.libero import SCRIPTS
from sim_farm.contract import EpisodeSpec, FarmError, Float32, Physics, PhysicsResult, TaskSpec
from sim_farm.registry import make_physics
from tests.sim_farm.tabletop_controllers import CONTROLLERS

Driver = Callable[[PhysicsResult], np.ndarray]
KINDS = ("expert", "noisy", "left", "walk")
"""The task's expert; with noise on its actions; until it is left midway; a walk that leans a Panda onto the table."""


@dataclass(frozen=True)
class History:
    """An episode and what is done in it."""

    episode: EpisodeSpec
    kind: str
    steps: int
    """Env steps after which it is left, unless it has ended."""


def task_of(name: str, steps: int, **more: Any) -> TaskSpec:
    """The task in the control mode that its expert acts in, where it has one."""
    if not name.startswith("maniskill/"):
        return TaskSpec(name, max_episode_steps=steps, **more)
    spec = TaskSpec(name, control_mode="pd_ee_delta_pos", max_episode_steps=steps, reward="sparse", **more)
    try:
        make_physics(spec).close()
    except FarmError:
        spec = TaskSpec(name, max_episode_steps=steps, reward="sparse", **more)
    return spec


def histories(name: str, count: int, steps: int) -> list[History]:
    """`count` of all kinds, in turn; half of those of LIBERO from recorded initial states."""
    chosen = []
    for i in range(count):
        kind = KINDS[i % len(KINDS)]
        state = i % 50 if name.startswith("libero/") and i % 8 < 4 else None
        length = steps if kind != "left" else steps // 2 + i % (steps // 4)
        chosen.append(History(EpisodeSpec(1000 + i, state), kind, length))
    return chosen


def played(physics: Physics, history: History) -> list[PhysicsResult]:
    """The beginning, and what each env step brought."""
    results = [physics.reset(history.episode)]
    driver = driver_of(physics, history)
    while not results[-1].ended and len(results) <= history.steps:
        results.append(physics.step(np.asarray(driver(results[-1]), np.float32)[None]))
    return results


def digest(results: list[PhysicsResult]) -> str:
    """Of every bit of every result."""
    found = hashlib.sha256()
    for result in results:
        for name in ("reward", "success", "terminated", "truncated", "proprio", "state", "scene"):
            found.update(getattr(result, name).tobytes())
    return found.hexdigest()


def in_a_new_one(spec: TaskSpec, history: History) -> list[PhysicsResult]:
    with closing(make_physics(spec)) as physics:
        return played(physics, history)


def driver_of(physics: Any, history: History) -> Driver:
    """What chooses the history's actions."""
    rng = np.random.default_rng(history.episode.seed)
    expert = None if history.kind == "walk" else _expert(physics, rng)
    if expert is None:
        return _walk(physics, rng)
    if history.kind != "noisy":
        return expert
    return lambda result: expert(result) + rng.normal(0, 0.3, physics.info.action_dim)


def _expert(physics: Any, rng: np.random.Generator) -> Driver | None:
    info = physics.info
    if info.spec.name in CONTROLLERS:
        return lambda result: CONTROLLERS[info.spec.name](result.state.astype(np.float64))
    if info.spec.name.startswith("libero/"):
        return lambda result: (
            libero.act(result.state.astype(np.float64), result.instruction)
            if _scripted(result)
            else (rng.uniform(-1, 1, info.action_dim))
        )
    if info.spec.name == "maniskill/PushCube-v1":
        return lambda result: pushing_action(result.state)
    if info.spec.name in ("maniskill/PushRedCube-v1", "maniskill/PushGreenCube-v1"):
        return lambda result: two_cubes.act(result.state.astype(np.float64), result.instruction)
    if info.spec.control_mode == "pd_ee_delta_pos" and info.action_dim == 4:
        return _Grasping(physics.backend._env, rng)
    return None


def _scripted(result: PhysicsResult) -> bool:
    script = SCRIPTS.get(result.instruction.lower())
    return script is not None and script.layout.size == len(result.state)


def _walk(physics: Any, rng: np.random.Generator) -> Driver:
    low, high = np.array(physics.info.action_low), np.array(physics.info.action_high)
    place = np.zeros(physics.info.action_dim)

    def act(_: PhysicsResult) -> np.ndarray:
        nonlocal place
        place = np.clip(place + rng.normal(0, 0.3, len(place)), -1.2, 1.2)
        leaning = place.copy()
        leaning[1] += 0.5
        return low + (high - low) * (np.clip(leaning, -1, 1) + 1) / 2

    return act


class _Grasping:
    """Goes to one of ManiSkill's movable objects, grasps it, drags it somewhere, lets go and sweeps over the table."""

    def __init__(self, env: Any, rng: np.random.Generator) -> None:
        movable = [actor for actor in env.scene.actors.values() if actor.px_body_type == "dynamic"]
        self._hand, self._rng = env.agent.tcp, rng
        self._object = movable[rng.integers(len(movable))] if movable else None
        self._drag = rng.uniform(-1, 1, 3) * (1, 1, 0.5)
        self._stage, self._since = 0, 0

    def __call__(self, result: PhysicsResult) -> np.ndarray:
        self._since += 1
        hand_at = self._hand.pose.p[0].double().numpy()
        aim = hand_at if self._object is None else self._object.pose.p[0].double().numpy()
        above = aim + (0, 0, 0.1 if self._stage == 0 else 0.0)
        way = (above - hand_at) * 10
        near = np.abs(way).max() < 0.15
        if (self._stage < 2 and (near or self._since > 12)) or (self._stage >= 2 and self._since > 5):
            self._stage, self._since = self._stage + 1, 0
        if self._stage < 2:
            return np.append(np.clip(way, -1, 1), 1.0)
        if self._stage == 2:
            return np.array([0.0, 0.0, 0.0, -1.0])
        if self._stage == 3:
            return np.append(self._drag, -1.0)
        if self._stage == 4:
            return np.array([0.0, 0.0, 0.2, 1.0])
        return np.append(self._rng.uniform(-1, 1, 2), (-0.5, 1.0))


def pushing_action(state: Float32, short: float = -1) -> np.ndarray:
    """PushCube's expert, which lets go of the cube `short` metres before the goal's centre: the displacement of the
    gripper, proportional to its distance from where it should be."""
    gripper, goal, cube = state[18:21], state[25:28], state[28:31]
    behind = gripper[0] < cube[0] - 0.05
    if cube[0] > goal[0] - short:
        aim = gripper - (0.05, 0, 0)
    elif abs(gripper[1] - cube[1]) < 0.01 and gripper[2] < 0.04 and gripper[0] < cube[0]:
        aim = gripper + (0.03, 0, 0)
    elif behind or gripper[2] < 0.03:
        aim = np.array([cube[0] - 0.06, cube[1], 0.02])
    else:
        aim = np.array([cube[0] - 0.07, cube[1], 0.1])
    return np.append(np.clip((aim - gripper) * 20, -1, 1), -1)
