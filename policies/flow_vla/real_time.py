"""Real-time chunking: a flow is guided so that its chunk agrees with what is left of the last one, which is executed
while it is computed (arXiv 2506.07339).

With t = 1 for noise and t = 0 for actions, velocity v, target y (the left-over), weights w of the chunk's actions, and
the estimate of the clean chunk  a(x) = x - t v(x):

    v' = v - g e,   e = (da/dx)^T w (y - a),   g = min(most, t / (1 - t) (t^2 + (1 - t)^2) / t^2)

The paper's time is 1 - t, and its velocity -v. LeRobot 0.6 computes v before x requires a gradient, so that da/dx is
the identity: e = w (y - a).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from policies.denoising import Field

SCHEDULES = ("exp", "linear", "ones", "zeros")


def weights(schedule: str, delay: int, end: int, count: int) -> Tensor:
    """[count] float32 weights of a chunk's actions: 1 for the first `delay`, which are executed before the chunk
    arrives, 0 from `end` on, and between them by the schedule.

    `linear`: falling along a line, c_i = (end - i) / (end - delay + 1); `exp`: c_i (e^c_i - 1) / (e - 1), the paper's
    equation 5; `ones`; `zeros`.
    """
    place = torch.arange(count, dtype=torch.float64)
    delay = min(delay, end)
    line = (end - place) / (end - delay + 1)
    between = {
        "linear": line,
        "exp": line * torch.expm1(line) / math.expm1(1.0),
        "ones": torch.ones_like(line),
        "zeros": torch.zeros_like(line),
    }[schedule]
    found = torch.where(place < delay, torch.ones_like(line), between)
    return found.masked_fill(place >= end, 0.0).float()


def guidance(t: float, most: float) -> float:
    """g at time t: `most` at t = 1, where the paper's weight has no bound."""
    if t >= 1:
        return most
    return min(most, (t * t + (1 - t) ** 2) / (t * (1 - t)))


@dataclass(frozen=True)
class Guide:
    """What a chunk is guided to."""

    target: Tensor
    """[B, D] the left-over in the network's units, filled up."""
    weights: Tensor
    """[B, D]; a row of zeros is not guided."""
    most: float
    """Largest guidance weight."""
    jacobian: bool
    """True: e has the Jacobian, as in the paper; False: as LeRobot computes it."""

    def guided(self, field: Callable[[Tensor], Field], x: Tensor, t: float) -> Field:
        """The field at x [B, D] and time t, with the guided velocity."""
        with torch.set_grad_enabled(self.jacobian):
            at = x.detach().requires_grad_(self.jacobian)
            found = field(at)
            clean = at - t * found.v
            error = ((self.target - clean) * self.weights).detach()
            if self.jacobian:
                (error,) = torch.autograd.grad(clean, at, error)
        log_std = None if found.log_std is None else found.log_std.detach()
        return Field(found.v.detach() - guidance(t, self.most) * error, log_std)
