"""Proximal policy optimisation: advantages and losses as pure functions.

Every loss here returns a *sum*; the caller divides by a denominator of the whole minibatch, so that loss and
gradient do not depend on how rows are packed into micro-batches or spread over ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RatioUnit = Literal["chunk", "action", "element"]
Credit = Literal["chunk", "action"]
Units = Tensor | tuple[Tensor, ...]
"""Units that count: bool [B, U]; or their indices, rows and columns, whose number is known without waiting for the
GPU."""
RATIO_LOG_LIMIT = 20.0
HUBER_DELTA = 10.0


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
    termination like a truncation: the task goes on to be solved, only the episode is cut.
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
    executed: Tensor,
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
    `executed` [T, B] how many of the chunk's actions were. Actions that were not have advantage 0 and no part in the
    others'. The value of what follows a chunk's last action is that of the next chunk's first, `final_value` where
    the episode ended, `last_value` at the end of the rollout.
    """
    cut = terminated | truncated
    dead = terminated if bootstrap == "truncated" else torch.zeros_like(terminated)
    advantage = torch.zeros_like(value)
    following, carry = last_value, torch.zeros_like(last_value)
    for t in reversed(range(len(value))):
        following = torch.where(dead[t], 0.0, torch.where(cut[t], final_value[t], following))
        carry = torch.where(cut[t], 0.0, carry)
        for action in reversed(range(value.shape[2])):
            alive = action < executed[t]
            now = reward[t, :, action] + gamma * following - value[t, :, action] + gamma * lam * carry
            advantage[t, :, action] = torch.where(alive, now, 0.0)
            carry = torch.where(alive, now, carry)
            following = torch.where(alive, value[t, :, action], following)
    return advantage, advantage + value


def normalise(advantage: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Zero mean, unit (unbiased) standard deviation over the entries of the global batch where `mask`."""
    chosen = advantage[mask]
    spread = chosen.std() if len(chosen) > 1 else torch.ones(())
    return (advantage - chosen.mean()) / (spread + eps)


def reduce_to_unit(values: Tensor, executed: Tensor, unit: RatioUnit) -> tuple[Tensor, Tensor]:
    """Per-element values [B, C, A] to the ratio's unit [B, U], with the units' mask [B, U].

    `executed` [B] counts the actions of the chunk that were executed: the others had no effect and count
    nothing. `chunk` sums over a chunk's actions, `action` over an action's dimensions, `element` not at all.
    """
    rows, chunk, dims = values.shape
    values = values * alive_actions(executed, chunk)[:, :, None]
    mask = unit_mask(executed, chunk, dims, unit)
    if unit == "chunk":
        return values.sum((1, 2))[:, None], mask
    return (values.sum(2) if unit == "action" else values.reshape(rows, -1)), mask


def alive_actions(executed: Tensor, chunk: int) -> Tensor:
    """bool [.., C]: True for the executed actions of each chunk; `executed` [..] is their number."""
    return torch.arange(chunk, device=executed.device) < executed[..., None]


def unit_mask(executed: Tensor, chunk: int, dims: int, unit: RatioUnit) -> Tensor:
    """bool [B, U]: the units that count."""
    if unit == "chunk":
        return torch.ones(len(executed), 1, dtype=torch.bool, device=executed.device)
    alive = alive_actions(executed, chunk)
    return alive if unit == "action" else alive.repeat_interleave(dims, dim=1)


def advantage_of_units(advantage: Tensor, dims: int, unit: RatioUnit) -> Tensor:
    """Advantages [B] of chunks as they are; [B, C] of actions to those of units that are no more than an action."""
    return advantage.repeat_interleave(dims, dim=1) if advantage.ndim == 2 and unit == "element" else advantage


def sum_units(values: Tensor, mask: Units, weight: Tensor | None = None) -> Tensor:
    """Sum of `values` [B, U] over the units where `mask` [B, U], each times its weight.

    `weight` [B] belongs to every unit of its row, [B, U] to one unit; None weighs all alike.
    """
    if weight is not None:
        values = values * (weight if weight.ndim == 2 else weight[:, None])
    return values[mask].sum()


@dataclass(frozen=True)
class PolicyLoss:
    """Sums over the units of some rows. Only the loss is weighted."""

    loss: Tensor
    approx_kl: Tensor
    """Sum of k3 = (ratio - 1) - log ratio (Schulman 2020), no gradient."""
    clipped: Tensor
    """Number of units whose ratio left the clip range, no gradient."""
    off_policy: Tensor
    """Sum of |ratio - 1|, no gradient."""


def policy_loss(
    log_prob: Tensor,
    old_log_prob: Tensor,
    advantage: Tensor,
    mask: Units,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weight: Tensor | None = None,
) -> PolicyLoss:
    """The clipped surrogate (Schulman et al. 2017, eq. 7), summed over the units where `mask`.

    `log_prob`, `old_log_prob`, `mask` [B, U]; `advantage` [B] belongs to every unit of its row, [B, U] to one unit.
    `dual_clip` bounds the loss of negative advantages (Ye et al. 2020, arXiv 1912.09729). `weight` as in `sum_units`:
    inverse lengths for episodes of equal weight, `behaviour_weight` where the policy that acted is not that of
    `old_log_prob`.
    """
    log_ratio = (log_prob - old_log_prob).clamp(-RATIO_LOG_LIMIT, RATIO_LOG_LIMIT)
    ratio = log_ratio.exp()
    gain = advantage if advantage.ndim == 2 else advantage[:, None]
    loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - clip_low, 1 + clip_high))
    if dual_clip is not None:
        loss = torch.where(gain < 0, torch.minimum(loss, -gain * dual_clip), loss)
    with torch.no_grad():
        approx_kl = ((ratio - 1) - log_ratio)[mask].sum()
        outside = ((ratio < 1 - clip_low) | (ratio > 1 + clip_high))[mask].sum()
        off_policy = (ratio - 1).abs()[mask].sum()
    return PolicyLoss(sum_units(loss, mask, weight), approx_kl, outside, off_policy)


def behaviour_weight(proximal_log_prob: Tensor, behaviour_log_prob: Tensor, bound: float) -> Tensor:
    """min(proximal / behaviour, bound) of each unit [B, U], no gradient.

    As the weight of `policy_loss`, with the proximal policy as its old one, it makes the decoupled objective
    (Hilton et al. 2022, arXiv 2110.00641): an asynchronous rollout's actions come from a policy too old
    for the trust region, which is drawn around a newer one, the proximal. Truncation trades bias for variance.
    """
    return (proximal_log_prob - behaviour_log_prob).exp().clamp(max=bound).detach()


def k3(log_prob: Tensor, reference_log_prob: Tensor) -> Tensor:
    """Estimate of KL(policy || reference), in nats, per element of any shape; `sum_units` makes it a loss.

    exp(ref - log_prob) - (ref - log_prob) - 1 for actions of the policy (Schulman 2020; Shao et al. 2024, eq. 4).
    """
    # Bounded above only, against overflow: far below, where the policy must be drawn back, the gradient stays.
    gap = (reference_log_prob - log_prob).clamp(max=RATIO_LOG_LIMIT)
    return gap.exp() - gap - 1


def value_loss(
    value: Tensor, old_value: Tensor, returns: Tensor, clip: float | None, weight: Tensor | None = None
) -> Tensor:
    """Huber loss of the returns, the larger of plain and clipped prediction, each row times its weight, summed.

    All of one shape.
    """
    loss = torch.nn.functional.huber_loss(value, returns, reduction="none", delta=HUBER_DELTA)
    if clip is not None:
        near = old_value + (value - old_value).clamp(-clip, clip)
        clipped = torch.nn.functional.huber_loss(near, returns, reduction="none", delta=HUBER_DELTA)
        loss = torch.maximum(loss, clipped)
    return loss.sum() if weight is None else (loss * weight).sum()
