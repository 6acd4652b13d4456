"""Your own policy: a linear Gaussian policy learns the built-in scene by PPO.

    python examples/own_policy.py

The contract is `policies.Policy`; the laws that a policy keeps are in policies/conformance/.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributions import Normal

import embodied
from embodied.config.schema import Config
from policies.contract import Action, Evaluation, Inputs, Policy, PolicySpec


class Linear(Policy):
    """Action ~ N(W state + b, std^2). The noise is an input, so a decision does not depend on who computes it."""

    def __init__(self, spec: PolicySpec, *, std: float = 0.4) -> None:
        super().__init__()
        self.spec, self.noise_dim, self.std = spec, spec.action_dim, std
        self.mean = nn.Linear(spec.state_dim, spec.action_dim)
        self.value_head = nn.Linear(spec.state_dim, 1)  # the critic: trained with optim.value_lr

    @torch.no_grad()
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        density = self._density(inputs)
        chunk = density.mean if noise is None else density.mean + self.std * noise[:, None]
        return Action(chunk, density.log_prob(chunk), self.value(inputs), trace={"action": chunk})

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        density = self._density(inputs)
        return Evaluation(density.log_prob(trace["action"]), density.entropy(), self.value_head(inputs.state)[:, 0])

    @torch.no_grad()
    def value(self, inputs: Inputs) -> Tensor:
        return self.value_head(inputs.state)[:, 0]

    def architecture(self) -> dict[str, Any]:
        return {"std": self.std}

    def _density(self, inputs: Inputs) -> Normal:
        mean = self.mean(inputs.state)[:, None]  # [B, C, A] with chunks of C = 1
        return Normal(mean, self.std, validate_args=False)  # a check would have a GPU wait for the host


CONFIG = Config.model_validate(
    {
        "name": "example-policy",
        "iterations": 20,
        "env": {"task": "tabletop/reach", "num_envs": 8},
        "policy": {"kind": "own_policy:Linear", "options": {"std": 0.5}},
        "advantage": {"gamma": 0.9, "lam": 0.9},
        "optim": {"epochs": 8, "policy_lr": 3e-2, "value_lr": 1e-2},
        "eval": {"episodes": 20, "videos": 0},
    }
)

if __name__ == "__main__":
    embodied.train(CONFIG, runs_dir="runs")
