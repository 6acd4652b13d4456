"""Advantages: the formulas of GAE, GRPO, DAPO and REINFORCE++, as pure functions of tensors.

T decisions of B environments, or N episodes, each of one episode group: episodes of the same task and initial state.
Episode groups are named by ids, never by position, so that a lost or added episode does not shift the others. Every
function takes the whole batch (all ranks): statistics of a part of it would make the update depend on the plan.
`estimators.py` applies them to trajectories.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

Credit = Literal["chunk", "action"]
Scale = Literal["group", "batch", "none"]


def generalised_advantages(
    reward: Tensor,
    value: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor,
    last_value: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Literal["truncated", "always"] = "truncated",
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, both [T, B] (Schulman et al. 2016, with each episode's own end bootstrapped).

    `reward`, `value` [T, B]; `terminated`, `truncated` [T, B] bool, the decision ended its episode;
    `final_value` [T, B] is the value of that ended episode's final observation (read only where it ended);
    `last_value` [B] the value of the observation after the last decision. `bootstrap="always"` treats a
    termination like a truncation, as if the task continued after the end of the episode.
    """
    cut = terminated | truncated
    dead = terminated if bootstrap == "truncated" else torch.zeros_like(terminated)
    following = torch.cat([value[1:], last_value[None]])
    following = torch.where(cut, final_value, following)
    # `where` rather than a product: what is not read may be NaN, and 0 * NaN is NaN.
    delta = reward + gamma * torch.where(dead, 0.0, following) - value
    advantage = torch.zeros_like(value)
    carry = torch.zeros_like(last_value)
    for t in reversed(range(len(reward))):
        carry = delta[t] + gamma * lam * torch.where(cut[t], 0.0, carry)
        advantage[t] = carry
    return advantage, advantage + value


def action_advantages(
    reward: Tensor,
    value: Tensor,
    alive: Tensor,
    terminated: Tensor,
    truncated: Tensor,
    final_value: Tensor,
    last_value: Tensor,
    gamma: float,
    lam: float,
    bootstrap: Literal["truncated", "always"] = "truncated",
) -> tuple[Tensor, Tensor]:
    """`generalised_advantages` with a step per action of a chunk: advantages and returns, both [T, B, C].

    `reward` [T, B, C] of each env step; `value` [T, B, C], action by action, as foreseen when the chunk was decided;
    `alive` [T, B, C] bool, the action was executed. Actions that were not have advantage 0 and no part in the others'.
    The value of what follows a chunk's last executed action is that of the next chunk's first, `final_value` where the
    episode ended, `last_value` at the end of the rollout.
    """
    cut = terminated | truncated
    dead = terminated if bootstrap == "truncated" else torch.zeros_like(terminated)
    advantage = torch.zeros_like(value)
    following, carry = last_value, torch.zeros_like(last_value)
    for t in reversed(range(len(value))):
        following = torch.where(dead[t], 0.0, torch.where(cut[t], final_value[t], following))
        carry = torch.where(cut[t], 0.0, carry)
        for action in reversed(range(value.shape[2])):
            counts = alive[t, :, action]
            now = reward[t, :, action] + gamma * following - value[t, :, action] + gamma * lam * carry
            advantage[t, :, action] = torch.where(counts, now, 0.0)
            carry = torch.where(counts, now, carry)
            following = torch.where(counts, value[t, :, action], following)
    return advantage, advantage + value


def normalise(advantage: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Zero mean, unit (unbiased) standard deviation over the entries of the global batch where `mask`."""
    chosen = advantage[mask]
    spread = chosen.std() if len(chosen) > 1 else torch.ones(())
    return (advantage - chosen.mean()) / (spread + eps)


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
    """Addition to each episode's outcome float64 [N], in [-1, 0] (DAPO's soft overlong punishment: eq. 13).

    `length` [N] int64, `longest` and `margin` in one unit (env steps, say): 0 up to `longest - margin`, then
    falling linearly to -1 at `longest`, and -1 beyond. Raises ValueError unless 0 < margin <= longest.
    """
    if not 0 < margin <= longest:
        raise ValueError(f"the margin must be positive and at most the longest length {longest}, not {margin}")
    return ((longest - margin - length).double() / margin).clamp(-1, 0)


def _per_group(
    outcome: Tensor, group: Tensor, size: int, statistic: Callable[[Tensor], Tensor]
) -> tuple[Tensor, Tensor]:
    """`statistic` of the outcomes of each episode's group [N], 0 where incomplete; [N] bool, True if it is complete.

    Each group is computed alone, from its sorted outcomes, so that neither the order of its members nor the
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
