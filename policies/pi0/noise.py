"""Flow-noise: how far a drawn step of the integration is moved, which the policy learns."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from policies.contract import PolicyError
from policies.layers import mlp


class NoiseNet(nn.Module):
    """log s = (1 - u) / 2 log s_min + (1 + u) / 2 log s_max with u = tanh(MLP(h)), of the expert's outputs h.

    The bounds are the standard deviations that are possible (RLinf's explore_noise_net.py, ReinFlow's ppoflow.py).
    """

    def __init__(self, width: int, numbers: int, bounds: Sequence[float], widths: Sequence[int]) -> None:
        super().__init__()
        if len(bounds) != 2 or not 0 < bounds[0] <= bounds[1]:
            raise PolicyError(f"noise_bounds must be two standard deviations, 0 < least <= most, got {list(bounds)}")
        self.low, self.high = (math.log(bound) for bound in bounds)
        self.net = mlp(width, widths, numbers, last_gain=0.01)

    def forward(self, hidden: Tensor) -> Tensor:
        """[.., w] to log-standard deviations [.., A]: in the middle of the bounds at first."""
        u = torch.tanh(self.net(hidden.float()))
        return self.low + (self.high - self.low) * (u + 1) / 2
