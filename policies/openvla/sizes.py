"""OpenVLA with random weights at named sizes: for measuring speed and memory, which no weight's value changes.

A directory holds configuration, preprocessing and tokenizer; in place of shards, its config.json says from which seed
the weights are drawn, so that 15 GB are neither written nor read.

Names: openvla-7b is the published network (7,541,237,184 parameters; arXiv 2406.09246). openvla-100m is the same in
small: towers of 256 patches with a tenth of the parameters as published, projector, and a Llama with Llama's own
vocabulary, which does not shrink with the network and takes half of it. openvla-100m-deep keeps the published share of
the vocabulary, 4%, by a smaller one, and spends the rest on layers. openvla-small and openvla-small-128 are the
smallest that have learned a task (docs/learning.md), openvla-tiny is for tests, openvla-oft-... the same network as
OpenVLA-OFT uses it.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policies.contract import PolicyError
from policies.files import write_json
from policies.openvla.config import BINS, CONFIG, PUBLISHED_TOWERS
from policies.openvla.images import PREPROCESSOR
from policies.openvla.prompts import TEMPLATE, TOKENIZER
from policies.random_weights import FURTHER_WORDS, INSTRUCTION, RANDOM_WEIGHTS, SINGLE
from policies.registry import nearest

PAD_TO = 64
ACTION_DIM = 7
CHUNK = 8
"""Actions of OpenVLA-OFT's chunk on LIBERO."""

TENTH_TOWERS = ({"embed_dim": 192, "depth": 10, "num_heads": 3}, {"embed_dim": 216, "depth": 11, "num_heads": 3})
SMALL_LLAMA = {
    "hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 4, "vocab_size": 576,
}  # fmt: skip
SMALL_TOWER = {"embed_dim": 64, "depth": 3, "num_heads": 2}
SIZES: Mapping[str, Mapping[str, Any]] = {
    "7b": {"image_size": 224, "llama": {"vocab_size": 32064}},
    "100m": {
        "image_size": 224,
        "llama": {
            "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 5, "num_attention_heads": 12,
            "num_key_value_heads": 12, "vocab_size": 32064,
        },
        "towers": TENTH_TOWERS,
    },
    "100m-deep": {
        "image_size": 224,
        "llama": {
            "hidden_size": 768, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 12,
            "num_key_value_heads": 12, "vocab_size": 2112,
        },
        "towers": TENTH_TOWERS,
    },
    "small": {"image_size": 56, "bins": 32, "llama": SMALL_LLAMA, "towers": (SMALL_TOWER, SMALL_TOWER)},
    "small-128": {
        "image_size": 128,
        "bins": 32,
        "llama": SMALL_LLAMA,
        "towers": ({**SMALL_TOWER, "patch_size": 32}, {**SMALL_TOWER, "patch_size": 32}),
    },
    "tiny": {
        "image_size": 28,
        "llama": {
            "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 4, "vocab_size": 576,
        },
        "towers": ({"embed_dim": 24, "depth": 3, "num_heads": 2}, {"embed_dim": 24, "depth": 3, "num_heads": 2}),
    },
}  # fmt: skip
KINDS = {"openvla": "openvla", "openvla-oft": "openvla_oft"}
"""First part of a name, and the policy's kind."""
MODELS = {f"{first}-{size}": (kind, size) for first, kind in KINDS.items() for size in SIZES}
"""Name to the policy's kind and size."""


def find(name: str) -> tuple[str, str]:
    """The policy's kind and the size. Raises `PolicyError` with the nearest names."""
    if name not in MODELS:
        raise PolicyError(f"unknown model {name!r}{nearest(name, list(MODELS))}")
    return MODELS[name]


def write_random(folder: str | Path, name: str, seed: int = 0) -> Path:
    """Write the directory of a named model with random weights (some kB) and return it."""
    _, size = find(name)
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, _config(SIZES[size], seed))
    write_json(folder / PREPROCESSOR, preprocessor(SIZES[size]["image_size"]))
    (folder / TOKENIZER).write_text(json.dumps(_tokenizer()))
    return folder


def _config(size: Mapping[str, Any], seed: int) -> dict[str, Any]:
    rows = size["llama"]["vocab_size"]
    percentiles = {"q01": [-1.0] * ACTION_DIM, "q99": [1.0] * ACTION_DIM, "mask": [True] * (ACTION_DIM - 1) + [False]}
    config = {
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "arch_specifier": "no-align+fused-gelu-mlp",
        "image_resize_strategy": "resize-naive",
        "image_sizes": [size["image_size"]] * 2,
        "llm_max_length": 2048,
        "n_action_bins": size.get("bins", BINS),
        "norm_stats": {"random": {"action": percentiles, "num_transitions": 1, "num_trajectories": 1}},
        "pad_to_multiple_of": PAD_TO,
        "pad_token_id": rows - PAD_TO,
        "text_config": {"model_type": "llama", "pad_token_id": rows - PAD_TO, **size["llama"]},
        "timm_model_ids": list(PUBLISHED_TOWERS),
        "torch_dtype": "bfloat16",
        "use_fused_vision_backbone": True,
        RANDOM_WEIGHTS: seed,
    }
    if "towers" in size:
        config["timm_model_kwargs"] = towers(*size["towers"])
    return config


def towers(first: Mapping[str, Any], second: Mapping[str, Any]) -> list[dict[str, Any]]:
    """timm's arguments of DINOv2 and SigLIP at sizes that are in no registry: embed_dim, depth, num_heads, and
    patch_size where it is not 14 as published."""
    dino = {"reg_tokens": 4, "class_token": True, "no_embed_class": True, "init_values": 1e-5}
    siglip = {"class_token": False, "global_pool": "map", "mlp_ratio": 3.7362}
    return [{"patch_size": 14, **first, **dino}, {"patch_size": 14, **second, **siglip}]


def preprocessor(size: int) -> dict[str, Any]:
    """preprocessor_config.json as published, for frames of another size."""
    return {
        "image_processor_type": "PrismaticImageProcessor",
        "image_resize_strategy": "resize-naive",
        "input_sizes": [[3, size, size]] * 2,
        "interpolations": ["bicubic"] * 2,
        "means": [[0.485, 0.456, 0.406], [0.5] * 3],
        "stds": [[0.229, 0.224, 0.225], [0.5] * 3],
        "use_fused_vision_backbone": True,
    }


def _tokenizer() -> dict[str, Any]:
    """The words of the prompt, of `INSTRUCTION` and of `FURTHER_WORDS` are a token each, nearly as in Llama's
    vocabulary; others are spelled. What counts for speed is the prompt's length."""
    from tokenizers import Tokenizer, models, normalizers, processors

    text = TEMPLATE.format(INSTRUCTION).replace("?\n", " ? ").replace(":", " : ")
    words = sorted({f"▁{word}" for word in text.split() if word.isalpha()} | {"Out"})
    words += [piece for piece in (f"▁{word}" for word in FURTHER_WORDS.split()) if piece not in words]
    single = [SINGLE[0], "▁", *SINGLE[1:]]
    pieces = [(piece, 0.0) for piece in ("<unk>", "<s>", "</s>")]
    pieces += [(piece, -10.0) for piece in single] + [(word, -1.0) for word in words]
    tokenizer = Tokenizer(models.Unigram(pieces, unk_id=0))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return json.loads(tokenizer.to_str())
