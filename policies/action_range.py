"""The range of actions: from a network's -1 to 1 to the environment's lower and upper bounds, and back."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from policies.contract import PolicyError, PolicySpec


class ActionRange(nn.Module):
    """-1 is the environment's lower bound, 1 the upper: `low + (u + 1) / 2 * (high - low)`, element by element.

    A spec without bounds has actions from -1 to 1, which are left as they are, to the last bit. Log-probs are densities
    of the network's numbers: they differ from those of the environment's by a constant.
    """

    centre: Tensor
    """[A] float32."""
    scale: Tensor
    """[A] float32: half of the range."""

    def __init__(self, spec: PolicySpec) -> None:
        """Raises `PolicyError` unless the bounds are one for each element, the lower ones first, or none."""
        super().__init__()
        low, high = spec.action_low, spec.action_high
        given = {len(low), len(high)} in ({0}, {spec.action_dim})
        if not given or not all(0 < b - a < math.inf for a, b in zip(low, high, strict=True)):
            raise PolicyError(
                f"spec.action_low and spec.action_high are {spec.action_dim} finite numbers each, the first less than "
                f"the second, or none; got {list(low)} and {list(high)}"
            )
        # Derived from the spec, so not saved.
        pairs = list(zip(low, high, strict=True))
        self.register_buffer("centre", torch.tensor([(a + b) / 2 for a, b in pairs]), persistent=False)
        self.register_buffer("scale", torch.tensor([(b - a) / 2 for a, b in pairs]), persistent=False)

    def to_environment(self, numbers: Tensor) -> Tensor:
        """Actions [.., A] in the environment's units."""
        return numbers * self.scale + self.centre if len(self.scale) else numbers

    def to_network(self, actions: Tensor) -> Tensor:
        """[.., A] the network's numbers for actions in the environment's units."""
        return (actions - self.centre) / self.scale if len(self.scale) else actions
