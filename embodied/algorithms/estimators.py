"""From trajectories to rows to learn from: the estimators that workflows name.

An estimator is a function of (trajectories, configuration). It sees whole episodes or a whole rollout, never a
minibatch. Only the estimator depends on how the algorithm uses rewards; the learner's update is the same for all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from embodied.algorithms.episode_groups import (
    differing,
    group_advantages,
    group_means,
    informative,
    overlong_penalty,
    reinforce_returns,
)
from embodied.algorithms.ppo import action_advantages, alive_actions, generalised_advantages, normalise
from embodied.config import AdvantageConfig, Config
from embodied.data.trajectories import Decisions, HeldDecisions, Trajectories, join_decisions
from embodied.errors import UserError
from policies.contract import Inputs


@dataclass(frozen=True)
class Estimate:
    """What an estimator makes of trajectories; all [T, B]. Where single actions have credit of their own, advantages
    and returns are [T, B, C]."""

    advantage: Tensor
    returns: Tensor
    """What the critic should have said; read only where the workflow trains one."""
    keep: Tensor
    """bool, the decision is worth learning from."""
    weight: Tensor
    """Of each of the decision's units (`loss.ratio_unit`) in the loss; the update divides by the weights' sum."""


Estimator = Callable[[Trajectories, Config], Estimate]


@dataclass(frozen=True)
class Rows:
    """The decisions to learn from, flattened; every tensor has N rows."""

    decisions: Decisions
    """Their observations and traces, where they are kept."""
    log_prob: Tensor
    """[N, C, A] under the policy that acted."""
    value: Tensor
    """[N], or [N, C] where single actions have credit of their own; advantages and returns alike."""
    advantage: Tensor
    returns: Tensor
    executed: Tensor
    weight: Tensor
    """[N] of the row in the loss and in its denominator."""
    importance: Tensor
    """[N, 1] or [N, U] of its units in the loss alone: how much likelier the policy makes them than the one that acted
    did, where that is an update behind."""
    reference_log_prob: Tensor | None = None
    """[N, C, A] under the frozen reference policy, where the workflow has one."""
    precomputed: Mapping[str, Tensor] = field(default_factory=dict)
    """What `Policy.precompute` found, [N, ...] each; it joins the traces."""

    def take(self, index: Tensor) -> Rows:
        """The rows at `index`; observations and traces stay where they are."""
        reference = self.reference_log_prob
        return self._with(
            self.decisions.select(index),
            {key: getattr(self, key)[index] for key in PER_ROW},
            None if reference is None else reference[index],
            {key: tensor[index] for key, tensor in self.precomputed.items()},
        )

    def to(self, device: torch.device) -> Rows:
        """The same rows with all tensors on the device, observations and traces too: each is copied once."""
        reference = self.reference_log_prob
        return self._with(
            HeldDecisions(self.decisions.inputs(device), self.decisions.trace(device)),
            {key: getattr(self, key).to(device) for key in PER_ROW},
            None if reference is None else reference.to(device),
            {key: tensor.to(device) for key, tensor in self.precomputed.items()},
        )

    def _with(
        self, decisions: Decisions, tensors: dict[str, Any], reference: Tensor | None, precomputed: dict[str, Tensor]
    ) -> Rows:
        return Rows(decisions, **tensors, reference_log_prob=reference, precomputed=precomputed)

    @property
    def inputs(self) -> Inputs:
        return self.decisions.inputs()

    @property
    def trace(self) -> dict[str, Tensor]:
        return {**self.decisions.trace(), **self.precomputed}

    def __len__(self) -> int:
        return len(self.value)


PER_ROW = ("log_prob", "value", "advantage", "returns", "executed", "weight", "importance")


def rows_of(batch: Trajectories, estimate: Estimate) -> Rows:
    """The batch's rows, without decisions that were not taken and those that teach nothing."""
    reference = batch.reference_log_prob
    rows = Rows(
        batch.decisions,
        batch.log_prob.flatten(0, 1),
        batch.value.flatten(0, 1),
        estimate.advantage.flatten(0, 1),
        estimate.returns.flatten(0, 1),
        batch.executed.flatten(),
        estimate.weight.flatten(),
        torch.ones(batch.mask.numel(), 1),
        None if reference is None else reference.flatten(0, 1),
    )
    chosen = batch.mask & estimate.keep
    return rows if bool(chosen.all()) else rows.take(chosen.flatten().nonzero()[:, 0])


def join_rows(parts: Sequence[Rows]) -> Rows:
    """The rows of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    references = [part.reference_log_prob for part in parts]
    known = [reference for reference in references if reference is not None]
    tensors: dict[str, Any] = {key: torch.cat([getattr(part, key) for part in parts]) for key in PER_ROW}
    decisions = join_decisions([part.decisions for part in parts])
    return Rows(decisions, **tensors, reference_log_prob=torch.cat(known) if known else None)


def gae(batch: Trajectories, config: Config) -> Estimate:
    """Generalised advantages (Schulman et al. 2016), each episode's own end bootstrapped, normalised over the batch."""
    return gae_of(batch, config.advantage)


def gae_of(batch: Trajectories, settings: AdvantageConfig) -> Estimate:
    """`gae` from its own settings."""
    _check_values(batch, settings)
    ends = (batch.terminated, batch.truncated, batch.final_value, batch.last_value)
    counted = batch.mask
    if settings.credit == "action":
        assert batch.step_reward is not None, "gathered without the rewards of single actions"
        counted = batch.mask[..., None] & alive_actions(batch.executed, batch.value.shape[2])
        advantage, returns = action_advantages(
            batch.step_reward, batch.value, batch.executed, *ends, settings.gamma, settings.lam, settings.bootstrap
        )
    else:
        advantage, returns = generalised_advantages(
            batch.reward, batch.value, *ends, settings.gamma, settings.lam, settings.bootstrap
        )
    if settings.normalise != "none":
        advantage = _normalised(advantage, counted, batch.task if settings.normalise == "task" else None)
    return Estimate(advantage, returns, batch.mask, torch.ones_like(batch.reward))


def _normalised(advantage: Tensor, counted: Tensor, task: Tensor | None) -> Tensor:
    """`normalise` over all columns, or over those of each task by itself."""
    if task is None:
        return normalise(advantage, counted)
    found = advantage.clone()
    for number in task.unique():
        mine = task == number
        found[:, mine] = normalise(advantage[:, mine], counted[:, mine])
    return found


def _check_values(batch: Trajectories, settings: AdvantageConfig) -> None:
    """Raise `UserError` unless the policy has a value for each of what has credit."""
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
    teaches = complete & differing(outcome, batch.episode_group, size)
    if settings.keep_rates is not None:
        solved = (batch.success & batch.mask).any(0).float()
        teaches &= informative(solved, batch.episode_group, size, *settings.keep_rates)
    rows = _weights(batch, config)
    return Estimate(rows_like(advantage, batch), torch.zeros_like(batch.reward), rows_like(teaches, batch), rows)


def reinforce(batch: Trajectories, config: Config) -> Estimate:
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): what is left of the episode's outcome, less the KL divergence of
    the decisions from here on, normalised over all decisions. With `advantage.baseline: group` the outcome is less the
    episode group's mean.

    Raises ValueError for trajectories that are not whole episodes in episode groups.
    """
    if batch.episode_group is None:
        raise ValueError("REINFORCE++ needs whole episodes: a workflow with rollout='episodes'")
    settings, outcome, keep = config.advantage, judged(batch, config), batch.mask
    if settings.baseline == "group":
        mean, complete = group_means(outcome, batch.episode_group, config.rollout.episode_group)
        outcome, keep = outcome - mean, keep & complete
    last = batch.mask & ~torch.cat([batch.mask[1:], torch.zeros_like(batch.mask[:1])])
    reward = torch.where(last, outcome[None], 0.0)
    divergence = _divergence(batch) if settings.reward_kl else torch.zeros_like(reward)
    returns = reinforce_returns(reward, divergence, last, keep, settings.reward_kl)
    advantage = torch.where(keep, normalise(returns, keep), 0.0) if bool(keep.any()) else returns
    return Estimate(advantage, torch.zeros_like(reward), keep, _weights(batch, config))


def binary(batch: Trajectories, config: Config) -> Estimate:
    """1 for every decision of an episode that was solved, -1 for those of the others (pi-StepNFT, arXiv 2603.02083)."""
    outcome = torch.where((batch.success & batch.mask).any(0), 1.0, -1.0)
    return Estimate(rows_like(outcome, batch), torch.zeros_like(batch.reward), batch.mask, _weights(batch, config))


def _divergence(batch: Trajectories) -> Tensor:
    """[T, B]: log(policy / reference) of each decision's executed actions (Schulman 2020, k1)."""
    assert batch.reference_log_prob is not None, "the workflow has no reference policy"
    alive = alive_actions(batch.executed, batch.log_prob.shape[2])[..., None]
    return ((batch.log_prob - batch.reference_log_prob) * alive).sum((2, 3))


def _weights(batch: Trajectories, config: Config) -> Tensor:
    """[T, B]: of each decision's units in the loss, so that decisions or whole episodes count alike."""
    rows = torch.ones_like(batch.reward)
    if config.loss.weight == "episode":
        units = batch.mask if config.loss.ratio_unit == "chunk" else batch.executed * batch.mask
        rows = rows / units.sum(0).clamp(min=1)
    return rows


def judged(batch: Trajectories, config: Config) -> Tensor:
    """[B]: `outcomes`, less what an episode loses for its length."""
    outcome, margin = outcomes(batch, config.advantage), config.advantage.overlong_margin
    if margin is None:
        return outcome
    length, of = (batch.executed * batch.mask).sum(0), torch.zeros_like(outcome, dtype=torch.int64)
    if batch.task is not None:
        of = batch.task
    for number, limit in enumerate(overlong_limits(config)):
        outcome = torch.where(of == number, outcome + overlong_penalty(length, limit, margin), outcome)
    return outcome


def overlong_limits(config: Config) -> list[int]:
    """Env steps of an episode of each task. Raises `UserError` where that is not set, or less than the margin."""
    margin, found = config.advantage.overlong_margin or 0, []
    for differs in ({}, *config.extra_tasks):
        limit = differs.get("max_episode_steps", config.env.max_episode_steps)
        if limit is None or margin > limit:
            raise UserError(
                f"advantage.overlong_margin is {margin}, and max_episode_steps of "
                f"{differs.get('task', config.env.task)} {'not set' if limit is None else limit}: set it "
                "(env.max_episode_steps), to as many env steps as an episode may have, and no less than the margin"
            )
        found.append(limit)
    return found


def outcomes(batch: Trajectories, settings: AdvantageConfig) -> Tensor:
    """[B] what each episode is judged by: 1 where it was solved, or its return."""
    if settings.outcome == "success":
        return (batch.success & batch.mask).any(0).float()
    # In double precision, so that equal episodes have equal returns: how a sum rounds depends on the column's place.
    return (batch.reward * batch.mask).double().sum(0).float()


def rows_like(values: Tensor, batch: Trajectories) -> Tensor:
    """[B] to [T, B]."""
    return values[None].expand_as(batch.mask)


ESTIMATORS: dict[str, Estimator] = {
    "gae": gae,
    "group_relative": group_relative,
    "reinforce": reinforce,
    "binary": binary,
}
"""By the names that workflows use."""
