"""pi0's and pi0.5's network: from an observation and a noisy action chunk to the chunk's velocity.

In 16 bits the layers around the expert, norms and the embedding of patches stay in 32 (`KEPT`), as openpi has it.

Time runs from t = 1 (noise) to t = 0 (actions), x_t = t e + (1 - t) a, and the velocity is dx/dt = e - a
(openpi's pi0_pytorch.py). B rows, I images of S x S pixels, L tokens of the prompt, P = I * patches + L tokens of the
prefix, H actions of a chunk, A numbers of an action.
"""

from __future__ import annotations

import math
import re
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from policies.flow_vla.network import FlowNetwork, Observation, Prefix, blocks_seen, one_block, positions_of
from policies.layers import time_embedding
from policies.pi0.config import Layout, Pi0Sizes, VisionSizes
from policies.pi0.mixture import Mixture
from policies.quantised import weight_dtype
from policies.torchvision_operators import import_torchvision


class Pi0Network(FlowNetwork):
    """Parameters have openpi's names below `mixture`, `vision`, `projector` and `embedding`."""

    unused: Tensor
    """The expert's head of the checkpoint, on which nothing depends."""
    layout: Layout = "openpi"
    """Layout of the checkpoint directory."""

    def __init__(self, sizes: Pi0Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        width, inner, dims = sizes.vlm.width, sizes.expert.width, sizes.action_dim
        self.vision = build_vision(sizes.vision)
        self.projector = nn.Linear(sizes.vision.hidden_size, width)
        self.embedding = nn.Embedding(sizes.vocab_size, width)
        self.mixture = Mixture(sizes.vlm, sizes.expert, sizes.adaptive)
        self.action_in_proj = nn.Linear(dims, inner)
        self.action_out_proj = nn.Linear(inner, dims)
        if sizes.adaptive:
            self.time_mlp_in, self.time_mlp_out = nn.Linear(inner, inner), nn.Linear(inner, inner)
        else:
            self.state_proj = nn.Linear(dims, inner)
            self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * inner, inner), nn.Linear(inner, inner)

    def checkpoint_name(self, name: str) -> str:
        return stored_name(name, self.layout)

    def own_name(self, stored: str) -> str:
        return own_name(stored)

    # --- the prefix

    def embed_images(self, pixels: Tensor) -> Tensor:
        """[B, I, 3, S, S] to [B, I * patches, W]. Unlike tokens, images are not scaled."""
        patches = self.vision.embeddings(pixels.flatten(0, 1)).to(weight_dtype(self.projector))
        seen = self.vision.post_layernorm(self.vision.encoder(inputs_embeds=patches).last_hidden_state)
        return self.projector(seen).unflatten(0, pixels.shape[:2]).flatten(1, 2)

    def embed_prefix(self, seen: Observation) -> tuple[Tensor, Tensor]:
        """[B, P, W], and bool [B, P] which of them are present."""
        words = self.embedding(seen.tokens) * math.sqrt(self.sizes.vlm.width)
        images = seen.present.repeat_interleave(self.sizes.patches, 1)
        return torch.cat([self.embed_images(seen.pixels), words], 1), torch.cat([images, seen.counted], 1)

    def prefix(self, seen: Observation) -> Prefix:
        """One pass over images and prompt; each token sees all tokens that are present."""
        x, present = self.embed_prefix(seen)
        seen_by = blocks_seen(present, one_block(x.shape[1], x.device))
        hidden, cache = self.mixture.prefix(x, positions_of(present), seen_by)
        return Prefix(cache, present, hidden)

    # --- the suffix

    def embed_suffix(self, state: Tensor, x: Tensor, t: Tensor) -> tuple[Tensor, Tensor | None]:
        """State [B, A] and a noisy chunk [B, H, A] at times [B] to tokens, [B, 1 + H, w] (pi0) or [B, H, w] (pi0.5),
        and what pi0.5's norms are conditioned on [B, w]."""
        actions = self.action_in_proj(x.to(weight_dtype(self.action_in_proj)))
        time = time_embedding(t, self.sizes.expert.width).to(actions.dtype)
        if self.sizes.adaptive:
            return actions, functional.silu(self.time_mlp_out(functional.silu(self.time_mlp_in(time))))
        both = torch.cat([actions, time[:, None].expand_as(actions)], 2)
        actions = self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(both)))
        return torch.cat([self.state_proj(state.to(actions.dtype))[:, None], actions], 1), None

    def suffix(self, prefix: Prefix, state: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """[B, H, w]: the expert's outputs for the chunk's actions."""
        tokens, condition = self.embed_suffix(state, x, t)
        present = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        own = blocks_seen(present, self._begins(tokens.shape[1], tokens.device))
        before = prefix.present[:, None].expand(-1, tokens.shape[1], -1)
        positions = prefix.present.sum(1, keepdim=True) + positions_of(present)
        tokens, seen = tokens.to(prefix.cache.keys[0].dtype), torch.cat([before, own], 2)
        hidden = self.mixture.suffix(tokens, positions, seen, prefix.cache, condition)
        return hidden[:, -self.sizes.horizon :]

    def velocity_of(self, suffix: Tensor) -> Tensor:
        """[B, H, A] float32 from the expert's outputs."""
        return self.action_out_proj(suffix.to(weight_dtype(self.action_out_proj))).float()

    def joint_velocity(self, seen: Observation, x: Tensor, t: Tensor) -> Tensor:
        """[B, H, A] float32 at x [B, H, A] and times [B], in one pass over prefix and suffix: gradients reach both."""
        first, present = self.embed_prefix(seen)
        second, condition = self.embed_suffix(seen.state, x, t)
        second = second.to(first.dtype)
        present = torch.cat([present, torch.ones(second.shape[:2], dtype=torch.bool, device=x.device)], 1)
        begins = torch.zeros(present.shape[1], dtype=torch.bool, device=x.device)
        begins[first.shape[1] :] = self._begins(second.shape[1], x.device)
        _, hidden = self.mixture.joint(first, second, positions_of(present), blocks_seen(present, begins), condition)
        return self.velocity_of(hidden[:, -self.sizes.horizon :])

    def _begins(self, tokens: int, device: torch.device) -> Tensor:
        """Places where the suffix's attention blocks begin: with the state, and with the first action."""
        place = torch.arange(tokens, device=device)
        return (place == 0) | (place == tokens - self.sizes.horizon)


def build_vision(sizes: VisionSizes) -> Any:
    """transformers' SigLIP without its pooling head."""
    import_torchvision()
    from transformers import SiglipVisionConfig, SiglipVisionModel

    config: dict[str, Any] = {f.name: getattr(sizes, f.name) for f in fields(sizes)}
    return SiglipVisionModel(SiglipVisionConfig(**config, hidden_act="gelu_pytorch_tanh", vision_use_head=False))


# --- names of tensors in checkpoints
#
# Layouts differ in levels that libraries added and removed:
#
#     openpi               paligemma_with_expert.paligemma.model.language_model.layers.0...
#     LeRobot              model. before that
#     LeRobot, mid-2025    model.paligemma_with_expert.paligemma.language_model.model.layers.0...
#     newer transformers   ...vision_tower.embeddings... instead of ...vision_tower.vision_model.embeddings...

PALIGEMMA, EXPERT = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
UNUSED = f"{EXPERT}lm_head.weight"
NAMES = (
    (r"model\.(?=paligemma_with_expert\.|action_|state_proj|time_mlp)", ""),
    (re.escape(PALIGEMMA) + r"(model\.)?vision_tower\.(vision_model\.)?", "vision."),
    (re.escape(PALIGEMMA) + r"(model\.)?multi_modal_projector\.linear\.", "projector."),
    (re.escape(PALIGEMMA) + r"((model\.)?language_model\.)?lm_head\.", "embedding."),
    (re.escape(PALIGEMMA) + r"(model\.)?language_model\.(model\.)?embed_tokens\.", "embedding."),
    (re.escape(PALIGEMMA) + r"(model\.)?language_model\.(model\.)?", "mixture.vlm."),
    (re.escape(EXPERT) + r"model\.", "mixture.expert."),
)
"""Prefixes of stored names and their replacements, in this order."""
STORED = {
    "vision.": f"{PALIGEMMA}model.vision_tower.vision_model.",
    "projector.": f"{PALIGEMMA}model.multi_modal_projector.linear.",
    "embedding.": f"{PALIGEMMA}lm_head.",
    "mixture.vlm.": f"{PALIGEMMA}model.language_model.",
    "mixture.expert.": f"{EXPERT}model.",
}
"""Prefixes of the network's names in openpi's layout."""
KEPT = re.compile(
    r"(action_|state_|time_|vision\.embeddings\.|mixture\.(vlm|expert)\.(layers\.\d+\.\w+layernorm|norm)\.)"
)
"""Beginnings of the network's names that openpi keeps in 32 bits (gemma_pytorch.py)."""


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Dtype of the network's tensor of this name, where the network is to have that dtype."""
    return torch.float32 if KEPT.match(name) else dtype


def own_name(stored: str) -> str:
    """The network's name of a stored tensor; that of `UNUSED` without LeRobot's prefix."""
    for pattern, replacement in NAMES:
        stored = re.sub(f"^{pattern}", replacement, stored)
    return stored


def stored_name(name: str, layout: Layout) -> str:
    """The name of the network's tensor in a checkpoint."""
    for prefix, replacement in STORED.items():
        if name.startswith(prefix):
            name = replacement + name.removeprefix(prefix)
    return f"model.{name}" if layout == "lerobot" else name
