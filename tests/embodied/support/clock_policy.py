"""A policy whose actions tell by which decision they were taken."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from policies.contract import Action, Evaluation, Inputs, Policy, PolicySpec


class Clock(Policy):
    """Action i of a decision at env step t is (t + i / 100) / 1000 in each number: too small to move anything far."""

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self.spec, self.noise_dim, self.value_head = spec, 0, nn.Identity()

    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        assert inputs.episode is not None
        place = inputs.episode[:, 2, None] + torch.arange(self.spec.chunk) / 100
        chunk = (place[..., None].expand(-1, -1, self.spec.action_dim) / 1000).float()
        return Action(chunk, torch.zeros_like(chunk), torch.zeros(len(chunk)), {"action": chunk})

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        zeros = torch.zeros_like(trace["action"])
        return Evaluation(zeros, zeros, self.value(inputs))

    def value(self, inputs: Inputs) -> Tensor:
        assert inputs.episode is not None
        return torch.zeros(len(inputs.episode))

    def architecture(self) -> dict[str, Any]:
        return {}
