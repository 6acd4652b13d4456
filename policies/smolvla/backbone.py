"""The vision-language model under SmolVLA, whose shape and tokenizer no checkpoint of LeRobot's holds.

config.json says its name on Hugging Face's hub (`vlm_model_name`), and LeRobot asks the hub for both. Here they lie in
a folder with `config.json` and `tokenizer.json`: the one that policy.options.backbone names, else `vlm` within the
checkpoint, else `vlm_model_name` where that is a folder, else the hub's cache on this machine.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field

from policies.contract import PolicyError
from policies.files import CONFIG, checked, read_json, shown
from policies.smolvla.mixture import StackSizes

PUBLISHED = "HuggingFaceTB/SmolVLM2-500M-Video-Instruct"
BACKBONE = "vlm"
"""Folder of the backbone within a checkpoint that this project writes."""
TOKENIZER, TOKENIZER_CONFIG = "tokenizer.json", "tokenizer_config.json"
BACKBONE_FILES = (CONFIG, TOKENIZER, TOKENIZER_CONFIG)
"""Files that are read. The last one is only needed where its defaults do not hold."""
Size = Annotated[int, Field(strict=True, ge=1, le=2**20)]
Layers = Annotated[int, Field(strict=True, ge=1, le=512)]
Epsilon = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]


class Text(BaseModel, extra="ignore"):
    """transformers' LlamaConfig, with its defaults. `rope_theta` is not read: LeRobot rotates by another base."""

    hidden_size: Size = 4096
    intermediate_size: Size = 11008
    num_hidden_layers: Layers = 32
    num_attention_heads: Size = 32
    num_key_value_heads: Size | None = None
    head_dim: Size | None = None
    rms_norm_eps: Epsilon = 1e-6
    vocab_size: Size = 32000
    hidden_act: Literal["silu"] = "silu"
    attention_bias: Literal[False] = False
    mlp_bias: Literal[False] = False
    tie_word_embeddings: bool = False
    model_type: Literal["llama"] = "llama"


class Vision(BaseModel, extra="ignore"):
    """transformers' SmolVLMVisionConfig, with its defaults."""

    hidden_size: Size = 1152
    intermediate_size: Size = 3072
    num_hidden_layers: Layers = 12
    num_attention_heads: Size = 16
    image_size: Size = 224
    patch_size: Size = 32
    layer_norm_eps: Epsilon = 1e-6
    num_channels: Literal[3] = 3
    hidden_act: Literal["gelu_pytorch_tanh"] = "gelu_pytorch_tanh"


class Backbone(BaseModel, extra="ignore"):
    """config.json of the vision-language model."""

    model_type: Literal["smolvlm"]
    text_config: Text
    vision_config: Vision
    scale_factor: Annotated[int, Field(strict=True, ge=1, le=64)] = 2
    tie_word_embeddings: bool = False

    @property
    def tied(self) -> bool:
        """True if the model's head is the embeddings of words: a file may have only one of the two."""
        return self.tie_word_embeddings or self.text_config.tie_word_embeddings

    def stack(self) -> StackSizes:
        """Sizes of all its layers of words."""
        text = self.text_config
        heads = text.num_attention_heads
        return StackSizes(
            width=text.hidden_size,
            depth=text.num_hidden_layers,
            mlp_dim=text.intermediate_size,
            num_heads=heads,
            num_kv_heads=text.num_key_value_heads or heads,
            head_dim=text.head_dim or max(text.hidden_size // heads, 1),
            eps=text.rms_norm_eps,
        )


def read_backbone(folder: Path) -> Backbone:
    """Content of the backbone's config.json. Raises `PolicyError` for another model, and for sizes that cannot be."""
    path = folder / CONFIG
    raw = read_json(path)
    if raw.get("model_type") != "smolvlm":
        raise PolicyError(
            f"{path} is of {shown(raw.get('model_type'))}: SmolVLA's vision-language model is a SmolVLM2 (model_type "
            f"smolvlm), {PUBLISHED} as published"
        )
    found = checked(path, Backbone, raw)
    sizes, vision = found.stack(), found.vision_config
    if sizes.num_heads % sizes.num_kv_heads or sizes.head_dim % 2:
        raise PolicyError(
            f"{path}: {sizes.num_heads} heads share {sizes.num_kv_heads} keys of {sizes.head_dim} numbers: the first "
            "is a multiple of the second, and the third is even"
        )
    if vision.hidden_size % vision.num_attention_heads or vision.image_size < vision.patch_size:
        raise PolicyError(
            f"{path}: vision_config has {vision.num_attention_heads} heads for a width of {vision.hidden_size}, and "
            f"patches of {vision.patch_size} in pictures of {vision.image_size} pixels"
        )
    return found


def find_backbone(option: str, checkpoint: Path, config: Mapping[str, Any]) -> Path:
    """The folder with the backbone's configuration and tokenizer.

    Raises `PolicyError` where there is none, which says how to get it.
    """
    if option:
        folder = Path(option)
        if not folder.is_dir():
            raise PolicyError(f"policy.options.backbone: {folder} is not a folder here; {_command(PUBLISHED)}")
        _check_whole(folder)
        return folder.resolve()
    if (checkpoint / BACKBONE).is_dir():
        _check_whole(checkpoint / BACKBONE)
        return checkpoint / BACKBONE
    named = config.get("vlm_model_name", PUBLISHED)
    if not isinstance(named, str) or not named or "\0" in named or len(named) > 1000:
        raise PolicyError(f"{checkpoint / CONFIG}: vlm_model_name is {shown(named)} in place of a model's name")
    if os.path.isdir(named):
        _check_whole(Path(named))
        return Path(named).resolve()
    cached = _in_cache(named)
    if cached is not None:
        return cached
    raise PolicyError(
        f"{checkpoint} does not hold the shape and the tokenizer of its vision-language model {named}, and Hugging "
        f"Face's cache on this machine does not either; {_command(named)}"
    )


def _check_whole(folder: Path) -> None:
    for name in (CONFIG, TOKENIZER):
        if not (folder / name).is_file():
            raise PolicyError(f"incomplete backbone: {folder / name} is missing; {_command(PUBLISHED)}")


def _in_cache(name: str) -> Path | None:
    """The snapshot of a model on the hub, where its two files are there."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = [try_to_load_from_cache(name, file) for file in (CONFIG, TOKENIZER)]
    except (HFValidationError, OSError, ValueError):
        return None
    return Path(found[0]).parent if all(isinstance(path, str) for path in found) else None  # type: ignore[arg-type]


def _command(name: str) -> str:
    return (
        f"get both with\n  hf download {name} {' '.join(BACKBONE_FILES)} --local-dir backbone\nand set "
        "policy.options.backbone to that folder"
    )
