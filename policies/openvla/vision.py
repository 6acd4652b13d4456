"""Two vision transformers and the projector into the language model's space.

B images, N patches of each, E the towers' widths together, D the language model's width.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from policies.contract import PolicyError
from policies.openvla.config import TOWERS, ModelConfig
from policies.torchvision_operators import import_torchvision


def build_tower(name: str, sizes: Any, image_size: int) -> Any:
    """timm's vision transformer, whole, without pretrained weights."""
    import_torchvision()
    import timm
    from timm.models.vision_transformer import VisionTransformer

    if sizes is not None:
        return VisionTransformer(**sizes, img_size=image_size, num_classes=0)
    try:
        return timm.create_model(name, pretrained=False, num_classes=0, img_size=image_size)
    except RuntimeError as error:
        raise PolicyError(f"timm has no vision tower {name!r}: {error}") from error


class VisionBackbone(nn.Module):
    """DINOv2 and SigLIP side by side: their patch features, concatenated.

    Features are the output of the second to last block, without the final norm, and without class and register
    tokens (prismatic/extern/hf/modeling_prismatic.py). What comes after that block is in the checkpoint but never
    computed: it is not part of this module, so no optimiser and no adapter sees it.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        sizes = config.tower_sizes or (None, None)
        self.unused: dict[str, Tensor] = {}
        """Tensors of the checkpoint that no output depends on, by name, on the meta device."""
        for tower, name, size in zip(TOWERS, config.towers, sizes, strict=True):
            with torch.device("meta"):
                whole = build_tower(name, size, config.image_size)
            before = whole.state_dict()
            whole.prune_intermediate_layers([len(whole.blocks) - 2], prune_norm=True, prune_head=True)
            kept = whole.state_dict().keys()
            # In the tower's order: a set's would be another in each process.
            self.unused |= {f"{tower}.{key}": tensor for key, tensor in before.items() if key not in kept}
            self.add_module(tower, whole)
        self.width = sum(int(getattr(self, tower).embed_dim) for tower in TOWERS)

    def forward(self, pixels: Tensor, language: Tensor | None = None) -> Tensor:
        """[B, 6, S, S], three channels for each tower, to [B, N, E].

        `language` [B, D] is what modulates towers whose blocks are FiLM's (`policies.openvla.film`)."""
        return torch.cat(self.features(pixels, language), -1)

    def features(self, pixels: Tensor, language: Tensor | None = None) -> list[Tensor]:
        """[B, N, width] of each tower."""
        see = _see if language is None else partial(_see_filmed, language=language)
        return [see(getattr(self, tower), part) for tower, part in zip(TOWERS, pixels.split(3, 1), strict=True)]


def _see(tower: Any, pixels: Tensor) -> Tensor:
    """[B, 3, S, S] to [B, N, width]."""
    seen: Tensor = tower.forward_intermediates(
        pixels, indices=1, norm=False, stop_early=True, output_fmt="NLC", intermediates_only=True
    )[0]
    return seen


def _see_filmed(tower: Any, pixels: Tensor, language: Tensor) -> Tensor:
    """The same, block by block: timm's own loop gives a block nothing but its input."""
    x: Tensor = tower.norm_pre(tower.patch_drop(tower._pos_embed(tower.patch_embed(pixels))))
    for block in tower.blocks:
        x = block(x, language)
    return x[:, tower.num_prefix_tokens :]


class Projector(nn.Module):
    """[.., E] to [.., D]: three linear layers with exact GELU between them."""

    def __init__(self, features: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(features, 4 * features)
        self.fc2 = nn.Linear(4 * features, width)
        self.fc3 = nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc3(functional.gelu(self.fc2(functional.gelu(self.fc1(x)))))
