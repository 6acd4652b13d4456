"""SmolVLA with random weights at named sizes: for measuring, and as the beginning of small networks.

A folder has LeRobot's layout without weights, whose seed config.json says, and the backbone's configuration and
tokenizer in `vlm`. Numbers of states and actions are as they are, until demonstrations give them units.

Names: smolvla is the published network (450 million parameters, arXiv 2506.01844, on SmolVLM2-500M); smolvla-small
learns on two cores, and smolvla-small-128 from pictures of 128 x 128 pixels; smolvla-tiny is for tests.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.contract import PolicyError
from policies.files import CONFIG, read_json, write_json
from policies.random_weights import FURTHER_WORDS, INSTRUCTION, RANDOM_WEIGHTS, SINGLE
from policies.registry import nearest
from policies.smolvla.backbone import BACKBONE, PUBLISHED, TOKENIZER, TOKENIZER_CONFIG
from policies.smolvla.checkpoint import write_processors_of
from policies.smolvla.inputs import AROUND_IMAGES, PAD

SPECIAL = ("<|endoftext|>", "<|im_start|>", PAD, *dict.fromkeys(AROUND_IMAGES))


@dataclass(frozen=True)
class Size:
    """Sizes of a network."""

    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    scale_factor: int
    entries: Mapping[str, Any]
    """Entries of config.json that are not LeRobot's defaults."""


def _text(
    width: int, layers: int, units: int, heads: tuple[int, int], head_dim: int, vocabulary: int
) -> dict[str, Any]:
    return {
        "hidden_size": width, "num_hidden_layers": layers, "intermediate_size": units, "num_attention_heads": heads[0],
        "num_key_value_heads": heads[1], "head_dim": head_dim, "vocab_size": vocabulary, "rms_norm_eps": 1e-5,
        "model_type": "llama",
    }  # fmt: skip


def _vision(width: int, layers: int, units: int, heads: int, pixels: int, patch: int) -> dict[str, Any]:
    return {
        "hidden_size": width, "num_hidden_layers": layers, "intermediate_size": units, "num_attention_heads": heads,
        "image_size": pixels, "patch_size": patch,
    }  # fmt: skip


def _entries(pixels: int, layers: int, horizon: int) -> dict[str, Any]:
    return {
        "resize_imgs_with_padding": [pixels, pixels], "num_vlm_layers": layers, "chunk_size": horizon,
        "n_action_steps": horizon, "tokenizer_max_length": 24,
    }  # fmt: skip


MODELS = {
    "smolvla": Size(_text(960, 32, 2560, (15, 5), 64, 49280), _vision(768, 12, 3072, 12, 512, 16), 4, {}),
    "smolvla-small": Size(
        _text(128, 4, 256, (4, 2), 32, 256), _vision(64, 3, 192, 2, 56, 14), 1,
        {**_entries(56, 4, 4), "max_state_dim": 10, "max_action_dim": 10, "tokenizer_max_length": 16},
    ),
    "smolvla-small-128": Size(
        _text(128, 4, 256, (4, 2), 32, 256), _vision(64, 3, 192, 2, 128, 32), 1,
        {**_entries(128, 4, 8), "max_state_dim": 18, "max_action_dim": 18, "tokenizer_max_length": 16},
    ),
    "smolvla-tiny": Size(_text(32, 2, 48, (4, 2), 8, 256), _vision(24, 1, 36, 2, 32, 8), 2, _entries(32, 2, 4)),
}  # fmt: skip


def is_published(backbone: Path) -> bool:
    """True if the folder's vision-language model has the sizes of the published one, which LeRobot builds."""
    config = read_json(backbone / CONFIG)
    published = {"text_config": MODELS["smolvla"].text, "vision_config": MODELS["smolvla"].vision}
    names = ("hidden_size", "num_hidden_layers")
    return all(
        config.get(part, {}).get(name, size[name]) == size[name] for part, size in published.items() for name in names
    )


def write_random(folder: str | Path, name: str, seed: int = 0) -> Path:
    """Write the folder of a named model with random weights (some kB) and return it. Raises `PolicyError`."""
    if name not in MODELS:
        raise PolicyError(f"unknown model {name!r}{nearest(name, list(MODELS))}")
    size, folder = MODELS[name], Path(folder)
    (folder / BACKBONE).mkdir(parents=True, exist_ok=True)
    modes = dict.fromkeys(("VISUAL", "STATE", "ACTION"), "IDENTITY")
    config = {"type": "smolvla", "vlm_model_name": PUBLISHED, "normalization_mapping": modes, **size.entries}
    write_json(folder / CONFIG, {**config, RANDOM_WEIGHTS: seed})
    backbone = {"model_type": "smolvlm", "text_config": size.text, "vision_config": size.vision}
    write_json(folder / BACKBONE / CONFIG, {**backbone, "scale_factor": size.scale_factor})
    (folder / BACKBONE / TOKENIZER).write_text(_tokenizer())
    write_json(folder / BACKBONE / TOKENIZER_CONFIG, {"pad_token": PAD})
    write_processors_of(folder, read_json(folder / CONFIG).get("tokenizer_max_length", 48))
    return folder


def _tokenizer() -> str:
    """The usual words are a token each, others are spelled: for speed a prompt's length is what counts."""
    from tokenizers import Tokenizer, models, normalizers

    words = sorted({f"▁{word}" for word in f"{INSTRUCTION} {FURTHER_WORDS}".split()})
    pieces = [("<unk>", 0.0), *((piece, -10.0) for piece in ("▁", *SINGLE)), *((word, -1.0) for word in words)]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer.to_str()
