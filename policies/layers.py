"""Building blocks that several policies share."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor, nn

from policies.contract import PolicyError

HIDDEN_GAIN = math.sqrt(2)
MOST_LAYERS, WIDEST = 64, 2**16


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
    """[.., inputs] to [.., outputs]: hidden layers with the activation, then a linear one of its own gain."""
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
