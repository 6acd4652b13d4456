"""The kind `diffusion`: its options and files, and its policies on disk in LeRobot's layout."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from policies.diffusion.config import LAYOUT, DiffusionConfig, checked_config
from policies.diffusion.policy import DiffusionOptions, DiffusionPolicy
from policies.files import CONFIG, checked
from policies.lerobot.network_format import NetworkFormat
from policies.policy_kind import PolicyKind


class DiffusionFormat(NetworkFormat):
    """LeRobot's layout, and units beside it."""

    layout = LAYOUT

    def observations(self, architecture: Mapping[str, Any]) -> tuple[int, int]:
        source = self.source(architecture)
        return checked(source.folder / CONFIG, DiffusionConfig, source.config).n_obs_steps, 1

    def predicts(self, architecture: Mapping[str, Any]) -> int | None:
        source = self.source(architecture)
        known = checked(source.folder / CONFIG, DiffusionConfig, source.config).predicted
        return known if not source.is_new or "horizon" in source.config else None

    def left_out_rows(self, architecture: Mapping[str, Any]) -> int:
        source = self.source(architecture)
        own = checked(source.folder / CONFIG, DiffusionConfig, source.config).drop_n_last_frames
        return own if not source.is_new or "drop_n_last_frames" in source.config else 0

    def assumed(self, architecture: Mapping[str, Any]) -> Sequence[str]:
        source, found = self.source(architecture), [*super().assumed(architecture)]
        if not source.is_new and not checked_config(source.folder, source.config).use_group_norm:
            found.append(
                f"{source.folder / CONFIG}: use_group_norm is false. The statistics of the batch norms stay as they "
                "were read where the policy learns, too; LeRobot computes them anew from each batch"
            )
        return found


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
