"""Estimators: from trajectories to rows with advantages (GAE, GRPO, Dr.GRPO, DAPO, REINFORCE++). Pure functions.

N episodes, each of one episode group: episodes of the same task and initial state. Episode groups are named by ids,
never by position, so that a lost or added episode does not shift the others. Every function takes the whole batch (all
ranks): statistics of a part of it would make the update depend on the plan.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor

from embodied.algorithms.ppo import action_advantages, alive_actions, generalised_advantages, normalise
from embodied.config.schema import AdvantageConfig, Config
from embodied.errors import UserError
from embodied.trajectories.batch import Decisions, TensorDecisions, Trajectories, join_decisions
from policies.contract import Inputs

Scale = Literal["group", "batch", "none"]


def group_advantages(
    outcome: Tensor, group: Tensor, size: int, scale: Scale = "group", eps: float = 1e-6
) -> tuple[Tensor, Tensor]:
    """Advantage of each episode [N], and [N] bool: True if its group is complete.

    `outcome` [N] floating, `group` [N] int64. A group is complete if it has exactly `size` members; episodes of
    others have advantage 0. The advantage is (R - mean of the group) / (deviation + eps), deviations unbiased:

    - `group`: the group's own deviation (GRPO: Shao et al. 2024, section 4.1.2);
    - `batch`: that of all outcomes in complete groups (Lite PPO: Liu et al. 2025, arXiv 2508.08221);
    - `none`: no division (Dr.GRPO: Liu et al. 2025, arXiv 2503.20783).

    Equal outcomes have advantage exactly 0. The order of the episodes changes no bit; except through `batch`,
    neither do other groups. Raises ValueError for fewer than two members or shapes that differ.
    """
    mean, complete = group_means(outcome, group, size)
    advantage = torch.where(complete, outcome - mean, 0.0)
    if scale == "group":
        deviation, _ = _per_group(outcome, group, size, torch.std)
        return advantage / (deviation + eps), complete
    if scale == "batch" and bool(complete.any()):
        return advantage / (outcome[complete].sort().values.std() + eps), complete
    return advantage, complete


def group_means(outcome: Tensor, group: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Mean outcome of each episode's group [N], 0 where it is incomplete, and [N] bool: True if it is complete.

    Arguments and errors as those of `group_advantages`.
    """
    # A mean lies between the extremes; its rounding need not, and then equal outcomes would seem to differ.
    return _per_group(outcome, group, size, lambda values: values.mean().clamp(values[0], values[-1]))


def informative(outcome: Tensor, group: Tensor, size: int, low: float, high: float) -> Tensor:
    """[N] bool: the group is complete and its mean outcome lies in [low, high].

    With outcomes of 0 and 1 that mean is the success rate (SimpleVLA-RL: Li et al. 2025, arXiv 2509.09674, and
    RLinf: 0.1 to 0.9). Arguments and errors as those of `group_advantages`; `outcome` may also be bool.
    """
    rate, complete = _per_group(outcome.double(), group, size, lambda values: values.sum() / size)
    return complete & (rate >= low) & (rate <= high)


def differing(outcome: Tensor, group: Tensor, size: int) -> Tensor:
    """[N] bool: the group is complete and its outcomes are not all equal (DAPO: Yu et al. 2025, eq. 11).

    Arguments and errors as those of `group_advantages`.
    """
    extent, _ = _per_group(outcome, group, size, lambda values: values[-1] - values[0])
    return extent > 0


def overlong_penalty(length: Tensor, longest: int, margin: int) -> Tensor:
    """Addition to each episode's outcome [N], in [-1, 0] (DAPO's soft overlong punishment: eq. 13).

    `length` [N] int64, `longest` and `margin` in one unit (env steps, say): 0 up to `longest - margin`, then
    falling linearly to -1 at `longest`, and -1 beyond. Raises ValueError unless 0 < margin <= longest.
    """
    if not 0 < margin <= longest:
        raise ValueError(f"the margin must be positive and at most the longest length {longest}, not {margin}")
    return ((longest - margin - length) / margin).clamp(-1, 0)


def reinforce_returns(
    reward: Tensor, kl: Tensor, end: Tensor, mask: Tensor, beta: float, baseline: Tensor | None = None
) -> Tensor:
    """Undiscounted rewards-to-go less `beta` times the KL, each within its episode [T, B]; 0 where not `mask`.

    REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): `normalise` over the global batch makes them advantages.
    `reward`, `kl` [T, B], the latter in nats and of the whole decision; `end`, `mask` [T, B] bool, the decision ended
    its episode, was executed. A column holds several episodes one after the other. `baseline` [T, B] is
    subtracted; with the mean outcome of the episode's group (`group_means`) it is REINFORCE++-baseline.
    """
    # `where` rather than a product: what is not read may be NaN, and 0 * NaN is NaN.
    score = torch.where(mask, reward - beta * kl, 0.0)
    returns = torch.zeros_like(score)
    carry = score.new_zeros(score.shape[1:])
    for t in reversed(range(len(score))):
        carry = score[t] + torch.where(end[t], 0.0, carry)
        returns[t] = carry
    return torch.where(mask, returns if baseline is None else returns - baseline, 0.0)


def _per_group(
    outcome: Tensor, group: Tensor, size: int, statistic: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """`statistic` of the outcomes of each episode's group [N], 0 where incomplete; [N] bool, True if it is complete.

    Each group is computed by itself from its sorted outcomes, so that neither the order of its members nor the
    presence of other groups can change a bit of it.
    """
    if size < 2:
        raise ValueError(f"a group needs two members or more to be compared, not {size}")
    if outcome.ndim != 1 or outcome.shape != group.shape:
        raise ValueError(f"outcome and group must be [N] both, not {[*outcome.shape]} and {[*group.shape]}")
    found, complete = torch.zeros_like(outcome), torch.zeros_like(outcome, dtype=torch.bool)
    _, name, count = group.unique(return_inverse=True, return_counts=True)
    for members in name.argsort().split(count.tolist()):
        if len(members) == size:
            found[members] = statistic(outcome[members].sort().values)
            complete[members] = True
    return found, complete


# --- From trajectories to rows to learn from: the estimators that workflows name.


@dataclass(frozen=True)
class Estimate:
    """Result of an estimator; all [T, B]. With `advantage.credit` action, advantages and returns are [T, B, C]."""

    advantage: Tensor
    returns: Tensor
    """Targets of the critic; read only where the workflow trains one."""
    keep: Tensor
    """bool, True if the decision carries a gradient."""
    weight: Tensor
    """Weight of each of the decision's units (`loss.ratio_unit`) in the loss; the update divides by their sum."""


Estimator = Callable[[Trajectories, Config], Estimate]


@dataclass(frozen=True)
class Rows:
    """The decisions to learn from, flattened; every tensor has N rows."""

    decisions: Decisions
    """Observations and traces, in the trajectory memory or in tensors."""
    log_prob: Tensor
    """[N, C, A] under the rollout's policy."""
    value: Tensor
    """[N], or [N, C] with `advantage.credit` action; as advantages and returns."""
    advantage: Tensor
    returns: Tensor
    executed: Tensor
    weight: Tensor
    """[N] weight of the row in the loss and in its denominator."""
    importance: Tensor
    """[N, 1] or [N, U] weight of the row's units in the loss alone: ratio of the present to the rollout's probability,
    where the rollout is an update behind."""
    reference_log_prob: Tensor | None = None
    """[N, C, A] under the frozen reference policy, where the workflow has one."""
    precomputed: Mapping[str, Tensor] = field(default_factory=dict)
    """Results of `Policy.precompute`, [N, ...] each; they join the traces."""

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
            TensorDecisions(self.decisions.inputs(device), self.decisions.trace(device)),
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
    """The batch's rows, without masked decisions and those that carry no gradient."""
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
    keep = rows_like(informative_group, batch)
    weight = _weights(batch, config)
    return Estimate(rows_like(advantage, batch), torch.zeros_like(batch.reward), keep, weight)


def reinforce(batch: Trajectories, config: Config) -> Estimate:
    """REINFORCE++ (Hu et al. 2025, arXiv 2501.03262): the episode's remaining outcome, less the KL divergence of the
    decisions from here on, normalised over all decisions. With `advantage.baseline: group` the outcome is less the
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
"""Estimators by the names that workflows use."""
