"""The kind `diffusion`: its options and files, and its policies on disk in LeRobot's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from policies.checkpoint_folders import EXTRAS
from policies.diffusion.config import LAYOUT, DiffusionConfig, checked_config
from policies.diffusion.policy import DiffusionOptions, DiffusionPolicy
from policies.errors import PolicyError
from policies.files import CONFIG, check_tensors, checked, read_tensors, write_tensors
from policies.lerobot.config import autocast_notes
from policies.lerobot.network_folders import Source, find_source, read_weights, save_directory
from policies.lerobot.statistics import trained_on
from policies.policy_kind import PolicyFormat, PolicyKind, on_cpu
from policies.transforms import Transforms
from policies.units import DEMONSTRATIONS


class DiffusionFormat(PolicyFormat):
    """LeRobot's layout, and units beside it."""

    def reads(self, config: Mapping[str, Any]) -> bool:
        return config.get("type") == "diffusion"

    def check_files(self, architecture: Mapping[str, Any]) -> None:
        Transforms(architecture.get("transforms", ()))
        _source(architecture)

    def observations(self, architecture: Mapping[str, Any]) -> tuple[int, int]:
        source = _source(architecture)
        return checked(source.folder / CONFIG, DiffusionConfig, source.config).n_obs_steps, 1

    def left_out_rows(self, architecture: Mapping[str, Any]) -> int:
        source = _source(architecture)
        own = checked(source.folder / CONFIG, DiffusionConfig, source.config).drop_n_last_frames
        return own if not source.is_new or "drop_n_last_frames" in source.config else 0

    def assumed(self, architecture: Mapping[str, Any]) -> Sequence[str]:
        source = _source(architecture)
        found, path = autocast_notes(source.folder / CONFIG, source.config), source.folder / CONFIG
        if not source.is_new and not checked_config(source.folder, source.config).use_group_norm:
            found.append(
                f"{path}: use_group_norm is false. The statistics of the batch norms stay as they were read where the "
                "policy learns, too; LeRobot computes them anew from each batch"
            )
        return found

    def executed(self, architecture: Mapping[str, Any]) -> int | None:
        source = _source(architecture)
        return None if source.is_new else checked_config(source.folder, source.config).n_action_steps

    def converts(self, architecture: Mapping[str, Any]) -> Mapping[str, tuple[str, str]]:
        return Transforms(architecture.get("transforms", ())).conventions()

    def statistics_name(self, architecture: Mapping[str, Any]) -> str | None:
        if architecture.get("asset") == DEMONSTRATIONS:
            return None
        return trained_on(Path(architecture.get("checkpoint", "")))

    def export(self, policy: DiffusionPolicy, folder: Path) -> None:
        """Write a directory that LeRobot loads. `n_action_steps` is the number of actions that are executed here."""
        if policy.config.backbone_width != 64:
            raise PolicyError(
                f"the policy's ResNet has the width {policy.config.backbone_width}, and LeRobot's are of 64: only such "
                "a network is exported; the checkpoints of this project have this one"
            )
        config, units = policy.described()
        del config["backbone_width"]
        save_directory(policy.network, policy.source, folder, config, units)

    def write(self, policy: DiffusionPolicy, folder: Path) -> None:
        config, units = policy.described()
        save_directory(policy.network, policy.source, folder, config, units)
        write_tensors(folder / EXTRAS, _extras(policy))

    def read(self, policy: DiffusionPolicy, folder: Path) -> dict[str, Tensor]:
        extras = read_tensors(folder / EXTRAS)
        check_tensors(folder / EXTRAS, extras, _extras(policy))
        weights = read_weights(LAYOUT, folder, policy.network)
        return {f"network.{name}": tensor for name, tensor in weights.items()} | extras

    def restore_arguments(self, folder: Path) -> dict[str, Any]:
        return {"weights": str(folder)}


def _source(architecture: Mapping[str, Any]) -> Source:
    return find_source(LAYOUT, architecture.get("checkpoint", ""), architecture.get("weights", ""))


def _extras(policy: DiffusionPolicy) -> dict[str, Tensor]:
    """Tensors for which LeRobot's layout has no place, by the policy's names."""
    units = {f"units.{name}": tensor for name, tensor in policy.units.state_dict().items()}
    return on_cpu({**units, "pictures": policy.pictures})


DIFFUSION = PolicyKind(
    DiffusionPolicy,
    DiffusionOptions,
    DiffusionFormat(),
    incidental=frozenset(
        {
            "checkpoint", "noise_scheduler_type", "num_inference_steps", "trained_steps", "min_sampling_denoising_std",
            "min_logprob_denoising_std", "gamma_denoising", "critic_trains_network", "spec.chunk", "spec.horizon",
        }
    ),
    pretrained=True,
    predicts_more=True,
)  # fmt: skip
