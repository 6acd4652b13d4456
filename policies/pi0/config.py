"""Sizes of the network in a checkpoint's config.json, in openpi's layout and LeRobot's."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from pathlib import Path
from typing import Any, Literal

from policies.contract import PolicyError
from policies.files import read_json, shown
from policies.lerobot.config import check_known_entries
from policies.pi0.mixture import StackSizes
from policies.random_weights import RANDOM_WEIGHTS

Layout = Literal["openpi", "lerobot"]
CONFIG = "config.json"
ARCHITECTURE, OWN_SIZES = "architecture", "sizes"
"""Object of config.json that has sizes where they are not the published ones, and its name in this project's own
checkpoints, whose architecture is that of a policy."""
VARIANTS = {
    "gemma_2b": StackSizes(2048, 18, 16384, 8, 1, 256),
    "gemma_300m": StackSizes(1024, 18, 4096, 8, 1, 256),
}
"""openpi's names (openpi/models/gemma.py)."""
DEFAULT_VARIANTS = {"paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m"}
LARGEST, MOST_LAYERS = 2**20, 512
"""Limit of sizes: config.json may hold any number."""
OURS = {"kind", "spec", OWN_SIZES, ARCHITECTURE, RANDOM_WEIGHTS, "pi05"}
"""Entries that this project writes."""
READ: Mapping[Layout, set[str]] = {
    "openpi": {
        "action_dim", "action_horizon", "paligemma_variant", "action_expert_variant", "precision", "max_token_len",
        "discrete_state_input",
    },
    "lerobot": {
        "type", "input_features", "output_features", "normalization_mapping", "paligemma_variant",
        "action_expert_variant", "chunk_size", "max_state_dim", "max_action_dim", "num_inference_steps", "num_steps",
        "time_sampling_beta_alpha", "time_sampling_beta_beta", "time_sampling_scale", "time_sampling_offset",
        "use_relative_actions", "relative_exclude_joints", "action_feature_names", "image_resolution",
        "resize_imgs_with_padding", "empty_cameras", "tokenizer_max_length", "rtc_config", "use_peft",
    },
}  # fmt: skip
"""Entries of config.json that are applied, or compared with other files and options."""
PASSED: Mapping[Layout, tuple[str, ...]] = {
    "openpi": ("dtype", "pytorch_compile_mode"),
    "lerobot": (
        "n_action_steps",  # policy.chunk says it here
        "device", "dtype", "use_amp", "compile_model", "compile_mode", "gradient_checkpointing", "use_cache",
        "attention_implementation", "freeze_vision_encoder", "train_expert_only", "train_state_proj", "proj_width",
        "push_to_hub", "repo_id", "private", "tags", "license", "pretrained_path",
        "pretrained_revision", "memory_frames", "memory_stride", "memory_temporal_attention_every",
    ),
}  # fmt: skip
"""Entries that say how it was trained, on which machine, or where it was published."""
FIXED: Mapping[str, Any] = {
    "n_obs_steps": 1, "min_period": 4e-3, "max_period": 4.0, "adapt_to_pi_aloha": False,
    "use_delta_joint_actions_aloha": False, "use_visual_memory": False, "use_proprioceptive_memory": False,
    "rtc_training_max_delay": 0,
}  # fmt: skip
"""Entries of LeRobot's that have one value here: with another the network computes something else."""


@dataclass(frozen=True)
class VisionSizes:
    """SigLIP's; the defaults are So400m/14 at 224 pixels."""

    hidden_size: int = 1152
    intermediate_size: int = 4304
    num_hidden_layers: int = 27
    num_attention_heads: int = 16
    image_size: int = 224
    patch_size: int = 14


@dataclass(frozen=True)
class Pi0Sizes:
    """Sizes of a whole network."""

    vlm: StackSizes
    expert: StackSizes
    vision: VisionSizes
    vocab_size: int
    action_dim: int
    """Numbers of an action and of a state, with the zeros that fill them up."""
    horizon: int
    """Actions that are predicted."""
    prompt_len: int
    """Tokens of a prompt, with those that fill it up."""
    adaptive: bool
    """pi0.5: time enters by adaptive norms, and there is no state token."""

    @property
    def patches(self) -> int:
        """Tokens of an image."""
        return (self.vision.image_size // self.vision.patch_size) ** 2


def read_sizes(folder: Path, adaptive: bool) -> tuple[Pi0Sizes, Layout]:
    """Sizes, and whose layout the folder has. `adaptive` is known from the weights: openpi's config does not say it.

    Raises `PolicyError` for a config.json that is of neither, or that contradicts the weights.
    """
    raw = read_json(folder / CONFIG)
    layout = layout_of(folder, raw)
    if layout == "openpi":
        action_dim, horizon = raw.get("action_dim"), raw.get("action_horizon")
    else:
        action_dim, horizon = raw.get("max_action_dim", 32), raw.get("chunk_size", 50)
        if adaptive != (raw["type"] == "pi05"):
            has = "has" if adaptive else "has no"
            said = raw["type"]
            raise PolicyError(f"{folder / CONFIG} says {said}, and the checkpoint {has} time_mlp_in, as pi05 has")
        if not adaptive and raw.get("max_state_dim", action_dim) != action_dim:
            raise PolicyError(
                f"{folder / CONFIG}: max_state_dim is {shown(raw['max_state_dim'])} and max_action_dim "
                f"{shown(action_dim)}; states and actions are filled up to the same number here"
            )
    if layout == "openpi" and raw.get("pi05") not in (None, adaptive):
        has = "has" if adaptive else "has no"
        raise PolicyError(f"{folder / CONFIG}: pi05 is {shown(raw['pi05'])}, and the checkpoint {has} time_mlp_in")
    own = own_sizes(raw) or {}
    if not isinstance(own, dict):
        raise PolicyError(f"{folder / CONFIG}: {ARCHITECTURE} is {shown(own)}, and is an object with sizes")
    stated = raw.get("tokenizer_max_length" if layout == "lerobot" else "max_token_len")
    prompt_len = own.get("max_token_len") or stated or (200 if adaptive else 48)
    vocab_size = own.get("vocab_size", 257_152)
    numbers: dict[str, Any] = {
        "action dimensions": action_dim,
        "horizon": horizon,
        "prompt": prompt_len,
        "vocabulary": vocab_size,
    }
    if not all(_is_size(value) for value in numbers.values()):
        raise PolicyError(f"{folder / CONFIG}: one of these is no size of 1 to {LARGEST}: {shown(numbers, 200)}")
    dims, predicted, words, rows = numbers.values()
    return Pi0Sizes(
        _stack(folder, raw, own, "vlm", "paligemma_variant"),
        _stack(folder, raw, own, "expert", "action_expert_variant"),
        _vision(folder, raw, own.get("vision", {})),
        rows,
        dims,
        predicted,
        words,
        adaptive,
    ), layout


def layout_of(folder: Path, raw: Mapping[str, Any]) -> Layout:
    """Layout of the directory with this config.json. Raises `PolicyError` where it is neither project's."""
    kind = raw.get("type")
    if kind is None and "action_horizon" in raw:
        return "openpi"
    if kind in ("pi0", "pi05"):
        return "lerobot"
    raise PolicyError(f"{folder / CONFIG} is of no pi0: neither openpi's (action_horizon) nor LeRobot's (type pi0)")


def check_entries(path: Path, raw: Mapping[str, Any], layout: Layout) -> None:
    """Raise `PolicyError` for an entry that asks for what is not done here, and for one that is not known unless it is
    off: false, null, 0 or empty."""
    fixed = FIXED if layout == "lerobot" else {}
    check_known_entries(path, raw, OURS | READ[layout], PASSED[layout], fixed)


def _vision(folder: Path, raw: Mapping[str, Any], own: Any) -> VisionSizes:
    """Sizes of the vision tower, whose pictures are of the size to which the configuration brings them."""
    known, asked = _known(folder, own, VisionSizes), _picture_size(folder, raw)
    if known.get("image_size", asked) != asked and asked is not None:
        raise PolicyError(
            f"{folder / CONFIG}: pictures are brought to {asked} pixels, and {ARCHITECTURE} has {known['image_size']}"
        )
    return VisionSizes(**({} if asked is None else {"image_size": asked}) | known)


def _picture_size(folder: Path, raw: Mapping[str, Any]) -> int | None:
    """Pixels of the square to which LeRobot's configuration brings pictures."""
    for name in ("image_resolution", "resize_imgs_with_padding"):
        said = raw.get(name)
        if said is not None:
            if not isinstance(said, list) or len(said) != 2 or said[0] != said[1] or not _is_size(said[0]):
                raise PolicyError(f"{folder / CONFIG}: {name} is {shown(said)}; pictures are brought to a square")
            return int(said[0])
    return None


def own_sizes(raw: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """Sizes that are not the published ones; None where there are none. In this project's checkpoints, which say their
    policy's kind, `architecture` is something else."""
    return raw.get(OWN_SIZES if "kind" in raw else ARCHITECTURE)


def _stack(folder: Path, raw: Mapping[str, Any], own: Mapping[str, Any], name: str, variant: str) -> StackSizes:
    if name in own:
        return StackSizes(**_known(folder, own[name], StackSizes))
    if raw.get("type") in ("pi0", "pi05"):  # what LeRobot fills in where the entry is missing
        raw = {**DEFAULT_VARIANTS, **raw}
    if raw.get(variant) not in (*VARIANTS,):
        raise PolicyError(
            f"{folder / CONFIG}: {variant} is {shown(raw.get(variant))}; known are {', '.join(VARIANTS)}, others need "
            f"their sizes in {ARCHITECTURE}.{name}"
        )
    return VARIANTS[raw[variant]]


def _is_size(value: Any) -> bool:
    return type(value) is int and 0 < value <= LARGEST


def _known(folder: Path, found: Any, cls: type) -> dict[str, int]:
    """Sizes by the names of the class's fields. Raises `PolicyError` for others, and where one without a default is
    missing."""
    if not isinstance(found, dict):
        raise PolicyError(f"{folder / CONFIG}: {ARCHITECTURE} has {shown(found)} in place of sizes")
    names = {f.name: f.default is MISSING for f in fields(cls)}
    wrong = sorted(set(found) - set(names))
    missing = sorted(name for name, needed in names.items() if needed and name not in found)
    if wrong or missing or not all(_is_size(value) for value in found.values()):
        lacks = f" and lacks {', '.join(missing)}" if missing else ""
        raise PolicyError(
            f"{folder / CONFIG}: {ARCHITECTURE} has {shown(wrong or found, 300)}{lacks}; sizes of 1 to {LARGEST} are "
            f"{sorted(names)}"
        )
    if max(found.get("depth", 1), found.get("num_hidden_layers", 1)) > MOST_LAYERS:
        raise PolicyError(f"{folder / CONFIG}: {ARCHITECTURE} has {found}; at most {MOST_LAYERS} layers can be")
    return found
