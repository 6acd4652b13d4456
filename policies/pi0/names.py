"""Names of pi0's tensors: the network's own are openpi's with short prefixes.

Layouts differ in levels that libraries added and removed:

    openpi               paligemma_with_expert.paligemma.model.language_model.layers.0...
    LeRobot              model. before that
    LeRobot, mid-2025    model.paligemma_with_expert.paligemma.language_model.model.layers.0...
    newer transformers   ...vision_tower.embeddings... instead of ...vision_tower.vision_model.embeddings...
"""

from __future__ import annotations

import re

import torch

from policies.pi0.config import Layout

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
STATISTICS = re.compile(r"(model\.)?(un)?normalize_(inputs|targets|outputs)\.")
"""LeRobot's checkpoints of mid-2025 have statistics among the weights."""


def dtype_of(name: str, dtype: torch.dtype) -> torch.dtype:
    """Dtype of the network's tensor of this name, where the network is to have that dtype."""
    return torch.float32 if KEPT.match(name) else dtype


def own_name(stored: str) -> str:
    """The network's name of a stored tensor; that of `UNUSED` without LeRobot's prefix."""
    for pattern, replacement in NAMES:
        stored = re.sub(f"^{pattern}", replacement, stored)
    return stored


def stored(name: str) -> str:
    """The name of the network's tensor in openpi's layout."""
    for prefix, replacement in STORED.items():
        if name.startswith(prefix):
            name = replacement + name.removeprefix(prefix)
    return name


def stored_name(name: str, layout: Layout) -> str:
    """The name of the network's tensor in a checkpoint."""
    return in_layout(stored(name), layout)


def in_layout(name: str, layout: Layout) -> str:
    """A name of openpi's layout in another."""
    return f"model.{name}" if layout == "lerobot" else name
