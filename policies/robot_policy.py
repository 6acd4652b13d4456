"""Policies with transforms and units: their networks read and give a robot's numbers in units of a checkpoint or of
demonstrations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from policies.capabilities import Normalised
from policies.contract import Inputs, Policy
from policies.small.encoders import present, vector
from policies.transforms import Transforms
from policies.units import DEMONSTRATIONS, Mode, StoredUnits, demonstrated


class RobotPolicy(Policy):
    """A policy whose network reads proprioception, and gives actions, in stored units; the task's numbers pass through
    transforms. A subclass sets the attributes."""

    own_units = f"asset {DEMONSTRATIONS}"
    options: Any
    """The kind's, with `asset` and `as_data`."""
    transforms: Transforms
    units: StoredUnits
    cameras: tuple[str, ...]
    """The task's, in the order in which the network reads them."""
    learned_modes: tuple[Mode, Mode] = ("MEAN_STD", "MEAN_STD")
    """Statistics of demonstrations that give the state and the action their units: also MIN_MAX."""

    def adopt_units(self, actions: Tensor, proprio: Tensor | None) -> None:
        if self.options.asset == DEMONSTRATIONS:
            nothing = torch.zeros(1, 0)  # proprioception may be recorded that the policy does not read
            state = self.transforms.state(proprio) if proprio is not None and self.spec.proprio_dim else nothing
            said = self.transforms.demonstrated(actions[:, None], proprio)[:, 0]
            self.units.fill(demonstrated(state, said, self.learned_modes))

    def normalised_numbers(self, inputs: Inputs, actions: Tensor) -> Sequence[Normalised]:
        size = self.spec.proprio_dim
        given = vector(inputs, "proprio", size) if size else None  # of any policy a single observation
        said = self.transforms.demonstrated(actions[:, None].double(), given)[:, 0]
        found = [("action", said, self.units.action)]
        if given is not None:
            found.append(("proprio", self.transforms.state(given), self.units.state))
        return [
            Normalised(name, values, *(torch.broadcast_to(end, values.shape[1:]) for end in units.ends))
            for name, values, units in found
        ]

    @property
    def normalised_by(self) -> str:
        asset = self.options.asset
        if asset == DEMONSTRATIONS:
            return "the rows learned from"
        return "the checkpoint's own" + (f" of {asset!r}" if asset else "")

    def architecture(self) -> dict[str, Any]:
        return self.options.as_data()

    def _given(self, inputs: Inputs) -> Tensor | None:
        """[B, P] as the environment gives it, where it is read: of several observations the present one."""
        size = self.spec.proprio_dim
        return present(inputs, "proprio", size, self.spec.observations) if size else None

    def _normalised(self, actions: Tensor, inputs: Inputs) -> Tensor:
        """Demonstrated actions [B, N, A] in the environment's units, as float32 in the network's."""
        return self.units.action.normalise(self.transforms.demonstrated(actions.double(), self._given(inputs))).float()

    def _actions(self, said: Tensor, inputs: Inputs) -> Tensor:
        """[B, C, A] in the network's units to float32 in the environment's."""
        return self.transforms.executed(self.units.action.unnormalise(said), self._given(inputs)).float()
