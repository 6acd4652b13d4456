"""A controller that follows a script: no parameters, nothing learned, nothing remembered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from policies.contract import Action, Evaluation, Inputs, Policy, PolicyError, PolicySpec
from policies.policy_kind import PolicyKind
from policies.scripted import libero, tabletop, two_cubes
from policies.small.encoders import vector

SCRIPTS = {script.ACTION_DIM: script.act for script in (libero, tabletop, two_cubes)}
"""Script by number of action dimensions, which differs between the simulators."""


class Scripted(Policy):
    """Solves the LIBERO tasks of `policies.scripted.libero.SCRIPTS`, tabletop's reach tasks and ManiSkill's two cubes.
    Reads `state` and `instruction`.

    The instruction names the script. Chunks are of one action: each looks at where things are. The gripper's convention
    is the simulator's own. A row without instruction is an environment that rests, and so does the policy. Every
    log-prob and value is zero: nothing is drawn, nothing estimated, and there is nothing to train.
    """

    kind = "scripted"

    def __init__(self, spec: PolicySpec) -> None:
        """Raises `PolicyError` where the spec is that of no task with a script, or not of chunks of one action."""
        super().__init__()
        if spec.state_dim < 1:
            raise PolicyError("a scripted policy looks at the state: add 'state' to policy.reads")
        if spec.action_dim not in SCRIPTS or spec.chunk != 1:
            raise PolicyError(
                f"a scripted policy has LIBERO's {libero.ACTION_DIM} action dimensions, the {tabletop.ACTION_DIM} of "
                f"tabletop's reach tasks or the {two_cubes.ACTION_DIM} of ManiSkill's two cubes, and chunks of 1, got "
                f"{spec.action_dim} and {spec.chunk}: set env.task to libero/<suite>/<index>, to tabletop/reach, "
                "reach_red or reach_blue, or to maniskill/PushRedCube-v1 or PushGreenCube-v1 with env.control_mode "
                "pd_ee_delta_pos, and policy.chunk to 1"
            )
        self.spec = spec
        self.noise_dim = 0
        self.value_head = nn.Identity()

    @torch.no_grad()
    def act(self, inputs: Inputs, noise: Tensor | None) -> Action:
        state = vector(inputs, "state", self.spec.state_dim)
        if len(inputs.instruction) != len(state):
            raise PolicyError(
                "a scripted policy finds its script by the instruction: add 'instruction' to policy.reads"
            )
        rows = state.cpu().double().numpy()
        act = SCRIPTS[self.spec.action_dim]
        chosen = [act(row, text) for row, text in zip(rows, inputs.instruction, strict=True)]
        chunk = torch.from_numpy(np.array(chosen, np.float32).reshape(-1, 1, self.spec.action_dim)).to(state.device)
        return Action(chunk, torch.zeros_like(chunk), self.value(inputs), {"action": chunk})

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        zeros = torch.zeros_like(trace["action"])
        return Evaluation(zeros, zeros, self.value(inputs))

    def value(self, inputs: Inputs) -> Tensor:
        return torch.zeros_like(vector(inputs, "state", self.spec.state_dim)[:, 0])

    def architecture(self) -> dict[str, Any]:
        return {}


SCRIPTED = PolicyKind(Scripted, trainable=False)
