"""Sizes of SmolVLA's network: config.json of a LeRobot folder, and that of its backbone."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from policies.contract import PolicyError
from policies.files import CONFIG, shown
from policies.lerobot.config import check_known_entries
from policies.random_weights import RANDOM_WEIGHTS
from policies.smolvla.backbone import Backbone, Vision
from policies.smolvla.mixture import StackSizes

LARGEST = 2**20
"""Limit of sizes: config.json may hold any number."""
MULTIPLE = 256
"""The expert's gated layers have a multiple of so many units."""
READ = {
    "type", "input_features", "output_features", "normalization_mapping", "chunk_size", "n_action_steps",
    "max_state_dim", "max_action_dim", "resize_imgs_with_padding", "empty_cameras", "tokenizer_max_length", "num_steps",
    "vlm_model_name", "add_image_special_tokens", "attention_mode", "num_expert_layers", "num_vlm_layers",
    "self_attn_every_n_layers", "expert_width_multiplier", "rtc_config", "use_peft",
    "kind", "spec", "architecture", RANDOM_WEIGHTS,
}  # fmt: skip
"""Entries of config.json that are applied, or compared with other files and options."""
PASSED = (
    "device", "use_amp", "compile_model", "compile_mode", "use_cache", "freeze_vision_encoder", "train_expert_only",
    "train_state_proj", "push_to_hub", "repo_id", "private", "tags", "license",
    "pretrained_path", "pretrained_revision", "load_vlm_weights",
    "prefix_length", "pad_language_to",  # tokens that fill a prompt up are seen by none
)  # fmt: skip
"""Entries that say how it was trained, on which machine, or where it was published."""
FIXED: Mapping[str, Any] = {
    "n_obs_steps": 1, "min_period": 4e-3, "max_period": 4.0, "adapt_to_pi_aloha": False,
    "use_delta_joint_actions_aloha": False,
}  # fmt: skip
"""Entries that have one value here: with another the network computes something else."""
MODES = ("cross_attn", "self_attn")


@dataclass(frozen=True)
class SmolVLASizes:
    """Sizes of a whole network."""

    vlm: StackSizes
    """Of the layers that are used."""
    expert: StackSizes
    joint: tuple[bool, ...]
    """For each layer: True if actions attend to actions in it."""
    vision: Vision
    image: tuple[int, int]
    """Width and height in pixels of the pictures that the network is shown."""
    scale_factor: int
    """Patches in a row, and in a column, that become one token."""
    vocab_size: int
    state_dim: int
    """Numbers of a state, with the zeros that fill it up."""
    action_dim: int
    """Numbers of an action, with the zeros that fill it up."""
    horizon: int
    """Actions that are predicted."""
    prompt_len: int
    """Tokens of a prompt, with those that fill it up."""
    image_tokens: bool
    """True if special tokens stand before and after each image."""
    empty_cameras: int
    """Images without a camera that a checkpoint has."""

    @property
    def patches(self) -> int:
        """Tokens of an image."""
        side = self.image[0] // self.vision.patch_size // self.scale_factor
        return side**2


def read_sizes(
    folder: Path, raw: Mapping[str, Any], backbone: Backbone, *, prompt_len: int | None = None
) -> SmolVLASizes:
    """Sizes of the network in the folder, whose processors fill prompts up to `prompt_len` tokens, if it has any.
    Raises `PolicyError` for what is no size, or is not computed here."""
    path = folder / CONFIG
    numbers = {
        "chunk_size": raw.get("chunk_size", 50),
        "max_state_dim": raw.get("max_state_dim", 32),
        "max_action_dim": raw.get("max_action_dim", 32),
        "tokenizer_max_length": raw.get("tokenizer_max_length", 48 if prompt_len is None else prompt_len),
    }
    for name, value in numbers.items():
        if type(value) is not int or not 0 < value <= LARGEST:
            raise PolicyError(f"{path}: {name} is {shown(value)}, and is of 1 to {LARGEST}")
    empty = raw.get("empty_cameras", 0)
    if type(empty) is not int or not 0 <= empty <= 64:
        raise PolicyError(f"{path}: empty_cameras is {shown(empty)}, and is of 0 to 64")
    special = raw.get("add_image_special_tokens", False)
    if type(special) is not bool:
        raise PolicyError(f"{path}: add_image_special_tokens is {shown(special)}, and is true or false")
    vlm = _vlm(path, raw, backbone)
    return SmolVLASizes(
        vlm,
        _expert(path, raw, vlm),
        _joint(path, raw, vlm.depth),
        backbone.vision_config,
        _image(path, raw, backbone),
        backbone.scale_factor,
        backbone.text_config.vocab_size,
        numbers["max_state_dim"],
        numbers["max_action_dim"],
        numbers["chunk_size"],
        numbers["tokenizer_max_length"],
        special,
        empty,
    )


def check_entries(path: Path, raw: Mapping[str, Any]) -> None:
    """Raise `PolicyError` for a config.json of another policy, and for an entry that is not applied here."""
    if raw.get("type") != "smolvla":
        raise PolicyError(f"{path} is of no SmolVLA: its type is {shown(raw.get('type'))}")
    check_known_entries(path, raw, READ, PASSED, FIXED)


def trained_parts(raw: Mapping[str, Any]) -> tuple[str, ...]:
    """Parts of the network, as `policy.options.train` names them, that LeRobot trains with this config.json."""
    found = ["expert", "projections"]
    if raw.get("train_expert_only") is False:
        found += ["language"] if raw.get("freeze_vision_encoder", True) else ["language", "vision"]
    return tuple(found)


def _vlm(path: Path, raw: Mapping[str, Any], backbone: Backbone) -> StackSizes:
    whole, used = backbone.stack(), raw.get("num_vlm_layers", 16)
    if type(used) is not int or used > whole.depth:
        raise PolicyError(
            f"{path}: num_vlm_layers is {shown(used)}, and the backbone has {whole.depth} layers: set "
            "policy.options.backbone to the folder of the one that it was trained with"
        )
    return replace(whole, depth=used) if used > 0 else whole


def _expert(path: Path, raw: Mapping[str, Any], vlm: StackSizes) -> StackSizes:
    factor, layers = raw.get("expert_width_multiplier", 0.75), raw.get("num_expert_layers", -1)
    if type(factor) not in (int, float) or not 0 < factor <= 16:
        raise PolicyError(f"{path}: expert_width_multiplier is {shown(factor)}, and is of 0 to 16")
    if type(layers) is not int or (layers > 0 and layers != vlm.depth):
        raise PolicyError(
            f"{path}: num_expert_layers is {shown(layers)}, and the vision-language model has {vlm.depth}: an expert "
            "of fewer layers is not supported. Neither does LeRobot act with one whose actions attend to each other"
        )
    width = int(vlm.width * factor)
    if width < 2 or width % 2:
        raise PolicyError(
            f"{path}: expert_width_multiplier {factor} of a width of {vlm.width} is {width}, and sines and cosines of "
            "the time need an even width"
        )
    units = 4 * (2 * width // 3)
    return replace(vlm, width=width, mlp_dim=MULTIPLE * -(-units // MULTIPLE))


def _joint(path: Path, raw: Mapping[str, Any], depth: int) -> tuple[bool, ...]:
    mode, every = raw.get("attention_mode", "cross_attn"), raw.get("self_attn_every_n_layers", 2)
    if mode not in MODES or type(every) is not int:
        raise PolicyError(
            f"{path}: attention_mode is {shown(mode)} and self_attn_every_n_layers {shown(every)}; known are "
            f"{' and '.join(MODES)}, with a whole number"
        )
    return tuple(mode == "self_attn" or (every > 0 and number % every == 0) for number in range(depth))


def _image(path: Path, raw: Mapping[str, Any], backbone: Backbone) -> tuple[int, int]:
    """Width and height, which give a square grid of patches that the connector can fold."""
    found = raw.get("resize_imgs_with_padding", [512, 512])
    if not isinstance(found, list) or len(found) != 2 or not all(type(n) is int and 0 < n <= 4096 for n in found):
        raise PolicyError(
            f"{path}: resize_imgs_with_padding is {shown(found)}; pictures are brought to a width and a height in "
            "pixels, of at most 4096"
        )
    width, height = found
    patch, factor = backbone.vision_config.patch_size, backbone.scale_factor
    grid = (width // patch, height // patch)
    if grid[0] != grid[1] or grid[0] % factor or not grid[0]:
        raise PolicyError(
            f"{path}: resize_imgs_with_padding {found} gives {grid[0]} x {grid[1]} patches of {patch} pixels, and the "
            f"connector joins {factor} x {factor} patches of a square grid"
        )
    return width, height
