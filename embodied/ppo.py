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


def normalise(advantage: Tensor, mask: Tensor, eps: float = 1e-8) -> Tensor:
    """Zero mean, unit (unbiased) standard deviation over the rows of the global batch where `mask`."""
    chosen = advantage[mask]
    spread = chosen.std() if len(chosen) > 1 else torch.ones(())
    return (advantage - chosen.mean()) / (spread + eps)


def reduce_to_unit(values: Tensor, executed: Tensor, unit: RatioUnit) -> tuple[Tensor, Tensor]:
    """Per-element values [B, C, A] to the ratio's unit [B, U], with the units' mask [B, U].

    `executed` [B] counts the actions of the chunk that were executed: the others had no effect and count
    nothing. `chunk` sums over a chunk's actions, `action` over an action's dimensions, `element` not at all.
    """
    rows, chunk, dims = values.shape
    alive = torch.arange(chunk)[None, :] < executed[:, None]
    values = values * alive[:, :, None]
    if unit == "chunk":
        return values.sum((1, 2))[:, None], torch.ones(rows, 1, dtype=torch.bool)
    if unit == "action":
        return values.sum(2), alive
    return values.reshape(rows, -1), alive.repeat_interleave(dims, dim=1)


def sum_units(values: Tensor, mask: Tensor, weight: Tensor | None = None) -> Tensor:
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
    mask: Tensor,
    clip_low: float,
    clip_high: float,
    dual_clip: float | None = None,
    weight: Tensor | None = None,
) -> PolicyLoss:
    """The clipped surrogate (Schulman et al. 2017, eq. 7), summed over the units where `mask`.

    `log_prob`, `old_log_prob`, `mask` [B, U]; `advantage` [B] belongs to every unit of its row. `dual_clip` bounds
    the loss of negative advantages (Ye et al. 2020, arXiv 1912.09729). `weight` as in `sum_units`: `inverse_lengths`
    for episodes of equal weight, `behaviour_weight` where the policy that acted is not that of `old_log_prob`.
    """
    log_ratio = (log_prob - old_log_prob).clamp(-RATIO_LOG_LIMIT, RATIO_LOG_LIMIT)
    ratio = log_ratio.exp()
    gain = advantage[:, None]
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

    All [B].
    """
    loss = torch.nn.functional.huber_loss(value, returns, reduction="none", delta=HUBER_DELTA)
    if clip is not None:
        near = old_value + (value - old_value).clamp(-clip, clip)
        clipped = torch.nn.functional.huber_loss(near, returns, reduction="none", delta=HUBER_DELTA)
        loss = torch.maximum(loss, clipped)
    return loss.sum() if weight is None else (loss * weight).sum()
