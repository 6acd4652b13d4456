"""Objectives: loss functions of the policy, by the names that workflows use.

Like the losses of `ppo.py`, each is a sum over units; the caller divides.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional

from embodied.algorithms.estimators import Rows
from embodied.algorithms.ppo import (
    PolicyLoss,
    RatioUnit,
    Units,
    advantage_of_units,
    behaviour_weight,
    policy_loss,
    reduce_to_unit,
    sum_units,
)
from embodied.config.schema import LossConfig
from policies.contract import Evaluation

BEHAVIOUR_BOUND = 2.0
"""Truncation of the weight proximal / behaviour where the rollout is one update behind."""
MAX_DRIFT = 0.5
"""Norm of an action's change of velocity, beyond which it is shortened (pi-StepNFT's code)."""
Objective = Callable[[Evaluation, Rows, LossConfig, Units], PolicyLoss]
"""(evaluation of the rows under the present weights, the rows, settings, the units that count) -> the loss."""


def ratio(new: Evaluation, rows: Rows, settings: LossConfig, places: Units) -> PolicyLoss:
    """The clipped surrogate of the probabilities' ratio (`policy_loss`)."""
    unit = settings.ratio_unit
    log_prob, old = (reduce_to_unit(found, rows.executed, unit)[0] for found in (new.log_prob, rows.log_prob))
    gain, high = advantage_of_units(rows.advantage, rows.log_prob.shape[-1], unit), settings.clip_high or settings.clip
    weight = rows.weight[:, None] * rows.importance
    return policy_loss(log_prob, old, gain, places, settings.clip, high, settings.dual_clip, weight)


def contrast(new: Evaluation, rows: Rows, settings: LossConfig, places: Units) -> PolicyLoss:
    """Step-wise negative-aware fine-tuning (pi-StepNFT, arXiv 2603.02083), per action, with y the advantage's sign:

        softplus(1/2 y (E+ - E-)) + contrast_drift * mean (v - v_old)^2

    E+ and E- are squared distances, in the drawn step's variance, of what was drawn from the means of two velocities,
    v_old + b d and v_old - b d, with d = v - v_old no longer than `MAX_DRIFT` and b `contrast_scale`. The mean is
    linear in the velocity, hence E+ - E- = -4 b sum(pull) (`Contrast`). No ratio and no value enters.
    """
    assert new.contrast is not None, "the policy draws no denoising step to compare its velocity with"
    drift, pull = new.contrast.drift, new.contrast.pull
    norm = (drift.square().sum(2) + 1e-16).sqrt()
    shortened = (MAX_DRIFT / norm).clamp(max=1)
    towards = settings.contrast_scale * (pull.sum(2) * shortened)
    sign = torch.sign(rows.advantage)[:, None]
    loss = functional.softplus(-2 * sign * towards) + settings.contrast_drift * drift.square().mean(2)
    with torch.no_grad():
        seen = ratio(new, rows, settings, places)
    return replace(seen, loss=sum_units(loss, places, rows.weight), clipped=(norm > MAX_DRIFT)[places].sum())


def decoupled(rows: Rows, log_prob: Tensor, unit: RatioUnit) -> Rows:
    """The rows for the decoupled objective (`behaviour_weight`), where the rollout's policy is an update behind.

    Ratios are taken to `log_prob` [N, C, A] of the present policy, the proximal one, and every unit is weighted by the
    ratio of the proximal to the acting probability.
    """
    proximal, _ = reduce_to_unit(log_prob, rows.executed, unit)
    behaviour, _ = reduce_to_unit(rows.log_prob, rows.executed, unit)
    return replace(rows, log_prob=log_prob, importance=behaviour_weight(proximal, behaviour, BEHAVIOUR_BOUND))


OBJECTIVES: dict[str, Objective] = {"ratio": ratio, "contrast": contrast}
"""Objectives by the names that workflows use."""
