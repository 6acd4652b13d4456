"""config.json of ACT, as LeRobot writes it: which network it is, and what it reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from policies.act.network import ActSizes
from policies.contract import PolicyError, PolicySpec
from policies.files import CONFIG, checked
from policies.lerobot.network_config import (
    NetworkConfig,
    check_entries,
    check_features,
    new_features,
    read_entries,
    with_entries,
)
from policies.lerobot.network_folders import Layout
from policies.lerobot.processors import Text
from policies.units import Mode

MOST_ENSEMBLE = 100.0
"""Largest coefficient of temporal ensembling: with more, one prediction alone counts."""

Size = Annotated[int, Field(ge=1, le=2**14)]
Layers = Annotated[int, Field(ge=1, le=64)]


class ActConfig(NetworkConfig):
    """The entries that are applied, with LeRobot's defaults."""

    type: Literal["act"]
    n_obs_steps: Literal[1] = 1
    normalization_mapping: dict[Text, Mode] = {"VISUAL": "MEAN_STD", "STATE": "MEAN_STD", "ACTION": "MEAN_STD"}
    chunk_size: Size = 100
    n_action_steps: Size = 100
    vision_backbone: Literal["resnet18", "resnet34"] = "resnet18"
    replace_final_stride_with_dilation: Literal[False, 0] | None = False
    pre_norm: bool = False
    dim_model: Size = 512
    n_heads: Size = 8
    dim_feedforward: Size = 3200
    feedforward_activation: Literal["relu", "gelu"] = "relu"
    n_encoder_layers: Layers = 4
    n_decoder_layers: Layers = 1
    use_vae: bool = True
    latent_dim: Size = 32
    n_vae_encoder_layers: Layers = 4
    temporal_ensemble_coeff: Annotated[float, Field(ge=-MOST_ENSEMBLE, le=MOST_ENSEMBLE)] | None = None
    kl_weight: Annotated[float, Field(ge=0, le=1e6, allow_inf_nan=False)] = 10.0
    backbone_width: Annotated[int, Field(ge=1, le=256)] = 64
    """Width of the ResNet's first layers; this project's own."""

    @property
    def sizes(self) -> ActSizes:
        """Sizes of the network."""
        return ActSizes(
            state_dim=self.state_dim,
            action_dim=self.action_dim,
            cameras=len(self.cameras),
            chunk=self.chunk_size,
            backbone=self.vision_backbone,
            backbone_width=self.backbone_width,
            width=self.dim_model,
            heads=self.n_heads,
            feedforward=self.dim_feedforward,
            activation=self.feedforward_activation,
            encoder_layers=self.n_encoder_layers,
            decoder_layers=self.n_decoder_layers,
            norm_first=self.pre_norm,
            vae=self.use_vae,
            latent=self.latent_dim,
            vae_layers=self.n_vae_encoder_layers,
        )


def read_config(folder: Path, saved: bool = False) -> dict[str, Any]:
    """The object in a directory's config.json, as this project saved it (`saved`) or LeRobot.

    Raises `PolicyError` for another policy's, for an entry that asks for what is not done here, and for one that is not
    known unless it is off: false, null, 0 or empty.
    """
    raw = read_entries(folder, "act", "ACT")
    check_entries(folder, raw, ActConfig, saved=saved, passed=["dropout"])
    return raw


def checked_config(folder: Path, raw: Mapping[str, Any]) -> ActConfig:
    """The entries of a directory's config.json. Raises `PolicyError` for one that no network here has."""
    path = folder / CONFIG
    config = checked(path, ActConfig, raw)
    check_features(path, config)
    if config.dim_model % 4 or config.dim_model % config.n_heads:
        raise PolicyError(
            f"{path}: dim_model is {config.dim_model}, and must be a multiple of 4 and of n_heads, {config.n_heads}"
        )
    if config.n_action_steps > config.chunk_size:
        raise PolicyError(
            f"{path}: n_action_steps is {config.n_action_steps}, and of a chunk of {config.chunk_size} at most all "
            "are executed: set it to fewer"
        )
    if config.temporal_ensemble_coeff is not None and config.n_action_steps > 1:
        raise PolicyError(
            f"{path}: temporal_ensemble_coeff is {config.temporal_ensemble_coeff:g} and n_action_steps is "
            f"{config.n_action_steps} (policy.chunk, for a new network); LeRobot averages only where 1 action is "
            "executed: set the first to null, or the second to 1"
        )
    return config


LAYOUT = Layout("act", "model.", read_config, checked_config)
"""LeRobot's directories of ACT."""


def coefficient_of(config: ActConfig, option: float | Literal[False] | None, chunk: int) -> float | None:
    """Coefficient of temporal ensembling: the option's, or else the checkpoint's. None: the option is False, there is
    none, or more than one action of a chunk is executed."""
    found = config.temporal_ensemble_coeff if option is None else option
    return None if chunk > 1 or found is False else found


def for_task(folder: Path, raw: Mapping[str, Any], spec: PolicySpec) -> dict[str, Any]:
    """config.json of a network that is new: it reads what the task gives, and predicts as many actions.

    Raises `PolicyError` for an entry that differs from these.
    """
    predicted = spec.horizon or raw.get("chunk_size", spec.chunk)
    given = {**new_features(spec), "chunk_size": predicted, "n_action_steps": spec.chunk}
    return with_entries(folder, raw, given)
