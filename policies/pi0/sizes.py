"""pi0 and pi0.5 with random weights at named sizes: for measuring, and as the beginning of small networks.

A directory has openpi's layout without weights; its config.json says from which seed they are drawn.

Names: pi0 and pi05 are the published networks (3.3 billion parameters, arXiv 2410.24164 and 2504.16054); pi0-small,
pi0-small-128, pi05-small and pi05-small-128 are for pictures of 56 (or 128) pixels, and learn on two cores
(docs/learning.md); pi0-tiny and pi05-tiny are for tests.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from policies.contract import PolicyError
from policies.files import write_json
from policies.pi0.config import ARCHITECTURE, CONFIG, VisionSizes
from policies.pi0.inputs import TOKENIZER
from policies.pi0.mixture import StackSizes
from policies.pi0.network import Pi0Network, dtype_of
from policies.random_weights import FURTHER_WORDS, INSTRUCTION, RANDOM_WEIGHTS, SINGLE, draw, draw_network, drawn_on
from policies.registry import nearest

STATISTICS = Path("assets") / "random" / "norm_stats.json"


@dataclass(frozen=True)
class Size:
    """Sizes of a network that is not as published."""

    vlm: StackSizes
    expert: StackSizes
    vision: VisionSizes
    action_dim: int
    horizon: int
    max_token_len: int
    vocab_size: int = 256


SMALL = Size(
    StackSizes(128, 3, 256, 4, 1, 32), StackSizes(96, 3, 192, 4, 1, 32), VisionSizes(64, 192, 3, 2, 56, 14), 10, 4, 16
)  # fmt: skip
TINY = Size(StackSizes(32, 2, 48, 4, 1, 8), StackSizes(24, 2, 40, 4, 1, 8), VisionSizes(24, 36, 2, 2, 28), 10, 4, 48)
SMALL_128 = replace(SMALL, vision=replace(SMALL.vision, image_size=128, patch_size=32), action_dim=18)
SIZES: Mapping[str, Size | None] = {"": None, "-small": SMALL, "-small-128": SMALL_128, "-tiny": TINY}
"""End of a name, and the sizes; None: as published."""
MODELS = {f"{family}{end}": (family == "pi05", size) for family in ("pi0", "pi05") for end, size in SIZES.items()}
"""Name to whether it is a pi0.5, and its sizes."""
PUBLISHED: Mapping[str, Any] = {
    "action_dim": 32, "action_horizon": 50, "paligemma_variant": "gemma_2b", "action_expert_variant": "gemma_300m",
}  # fmt: skip


def find(name: str) -> tuple[bool, Size | None]:
    """True if it is a pi0.5, and its sizes. Raises `PolicyError` with the nearest names."""
    if name not in MODELS:
        raise PolicyError(f"unknown model {name!r}{nearest(name, list(MODELS))}")
    return MODELS[name]


def write_random(folder: str | Path, name: str, seed: int = 0) -> Path:
    """Write the directory of a named model with random weights (some kB) and return it."""
    adaptive, size = find(name)
    folder = Path(folder)
    (folder / STATISTICS).parent.mkdir(parents=True, exist_ok=True)
    config = dict(PUBLISHED) if size is None else _config(size)
    write_json(folder / CONFIG, config | {"precision": "bfloat16", "pi05": adaptive, RANDOM_WEIGHTS: seed})
    (folder / TOKENIZER).write_bytes(_tokenizer())
    numbers = {"mean": 0.0, "std": 1.0, "q01": -1.0, "q99": 1.0}
    units = {key: [value] * config["action_dim"] for key, value in numbers.items()}
    write_json(folder / STATISTICS, {"norm_stats": {"state": units, "actions": units}})
    return folder


def draw_weights(network: Pi0Network, seed: int, dtype: torch.dtype) -> Pi0Network:
    """Give an empty network random weights, on torch's default device."""
    # The mixture's norms scale by one and their weight.
    generator = draw_network(
        network, seed, lambda name: dtype_of(name, dtype), lambda name: 0.0 if name.startswith("mixture.") else 1.0
    )
    shape = (network.sizes.vocab_size, network.sizes.expert.width)
    network.unused = torch.empty(shape, dtype=dtype, device=drawn_on())
    draw("unused", network.unused, generator)
    return network


def _config(size: Size) -> dict[str, Any]:
    stacks = {name: asdict(getattr(size, name)) for name in ("vlm", "expert", "vision")}
    own = stacks | {"vocab_size": size.vocab_size, "max_token_len": size.max_token_len}
    return {"action_dim": size.action_dim, "action_horizon": size.horizon, ARCHITECTURE: own}


def _tokenizer() -> bytes:
    """A SentencePiece model with PaliGemma's special tokens, which has the usual words whole and spells others."""
    from sentencepiece import SentencePieceTrainer

    words = sorted({f"▁{word}" for word in f"{INSTRUCTION} {FURTHER_WORDS}".split()})
    written = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(["a"]),
        model_writer=written,
        model_type="bpe",
        vocab_size=SMALL.vocab_size,
        hard_vocab_limit=False,
        user_defined_symbols=[*SINGLE, *words],
        pad_id=0,
        eos_id=1,
        bos_id=2,
        unk_id=3,
        normalization_rule_name="identity",
        minloglevel=2,
    )
    return written.getvalue()
