"""A tiny OpenVLA with random weights, as a directory like a real one: for tests and for trying things out.

Everything is as in a published checkpoint, only smaller: two towers, projector, Llama, statistics and a tokenizer that
knows single characters. Two entries of config.json give what timm's registry gives for the published sizes.
"""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import torch

from policies.files import INDEX, Shards, write_json
from policies.openvla.config import CONFIG, read_config
from policies.openvla.images import PREPROCESSOR
from policies.openvla.model import OpenVLAModel, to_checkpoint
from policies.openvla.prompts import TOKENIZER
from policies.openvla.sizes import PAD_TO, preprocessor, towers
from policies.random_weights import draw

VOCAB = 512


def write_tiny(
    folder: str | Path,
    seed: int = 0,
    *,
    width: int = 32,
    layers: int = 2,
    heads: int = 4,
    image_size: int = 28,
    action_dim: int = 7,
    proprio_dim: int = 8,
    datasets: tuple[str, ...] = ("tiny",),
) -> Path:
    """Write the directory and return it. The seed determines every tensor; global generators are untouched."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    write_json(folder / CONFIG, _config(width, layers, heads, image_size, action_dim, proprio_dim, datasets))
    write_json(folder / PREPROCESSOR, preprocessor(image_size))
    (folder / TOKENIZER).write_text(json.dumps(_tokenizer()))
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        config = read_config(folder)
        model = OpenVLAModel(config)
        for module in model.vision_backbone.children():
            module.to_empty(device="cpu")
        for name, parameter in model.named_parameters():
            draw(name, parameter, torch.default_generator)
        state = {to_checkpoint(name): tensor for name, tensor in model.state_dict().items()}
        for name, tensor in model.vision_backbone.unused.items():
            state[to_checkpoint(f"vision_backbone.{name}")] = unused = torch.empty(tensor.shape)
            draw(name, unused, torch.default_generator)
    # Two files, as real ones have several.
    halves = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    files = {name: halves[name.startswith("language_model")] for name in sorted(state)}
    Shards(folder, files).write(folder, state)
    assert (folder / INDEX).exists()
    return folder


def _config(
    width: int, layers: int, heads: int, size: int, actions: int, proprio: int, datasets: tuple[str, ...]
) -> dict[str, Any]:
    tower = {"embed_dim": 24, "depth": 3, "num_heads": 2}
    rows = VOCAB + PAD_TO
    return {
        "architectures": ["OpenVLAForActionPrediction"],
        "model_type": "openvla",
        "arch_specifier": "no-align+fused-gelu-mlp",
        "image_resize_strategy": "resize-naive",
        "image_sizes": [size, size],
        "llm_max_length": 2048,
        "n_action_bins": 256,
        "norm_stats": {name: _statistics(actions, proprio, shift) for shift, name in enumerate(datasets)},
        "pad_to_multiple_of": PAD_TO,
        "pad_token_id": VOCAB,
        "text_config": {
            "model_type": "llama", "hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": layers,
            "num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": rows, "pad_token_id": VOCAB,
        },
        "timm_model_ids": ["tiny_dinov2", "tiny_siglip"],
        "timm_model_kwargs": towers(tower, tower),
        "torch_dtype": "float32",
        "use_fused_vision_backbone": True,
    }  # fmt: skip


def _statistics(actions: int, proprio: int, shift: int) -> dict[str, Any]:
    def percentiles(size: int) -> dict[str, list[float]]:
        return {"q01": [-1.0 - 0.1 * (i + shift) for i in range(size)], "q99": [0.5 + 0.1 * i for i in range(size)]}

    action = percentiles(actions) | {"mask": [True] * (actions - 1) + [False]}
    return {"action": action, "proprio": percentiles(proprio), "num_transitions": 1, "num_trajectories": 1}


def _tokenizer() -> dict[str, Any]:
    """Llama's arrangement with an alphabet instead of a vocabulary of words."""
    from tokenizers import Tokenizer, models, normalizers, processors

    pieces = ["<unk>", "<s>", "</s>", "\n", "▁", *string.ascii_letters, *string.digits, *string.punctuation]
    tokenizer = Tokenizer(models.BPE({piece: i for i, piece in enumerate(pieces)}, [], unk_token="<unk>"))
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return json.loads(tokenizer.to_str())
