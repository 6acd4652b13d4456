"""Demonstrations that are worth learning from: a controller solves `tabletop/reach`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from embodied.commands.record import record_run
from embodied.config.files import parse_config
from embodied.demonstrations import Dataset
from policies import registry
from policies.contract import Action, Evaluation, Inputs, Policy, PolicySpec
from policies.policy_kind import PolicyKind

GAIN = 15.0
"""Action per metre that is left."""


class ReachExpert(Policy):
    """Goes straight to the goal. Reads `state`, of which the last three numbers say how far it is."""

    kind = "reach_expert"

    def __init__(self, spec: PolicySpec) -> None:
        super().__init__()
        self.spec, self.noise_dim, self.value_head = spec, 0, nn.Identity()

    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        assert inputs.state is not None
        chunk = (GAIN * inputs.state[:, -3:]).clamp(-0.8, 0.8)[:, None]
        return Action(chunk, torch.zeros_like(chunk), self.value(inputs), {"action": chunk})

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        raise NotImplementedError

    def value(self, inputs: Inputs) -> Tensor:
        assert inputs.state is not None
        return torch.zeros(len(inputs.state))

    def architecture(self) -> dict[str, Any]:
        return {}


EXPERT = PolicyKind(ReachExpert)


def record_reach(folder: Path, episodes: int, image_size: int = 32, cameras: int = 1) -> Dataset:
    """The expert's episodes."""
    registry.KINDS[ReachExpert.kind] = f"{__name__}:EXPERT"
    config = parse_config(
        {
            "env": {"task": "tabletop/reach", "num_envs": 4, "cameras": cameras, "image_size": image_size},
            "policy": {"kind": ReachExpert.kind},
            "runtime": {"mode": "inline"},
        },
        "test",
    )
    try:
        record_run("test", config, None, folder, episodes, True, Path("no-runs"))
    finally:
        del registry.KINDS[ReachExpert.kind]
    return Dataset(folder)
