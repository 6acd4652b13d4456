"""Flow-SDE: a flow policy's denoising as a stochastic process whose steps have a density. Pure functions.

Time runs from t = 1 (noise) to t = 0 (action) in N equal steps, t_i = 1 - i/N, delta = 1/N, with velocity
v = dx/dt. The ODE step is x - delta v. Flow-SDE (pi-RL, arXiv 2510.25889; Flow-GRPO, arXiv 2505.05470) adds
noise of strength sigma and the score term that keeps the marginals of the process:

    x_{i+1} = x - delta [v + sigma_i^2 / (2 t_i) (x + (1 - t_i) v)] + sigma_i sqrt(delta) z,   z ~ N(0, I)
    sigma_i = noise_level sqrt(t_i / (1 - t_i)),  with t_1 for t_0 in the denominator, where 1 - t_0 = 0

The mean is linear in x and v with weights that depend on the step alone, hence `mean_weights`. All of it is
computed in float64; cast it where it meets the network's numbers.
"""

from __future__ import annotations

import torch
from torch import Tensor


def timesteps(steps: int) -> Tensor:
    """t_0 = 1 .. t_N = 0, float64 [N + 1]."""
    return 1 - torch.arange(steps + 1, dtype=torch.float64) / steps


def sigmas(steps: int, noise_level: float) -> Tensor:
    """Noise strength sigma_i of each step, float64 [N]."""
    t = timesteps(steps)
    denominator = 1 - t[:-1]
    denominator[0] = 1 - t[1]
    return noise_level * torch.sqrt(t[:-1] / denominator)


def stds(steps: int, noise_level: float) -> Tensor:
    """Standard deviation s_i = sigma_i sqrt(delta) of each step's result, float64 [N]."""
    return sigmas(steps, noise_level) * steps**-0.5


def mean_weights(steps: int, noise_level: float) -> tuple[Tensor, Tensor]:
    """The weights (of x, of v), each float64 [N], with which step i has the mean w_x x + w_v v.

    At noise level 0 they are (1, -delta): the ODE.
    """
    t, sigma = timesteps(steps)[:-1], sigmas(steps, noise_level)
    score = sigma**2 / (2 * t)
    return 1 - score / steps, -(1 + score * (1 - t)) / steps
