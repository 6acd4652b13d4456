"""What a checkpoint's config.json says about the model.

Source of names and defaults: openvla/openvla, prismatic/extern/hf/configuration_prismatic.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.contract import PolicyError
from policies.files import CONFIG, read_json

TOWERS = ("featurizer", "fused_featurizer")
"""Names of the two vision towers in the checkpoint: DINOv2 and SigLIP."""
PUBLISHED_TOWERS = ("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224")
"""timm's names of the towers in the published checkpoints."""
BINS = 256
"""Of an action dimension, in the published checkpoints."""
OWN_ENTRIES = ("kind", "spec", "architecture")
"""What `policies.save` adds to a config.json: no part of the model's configuration."""


@dataclass(frozen=True)
class ModelConfig:
    """The model's sizes."""

    raw: Mapping[str, Any]
    """config.json as the reference writes it."""
    image_size: int
    towers: tuple[str, str]
    """timm's model names."""
    tower_sizes: tuple[Mapping[str, Any], Mapping[str, Any]] | None
    """Arguments of timm's VisionTransformer where the towers are in no registry (test models), else None."""
    llama: Mapping[str, Any]
    """Arguments of transformers' LlamaConfig.

    Released checkpoints list four of them; the others are LlamaConfig's defaults, among them rms_norm_eps 1e-6,
    which is not Llama-2's.
    """
    pad_token: int
    action_vocab: int
    """Size of the tokenizer's vocabulary: bin d of an action is the token `action_vocab - d`."""
    bins: int
    """Action tokens: what an action dimension is divided into."""
    max_tokens: int
    """Longest sequence of image patches, prompt and actions."""

    @property
    def first_action_token(self) -> int:
        return self.action_vocab - self.bins

    @property
    def patches(self) -> int:
        """Image patches of one picture."""
        sizes = self.tower_sizes[0] if self.tower_sizes else {}
        return (self.image_size // int(sizes.get("patch_size", 14))) ** 2


def read_config(folder: Path) -> ModelConfig:
    """The configuration of an OpenVLA directory. Raises `PolicyError` where it is something else."""
    path = folder / CONFIG
    raw = {name: value for name, value in read_json(path).items() if name not in OWN_ENTRIES}
    if raw.get("model_type") != "openvla":
        raise PolicyError(f"{path} is not OpenVLA's: its model_type is {raw.get('model_type')!r}, not 'openvla'")
    if not raw.get("use_fused_vision_backbone", True):
        raise PolicyError(f"{path}: only the fused vision backbone (DINOv2 and SigLIP) is supported")
    bins = raw.get("n_action_bins", BINS)
    if not isinstance(bins, int) or not 2 <= bins <= BINS:
        raise PolicyError(f"{path}: n_action_bins is a number from 2 to {BINS}, it is {bins!r}")
    try:
        text = dict(raw["text_config"])
        text.pop("torch_dtype", None)
        text.pop("dtype", None)
        if text.pop("model_type", "llama") != "llama":
            raise PolicyError(f"{path}: the language model must be a llama, it is {raw['text_config']['model_type']!r}")
        sizes = raw.get("timm_model_kwargs")
        heights = {int(size) for size in raw["image_sizes"]}
        if len(heights) != 1:
            raise PolicyError(f"{path}: both towers must take images of one size, they take {sorted(heights)}")
        return ModelConfig(
            raw=raw,
            image_size=heights.pop(),
            towers=_pair(raw.get("timm_model_ids", PUBLISHED_TOWERS)),
            tower_sizes=None if sizes is None else _pair(sizes),
            llama=text,
            pad_token=int(raw.get("pad_token_id", 32000)),
            action_vocab=int(text.get("vocab_size", 32064)) - int(raw.get("pad_to_multiple_of", 64)),
            bins=bins,
            max_tokens=int(text.get("max_position_embeddings", raw.get("llm_max_length", 2048))),
        )
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyError(f"{path} lacks an entry or has one of the wrong type: {error!r}") from error


def _pair(values: Any) -> tuple[Any, Any]:
    first, second = values
    return first, second
