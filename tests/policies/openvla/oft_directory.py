"""A small OpenVLA-OFT directory as its authors' program leaves it, and what it computes, written out on its own.

The formulas are those of arXiv 2502.19645: FiLM in both towers, proprioception as one token, a chunk of placeholders
under full attention, an MLP of residual blocks on their states. Nothing of `policies.openvla` computes here; the
language model is transformers' own, under a mask of ones.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from tests.policies.openvla.tiny import write_tiny

WIDTH, TOWER, BLOCKS, CHUNK, ACTIONS, PROPRIO, INNER = 32, 24, 3, 3, 7, 8, 20
HEADS = 2
RANK, ALPHA = 4, 4  # an alpha of min(rank, 16), as the reference trains
STEP = "150000"
TOWERS = ("featurizer", "fused_featurizer")
LINEAR = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")


def write_oft(folder: Path, *, step: str = STEP, adapters: bool = True, seed: int = 5) -> Path:
    """The directory: shards with the base's towers, and the three side files, of which the backbone's has trained ones,
    with their adapters apart."""
    write_tiny(folder, seed=seed, width=WIDTH, action_dim=ACTIONS, proprio_dim=PROPRIO)
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int, scale: float = 0.3) -> Tensor:
        return scale * torch.randn(*shape, generator=g)

    inputs = ACTIONS * WIDTH
    head = {"layer_norm1.weight": 1 + draw(inputs), "layer_norm1.bias": draw(inputs), "fc1.weight": draw(INNER, inputs),
            "fc1.bias": draw(INNER), "layer_norm2.weight": 1 + draw(INNER), "layer_norm2.bias": draw(INNER),
            "fc2.weight": draw(ACTIONS, INNER), "fc2.bias": draw(ACTIONS)}  # fmt: skip
    for block in range(2):
        at = f"mlp_resnet_blocks.{block}.ffn"
        head |= {f"{at}.0.weight": 1 + draw(INNER), f"{at}.0.bias": draw(INNER)}
        head |= {f"{at}.1.weight": draw(INNER, INNER), f"{at}.1.bias": draw(INNER)}
    save(folder, "action_head", step, {f"module.model.{name}": tensor for name, tensor in head.items()})
    projector = {"fc1.weight": draw(WIDTH, PROPRIO), "fc1.bias": draw(WIDTH), "fc2.weight": draw(WIDTH, WIDTH),
                 "fc2.bias": draw(WIDTH)}  # fmt: skip
    save(folder, "proprio_projector", step, {f"module.{name}": tensor for name, tensor in projector.items()})
    backbone: dict[str, Tensor] = {}
    for name, tensor in stored(folder).items():
        if not name.startswith("vision_backbone."):
            continue
        tensor = tensor + draw(*tensor.shape, scale=0.02)  # the towers were trained
        parts = name.split(".")
        if parts[2] == "blocks":
            name = ".".join([*parts[:4], "block", *parts[4:]])
        layer, kind = name.rsplit(".", 1)
        if adapters and (layer.endswith(LINEAR) or ".attn_pool." in layer and "norm" not in layer and kind != "latent"):
            name = f"{layer}.base_layer.{kind}"
            if kind == "weight":
                backbone[f"{layer}.lora_A.default.weight"] = draw(RANK, tensor.shape[1])
                backbone[f"{layer}.lora_B.default.weight"] = draw(tensor.shape[0], RANK)
        backbone[name] = tensor
    for tower in TOWERS:
        for block in range(BLOCKS):
            for part in ("scale", "shift"):
                at = f"vision_backbone.{tower}.blocks.{block}.{part}"
                backbone |= {f"{at}.weight": draw(TOWER, WIDTH), f"{at}.bias": draw(TOWER)}
    save(folder, "vision_backbone", step, backbone)
    return folder


def save(folder: Path, component: str, step: str, state: dict[str, Tensor]) -> None:
    torch.save(state, folder / f"{component}--{step}_checkpoint.pt")


def side(folder: Path, component: str, step: str = STEP) -> dict[str, Tensor]:
    found: dict[str, Tensor] = torch.load(folder / f"{component}--{step}_checkpoint.pt", weights_only=True)
    return found


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: t for path in sorted(folder.glob("*.safetensors")) for name, t in load_file(path).items()}


def tower_features(state: dict[str, Tensor], tower: str, pixels: Tensor, language: Tensor, heads: int) -> Tensor:
    """Patches [B, N, E] of pixels [B, 3, S, S], after the last block but one, told [B, D] what the language says."""
    at = f"vision_backbone.{tower}"

    def linear(layer: str, x: Tensor) -> Tensor:
        if f"{layer}.weight" in state:
            return F.linear(x, state[f"{layer}.weight"], state[f"{layer}.bias"])
        apart = x @ state[f"{layer}.lora_A.default.weight"].T @ state[f"{layer}.lora_B.default.weight"].T
        return (
            F.linear(x, state[f"{layer}.base_layer.weight"], state[f"{layer}.base_layer.bias"]) + ALPHA / RANK * apart
        )

    def norm(layer: str, x: Tensor) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], state[f"{layer}.weight"], state[f"{layer}.bias"], 1e-6)

    kernel = state[f"{at}.patch_embed.proj.weight"]
    x = F.conv2d(pixels, kernel, state[f"{at}.patch_embed.proj.bias"], stride=kernel.shape[-1]).flatten(2).mT
    prefix = [state[f"{at}.{name}"] for name in ("cls_token", "reg_token") if f"{at}.{name}" in state]
    x = x + state[f"{at}.pos_embed"]
    x = torch.cat([*(token.expand(len(x), -1, -1) for token in prefix), x], 1)
    for number in range(BLOCKS - 1):
        block = f"{at}.blocks.{number}.block"
        scales = [state.get(f"{block}.ls{which}.scale_factor", torch.ones(())) for which in (1, 2)]
        q, k, v = (
            linear(f"{block}.attn.qkv", norm(f"{block}.norm1", x)).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        )
        weights = (q @ k.mT / math.sqrt(q.shape[-1])).softmax(-1)
        x = x + scales[0] * linear(f"{block}.attn.proj", (weights @ v).transpose(1, 2).flatten(2))
        gamma, beta = (
            F.linear(language, state[f"{at}.blocks.{number}.{part}.weight"], state[f"{at}.blocks.{number}.{part}.bias"])
            for part in ("scale", "shift")
        )
        x = x * (1 + gamma[:, None]) + beta[:, None]
        hidden = F.gelu(linear(f"{block}.mlp.fc1", norm(f"{block}.norm2", x)))
        x = x + scales[1] * linear(f"{block}.mlp.fc2", hidden)
    return x[:, sum(token.shape[1] for token in prefix) :]


def normalised_actions(folder: Path, pixels: Tensor, ids: Tensor, proprio: Tensor) -> Tensor:
    """[C, A] in -1..1 of one decision: pixels [I, 6, S, S], prompt tokens [L] from BOS on, raw proprio [P]."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    weights = stored(folder)
    language_model = LlamaForCausalLM(LlamaConfig(**config["text_config"] | {"attn_implementation": "eager"})).eval()
    language_model.load_state_dict(
        {name.removeprefix("language_model."): t for name, t in weights.items() if name.startswith("language_model.")}
    )
    table = weights["language_model.model.embed_tokens.weight"]
    text = table[ids]
    stop = table[2:3]
    average = torch.cat([text, stop]).mean(0, keepdim=True).expand(len(pixels), -1)
    backbone = side(folder, "vision_backbone")
    seen = torch.cat(
        [tower_features(backbone, t, part, average, HEADS) for t, part in zip(TOWERS, pixels.split(3, 1), strict=True)],
        -1,
    ).flatten(0, 1)
    for number in (1, 2, 3):
        seen = F.linear(seen, weights[f"projector.fc{number}.weight"], weights[f"projector.fc{number}.bias"])
        seen = F.gelu(seen) if number < 3 else seen
    ends = next(iter(config["norm_stats"].values()))["proprio"]
    low, high = (torch.tensor(ends[name], dtype=torch.float64) for name in ("q01", "q99"))
    unit = (2 * (proprio.double() - low) / (high - low + 1e-8) - 1).clamp(-1, 1).float()
    p = {name.removeprefix("module."): t for name, t in side(folder, "proprio_projector").items()}
    token = F.linear(F.gelu(F.linear(unit, p["fc1.weight"], p["fc1.bias"])), p["fc2.weight"], p["fc2.bias"])
    zeros = torch.zeros(CHUNK * ACTIONS, WIDTH)
    sequence = torch.cat([text[:1], seen, token[None], text[1:], zeros, stop])[None]
    mask = torch.zeros(1, 1, sequence.shape[1], sequence.shape[1])  # added to the scores: every token sees every other
    hidden = language_model.model(inputs_embeds=sequence, attention_mask=mask, use_cache=False).last_hidden_state[0]
    before = len(seen) + len(ids)  # the state before the first placeholder
    states = hidden[before : before + CHUNK * ACTIONS].reshape(CHUNK, ACTIONS * WIDTH)
    h = {name.removeprefix("module.model."): t for name, t in side(folder, "action_head").items()}
    x = F.layer_norm(states, states.shape[-1:], h["layer_norm1.weight"], h["layer_norm1.bias"])
    x = F.relu(F.linear(x, h["fc1.weight"], h["fc1.bias"]))
    for block in range(2):
        at = f"mlp_resnet_blocks.{block}.ffn"
        y = F.layer_norm(x, x.shape[-1:], h[f"{at}.0.weight"], h[f"{at}.0.bias"])
        x = x + F.relu(F.linear(y, h[f"{at}.1.weight"], h[f"{at}.1.bias"]))
    return F.linear(
        F.layer_norm(x, x.shape[-1:], h["layer_norm2.weight"], h["layer_norm2.bias"]), h["fc2.weight"], h["fc2.bias"]
    )
