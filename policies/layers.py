"""Building blocks of several policies: layers, time embedding, the normal density, the imitation loss's mask."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from policies.contract import PolicyError

HIDDEN_GAIN = math.sqrt(2)
MOST_LAYERS, WIDEST = 64, 2**16
ROTATION_BASE = 10_000.0


def orthogonal(layer: nn.Linear | nn.Conv2d, gain: float = HIDDEN_GAIN) -> nn.Linear | nn.Conv2d:
    """The layer with orthogonal weights and, where it has one, a zero bias."""
    nn.init.orthogonal_(layer.weight, gain)
    if layer.bias is not None:
        nn.init.zeros_(layer.bias)
    return layer


def mlp(
    inputs: int,
    widths: Sequence[int],
    outputs: int,
    *,
    last_gain: float,
    activation: type[nn.Module] = nn.Tanh,
) -> nn.Sequential:
    """[.., inputs] to [.., outputs]: hidden layers with the activation, then a linear one with gain `last_gain`."""
    layers: list[nn.Module] = []
    for width in widths:
        layers += [orthogonal(nn.Linear(inputs, width)), activation()]
        inputs = width
    return nn.Sequential(*layers, orthogonal(nn.Linear(inputs, outputs), last_gain))


def checked_widths(name: str, widths: Sequence[int]) -> tuple[int, ...]:
    """The widths as a tuple of positive whole numbers, or a `PolicyError` that names the argument."""
    if (
        not isinstance(widths, (list, tuple))
        or len(widths) > MOST_LAYERS
        or not all(isinstance(width, int) and 0 < width <= WIDEST for width in widths)
    ):
        raise PolicyError(
            f"{name} is a list of positive layer widths such as [256, 256] (at most {MOST_LAYERS}, of at most "
            f"{WIDEST}), got {widths!r:.100}"
        )
    return tuple(widths)


def checked_noise(noise: Tensor, noise_dim: int) -> Tensor:
    """The noise itself, if it has the width that the policy draws from."""
    if noise.dim() != 2 or noise.shape[1] != noise_dim:
        raise PolicyError(f"noise must be [B, {noise_dim}] for this policy, got {list(noise.shape)}")
    return noise


def time_embedding(t: Tensor, width: int) -> Tensor:
    """[N] times in [0, 1] to float64 [N, width]: sines and cosines of periods from 0.004 to 4 (those of pi0).

    float64, since at the shortest period a rounding of t by 1e-7 is a phase of 1e-4.
    """
    periods = 0.004 * 1000 ** torch.linspace(0, 1, width // 2, dtype=torch.float64, device=t.device)
    phase = 2 * math.pi * t.double()[:, None] / periods
    return torch.cat([phase.sin(), phase.cos()], -1)


# --- the diagonal normal distribution, element by element: the density of every continuous policy

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


# --- imitation losses: B rows, C actions of a chunk, A action dimensions


def only_counted(actions: Tensor, counted: Tensor) -> Tensor:
    """[B, H, A] with zeros for the actions that are not counted [B, H], whatever stands there: NaN times zero, in a
    backward pass, would still be NaN."""
    return torch.where(counted[..., None], actions, torch.zeros_like(actions))


def counted_mean(losses: Tensor, counted: Tensor) -> Tensor:
    """[B]: each row's mean of the losses [B, H, A] over its counted actions [B, H]; 0 for a row without any."""
    weights = counted[..., None].to(losses.dtype).expand_as(losses)
    return (losses * weights).sum((1, 2)) / weights.sum((1, 2)).clamp(min=1)


def rotation(positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines float32 [B, 1, L, D] of the rotary embedding (arXiv 2104.09864) at positions int64 [B, L], for
    heads of D numbers whose halves are rotated against each other."""
    exponent = torch.arange(0, head_dim, 2, device=positions.device).float() / head_dim
    angle = positions[..., None].float() / ROTATION_BASE**exponent
    angle = torch.cat([angle, angle], -1)[:, None]
    return angle.cos(), angle.sin()
