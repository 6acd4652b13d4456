"""Driving a farm through some chunks, and comparing what its environments showed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any

import numpy as np

from sim_farm.client.farm import Farm
from sim_farm.client.observations import Observations
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess

Row = dict[str, Any]
Trace = dict[int, list[Row]]
"""Per environment what it showed at each collect."""
Policy = Callable[[int, int, np.ndarray], np.ndarray]
"""`(environment, chunk's number, state)` to the actions [C, A]."""


def mixed_policy(env: int, number: int, state: np.ndarray) -> np.ndarray:
    """Environments with odd numbers reach for the goal, which ends episodes; the others wander until the limit."""
    if env % 2:
        return np.repeat(state[None, 13:16] / 0.09, 3, axis=0).astype(np.float32)
    return np.random.default_rng((env, number)).uniform(-1, 1, (3, 3)).astype(np.float32)


def rows_of(seen: Observations) -> dict[int, Row]:
    """What each environment of a collected group shows, but for the times: environment to named values."""
    names = ("active", "episode", "episode_step", "steps", "reward", "success", "terminated", "truncated")
    finals = {int(row): k for k, row in enumerate(seen.final.rows)}
    rows = {}
    for i, env in enumerate(seen.envs.tolist()):
        row: Row = {name: getattr(seen, name)[i] for name in (*names, "state", "proprio", "instruction")}
        if seen.active[i]:
            row |= {camera: picture[i].copy() for camera, picture in seen.frames.items()}
        if i in finals:
            row |= {f"final {name}": getattr(seen.final, name)[finals[i]] for name in ("state", "proprio", "drawn")}
            if seen.final.drawn[finals[i]]:
                finals_of = seen.final.frames.items()
                row |= {f"final {camera}": picture[finals[i]].copy() for camera, picture in finals_of}
        rows[env] = row
    return rows


def drive(
    farm: Farm,
    begin: int = 0,
    end: int = 7,
    policy: Policy = mixed_policy,
    reset: bool = True,
    deadline_s: float = 60,
) -> Trace:
    """All groups in turn, each submitted before any is collected: per environment what it showed each time."""
    trace: Trace = {env: [] for env in range(farm.specs[0].num_envs)}
    groups = range(farm.groups)
    if reset:
        for group in groups:
            farm.reset(group)
        for group in groups:
            append(trace, farm.collect(group, deadline_s))
    for number in range(begin, end):
        for group in groups:
            farm.submit(group, actions_for(farm, group, number, policy))
        for group in groups:
            append(trace, farm.collect(group, deadline_s))
    return trace


def actions_for(farm: Farm, group: int, number: int, policy: Policy = mixed_policy) -> np.ndarray:
    """The policy's actions on the states that the group's slots hold."""
    state, envs = farm.tasks[farm.task_of(group)].slots["state"], farm.envs_of(group).tolist()
    return np.stack([policy(env, number, state[env]) for env in envs])


def append(trace: Trace, seen: Observations) -> None:
    for env, row in rows_of(seen).items():
        trace[env].append(row)


def assert_same(one: Trace, two: Trace, law: str) -> None:
    assert one.keys() == two.keys()
    for env in one:
        assert len(one[env]) == len(two[env]), f"{law}: environment {env} showed itself a different number of times"
        for time, (left, right) in enumerate(zip(one[env], two[env], strict=True)):
            assert left.keys() == right.keys(), f"{law}: environment {env}, time {time}"
            for name in left:
                same = np.asarray(left[name]).tobytes() == np.asarray(right[name]).tobytes()
                assert same, f"{law}: environment {env}, time {time}: {name} {left[name]} and {right[name]}"


def run(spec: FarmSpec, policy: Policy = mixed_policy, chunks: int = 7) -> Trace:
    with closing(Farm.create(spec, InProcess())) as farm:
        return drive(farm, end=chunks, policy=policy)
