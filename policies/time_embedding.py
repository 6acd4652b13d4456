"""The embedding of a denoising time."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def time_embedding(t: Tensor, width: int) -> Tensor:
    """[N] times in [0, 1] to float64 [N, width]: sines and cosines of periods from 0.004 to 4 (those of pi0).

    float64, since at the shortest period a rounding of t by 1e-7 is a phase of 1e-4.
    """
    periods = 0.004 * 1000 ** torch.linspace(0, 1, width // 2, dtype=torch.float64, device=t.device)
    phase = 2 * math.pi * t.double()[:, None] / periods
    return torch.cat([phase.sin(), phase.cos()], -1)
