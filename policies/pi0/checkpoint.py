"""Checkpoints of pi0 and pi0.5, openpi's directories and LeRobot's: found, compared with the task, read and written.

All that lies there is used, or is known to be of no meaning. The token embedding is stored once, as its tied `lm_head`.
The expert's `lm_head` is in every checkpoint and has no part in anything: it is kept aside, and written again. A policy
that is saved here adds `units.safetensors`.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from policies.checkpoint_folders import (
    NORM_STATS,
    DescribedFolders,
    check_adapter_is_named,
    check_all_is_read,
    find_folders,
    is_random,
    own_files,
)
from policies.contract import PolicyError
from policies.files import (
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    SINGLE,
    Shards,
    read_json,
    shown,
    write_json,
    write_tensors,
)
from policies.flow_vla.checkpoint import read_named, stored_names
from policies.flow_vla.options import DTYPES
from policies.lerobot.processors import PRE, Processors, StateWords, Tokenizer, read_processors
from policies.lora import merged_state
from policies.pi0.config import (
    ARCHITECTURE,
    OWN_SIZES,
    Layout,
    check_entries,
    layout_of,
    own_sizes,
    read_sizes,
)
from policies.pi0.inputs import TOKENIZER
from policies.pi0.network import PALIGEMMA, UNUSED, Pi0Network, dtype_of, own_name, stored_name
from policies.pi0.sizes import draw_weights
from policies.random_weights import RANDOM_WEIGHTS, empty_network

TOKENIZERS = "google/paligemma-"
"""Beginning of the names of tokenizers that are one: PaliGemma's."""


class Sources(DescribedFolders):
    """The folders of one checkpoint."""

    @property
    def layout(self) -> Layout:
        return "openpi" if self.processors is None else "lerobot"

    @property
    def tokenizer(self) -> Path:
        """The folder with `tokenizer.model`, or where it is looked for."""
        folders = (self.described, self.weights, self.described / "tokenizer", self.weights / "tokenizer")
        return next((folder for folder in folders if (folder / TOKENIZER).is_file()), self.weights)


def find_sources(checkpoint: str, adapter: str = "", saved: str = "") -> Sources:
    """Source named by the options `checkpoint` and `adapter`. `saved` is the saved folder: it takes the adapter's
    place where it is one, else that of the checkpoint. Reads no tensor.

    Raises `PolicyError` if a folder is missing or lacks something, and for weight files that no option reads.
    """
    found = find_folders("pi0", checkpoint, adapter, saved)
    weights, hung, described = found.weights, found.adapter, found.described
    raw, config = read_json(weights / CONFIG), read_json(described / CONFIG)
    layout = layout_of(weights, raw)
    if layout_of(described, config) != layout:
        raise PolicyError(f"{described / CONFIG} is of another project than {weights / CONFIG}")
    for folder, said in ((weights, raw), (described, config)):
        check_entries(folder / CONFIG, said, layout)
    check_adapter_is_named(found)
    processors = None
    if layout == "lerobot":
        processors = read_processors(described, config)
        _check_words(processors, config)
    sources = Sources(weights, hung, described, config, processors)
    statistics = [
        path
        for folder in {weights, described, *([hung] if hung is not None else [])}
        if layout == "openpi" or folder != described
        for path in folder.rglob(NORM_STATS)
    ]
    check_all_is_read(found, processors, saved=bool(saved), further=statistics)
    return sources


def _check_words(found: Processors, raw: Mapping[str, Any]) -> None:
    """The prompt is that of the model which config.json says, and as long."""
    step, tokenizer = found.needed(PRE, "tokenizer_processor", Tokenizer)
    name = tokenizer.tokenizer_name
    if name is not None and not name.startswith(TOKENIZERS) and name != "tokenizer":
        raise PolicyError(f"{step}: tokenizer_name is {shown(name)}; known are PaliGemma's ({TOKENIZERS}...)")
    if raw.get("type") == "pi05":
        found.needed(PRE, "pi05_prepare_state_tokenizer_processor_step", StateWords)
    elif not any(s.name.endswith("new_line_processor") and s.place < step.place for s in found.steps[PRE]):
        raise PolicyError(f"{step}: no pi0_new_line_processor comes before it, and prompts of pi0 end in a new line")
    other = next((s for s in found.steps[PRE] if s.name.endswith("new_line_processor")), None)
    words = found.one(PRE, StateWords)
    if raw.get("type") == "pi05" and other is not None:
        raise PolicyError(f"{other}: prompts of pi0.5 have their state, and no further line")
    if raw.get("type") == "pi0" and words is not None:
        raise PolicyError(f"{words[0]}: prompts of pi0 have no state")


# --- the network, read and written

ADAPTIVE = "time_mlp_in.weight"
"""A tensor that pi0.5 alone has."""
COPIED = ("*.json", "*.model", "*.md", "policy_*processor_step_*.safetensors")
"""Files that go with the weights wherever these go."""
LEFT = (INDEX, CONFIG, ADAPTER_CONFIG)
"""Files that are not copied but written anew."""
OWN = ("kind", "spec", RANDOM_WEIGHTS, "pi05")
"""Entries of config.json that are this project's alone."""


def load_network(folder: str | Path, dtype: str = "checkpoint", described: Path | None = None) -> Pi0Network:
    """The network of a directory, on the CPU. pi0.5 is known by its tensors. Raises `PolicyError`.

    `described` is the folder whose config.json counts, if it is another.

    `dtype` is float32, bfloat16, float16 (but for what openpi keeps in 32 bits), or checkpoint: as stored. Every tensor
    of the files is one of the network's, the expert's unused head, or a statistic of LeRobot's, and the other way
    round. Where there are none and config.json asks for random weights (`sizes`), they are drawn, on torch's default
    device.
    """
    folder = Path(folder)
    if dtype not in (*DTYPES, "checkpoint"):
        raise PolicyError(f"dtype must be one of checkpoint, {', '.join(DTYPES)}, got {dtype!r}")
    if is_random(folder):
        return _drawn(folder, dtype)
    shards = Shards.find(folder)
    sizes, layout = read_sizes(described or folder, _adaptive(shards))
    network = empty_network(folder / CONFIG, lambda: Pi0Network(sizes))
    tensors = _read(shards, network)
    if dtype != "checkpoint":
        tensors = {own: tensor.to(dtype_of(own, DTYPES[dtype])) for own, tensor in tensors.items()}
    network.unused, network.layout, network.folder = tensors.pop(UNUSED), layout, folder
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
    unused = torch.empty(network.sizes.vocab_size, network.sizes.expert.width, device="meta")
    return read_named(shards, stored_names(shards, own_name), network.state_dict() | {UNUSED: unused}, str)


def is_adaptive(folder: Path) -> bool:
    """True if a directory's weights are those of a pi0.5. Raises `PolicyError`."""
    return _adaptive(Shards.find(folder))


def _adaptive(shards: Shards) -> bool:
    return ADAPTIVE in {own_name(name) for name in shards.files}


def _drawn(folder: Path, dtype: str) -> Pi0Network:
    raw = read_json(folder / CONFIG)
    named, seed = raw.get("precision") if dtype == "checkpoint" else dtype, raw[RANDOM_WEIGHTS]
    seeded = type(seed) is int and 0 <= seed < 2**63
    if not isinstance(named, str) or named not in DTYPES or not seeded or type(raw.get("pi05")) is not bool:
        raise PolicyError(
            f"{folder / CONFIG}: {RANDOM_WEIGHTS} must be a seed, with pi05 (true or false) and a precision; got "
            f"{shown(seed)}, {shown(raw.get('pi05'))}, {shown(named)}"
        )
    sizes, layout = read_sizes(folder, raw["pi05"])
    network = empty_network(folder / CONFIG, lambda: Pi0Network(sizes))
    network = draw_weights(network, seed, DTYPES[named])
    network.layout, network.folder = layout, folder
    fill_vision(network)
    return network.eval()


def save_directory(network: Pi0Network, sources: Sources, folder: Path, config: Mapping[str, Any], ours: bool) -> None:
    """Write a directory in the layout of the sources, whose tokenizer and statistics are copied, with its `config`. An
    adapter is added to the weights.

    `ours`: the configuration is to get the entries of this project's own checkpoints. Raises `PolicyError` where the
    sources are gone.
    """
    whole = {"use_peft": False} if config.get("use_peft") else {}
    save_description(sources, folder, {**config, **whole}, ours)
    save_network(network, folder, network.layout)


def save_description(sources: Sources, folder: Path, config: Mapping[str, Any], ours: bool) -> None:
    """Write such a directory without the weights."""
    for source, kinds in ((sources.described, COPIED), (sources.tokenizer, (TOKENIZER,))):
        if not source.is_dir():
            raise PolicyError(f"{source} is gone, from which tokenizer and statistics of what is saved are to come")
        if source.resolve() == folder.resolve():
            continue
        for path in list(own_files(source)):  # the target may lie within
            if path.name not in LEFT and any(path.match(kind) for kind in kinds):
                target = folder / path.relative_to(source)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, target)
    sizes = own_sizes(config)
    kept = {name: value for name, value in config.items() if name not in (*OWN, ARCHITECTURE, OWN_SIZES)}
    write_json(folder / CONFIG, kept | ({OWN_SIZES if ours else ARCHITECTURE: sizes} if sizes else {}))


def save_network(network: Pi0Network, folder: Path, layout: Layout) -> None:
    """Write the weights, an adapter added to them, as openpi or LeRobot have them, in one file."""
    state = merged_state(network) if network.adapter_config else network.checkpoint_state()
    named = {stored_name(own_name(name), layout): tensor for name, tensor in state.items()}
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted(named.items())}
    tensors[stored_name(UNUSED, layout)] = network.unused.cpu()
    tied = stored_name("embedding.weight", layout)
    second = tied.replace(f"{PALIGEMMA}lm_head.", f"{PALIGEMMA}model.language_model.embed_tokens.")
    write_tensors(folder / SINGLE, tensors, {second: tied})


def fill_vision(network: Pi0Network) -> None:
    """The positions of SigLIP's patches, which are no weights: a network that was built on no device lacks them."""
    embeddings = network.vision.embeddings
    count = embeddings.position_embedding.num_embeddings
    device = embeddings.position_embedding.weight.device
    embeddings.register_buffer("position_ids", torch.arange(count, device=device)[None], persistent=False)
