"""Policies in LeRobot's directories of networks that read pictures and the robot's state (`network_folders`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from policies.checkpoint_folders import EXTRAS
from policies.errors import PolicyError
from policies.files import CONFIG, check_tensors, read_tensors, write_tensors
from policies.lerobot.config import autocast_notes
from policies.lerobot.loading import loaded_by_lerobot
from policies.lerobot.network_folders import Layout, Source, find_source, read_weights, save_directory
from policies.lerobot.statistics import trained_on
from policies.policy_kind import LoadedBy, PolicyFormat, on_cpu
from policies.transforms import Transforms
from policies.units import DEMONSTRATIONS

PUBLISHED_WIDTH = 64
"""Width of a ResNet's first layers in every network of LeRobot's."""


class NetworkFormat(PolicyFormat):
    """LeRobot's layout, and tensors beside it for which that has no place."""

    layout: Layout
    beside: tuple[str, ...] = ("pictures",)
    """Tensors of the policy that are kept beside, as its units are."""

    def source(self, architecture: Mapping[str, Any]) -> Source:
        """The directory that the options name. Raises `PolicyError`."""
        return find_source(self.layout, architecture.get("checkpoint", ""), architecture.get("weights", ""))

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("type") == self.layout.kind

    def check_files(self, architecture: Mapping[str, Any]) -> None:
        Transforms(architecture.get("transforms", ()))
        self.source(architecture)

    def assumed(self, architecture: Mapping[str, Any]) -> Sequence[str]:
        source = self.source(architecture)
        return autocast_notes(source.folder / CONFIG, source.config)

    def executed(self, architecture: Mapping[str, Any]) -> int | None:
        source = self.source(architecture)
        return None if source.is_new else self.layout.check(source.folder, source.config).n_action_steps

    def converts(self, architecture: Mapping[str, Any]) -> Mapping[str, tuple[str, str]]:
        return Transforms(architecture.get("transforms", ())).conventions()

    def statistics_name(self, architecture: Mapping[str, Any]) -> str | None:
        if architecture.get("asset") == DEMONSTRATIONS:
            return None
        return trained_on(Path(architecture.get("checkpoint", "")))

    def export(self, policy: Any, folder: Path) -> None:
        """Write a directory that LeRobot loads. `n_action_steps` is the number of actions that are executed here."""
        if policy.config.backbone_width != PUBLISHED_WIDTH:
            raise PolicyError(
                f"the policy's ResNet has the width {policy.config.backbone_width}, and LeRobot's are of "
                f"{PUBLISHED_WIDTH}: only such a network is exported; the checkpoints of this project have this one"
            )
        config, units = policy.described()
        del config["backbone_width"]
        save_directory(policy.network, policy.source, folder, config, units)

    def loaded_by(self, folder: Path) -> LoadedBy:
        return loaded_by_lerobot(self.layout.kind)

    def write(self, policy: Any, folder: Path) -> None:
        config, units = policy.described()
        save_directory(policy.network, policy.source, folder, config, units)
        write_tensors(folder / EXTRAS, self._extras(policy))

    def read(self, policy: Any, folder: Path) -> dict[str, Tensor]:
        extras = read_tensors(folder / EXTRAS)
        check_tensors(folder / EXTRAS, extras, self._extras(policy))
        weights = read_weights(self.layout, folder, policy.network)
        return {f"network.{name}": tensor for name, tensor in weights.items()} | extras

    def restore_arguments(self, folder: Path) -> dict[str, Any]:
        return {"weights": str(folder)}

    def _extras(self, policy: Any) -> dict[str, Tensor]:
        """Tensors for which LeRobot's layout has no place, by the policy's names."""
        units = {f"units.{name}": tensor for name, tensor in policy.units.state_dict().items()}
        return on_cpu({**units, **{name: getattr(policy, name) for name in self.beside}})
