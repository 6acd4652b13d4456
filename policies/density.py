"""The diagonal normal distribution, element by element: what every continuous policy is scored with."""

from __future__ import annotations

import math

import torch
from torch import Tensor

LOG_SQRT_2PI = 0.5 * math.log(2 * math.pi)


def gaussian_log_prob(x: Tensor, mean: Tensor, log_std: Tensor) -> Tensor:
    """log N(x; mean, exp(log_std)^2) per element; the three broadcast against each other.

    Takes log_std, which the callers have exactly, so that no logarithm of an exponential is rounded.
    """
    z = (x - mean) * torch.exp(-log_std)
    return -0.5 * z * z - log_std - LOG_SQRT_2PI


def gaussian_entropy(log_std: Tensor) -> Tensor:
    """Differential entropy in nats per element: 0.5 log(2 pi e s^2) with s = exp(log_std)."""
    return log_std + (0.5 + LOG_SQRT_2PI)
