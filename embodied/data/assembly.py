"""What the policy worker keeps of its decisions, and how it becomes trajectories.

A step is one decision of one group of environments. Steps come in the order in which a plan lets them happen;
trajectories are arranged by (decision, environment), so that nothing of the plan is left in them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from embodied.data.trajectories import Trajectories, join_inputs
from policies.contract import Action, Inputs
from sim_farm.observations import Observations

Value = Callable[[Inputs], Tensor]
NAMES = 44
"""Bits of a group's name."""


@dataclass(frozen=True)
class EndedEpisode:
    """One ended training episode."""

    env: int
    success: bool
    """Solved at any env step."""
    total_reward: float
    length: int
    """Env steps."""


@dataclass
class Step:
    """One decision of one group of environments, until what became of it is known."""

    envs: np.ndarray
    """Environments of the group."""
    rows: np.ndarray
    """Of them, those that decided: the others rest. Inputs and action have as many rows."""
    episode: np.ndarray
    """[len(envs)] the number of each environment's episode."""
    inputs: Inputs
    action: Action
    outcome: Observations | None = None
    finals: list[tuple[int, Inputs]] = field(default_factory=list)
    """(environment, final observation) of the ended episodes whose value is bootstrapped."""


class EpisodeSums:
    """Return, success and length of the episodes under way."""

    def __init__(self, num_envs: int) -> None:
        self.total = np.zeros(num_envs)
        self.solved = np.zeros(num_envs, np.bool_)
        self.length = np.zeros(num_envs, np.int64)

    def add(self, seen: Observations) -> list[EndedEpisode]:
        """Count one outcome; the episodes that ended with it, in the order of environments."""
        self.total[seen.envs] += seen.reward.sum(1)
        self.solved[seen.envs] |= seen.success.any(1)
        self.length[seen.envs] += seen.steps
        ended = []
        for env in sorted(seen.envs[seen.terminated | seen.truncated].tolist()):
            ended.append(EndedEpisode(env, bool(self.solved[env]), float(self.total[env]), int(self.length[env])))
            self.total[env] = self.length[env] = 0
            self.solved[env] = False
        return ended


@dataclass(frozen=True)
class _Place:
    """Where a row of a step belongs: decision t of environment `env`."""

    t: int
    env: int
    step: int
    row: int
    """Within the group."""
    taken: int
    """Within the step's inputs."""


def gather_decisions(
    groups: Sequence[Sequence[Step]], num_envs: int, value: Value, last: Inputs, version: int
) -> Trajectories:
    """Decision t of every environment in row t: rollouts of a fixed number of decisions.

    `last` holds the observations [B] after the last decision.
    """
    places: list[_Place] = []
    flat = [(t, step) for steps in groups for t, step in enumerate(steps)]
    for number, (t, step) in enumerate(flat):
        places += [_Place(t, int(step.envs[r]), number, r, i) for i, r in enumerate(step.rows.tolist())]
    steps = [step for _, step in flat]
    return _arrange(steps, places, len(groups[0]), num_envs, value, _at_first(value(last)), version, None)


def gather_wave(
    groups: Sequence[Sequence[Step]], wave: int, num_envs: int, value: Value, group: Tensor, version: int
) -> Trajectories:
    """Every environment's episode number `wave`, its t-th decision in row t: rollouts of whole episodes."""
    places: list[_Place] = []
    flat = [step for steps in groups for step in steps]
    taken = np.zeros(num_envs, np.int64)
    for number, step in enumerate(flat):  # within a group steps are in the order of time
        for i, r in enumerate(step.rows.tolist()):
            env = int(step.envs[r])
            if step.episode[r] == wave:
                places.append(_Place(int(taken[env]), env, number, r, i))
                taken[env] += 1
    return _arrange(flat, places, int(taken.max()), num_envs, value, torch.zeros(num_envs), version, group)


def _arrange(
    steps: Sequence[Step],
    places: list[_Place],
    count: int,
    num_envs: int,
    value: Value,
    last_value: Tensor,
    version: int,
    group: Tensor | None,
) -> Trajectories:
    """Put every row where it belongs. Rows of decisions that nobody took repeat another one and are masked."""
    places.sort(key=lambda place: (place.t, place.env))
    offsets = np.cumsum([0, *(len(step.rows) for step in steps)])
    at = torch.tensor([place.t * num_envs + place.env for place in places])
    rows = torch.tensor([int(offsets[place.step]) + place.taken for place in places])
    every = torch.full((count * num_envs,), int(rows[0]))
    every[at] = rows
    mask = torch.zeros(count * num_envs, dtype=torch.bool)
    mask[at] = True

    def decided(parts: Sequence[Tensor]) -> Tensor:
        """[T * B, ...] from the steps' own rows."""
        return torch.cat(list(parts))[every]

    def became(name: str, dtype: torch.dtype) -> Tensor:
        """[T, B] or [T, B, C] from the outcomes, zero where nobody decided."""
        outcomes = np.asarray([_outcome(steps[place.step], name)[place.row] for place in places])
        whole = torch.zeros(count * num_envs, *outcomes.shape[1:], dtype=dtype)
        whole[at] = torch.from_numpy(outcomes).to(dtype)
        return whole.reshape(count, num_envs, *outcomes.shape[1:])

    log_prob = decided([step.action.log_prob for step in steps])
    values = decided([step.action.value for step in steps])
    return Trajectories(
        inputs=join_inputs([step.inputs for step in steps], every),
        trace={key: decided([step.action.trace[key] for step in steps]) for key in steps[0].action.trace},
        log_prob=log_prob.reshape(count, num_envs, *log_prob.shape[1:]),
        value=values.reshape(count, num_envs, *values.shape[1:]),
        reward=became("reward", torch.float32),
        success=became("success", torch.bool),
        executed=became("steps", torch.int64),
        mask=mask.reshape(count, num_envs),
        terminated=became("terminated", torch.bool),
        truncated=became("truncated", torch.bool),
        final_value=_final_values(steps, places, count, num_envs, value),
        last_value=last_value,
        version=version,
        group=group,
        step_reward=became("step_reward", torch.float32),
    )


def join_waves(waves: Sequence[Trajectories]) -> Trajectories:
    """Waves of whole episodes as one: their columns side by side, shorter ones masked at their end."""
    if len(waves) == 1:
        return waves[0]
    count = max(len(wave.reward) for wave in waves)
    columns, taken, begin = [], [], 0
    for wave in waves:
        decisions, envs = wave.reward.shape
        t = torch.arange(count)[:, None]
        columns.append(begin + t.clamp(max=decisions - 1) * envs + torch.arange(envs))
        taken.append((t < decisions).expand(count, envs))
        begin += decisions * envs
    order, there = torch.cat(columns, 1), torch.cat(taken, 1)
    rows = order.flatten()

    def joined(name: str) -> Tensor:
        """[T, B, ...]"""
        flat = torch.cat([getattr(wave, name).flatten(0, 1) for wave in waves])
        return flat[rows].reshape(*order.shape, *flat.shape[1:])

    def happened(name: str) -> Tensor:
        """[T, B, ...] and zero beyond a wave's end."""
        values = joined(name)
        return values.masked_fill(~there.reshape(*there.shape, *(1,) * (values.ndim - 2)), 0)

    return Trajectories(
        inputs=join_inputs([wave.inputs for wave in waves], rows),
        trace={key: torch.cat([wave.trace[key] for wave in waves])[rows] for key in waves[0].trace},
        log_prob=joined("log_prob"),
        value=joined("value"),
        reward=happened("reward"),
        success=happened("success"),
        executed=happened("executed"),
        mask=happened("mask"),
        terminated=happened("terminated"),
        truncated=happened("truncated"),
        final_value=happened("final_value"),
        last_value=torch.cat([wave.last_value for wave in waves]),
        version=min(wave.version for wave in waves),
        # No group is in two waves, even where two tasks have given theirs the same names.
        group=torch.cat([wave.group + (n << NAMES) for n, wave in enumerate(waves) if wave.group is not None]),
        step_reward=None if waves[0].step_reward is None else happened("step_reward"),
    )


def _outcome(step: Step, name: str) -> np.ndarray:
    """What came of a step, a number for each environment; reward is summed over the chunk (`step_reward` is not),
    success is any."""
    assert step.outcome is not None, "gathered before its outcome was collected"
    if name == "step_reward":
        return step.outcome.reward
    values: np.ndarray = getattr(step.outcome, name)
    if name == "reward":
        values = values.sum(1)
    if name == "success":
        values = np.asarray(values.any(1))
    return values


def _final_values(steps: Sequence[Step], places: list[_Place], count: int, num_envs: int, value: Value) -> Tensor:
    """[T, B] the value of each ended episode's own final observation, in one forward pass."""
    values = torch.zeros(count, num_envs)
    finals = {(number, env): inputs for number, step in enumerate(steps) for env, inputs in step.finals}
    found = [(place, finals[place.step, place.env]) for place in places if (place.step, place.env) in finals]
    if found:
        inputs = join_inputs([final for _, final in found], torch.arange(len(found)))
        values[[place.t for place, _ in found], [place.env for place, _ in found]] = _at_first(value(inputs))
    return values


def _at_first(value: Tensor) -> Tensor:
    """[B] of [B], or of the first action's [B, C]: the value of an observation before anything is done there."""
    return value if value.ndim == 1 else value[:, 0]
