"""SmolVLA's network: from an observation and a noisy action chunk to the chunk's velocity.

    prefix     images, then words, which see each other; both are multiplied by the square root of the width
    state      one token after them, which sees the prefix: `with_state`
    suffix     the noisy actions, which see prefix and state, and in joint layers the actions before them (LeRobot's
               modeling_smolvla.py; unlike pi0's, whose actions see each other)

B rows, I images, L tokens of the prompt, P tokens of the prefix, S numbers of a state, H actions of a chunk, A numbers
of an action, W width of the vision-language model, w that of the expert.
"""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from policies.flow_vla.network import OF_THE_VLM, FlowNetwork, Observation, Prefix, blocks_seen, one_block, positions_of
from policies.layers import time_embedding
from policies.quantised import weight_dtype
from policies.smolvla.backbone import Vision
from policies.smolvla.config import SmolVLASizes
from policies.smolvla.mixture import Mixture
from policies.torchvision_operators import import_torchvision


class SmolVLANetwork(FlowNetwork):
    """Parameters have transformers' names below `mixture`, `vision`, `projector` and `embedding`."""

    image_tokens: Tensor
    """int64 [3]: the special tokens of which two stand before each image and one after it; [0] where there are none."""
    unused: dict[str, Tensor]
    """The vision-language model's head, on which nothing depends, if the checkpoint has it."""

    def __init__(self, sizes: SmolVLASizes) -> None:
        super().__init__()
        self.sizes = sizes
        width, inner = sizes.vlm.width, sizes.expert.width
        self.vision = build_vision(sizes.vision)
        self.projector = nn.Linear(sizes.vision.hidden_size * sizes.scale_factor**2, width, bias=False)
        self.embedding = nn.Embedding(sizes.vocab_size, width)
        self.mixture = Mixture(sizes.vlm, sizes.expert, sizes.joint)
        self.state_proj = nn.Linear(sizes.state_dim, width)
        self.action_in_proj = nn.Linear(sizes.action_dim, inner)
        self.action_out_proj = nn.Linear(inner, sizes.action_dim)
        self.action_time_mlp_in, self.action_time_mlp_out = nn.Linear(2 * inner, inner), nn.Linear(inner, inner)
        self.unused = {}

    def fill_image_tokens(self, tokens: tuple[int, ...]) -> None:
        """Have these special tokens around images: a beginning of two and an end of one, or none."""
        device = next(self.projector.parameters()).device
        self.register_buffer("image_tokens", torch.tensor(tokens, dtype=torch.long, device=device), persistent=False)

    def checkpoint_name(self, name: str) -> str:
        return stored_name(name)

    def own_name(self, stored: str) -> str:
        return own_name(stored)

    # --- the prefix

    def embed_images(self, pixels: Tensor) -> Tensor:
        """[B, I, 3, height, width] to [B, I, patches, W]."""
        embeddings = self.vision.embeddings
        weight = embeddings.patch_embedding.weight
        patches = embeddings.patch_embedding(pixels.flatten(0, 1).to(weight.dtype))
        grid = patches.shape[-1]
        places = patch_positions(grid, embeddings.num_patches_per_side, patches.device)
        # Contiguous: every layer would have the strides of its input, and its norms copy what they read.
        patches = patches.flatten(2).transpose(1, 2).contiguous() + embeddings.position_embedding(places)
        seen = self.vision.post_layernorm(self.vision.encoder(inputs_embeds=patches).last_hidden_state)
        folded = joined(seen, grid, self.sizes.scale_factor)
        return self.projector(folded).unflatten(0, pixels.shape[:2]) * self._scale

    def embed_prefix(self, seen: Observation) -> tuple[Tensor, Tensor]:
        """[B, P, W], and bool [B, P] which of them are present."""
        images = self.embed_images(seen.pixels)
        present = seen.present[..., None].expand(images.shape[:3])
        if self.sizes.image_tokens:
            images, present = self._between_tokens(images, present)
        words = self.embedding(seen.tokens) * self._scale
        x, present = images.flatten(1, 2), present.flatten(1)
        return torch.cat([x, words], 1), torch.cat([present, seen.counted], 1)

    def prefix(self, seen: Observation) -> Prefix:
        """One pass over images and prompt; each token sees all tokens that are present."""
        x, present = self.embed_prefix(seen)
        mask = blocks_seen(present, one_block(x.shape[1], x.device))
        hidden, cache = self.mixture.prefix(x, positions_of(present), mask)
        return Prefix(cache, present, hidden)

    def with_state(self, prefix: Prefix, state: Tensor) -> Prefix:
        """The prefix and a token of the state; `hidden` stays that of images and prompt."""
        token = self.state_proj(state.to(weight_dtype(self.state_proj)))[:, None].to(prefix.cache.keys[0].dtype)
        present = torch.cat([prefix.present, prefix.present.new_ones(len(state), 1)], 1)
        positions = prefix.present.sum(1, keepdim=True)
        _, cache = self.mixture.prefix(token, positions, present[:, None], prefix.cache)
        return Prefix(cache, present, prefix.hidden)

    # --- the suffix

    def embed_suffix(self, x: Tensor, t: Tensor) -> Tensor:
        """A noisy chunk [B, H, A] at times [B] to tokens [B, H, w]."""
        actions = self.action_in_proj(x.to(weight_dtype(self.action_in_proj)))
        time = time_embedding(t, self.sizes.expert.width).to(actions.dtype)
        both = torch.cat([actions, time[:, None].expand_as(actions)], 2)
        return self.action_time_mlp_out(functional.silu(self.action_time_mlp_in(both)))

    def suffix(self, prefix: Prefix, state: Tensor, x: Tensor, t: Tensor) -> Tensor:
        tokens = self.embed_suffix(x, t)
        present = torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)
        own = blocks_seen(present, present[0])
        before = prefix.present[:, None].expand(-1, tokens.shape[1], -1)
        positions = prefix.present.sum(1, keepdim=True) + positions_of(present)
        return self.mixture.suffix(tokens, positions, torch.cat([before, own], 2), prefix.cache)

    def velocity_of(self, suffix: Tensor) -> Tensor:
        return self.action_out_proj(suffix.to(weight_dtype(self.action_out_proj))).float()

    def _between_tokens(self, images: Tensor, present: Tensor) -> tuple[Tensor, Tensor]:
        """[B, I + E, 2 + patches + 1, W]: special tokens around each image, also of the E images without a camera that
        the checkpoint has, and which of them are present. They are not scaled as other words are."""
        missing = self.sizes.empty_cameras
        images = functional.pad(images, (0, 0, 0, 0, 0, missing))
        present = functional.pad(present, (0, 0, 0, missing))
        tokens = self.embedding(self.image_tokens).to(images.dtype).expand(*images.shape[:2], -1, -1)
        there = present.new_ones(*present.shape[:2], 1)
        around = torch.cat([tokens[:, :, :2], images, tokens[:, :, 2:]], 2)
        return around, torch.cat([there, there, present, there], 2)

    @property
    def _scale(self) -> float:
        return math.sqrt(self.sizes.vlm.width)


def build_vision(sizes: Vision) -> Any:
    """transformers' vision transformer of SmolVLM."""
    import_torchvision()
    from transformers.models.smolvlm.configuration_smolvlm import SmolVLMVisionConfig
    from transformers.models.smolvlm.modeling_smolvlm import SmolVLMVisionTransformer

    config = sizes.model_dump()
    return SmolVLMVisionTransformer(SmolVLMVisionConfig(**config))


def patch_positions(grid: int, side: int, device: torch.device) -> Tensor:
    """int64 [grid * grid]: for each patch of a square picture its place among the `side` x `side` that positions were
    learned for. Pictures of another size than in the vision tower's training are stretched over those."""
    edges = torch.arange(1 / side, 1.0, 1 / side, device=device)
    along = torch.arange(grid, dtype=torch.float32, device=device) * (1.0 / grid)
    place = torch.bucketize(along.clamp(max=1.0 - 1e-6), edges, right=True)
    return (place[:, None] * side + place).flatten()


def joined(patches: Tensor, grid: int, factor: int) -> Tensor:
    """[B, grid * grid, E] to [B, (grid / factor)^2, E * factor^2]: `factor` x `factor` patches become one token."""
    side, rows = grid // factor, len(patches)
    split = patches.view(rows, side, factor, side, factor, -1)
    return split.permute(0, 1, 3, 2, 4, 5).reshape(rows, side * side, -1)


# --- names of tensors in checkpoints

VLM, EXPERT = "vlm_with_expert.vlm.", "vlm_with_expert.lm_expert."
UNUSED = f"model.{VLM}lm_head.weight"
"""The vision-language model's head, which some checkpoints have."""
NAMES = (
    (r"model\.(_orig_mod\.)?", ""),  # _orig_mod: the policy was compiled
    (re.escape(VLM) + r"model\.vision_model\.", "vision."),
    (re.escape(VLM) + r"model\.connector\.modality_projection\.proj\.", "projector."),
    (re.escape(VLM) + r"model\.text_model\.embed_tokens\.", "embedding."),
    (re.escape(VLM) + r"model\.text_model\.", "mixture.vlm."),
    (re.escape(EXPERT), "mixture.expert."),
)
"""Prefixes of stored names and their replacements, in this order."""
STORED = {
    "vision.": f"{VLM}model.vision_model.",
    "projector.": f"{VLM}model.connector.modality_projection.proj.",
    "embedding.": f"{VLM}model.text_model.embed_tokens.",
    "mixture.vlm.": f"{VLM}model.text_model.",
    "mixture.expert.": EXPERT,
}
"""Prefixes of the network's names in LeRobot's layout."""


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Dtype of the network's tensor of this name, where the network is to have that dtype: the vision-language model
    alone is in 16 bits. LeRobot has the expert in 16 bits too, where it loads that model's published weights
    (`load_vlm_weights`): it builds the expert in the text model's dtype."""
    return dtype if name.startswith(OF_THE_VLM) else torch.float32


def own_name(stored: str) -> str:
    """The network's name of a stored tensor."""
    for pattern, replacement in NAMES:
        stored = re.sub(f"^{pattern}", replacement, stored)
    return stored


def stored_name(name: str) -> str:
    """The name of the network's tensor in a checkpoint."""
    for prefix, replacement in STORED.items():
        if name.startswith(prefix):
            name = replacement + name.removeprefix(prefix)
    return f"model.{name}"
