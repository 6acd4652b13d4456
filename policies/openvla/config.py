"""Description of the model in a checkpoint's config.json.

Source of names and defaults: openvla/openvla, prismatic/extern/hf/configuration_prismatic.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import BaseModel, Field

from policies.contract import PolicyError
from policies.files import CONFIG, checked, read_json, shown

TOWERS = ("featurizer", "fused_featurizer")
"""Names of the two vision towers in the checkpoint: DINOv2 and SigLIP."""
PUBLISHED_TOWERS = ("vit_large_patch14_reg4_dinov2.lvd142m", "vit_so400m_patch14_siglip_224")
"""timm's names of the towers in the published checkpoints."""
BINS = 256
"""Bins of an action dimension, in the published checkpoints."""
OWN_ENTRIES = ("kind", "spec", "architecture")
"""Keys that `policies.save` adds to a config.json: no part of the model's configuration."""
Size = Annotated[int, Field(strict=True, gt=0, le=2**20)]
Layers = Annotated[int, Field(strict=True, gt=0, le=512)]


class _Language(BaseModel, extra="allow"):
    """Sizes among LlamaConfig's arguments; whatever else is there transformers judges."""

    model_type: str = "llama"
    hidden_size: Size = 4096
    intermediate_size: Size = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Size = 32
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    vocab_size: Size = 32064
    max_position_embeddings: Size | None = None


class _Tower(BaseModel, extra="allow"):
    """Sizes among the arguments of timm's VisionTransformer."""

    embed_dim: Size = 768
    depth: Layers = 12
    num_heads: Size = 12
    patch_size: Annotated[int, Field(strict=True, gt=0, le=1024)] = 16
    reg_tokens: Annotated[int, Field(strict=True, ge=0, le=1024)] = 0
    mlp_ratio: Annotated[float, Field(gt=0, le=64, allow_inf_nan=False)] = 4.0


class _Said(BaseModel):
    """config.json, as far as it is read."""

    text_config: _Language
    image_sizes: Annotated[list[Annotated[int, Field(strict=True, gt=0, le=4096)]], Field(min_length=1, max_length=2)]
    timm_model_ids: tuple[str, str] = PUBLISHED_TOWERS
    timm_model_kwargs: tuple[_Tower, _Tower] | None = None
    pad_token_id: Annotated[int, Field(strict=True, ge=0, le=2**20)] = 32000
    pad_to_multiple_of: Annotated[int, Field(strict=True, ge=0, le=2**20)] = 64
    llm_max_length: Size = 2048


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
        raise PolicyError(f"{path} is not OpenVLA's: its model_type is {shown(raw.get('model_type'))}, not 'openvla'")
    if not raw.get("use_fused_vision_backbone", True):
        raise PolicyError(f"{path}: only the fused vision backbone (DINOv2 and SigLIP) is supported")
    bins = raw.get("n_action_bins", BINS)
    if type(bins) is not int or not 2 <= bins <= BINS:
        raise PolicyError(f"{path}: n_action_bins is a number from 2 to {BINS}, it is {shown(bins)}")
    said = checked(path, _Said, raw)
    if said.text_config.model_type != "llama":
        raise PolicyError(f"{path}: the language model must be a llama, it is {shown(said.text_config.model_type)}")
    heights = set(said.image_sizes)
    if len(heights) != 1:
        raise PolicyError(f"{path}: both towers must take images of one size, they take {sorted(heights)}")
    text = {k: v for k, v in raw["text_config"].items() if k not in ("model_type", "torch_dtype", "dtype")}
    rows, vocabulary = said.text_config.vocab_size, said.text_config.vocab_size - said.pad_to_multiple_of
    if vocabulary < bins or said.pad_token_id >= rows:
        raise PolicyError(
            f"{path}: a vocabulary of {vocabulary} tokens in {rows} rows has no room for {bins} action tokens "
            f"and the padding {said.pad_token_id}"
        )
    return ModelConfig(
        raw=raw,
        image_size=heights.pop(),
        towers=said.timm_model_ids,
        tower_sizes=None if said.timm_model_kwargs is None else _pair(raw["timm_model_kwargs"]),
        llama=text,
        pad_token=said.pad_token_id,
        action_vocab=vocabulary,
        bins=bins,
        max_tokens=said.text_config.max_position_embeddings or said.llm_max_length,
    )


def _pair(values: Any) -> tuple[Any, Any]:
    first, second = values
    return first, second
