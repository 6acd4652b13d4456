"""The kind `act`: its options and files, and its policies on disk in LeRobot's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from policies.act.config import LAYOUT, ActConfig, checked_config, coefficient_of
from policies.act.policy import Act, ActOptions
from policies.checkpoint_folders import EXTRAS
from policies.errors import PolicyError
from policies.files import CONFIG, check_tensors, checked, read_tensors, write_tensors
from policies.lerobot.config import autocast_notes
from policies.lerobot.network_folders import find_source, read_weights, save_directory
from policies.lerobot.statistics import trained_on
from policies.policy_kind import PolicyFormat, PolicyKind, on_cpu
from policies.transforms import Transforms
from policies.units import DEMONSTRATIONS


class ActFormat(PolicyFormat):
    """LeRobot's layout, and units and deviations beside it."""

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("type") == "act"

    def check_files(self, architecture: Mapping[str, Any]) -> None:
        Transforms(architecture.get("transforms", ()))
        find_source(LAYOUT, architecture.get("checkpoint", ""))

    def assumed(self, architecture: Mapping[str, Any]) -> Sequence[str]:
        source = find_source(LAYOUT, architecture.get("checkpoint", ""))
        return autocast_notes(source.folder / CONFIG, source.config)

    def chunk_notes(self, architecture: Mapping[str, Any], chunk: int, tasks: Sequence[str]) -> Sequence[str]:
        source = find_source(LAYOUT, architecture.get("checkpoint", ""))
        found = [*super().chunk_notes(architecture, chunk, tasks)]
        coefficient, given = self.ensemble(architecture, chunk), architecture.get("temporal_ensemble")
        if coefficient is not None and given is None:
            found.append(
                f"{source.folder}: evaluations average the predictions of each env step (temporal_ensemble_coeff "
                f"{coefficient:g}): set policy.options.temporal_ensemble to false to evaluate without"
            )
        if source.is_new:
            return found
        config = checked_config(source.folder, source.config)
        if config.temporal_ensemble_coeff is not None and chunk > 1 and given is not False:
            found.append(
                f"{source.folder}: LeRobot averages the predictions of each env step (temporal_ensemble_coeff), and "
                f"policy.chunk is {chunk}: set it to 1 to evaluate so"
            )
        return found

    def executed(self, architecture: Mapping[str, Any]) -> int | None:
        source = find_source(LAYOUT, architecture.get("checkpoint", ""))
        return None if source.is_new else checked_config(source.folder, source.config).n_action_steps

    def ensemble(self, architecture: Mapping[str, Any], chunk: int) -> float | None:
        source = find_source(LAYOUT, architecture.get("checkpoint", ""))
        config = checked(source.folder / CONFIG, ActConfig, source.config)
        return coefficient_of(config, architecture.get("temporal_ensemble"), chunk)

    def converts(self, architecture: Mapping[str, Any]) -> Mapping[str, tuple[str, str]]:
        return Transforms(architecture.get("transforms", ())).conventions()

    def statistics_name(self, architecture: Mapping[str, Any]) -> str | None:
        if architecture.get("asset") == DEMONSTRATIONS:
            return None
        return trained_on(Path(architecture.get("checkpoint", "")))

    def export(self, policy: Act, folder: Path) -> None:
        """Write a directory that LeRobot loads. `n_action_steps` is the number of actions that are executed here."""
        if policy.config.backbone_width != 64:
            raise PolicyError(
                f"the policy's ResNet has the width {policy.config.backbone_width}, and LeRobot's are of 64: only such "
                "a network is exported; the checkpoints of this project have this one"
            )
        config, units = policy.described()
        del config["backbone_width"]
        save_directory(policy.network, policy.source, folder, config, units)

    def write(self, policy: Act, folder: Path) -> None:
        config, units = policy.described()
        save_directory(policy.network, policy.source, folder, config, units)
        write_tensors(folder / EXTRAS, _extras(policy))

    def read(self, policy: Act, folder: Path) -> dict[str, Tensor]:
        extras = read_tensors(folder / EXTRAS)
        check_tensors(folder / EXTRAS, extras, _extras(policy))
        weights = read_weights(LAYOUT, folder, policy.network)
        return {f"network.{name}": tensor for name, tensor in weights.items()} | extras

    def restore_arguments(self, folder: Path) -> dict[str, Any]:
        return {"weights": str(folder)}


def _extras(policy: Act) -> dict[str, Tensor]:
    """Tensors for which LeRobot's layout has no place, by the policy's names."""
    units = {f"units.{name}": tensor for name, tensor in policy.units.state_dict().items()}
    return on_cpu({**units, "pictures": policy.pictures, "log_std": policy.log_std})


ACT = PolicyKind(
    Act,
    ActOptions,
    ActFormat(),
    incidental=frozenset(
        {"checkpoint", "temporal_ensemble", "initial_log_std", "critic_trains_network", "spec.chunk", "spec.horizon"}
    ),
    pretrained=True,
    predicts_more=True,
)
