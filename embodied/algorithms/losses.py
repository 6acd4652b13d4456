"""Losses of an update, as pure functions, and the objectives that workflows name.

An objective is the policy's term: the clipped surrogate of PPO and GRPO, or the contrast of StepNFT. Every loss is a
*sum*; the caller divides by a denominator of the whole minibatch, so that loss and gradient do not depend on how
samples are packed into micro-batches or spread over ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from embodied.algorithms.samples import Samples
from embodied.config.schema import LossConfig
from policies.contract import Evaluation

RatioUnit = Literal["chunk", "action", "element"]
Units = Tensor | tuple[Tensor, ...]
"""Units that count: bool [B, U]; or their indices, rows and columns, whose number is known without waiting for the
GPU."""
RATIO_LOG_LIMIT = 20.0
HUBER_DELTA = 10.0
BEHAVIOUR_BOUND = 2.0
"""Truncation of the weight proximal / behaviour where the rollout is one update behind, or an engine acts (truncated
importance sampling)."""
MAX_DRIFT = 0.5
"""Norm of an action's change of velocity, beyond which it is shortened (pi-StepNFT's code)."""
DRIFT_WEIGHT = 1e-4
"""Weight of the velocity's squared change since the rollout (likewise)."""


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
    weight: Tensor | None = None,
) -> PolicyLoss:
    """The clipped surrogate (Schulman et al. 2017, eq. 7), summed over the units where `mask`.

    `log_prob`, `old_log_prob`, `mask` [B, U]; `advantage` [B] belongs to every unit of its row, [B, U] to one unit.
    `weight` as in `sum_units`: `behaviour_weight` where the policy that acted is not that of `old_log_prob`.
    """
    log_ratio = (log_prob - old_log_prob).clamp(-RATIO_LOG_LIMIT, RATIO_LOG_LIMIT)
    ratio = log_ratio.exp()
    gain = advantage if advantage.ndim == 2 else advantage[:, None]
    loss = torch.maximum(-gain * ratio, -gain * ratio.clamp(1 - clip_low, 1 + clip_high))
    with torch.no_grad():
        approx_kl = ((ratio - 1) - log_ratio)[mask].sum()
        outside = ((ratio < 1 - clip_low) | (ratio > 1 + clip_high))[mask].sum()
        off_policy = (ratio - 1).abs()[mask].sum()
    return PolicyLoss(sum_units(loss, mask, weight), approx_kl, outside, off_policy)


def behaviour_weight(proximal_log_prob: Tensor, behaviour_log_prob: Tensor, bound: float) -> Tensor:
    """min(proximal / behaviour, bound) of each unit [B, U], no gradient.

    As the weight of `policy_loss`, with the proximal policy as its old one, it makes the decoupled objective
    (Hilton et al. 2022, arXiv 2110.00641): an asynchronous rollout's actions come from a policy too old
    for the trust region, which is drawn around a newer one, the proximal. So do those of an engine that computes the
    same policy with other rounding (Yao et al. 2025: truncated importance sampling). Truncation trades bias for
    variance.
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


# --- units of the ratio: a chunk, an action of it, or one number of it


def reduce_to_unit(values: Tensor, alive: Tensor, unit: RatioUnit) -> tuple[Tensor, Tensor]:
    """Per-element values [B, C, A] to the ratio's unit [B, U], with the units' mask [B, U].

    `alive` [B, C] marks the actions of the chunk that were executed: the others had no effect and count nothing.
    `chunk` sums over a chunk's actions, `action` over an action's dimensions, `element` not at all.
    """
    rows, _, dims = values.shape
    values = values * alive[:, :, None]
    mask = unit_mask(alive, dims, unit)
    if unit == "chunk":
        return values.sum((1, 2))[:, None], mask
    return (values.sum(2) if unit == "action" else values.reshape(rows, -1)), mask


def unit_mask(alive: Tensor, dims: int, unit: RatioUnit) -> Tensor:
    """bool [B, U]: the units that count, of chunks whose executed actions are `alive` [B, C]."""
    if unit == "chunk":
        return torch.ones(len(alive), 1, dtype=torch.bool, device=alive.device)
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


# --- objectives, by the names that workflows use


Objective = Callable[[Evaluation, Samples, LossConfig, Units], PolicyLoss]
"""(evaluation of the samples under the present weights, the samples, settings, the units that count) -> the loss."""


def ratio(new: Evaluation, samples: Samples, settings: LossConfig, places: Units) -> PolicyLoss:
    """The clipped surrogate of the probabilities' ratio (`policy_loss`)."""
    unit = settings.ratio_unit
    log_prob, old = (reduce_to_unit(found, samples.alive, unit)[0] for found in (new.log_prob, samples.log_prob))
    gain, high = (
        advantage_of_units(samples.advantage, samples.log_prob.shape[-1], unit),
        settings.clip_high or settings.clip,
    )
    weight = samples.weight[:, None] * samples.importance
    return policy_loss(log_prob, old, gain, places, settings.clip, high, weight)


def contrast(new: Evaluation, samples: Samples, settings: LossConfig, places: Units) -> PolicyLoss:
    """Step-wise negative-aware fine-tuning (pi-StepNFT, arXiv 2603.02083), per action, with y the advantage's sign:

        softplus(1/2 y (E+ - E-)) + DRIFT_WEIGHT * mean (v - v_old)^2

    E+ and E- are the squared distances of the drawn sample from the means that two velocities give, v_old + d and
    v_old - d, in units of the step's variance. Here d is v - v_old, shortened to `MAX_DRIFT` if it is longer. The mean
    is linear in the velocity, so E+ - E- = -4 sum(pull) (`Contrast`). The loss uses neither a probability ratio nor a
    value.
    """
    assert new.contrast is not None, "the policy draws no denoising step to compare its velocity with"
    drift, pull = new.contrast.drift, new.contrast.pull
    norm = (drift.square().sum(2) + 1e-16).sqrt()
    shortened = (MAX_DRIFT / norm).clamp(max=1)
    towards = pull.sum(2) * shortened
    sign = torch.sign(samples.advantage)[:, None]
    loss = functional.softplus(-2 * sign * towards) + DRIFT_WEIGHT * drift.square().mean(2)
    with torch.no_grad():
        seen = ratio(new, samples, settings, places)
    return replace(seen, loss=sum_units(loss, places, samples.weight), clipped=(norm > MAX_DRIFT)[places].sum())


def decoupled(samples: Samples, log_prob: Tensor, unit: RatioUnit) -> Samples:
    """The samples for the decoupled objective (`behaviour_weight`), where the rollout's policy is an update behind, or
    an engine's.

    Ratios are taken to `log_prob` [N, C, A] of the present policy, the proximal one, and every unit is weighted by the
    ratio of the proximal to the acting probability.
    """
    proximal, _ = reduce_to_unit(log_prob, samples.alive, unit)
    behaviour, _ = reduce_to_unit(samples.log_prob, samples.alive, unit)
    return replace(samples, log_prob=log_prob, importance=behaviour_weight(proximal, behaviour, BEHAVIOUR_BOUND))


def divergence(samples: Samples, log_prob: Tensor) -> tuple[float, int]:
    """Sum over the executed actions, and their number, of k3 as an estimate of KL(acting policy || learner), in nats.

    `log_prob` [N, C, A] are the learner's, of the weights that the acting policy has too.
    """
    # In float64: what is measured is of the size of float32's rounding where the two are the same program.
    acted, mask = reduce_to_unit(samples.log_prob.double(), samples.alive, "action")
    learners, _ = reduce_to_unit(log_prob.double(), samples.alive, "action")
    return float(k3(acted, learners)[mask].sum()), int(mask.sum())


OBJECTIVES: dict[str, Objective] = {"ratio": ratio, "contrast": contrast}
