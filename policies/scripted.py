"""A controller that follows a script: no parameters, nothing learned, nothing remembered."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from policies.contract import Action, Evaluation, Inputs, Policy, PolicyError, PolicySpec
from policies.encoders import vector
from policies.registry import nearest
from policies.waypoints import tabletop
from policies.waypoints.libero import SCRIPTS, Script
from policies.waypoints.scene import Scene, Vector, turn_between
from policies.waypoints.steps import OPEN, Aim

ACTION_DIM = 7
"""LIBERO's actions: position 3, axis-angle 3, gripper."""
REST = (0.0, 0.0, 0.0, 0.0, 0.0, 0.0, OPEN)
METRES, RADIANS = 0.05, 0.5
"""How far an action of 1 moves the hand's goal (robosuite's OSC_POSE)."""
LINEAR_GAIN, ANGULAR_GAIN = 2.5, 1.0
"""Goal ahead of the hand, in units of the remaining way. The hand covers a fraction of the goal's distance in an
env step, so that a gain above 1 makes it fast; the robot's own damping keeps it from overshooting."""


class Scripted(Policy):
    """Solves the LIBERO tasks of `policies.waypoints.libero.SCRIPTS`, and those of `policies.waypoints.tabletop`. Reads
    `state` and `instruction`.

    The instruction names the script. One for LIBERO has steps: the first that the state does not show as done says
    where the hand should go; when all are done the hand opens and rests. Chunks are of one action: each looks at where
    things are. The gripper's convention is the simulator's own (-1 opens). A row without instruction is an environment
    that rests, and so does the policy. Every log-prob and value is zero: nothing is drawn, nothing estimated, and
    there is nothing to train.
    """

    kind = "scripted"

    def __init__(self, spec: PolicySpec) -> None:
        """Raises `PolicyError` where the spec is not that of a LIBERO or tabletop task in chunks of one action."""
        super().__init__()
        if spec.state_dim < 1:
            raise PolicyError("a scripted policy looks at the state: add 'state' to policy.reads")
        if spec.action_dim not in (ACTION_DIM, tabletop.ACTION_DIM) or spec.chunk != 1:
            raise PolicyError(
                f"a scripted policy has LIBERO's {ACTION_DIM} action dimensions or the {tabletop.ACTION_DIM} of "
                f"tabletop's reach tasks, and chunks of 1, got {spec.action_dim} and {spec.chunk}: set env.task to "
                "libero/<suite>/<index> or tabletop/reach, reach_red or reach_blue, and policy.chunk to 1"
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
        chosen = [self._action(row, text) for row, text in zip(rows, inputs.instruction, strict=True)]
        chunk = torch.from_numpy(np.array(chosen, np.float32).reshape(-1, 1, self.spec.action_dim)).to(state.device)
        return Action(chunk, torch.zeros_like(chunk), self.value(inputs), {"action": chunk})

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        zeros = torch.zeros_like(trace["action"])
        return Evaluation(zeros, zeros, self.value(inputs))

    def value(self, inputs: Inputs) -> Tensor:
        return torch.zeros_like(vector(inputs, "state", self.spec.state_dim)[:, 0])

    def architecture(self) -> dict[str, Any]:
        return {}

    def _action(self, state: Vector, instruction: str) -> Vector:
        if self.spec.action_dim == tabletop.ACTION_DIM:
            return tabletop.act(state, instruction)
        if not instruction:
            return np.array(REST)
        script = find_script(instruction)
        if script.layout.size != len(state):
            raise PolicyError(
                f"the script for {instruction!r} reads a state of {script.layout.size} numbers, this task has "
                f"{len(state)}: it is another task of the same words, for which there is no script"
            )
        scene = Scene(state, script.layout)
        aims = (step.aim(scene) for step in script.steps if not step.done(scene))
        aim = next(aims, None)
        return np.array(REST) if aim is None else towards(scene, aim)


def find_script(instruction: str) -> Script:
    """The script for an instruction, whatever its case. Raises `PolicyError` with the nearest there is."""
    text = instruction.strip().lower()
    if text not in SCRIPTS:
        raise PolicyError(
            f"no script for {instruction!r}{nearest(text, list(SCRIPTS))} (docs/scripted-policies.md lists the "
            "tasks that have one and says how to write another)"
        )
    return SCRIPTS[text]


def towards(scene: Scene, aim: Aim) -> Vector:
    """[7] in [-1, 1]: the action that brings the hand nearer to its aim, both motions in straight lines."""
    way = LINEAR_GAIN * (aim.position - scene.hand.position) / METRES
    turn = ANGULAR_GAIN * turn_between(scene.hand.quaternion, aim.quaternion) / RADIANS
    return np.concatenate((_at_most_one(way), _at_most_one(turn), [aim.gripper]))


def _at_most_one(vector: Vector) -> Vector:
    """The vector, shortened to a largest element of 1 if it is longer."""
    return vector / max(1.0, float(np.abs(vector).max()))
