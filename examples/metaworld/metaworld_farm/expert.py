"""Meta-World's scripted experts as a policy: demonstrations for each of its 50 tasks, nothing to train."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from metaworld_farm.simulator import ALL_V3_ENVIRONMENTS, instruction_of
from policies.contract import Action, Evaluation, Inputs, Policy, PolicyError, PolicySpec
from policies.policy_kind import PolicyKind

from metaworld.policies import ENV_POLICY_MAP  # isort: skip


class Expert(Policy):
    """Reads `state` and `instruction`, which names the script; chunks are of one action. The goal must be in the state:
    the scripts do not find one that is hidden. A row without instruction is an environment that rests."""

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        if spec.state_dim != 39 or spec.action_dim != 4 or spec.chunk != 1:
            raise PolicyError(
                "Meta-World's experts take its state and give one action: set policy.reads to [state, instruction], "
                "policy.chunk to 1, and env.task to a task of metaworld"
            )
        self.spec, self.noise_dim, self.value_head = spec, 0, nn.Identity()
        self._scripts = {instruction_of(f"metaworld/{name}"): ENV_POLICY_MAP[name]() for name in ALL_V3_ENVIRONMENTS}

    @torch.no_grad()
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        states = inputs.state.cpu().double().numpy()
        chunk = torch.zeros(len(states), 1, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that actions are clipped
            for row, (state, text) in enumerate(zip(states, inputs.instruction, strict=True)):
                if text:
                    chunk[row, 0] = torch.from_numpy(np.clip(self._script(text).get_action(state), -1.0, 1.0))
        chunk = chunk.to(inputs.state.device)
        return Action(chunk, torch.zeros_like(chunk), self.value(inputs), {"action": chunk})

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        zeros = torch.zeros_like(trace["action"])
        return Evaluation(zeros, zeros, self.value(inputs))

    def value(self, inputs: Inputs) -> Tensor:
        return torch.zeros_like(inputs.state[:, 0])

    def architecture(self) -> dict[str, Any]:
        return {}

    def _script(self, instruction: str) -> Any:
        if instruction not in self._scripts:
            raise PolicyError(f"Meta-World has no expert for {instruction!r}; it has {', '.join(self._scripts)}")
        return self._scripts[instruction]


EXPERT = PolicyKind(Expert, trainable=False)
