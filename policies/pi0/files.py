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
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from policies.contract import PolicyError
from policies.files import CONFIG, INDEX, SINGLE, Shards, read_json, write_json, write_tensors
from policies.pi0.config import ARCHITECTURE, SIZES, Layout, read_sizes
from policies.pi0.network import Pi0Network
from policies.pi0.sizes import draw_weights
from policies.random_weights import RANDOM_WEIGHTS

PALIGEMMA, EXPERT = "paligemma_with_expert.paligemma.", "paligemma_with_expert.gemma_expert."
UNUSED = f"{EXPERT}lm_head.weight"
ADAPTIVE = "time_mlp_in.weight"
"""A tensor that pi0.5 alone has."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
COPIED = ("*.json", "*.model", "*.md", "policy_*processor_step_*.safetensors")
"""Files that go with the weights wherever these go."""
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
OWN = ("kind", "spec", RANDOM_WEIGHTS, "pi05")
"""Entries of config.json that are this project's alone."""
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
    the expert's unused head, or a statistic of LeRobot's, and the other way round. Where there are none and config.json
    asks for random weights (`sizes`), they are drawn, on torch's default device.
    """
    folder = Path(folder)
    if dtype not in (*DTYPES, "checkpoint"):
        raise PolicyError(f"dtype must be one of checkpoint, {', '.join(DTYPES)}, got {dtype!r}")
    if is_random(folder):
        return _drawn(folder, dtype)
    shards = Shards.find(folder)
    sizes, layout = read_sizes(folder, ADAPTIVE in {own_name(name) for name in shards.files})
    with torch.device("meta"):
        network = Pi0Network(sizes)
    tensors = _read(shards, network)
    if dtype != "checkpoint":
        tensors = {own: tensor.to(DTYPES[dtype]) for own, tensor in tensors.items()}
    network.unused, network.layout = tensors.pop(UNUSED), layout
    network.load_state_dict(tensors, assign=True)
    fill_vision(network)
    return network.eval()


def read_weights(folder: Path, network: Pi0Network) -> dict[str, torch.Tensor]:
    """Tensors of a directory, by the names of the network that they fit. Raises `PolicyError`."""
    tensors = _read(Shards.find(folder), network)
    tensors.pop(UNUSED)
    return tensors


def _read(shards: Shards, network: Pi0Network) -> dict[str, torch.Tensor]:
    """All of the files' tensors by the network's names, and `UNUSED`."""
    weights = {name: own_name(name) for name in shards.files if not STATISTICS.match(name)}
    names = {own: stored for stored, own in weights.items()}
    if len(names) < len(weights):
        raise PolicyError(f"{shards.folder} holds a tensor more than once, under names of several layouts")
    unused = torch.empty(network.sizes.vocab_size, network.sizes.expert.width, device="meta")
    expected = network.state_dict() | {UNUSED: unused}
    wanted = {names.get(own, own): tensor for own, tensor in expected.items()}
    found = shards.read(wanted | shards.empty(name for name in shards.files if STATISTICS.match(name)))
    return {own: found[names.get(own, own)] for own in expected}


def is_random(folder: Path) -> bool:
    """Whether the folder has no weights, and says from which seed they are drawn."""
    return RANDOM_WEIGHTS in read_json(folder / CONFIG) and not any((folder / n).exists() for n in (INDEX, SINGLE))


def _drawn(folder: Path, dtype: str) -> Pi0Network:
    raw = read_json(folder / CONFIG)
    named, seed = raw.get("precision") if dtype == "checkpoint" else dtype, raw[RANDOM_WEIGHTS]
    if named not in DTYPES or type(seed) is not int or type(raw.get("pi05")) is not bool:
        raise PolicyError(
            f"{folder / CONFIG}: {RANDOM_WEIGHTS} must be a seed, with pi05 (true or false) and a precision; got "
            f"{seed!r}, {raw.get('pi05')!r}, {named!r}"
        )
    sizes, layout = read_sizes(folder, raw["pi05"])
    with torch.device("meta"):
        network = Pi0Network(sizes)
    network = draw_weights(network, seed, DTYPES[named])
    network.layout = layout
    fill_vision(network)
    return network.eval()


def save_directory(network: Pi0Network, source: Path, folder: Path, config: Mapping[str, Any], ours: bool) -> None:
    """Write a directory in the layout of `source`, whose tokenizer and statistics are copied, with its `config`.

    `ours`: the configuration is to get the entries of this project's own checkpoints. Raises `PolicyError` where the
    source is gone.
    """
    if not source.is_dir():
        raise PolicyError(f"{source} is gone, from which tokenizer and statistics of what is saved are to come")
    if source.resolve() != folder.resolve():
        for path in sorted(path for kind in COPIED for path in source.rglob(kind)):
            if path.name not in (INDEX, CONFIG):
                target = folder / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    sizes = config.get(SIZES, config.get(ARCHITECTURE))
    kept = {name: value for name, value in config.items() if name not in (*OWN, ARCHITECTURE, SIZES)}
    write_json(folder / CONFIG, kept | ({SIZES if ours else ARCHITECTURE: sizes} if sizes else {}))
    save_network(network, folder, network.layout)


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
