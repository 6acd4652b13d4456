"""Estimators: from trajectories to advantages (GAE, GRPO, Dr.GRPO, DAPO, REINFORCE++, StepNFT), by the names that
workflows use. Each is a pure function of the whole batch (all ranks); the formulas are in `advantages.py`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from embodied.algorithms.advantages import (
    action_advantages,
    differing,
    generalised_advantages,
    group_advantages,
    group_means,
    informative,
    normalise,
    overlong_penalty,
)
from embodied.algorithms.samples import Estimate
from embodied.config.schema import AdvantageConfig, Config
from embodied.errors import UserError
from embodied.trajectories.batch import Trajectories

Estimator = Callable[[Trajectories, Config], Estimate]


def gae(batch: Trajectories, config: Config) -> Estimate:
    """Generalised advantages (Schulman et al. 2016), each episode's own end bootstrapped, normalised by task."""
    return gae_of(batch, config.advantage)


def gae_of(batch: Trajectories, settings: AdvantageConfig) -> Estimate:
    """`gae` from its own settings."""
    _check_values(batch, settings)
    ends = (batch.terminated, batch.truncated, batch.final_value, batch.last_value)
    counted = batch.mask
    if settings.credit == "action":
        assert batch.step_reward is not None, "gathered without the rewards of single actions"
        counted = batch.mask[..., None] & batch.alive
        advantage, returns = action_advantages(
            batch.step_reward, batch.value, batch.alive, *ends, settings.gamma, settings.lam, settings.bootstrap
        )
    else:
        advantage, returns = generalised_advantages(
            batch.reward, batch.value, *ends, settings.gamma, settings.lam, settings.bootstrap
        )
    advantage = _normalised(advantage, counted, batch.task)
    return Estimate(advantage, returns, batch.mask, torch.ones_like(batch.reward))


def _normalised(advantage: Tensor, counted: Tensor, task: Tensor | None) -> Tensor:
    """`normalise` over the columns of each task separately."""
    if task is None:
        return normalise(advantage, counted)
    found = advantage.clone()
    for number in task.unique():
        mine = task == number
        found[:, mine] = normalise(advantage[:, mine], counted[:, mine])
    return found


def _check_values(batch: Trajectories, settings: AdvantageConfig) -> None:
    """Raise `UserError` unless the policy's values are per chunk or per action, as `advantage.credit`."""
    wanted, found = 3 if settings.credit == "action" else 2, batch.value.ndim
    if found < wanted:
        raise UserError(
            "advantage.credit is action, and the policy has one value for a whole chunk: set it to chunk, or build the "
            "policy with a value for each action"
        )
    if found > wanted:
        raise UserError(
            "the policy has a value for each action: set advantage.credit to action, and loss.ratio_unit too"
        )


def group_relative(batch: Trajectories, config: Config) -> Estimate:
    """GRPO (Shao et al. 2024): every decision of an episode has the episode's advantage within its group.

    Raises ValueError for trajectories that are not whole episodes in episode groups.
    """
    if batch.episode_group is None:
        raise ValueError("group-relative advantages need whole episodes: a workflow with rollout='episodes'")
    settings, size = config.advantage, config.rollout.episode_group
    outcome = judged(batch, config)
    advantage, complete = group_advantages(outcome, batch.episode_group, size, settings.scale)
    informative_group = complete & differing(outcome, batch.episode_group, size)
    if settings.keep_rates is not None:
        solved = (batch.success & batch.mask).any(0).float()
        informative_group &= informative(solved, batch.episode_group, size, *settings.keep_rates)
    keep = per_decision(informative_group & _counts(batch, settings), batch)
    nothing = torch.zeros_like(batch.reward)
    return Estimate(per_decision(advantage, batch), nothing, keep, nothing + 1)


def reinforce(batch: Trajectories, config: Config) -> Estimate:
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): the episode's outcome, normalised over all decisions.
    With `advantage.baseline: group` the outcome is less the episode group's mean. With `advantage.credit: action` all
    this is of single actions, the tokens of an answer.

    Raises ValueError for trajectories that are not whole episodes in episode groups.
    """
    if batch.episode_group is None:
        raise ValueError("REINFORCE++ needs whole episodes: a workflow with rollout='episodes'")
    settings, outcome = config.advantage, judged(batch, config)
    keep = batch.mask & _counts(batch, settings)
    if settings.baseline == "group":
        mean, complete = group_means(outcome, batch.episode_group, config.rollout.episode_group)
        outcome, keep = outcome - mean, keep & complete
    counted = keep
    if settings.credit == "action":  # [T, C, B]
        counted = keep[:, None] & batch.alive.transpose(1, 2)
    returns = torch.where(counted, outcome, 0.0)
    advantage = torch.where(counted, normalise(returns, counted), 0.0) if bool(counted.any()) else returns
    if settings.credit == "action":
        advantage = advantage.transpose(1, 2)
    return Estimate(advantage, torch.zeros_like(batch.reward), keep, torch.ones_like(batch.reward))


def binary(batch: Trajectories, config: Config) -> Estimate:
    """1 for every decision of an episode that was solved, -1 for those of the others (pi-StepNFT, arXiv 2603.02083)."""
    outcome = torch.where((batch.success & batch.mask).any(0), 1.0, -1.0)
    nothing = torch.zeros_like(batch.reward)
    return Estimate(per_decision(outcome, batch), nothing, batch.mask, nothing + 1)


def judged(batch: Trajectories, config: Config) -> Tensor:
    """[B] outcome of each episode, less what it loses for its length."""
    outcome, margin = outcomes(batch, config.advantage), config.advantage.overlong_margin
    if margin is None:
        return outcome
    length, of = (batch.executed * batch.mask).sum(0), torch.zeros_like(outcome, dtype=torch.int64)
    if batch.task is not None:
        of = batch.task
    for number, limit in enumerate(overlong_limits(config)):
        penalty = overlong_penalty(length, limit, margin).to(outcome.dtype)
        outcome = torch.where(of == number, outcome + penalty, outcome)
    return outcome


def _counts(batch: Trajectories, settings: AdvantageConfig) -> Tensor:
    """[B] bool: the episode may carry a gradient, which one that was cut off at its limit may be denied."""
    cut_off = (batch.truncated & batch.mask).any(0)
    return ~cut_off if settings.overlong == "masked" else torch.ones_like(cut_off)


def overlong_limits(config: Config) -> list[int]:
    """Env steps of an episode of each task. Raises `UserError` where that is not set, or less than the margin."""
    margin, found = config.advantage.overlong_margin or 0, []
    for differs in ({}, *config.extra_tasks):
        limit = differs.get("max_episode_steps", config.env.max_episode_steps)
        if limit is None or margin > limit:
            raise UserError(
                f"advantage.overlong is {margin}, and max_episode_steps of "
                f"{differs.get('task', config.env.task)} {'not set' if limit is None else limit}: set it "
                "(env.max_episode_steps), to as many env steps as an episode may have, and no less than the margin"
            )
        found.append(limit)
    return found


def outcomes(batch: Trajectories, settings: AdvantageConfig) -> Tensor:
    """[B] what each episode is judged by: 1 where it was solved, or its return."""
    if settings.outcome == "success":
        return (batch.success & batch.mask).any(0).to(batch.reward.dtype)
    # In double precision, so that equal episodes have equal returns: how a sum rounds depends on the column's place.
    return (batch.reward * batch.mask).double().sum(0).to(batch.reward.dtype)


def per_decision(values: Tensor, batch: Trajectories) -> Tensor:
    """[B] to [T, B]."""
    return values[None].expand_as(batch.mask)


ESTIMATORS: dict[str, Estimator] = {
    "gae": gae,
    "group_relative": group_relative,
    "reinforce": reinforce,
    "binary": binary,
}
"""Estimators by the names that workflows use."""
