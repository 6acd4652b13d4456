"""Checkpoints of pi0 and pi0.5: openpi's directories and LeRobot's, by one set of names.

The network's own names are openpi's with short prefixes. Layouts differ in levels that libraries added and removed:

    openpi               paligemma_with_expert.paligemma.model.language_model.layers.0...
    LeRobot              model. before that
    LeRobot, mid-2025    model.paligemma_with_expert.paligemma.language_model.model.layers.0...
    newer transformers   ...vision_tower.embeddings... instead of ...vision_tower.vision_model.embeddings...

The token embedding is stored once, as its tied `lm_head`. The expert's `lm_head` is in every checkpoint and has no part
in anything: it is kept aside, and written again.
"""

from __future__ import annotations

import re
from pathlib import Path

import torch

from policies.contract import PolicyError
from policies.files import SINGLE, Shards, write_tensors
from policies.pi0.config import Layout, read_sizes
from policies.pi0.network import Pi0Network

PALIGEMMA, EXPERT = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
UNUSED = f"{EXPERT}lm_head.weight"
ADAPTIVE = "time_mlp_in.weight"
"""A tensor that pi0.5 alone has."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
NAMES = (
    (r"model\.(?=paligemma_with_expert\.|action_|state_proj|time_mlp)", ""),
    (re.escape(PALIGEMMA) + r"(model\.)?vision_tower\.(vision_model\.)?", "vision."),
    (re.escape(PALIGEMMA) + r"(model\.)?multi_modal_projector\.linear\.", "projector."),
    (re.escape(PALIGEMMA) + r"((model\.)?language_model\.)?lm_head\.", "embedding."),
    (re.escape(PALIGEMMA) + r"(model\.)?language_model\.(model\.)?embed_tokens\.", "embedding."),
    (re.escape(PALIGEMMA) + r"(model\.)?language_model\.(model\.)?", "mixture.vlm."),
    (re.escape(EXPERT) + r"model\.", "mixture.expert."),
)
"""What a stored name begins with, and what takes its place, in this order."""
STORED = {
    "vision.": f"{PALIGEMMA}model.vision_tower.vision_model.",
    "projector.": f"{PALIGEMMA}model.multi_modal_projector.linear.",
    "embedding.": f"{PALIGEMMA}lm_head.",
    "mixture.vlm.": f"{PALIGEMMA}model.language_model.",
    "mixture.expert.": f"{EXPERT}model.",
}
"""What the network's names begin with, in openpi's layout."""
STATISTICS = re.compile(r"(model\.)?(un)?normalize_(inputs|targets|outputs)\.")
"""LeRobot's checkpoints of mid-2025 have statistics among the weights."""


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


def load_network(folder: str | Path, dtype: str = "checkpoint") -> Pi0Network:
    """The network of a directory, on the CPU. pi0.5 is known by its tensors. Raises `PolicyError`.

    `dtype` is float32, bfloat16, float16, or checkpoint: as stored. Every tensor of the files is one of the network's,
    the expert's unused head, or a statistic of LeRobot's, and the other way round.
    """
    folder = Path(folder)
    if dtype not in (*DTYPES, "checkpoint"):
        raise PolicyError(f"dtype must be one of checkpoint, {', '.join(DTYPES)}, got {dtype!r}")
    shards = Shards.find(folder)
    weights = {name: own_name(name) for name in shards.files if not STATISTICS.match(name)}
    sizes, layout = read_sizes(folder, ADAPTIVE in weights.values())
    with torch.device("meta"):
        network = Pi0Network(sizes)
        unused = torch.empty(sizes.vocab_size, sizes.expert.width)
    expected = network.state_dict() | {UNUSED: unused}
    names = {own: stored for stored, own in weights.items()}
    if len(names) < len(weights):
        raise PolicyError(f"{folder} holds a tensor more than once, under names of several layouts")
    wanted = {names.get(own, own): tensor for own, tensor in expected.items()}
    found = shards.read(wanted | shards.empty(name for name in shards.files if STATISTICS.match(name)))
    tensors = {own: found[names.get(own, own)] for own in expected}
    if dtype != "checkpoint":
        tensors = {own: tensor.to(DTYPES[dtype]) for own, tensor in tensors.items()}
    network.unused, network.layout = tensors.pop(UNUSED), layout
    network.load_state_dict(tensors, assign=True)
    fill_vision(network)
    return network.eval()


def save_network(network: Pi0Network, folder: Path, layout: Layout) -> None:
    """Write the weights as openpi or LeRobot have them, in one file."""
    tensors = {stored_name(name, layout): tensor.detach().cpu() for name, tensor in network.state_dict().items()}
    tensors[stored_name(UNUSED, layout)] = network.unused
    tied = stored_name("embedding.weight", layout)
    second = tied.replace(f"{PALIGEMMA}lm_head.", f"{PALIGEMMA}model.language_model.embed_tokens.")
    write_tensors(
        folder / SINGLE, {name: tensor.contiguous() for name, tensor in sorted(tensors.items())}, {second: tied}
    )


def fill_vision(network: Pi0Network) -> None:
    """The positions of SigLIP's patches, which are no weights: a network that was built on no device lacks them."""
    embeddings = network.vision.embeddings
    count = embeddings.position_embedding.num_embeddings
    device = embeddings.position_embedding.weight.device
    embeddings.register_buffer("position_ids", torch.arange(count, device=device)[None], persistent=False)
