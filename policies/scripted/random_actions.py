"""Actions drawn at random: the floor that any policy should leave, and a policy without parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from policies.action_range import ActionRange
from policies.contract import Action, Evaluation, Inputs, Policy, PolicySpec
from policies.layers import checked_noise
from policies.policy_kind import PolicyKind


class RandomActions(Policy):
    """Draws every element uniformly between its bounds, whatever the observation. `noise` [B, C * A] passes through the
    normal's distribution function. A uniform density has no mode, so the mode is the mean: the middle of the range.
    Values are zero. `trace["action"]` and densities belong to the drawn numbers from -1 to 1."""

    kind = "random"

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self.spec = spec
        self.noise_dim = spec.chunk * spec.action_dim
        self.range = ActionRange(spec)
        self.value_head = nn.Identity()

    @torch.no_grad()
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        shape = (_rows(inputs) if noise is None else len(noise), self.spec.chunk, self.spec.action_dim)
        if noise is None:
            drawn = torch.zeros(shape, device=self.range.scale.device)
        else:
            drawn = torch.erf(checked_noise(noise, self.noise_dim).view(shape) / math.sqrt(2))  # 2 Phi(z) - 1
        chunk = self.range.to_environment(drawn)
        return Action(chunk, self._log_prob(drawn), torch.zeros_like(drawn[:, 0, 0]), {"action": drawn})

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        chunk = trace["action"]
        return Evaluation(self._log_prob(chunk), torch.full_like(chunk, math.log(2)), torch.zeros_like(chunk[:, 0, 0]))

    def value(self, inputs: Inputs) -> Tensor:
        return torch.zeros(_rows(inputs), device=self.range.scale.device)

    def architecture(self) -> dict[str, Any]:
        return {}

    @staticmethod
    def _log_prob(chunk: Tensor) -> Tensor:
        """Density 1/2 on [-1, 1], the bounds included: z of 6 and more rounds to them."""
        return torch.full_like(chunk, -math.log(2))


def _rows(inputs: Inputs) -> int:
    """B, from whatever there is to see."""
    for seen in (inputs.state, inputs.proprio, inputs.episode, *inputs.frames.values()):
        if seen is not None:
            return len(seen)
    return len(inputs.instruction)


RANDOM = PolicyKind(RandomActions, trainable=False, scales_to_bounds=True)
