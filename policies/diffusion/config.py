"""config.json of Diffusion Policy, as LeRobot writes it: which network it is, what it reads, and how it denoises."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field

from policies.contract import PolicyError, PolicySpec
from policies.diffusion.network import FINAL_GROUPS, DiffusionSizes
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
from policies.lerobot.processors import STATE, Text
from policies.resnet import coarse
from policies.units import Mode

OF_SPEED = ("gradient_checkpointing", "compile_model", "compile_mode")
"""Entries that change memory and time alone."""
Sampler = Literal["DDPM", "DDIM"]

Size = Annotated[int, Field(ge=1, le=2**14)]
Pair = Annotated[list[Size], Field(min_length=2, max_length=2)]
Noise = Annotated[float, Field(gt=0, lt=1)]


class DiffusionConfig(NetworkConfig):
    """The entries that are applied, with LeRobot's defaults."""

    type: Literal["diffusion"]
    n_obs_steps: Annotated[int, Field(ge=1, le=64)] = 2
    normalization_mapping: dict[Text, Mode] = {"VISUAL": "MEAN_STD", "STATE": "MIN_MAX", "ACTION": "MIN_MAX"}
    horizon: Size = 64
    n_action_steps: Size = 32
    drop_n_last_frames: Annotated[int, Field(ge=0, le=2**14)] = 7
    vision_backbone: Literal["resnet18", "resnet34"] = "resnet18"
    resize_shape: Pair | None = None
    crop_ratio: Annotated[float, Field(gt=0, le=1)] = 1.0
    crop_shape: Pair | None = None
    crop_is_random: bool = True
    use_group_norm: bool = False
    spatial_softmax_num_keypoints: Size = 32
    use_separate_rgb_encoder_per_camera: bool = True
    down_dims: Annotated[list[Size], Field(min_length=1, max_length=8)] = [512, 1024, 2048]
    kernel_size: Annotated[int, Field(ge=1, le=63)] = 5
    n_groups: Size = 8
    diffusion_step_embed_dim: Size = 128
    use_film_scale_modulation: bool = True
    noise_scheduler_type: Sampler = "DDPM"
    num_train_timesteps: Annotated[int, Field(ge=1, le=10_000)] = 100
    beta_schedule: Literal["linear", "scaled_linear", "squaredcos_cap_v2"] = "squaredcos_cap_v2"
    beta_start: Noise = 0.0001
    beta_end: Noise = 0.02
    prediction_type: Literal["epsilon", "sample"] = "epsilon"
    clip_sample: bool = True
    clip_sample_range: Annotated[float, Field(gt=0, le=1e6)] = 1.0
    num_inference_steps: Annotated[int, Field(ge=1, le=10_000)] | None = None
    do_mask_loss_for_padding: bool = False
    backbone_width: Annotated[int, Field(ge=1, le=256)] = 64
    """Width of the ResNet's first layers; this project's own."""

    @property
    def past(self) -> int:
        """Actions of the horizon that lie before the present: it begins with the first observation."""
        return self.n_obs_steps - 1

    @property
    def predicted(self) -> int:
        """Actions of the horizon from the present on."""
        return self.horizon - self.past

    @property
    def crop(self) -> tuple[int, int] | None:
        """Height and width of what is cut out of the resized pictures. A ratio takes the place of `crop_shape` where
        pictures are resized."""
        if self.resize_shape is not None:
            height, width = (int(side * self.crop_ratio) for side in self.resize_shape)
            return (height, width) if self.crop_ratio < 1 else None
        return None if self.crop_shape is None else (self.crop_shape[0], self.crop_shape[1])

    @property
    def resized(self) -> tuple[int, int]:
        """Height and width of the pictures before they are cropped."""
        height, width = self.resize_shape or (self.image_size, self.image_size)
        return height, width

    @property
    def sizes(self) -> DiffusionSizes:
        """Sizes of the network."""
        return DiffusionSizes(
            state_dim=self.state_dim,
            action_dim=self.action_dim,
            cameras=len(self.cameras),
            observations=self.n_obs_steps,
            pictures=self.crop or self.resized,
            backbone=self.vision_backbone,
            backbone_width=self.backbone_width,
            group_norm=self.use_group_norm,
            keypoints=self.spatial_softmax_num_keypoints,
            separate_encoders=self.use_separate_rgb_encoder_per_camera,
            widths=tuple(self.down_dims),
            kernel=self.kernel_size,
            groups=self.n_groups,
            step_width=self.diffusion_step_embed_dim,
            scale_modulation=self.use_film_scale_modulation,
        )


def read_config(folder: Path, saved: bool = False) -> dict[str, Any]:
    """The object in a directory's config.json, as this project saved it (`saved`) or LeRobot.

    Raises `PolicyError` for another policy's, for an entry that asks for what is not done here, and for one that is not
    known unless it is off: false, null, 0 or empty.
    """
    raw = read_entries(folder, "diffusion", "Diffusion Policy")
    if raw.get("use_transformer") or str(raw.get("noise_net", "unet")).lower().find("transformer") >= 0:
        raise PolicyError(
            f"{folder / CONFIG}: it asks for a transformer that denoises, and only the U-Net is read here, as in "
            "LeRobot: take a checkpoint with one"
        )
    check_entries(folder, raw, DiffusionConfig, saved=saved, passed=OF_SPEED)
    return raw


def checked_config(folder: Path, raw: Mapping[str, Any]) -> DiffusionConfig:
    """The entries of a directory's config.json. Raises `PolicyError` for one that no network here has."""
    path = folder / CONFIG
    config = checked(path, DiffusionConfig, raw)
    check_features(path, config)
    if not config.state_dim:
        raise PolicyError(f"{path}: input_features has no {STATE}, which every Diffusion Policy of LeRobot's reads")
    factor = 2 ** len(config.down_dims)
    if config.horizon % factor:
        raise PolicyError(
            f"{path}: horizon is {config.horizon}, and must be a multiple of {factor}, since each of the "
            f"{len(config.down_dims)} entries of down_dims halves it"
        )
    if config.n_action_steps > config.predicted:
        raise PolicyError(
            f"{path}: n_action_steps is {config.n_action_steps}. The horizon has {config.horizon} actions and begins "
            f"with the first of {config.n_obs_steps} observations, so at most {config.predicted} are executed: set "
            "n_action_steps to fewer"
        )
    _check_network(path, config)
    _check_pictures(path, config)
    steps = config.num_inference_steps
    if steps is not None and steps > config.num_train_timesteps:
        raise PolicyError(
            f"{path}: num_inference_steps is {steps}, and at most the {config.num_train_timesteps} of "
            "num_train_timesteps are taken"
        )
    return config


def _check_network(path: Path, config: DiffusionConfig) -> None:
    if not config.kernel_size % 2:
        raise PolicyError(f"{path}: kernel_size is {config.kernel_size}, and must be odd: an even one moves actions")
    if config.diffusion_step_embed_dim % 2 or config.diffusion_step_embed_dim < 4:
        raise PolicyError(
            f"{path}: diffusion_step_embed_dim is {config.diffusion_step_embed_dim}, and must be even and at least 4"
        )
    for width in config.down_dims:
        if width % config.n_groups:
            raise PolicyError(f"{path}: down_dims has {width}, and must have multiples of n_groups, {config.n_groups}")
    if config.down_dims[0] % FINAL_GROUPS:
        raise PolicyError(
            f"{path}: down_dims begins with {config.down_dims[0]}, and must begin with a multiple of {FINAL_GROUPS}, "
            "the groups of the last norm"
        )


def _check_pictures(path: Path, config: DiffusionConfig) -> None:
    crop, resized = config.crop, config.resized
    if crop is None:
        return
    if min(crop) < 1 or crop[0] > resized[0] or crop[1] > resized[1]:
        name = "crop_shape" if config.resize_shape is None else "crop_ratio"
        raise PolicyError(
            f"{path}: {name} cuts {list(crop)} out of pictures of {list(resized)}: set it to what fits into them"
        )


def for_task(folder: Path, raw: Mapping[str, Any], spec: PolicySpec) -> dict[str, Any]:
    """config.json of a network that is new: it reads what the task gives. Its horizon is that of the file, else what
    `policy.horizon` or `policy.chunk` asks for, rounded up to what the U-Net can halve.

    Raises `PolicyError` for an entry that differs from these.
    """
    read = checked(folder / CONFIG, DiffusionConfig, raw)
    factor = 2 ** len(read.down_dims)
    wanted = spec.predicted + read.past
    rounded = -(-wanted // factor) * factor
    horizon = raw.get("horizon", rounded) if not spec.horizon else wanted
    given = {**new_features(spec), "horizon": horizon, "n_action_steps": spec.chunk}
    found = with_entries(folder, {"use_group_norm": True, "drop_n_last_frames": 0, **raw}, given)
    if spec.cameras and max(map(coarse, (pictures := checked_config(folder, found).sizes.pictures))) == 1:
        raise PolicyError(
            f"{folder / CONFIG}: the new network reads pictures of {list(pictures)}. The ResNet reduces them to one "
            "place, in which the spatial softmax finds nothing: set env.image_size, or the crop, to more than 32"
        )
    return found


LAYOUT = Layout("diffusion", "diffusion.", read_config, checked_config)
"""LeRobot's directories of Diffusion Policy."""
