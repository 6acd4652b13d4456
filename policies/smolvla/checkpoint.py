"""LeRobot's folders of SmolVLA: found, read and written. With processors (0.4 and later), or with statistics among the
weights (before).

All that lies there is used, or is known to be of no meaning. The vision-language model's head has no part in anything:
where a checkpoint has it, it is kept aside and written again. What is written is in the layout of LeRobot 0.4 and
later, with the backbone's configuration and tokenizer in `vlm`. A policy that is saved here adds `units.safetensors`.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from policies.checkpoint_folders import (
    PASSED_FOLDERS,
    DescribedFolders,
    check_adapter_is_named,
    check_all_is_read,
    find_folders,
    is_random,
)
from policies.contract import PolicyError
from policies.files import CONFIG, SINGLE, Shards, read_json, shown, write_json, write_tensors
from policies.flow_vla.checkpoint import read_named, stored_names
from policies.flow_vla.options import DTYPES, executed
from policies.lerobot.buffers import read_buffers, read_modes
from policies.lerobot.processors import (
    POST,
    PRE,
    Processors,
    StateWords,
    Tokenizer,
    read_processors,
    write_processors,
)
from policies.lerobot.statistics import check_pictures, read_lerobot, write_lerobot
from policies.lora import merged_state
from policies.random_weights import RANDOM_WEIGHTS, draw_network, empty_network, seed_of
from policies.smolvla.backbone import BACKBONE, BACKBONE_FILES, PUBLISHED, find_backbone, read_backbone
from policies.smolvla.config import SmolVLASizes, check_entries, read_sizes
from policies.smolvla.inputs import Prompts
from policies.smolvla.network import UNUSED, SmolVLANetwork, dtype_of, own_name, stored_name
from policies.units import RobotUnits

OWN = ("kind", "spec", "architecture", RANDOM_WEIGHTS)
"""Entries of config.json that are this project's alone."""
EMBEDDING = "embedding.weight"
"""The network's name of the embeddings of words."""
NEW_LINE = "smolvla_new_line_processor"


@dataclass(frozen=True)
class Sources(DescribedFolders):
    """The folders of one checkpoint."""

    backbone: Path

    def units(self) -> RobotUnits:
        """Units that the processors, or the buffers among the weights, give. Raises `PolicyError`."""
        if self.processors is not None:
            return read_lerobot(self.described)
        return read_buffers(Shards.find(self.weights), self.config)

    def check_pictures(self) -> None:
        """Raise `PolicyError` where pictures are normalised."""
        if self.processors is not None:
            check_pictures(self.processors, self.config)
        else:
            read_modes(self.described, self.config)

    def sizes(self) -> SmolVLASizes:
        """Sizes of the network. Raises `PolicyError`."""
        length = None if self.processors is None else self.processors.prompt_length
        backbone = read_backbone(self.backbone)
        try:
            return read_sizes(self.described, self.config, backbone, prompt_len=length)
        except PolicyError as error:  # either of the two may be the wrong one
            raise PolicyError(f"{error}; its backbone is {self.backbone}") from None


def find_sources(checkpoint: str, adapter: str = "", backbone: str = "", saved: str = "") -> Sources:
    """Source named by the options of these names. `saved` is the folder of a saved policy, which takes the place of the
    adapter or the checkpoint. Reads no tensor.

    Raises `PolicyError` if a folder is missing or lacks something, and for weight files that no option reads.
    """
    found = find_folders("smolvla", checkpoint, adapter, saved)
    config = read_json(found.described / CONFIG)
    for folder in {found.weights, found.described}:
        check_entries(folder / CONFIG, read_json(folder / CONFIG))
    executed(found.described, config)
    check_adapter_is_named(found)
    processors = None
    if (found.described / PRE).exists() or (found.described / POST).exists():
        processors = read_processors(found.described, config)
        _check_words(processors, config.get("vlm_model_name", PUBLISHED))
    inside = Path(saved) / BACKBONE
    place = inside.resolve() if saved and inside.is_dir() else find_backbone(backbone, found.weights, config)
    sources = Sources(found.weights, found.adapter, found.described, config, processors, place)
    sources.sizes()
    check_all_is_read(found, processors, saved=bool(saved), passed_folders={*PASSED_FOLDERS, BACKBONE})
    return sources


def _check_words(found: Processors, backbone: Any) -> None:
    """The prompt is the instruction and a line feed, in tokens of the model with the name `backbone`."""
    step, tokenizer = found.needed(PRE, "tokenizer_processor", Tokenizer)
    name = tokenizer.tokenizer_name
    # A folder's name does not tell which model's it is.
    local = any(os.path.isdir(str(each)) for each in (backbone, name, found.folder / (name or "tokenizer")))
    if name not in (None, backbone) and (not name or not local):
        raise PolicyError(
            f"{step}: tokenizer_name is {shown(name)}, and the vision-language model is {shown(backbone)} "
            f"(vlm_model_name in {CONFIG}), whose tokenizer is read: make both name the one of the training"
        )
    line = next((each for each in found.steps[PRE] if each.name.endswith("new_line_processor")), None)
    if line is None or line.place > step.place:
        raise PolicyError(f"{step}: no {NEW_LINE} comes before it, and prompts of SmolVLA end in a new line")
    words = found.one(PRE, StateWords)
    if words is not None:
        raise PolicyError(f"{words[0]}: prompts of SmolVLA have no state")


# --- the network, read and written


def load_network(sources: Sources, dtype: str = "float32") -> SmolVLANetwork:
    """The network of a checkpoint, on the CPU. Raises `PolicyError`.

    `dtype` is float32, or what the vision-language model is to have. Every tensor of the files is one of the network's,
    the vision-language model's head, or a statistic, and the other way round. Where there are none and config.json asks
    for random weights, they are drawn, on torch's default device.
    """
    sizes, folder = sources.sizes(), sources.weights
    network = empty_network(folder / CONFIG, lambda: SmolVLANetwork(sizes))
    if is_random(folder):
        seed = seed_of(folder / CONFIG, read_json(folder / CONFIG))
        draw_network(network, seed, lambda name: dtype_of(name, DTYPES[dtype]))
    else:
        tensors = _read(Shards.find(folder), network, tied=read_backbone(sources.backbone).tied)
        network.unused = {name: tensors.pop(name) for name in (UNUSED,) if name in tensors}
        # Copies: within a file a tensor lies at any address, and the address decides how a product of it is rounded.
        cast = {own: tensor.to(dtype_of(own, DTYPES[dtype]), copy=True) for own, tensor in tensors.items()}
        network.load_state_dict(cast, assign=True)
    network.folder = folder
    prompts = Prompts(sources.backbone, sizes.prompt_len, sizes.vocab_size)
    network.fill_image_tokens(prompts.around_images() if sizes.image_tokens else ())
    return network.eval()


def read_weights(folder: Path, network: SmolVLANetwork) -> dict[str, torch.Tensor]:
    """Tensors of a directory, by the names of the network that they fit. Raises `PolicyError`."""
    tensors = _read(Shards.find(folder), network)
    tensors.pop(UNUSED, None)
    return tensors


def _read(shards: Shards, network: SmolVLANetwork, *, tied: bool = False) -> dict[str, torch.Tensor]:
    """All of the files' tensors by the network's names, and `UNUSED` where it is there. `tied`: where the embeddings of
    words are missing, they are the head."""
    names, expected = stored_names(shards, own_name), dict(network.state_dict())
    head = own_name(UNUSED)
    if tied and head in names and EMBEDDING not in names:
        names[EMBEDDING] = names.pop(head)
    if head in names:
        expected[head] = torch.empty(network.sizes.vocab_size, network.sizes.vlm.width, device="meta")
    found = read_named(shards, names, expected, stored_name)
    return {UNUSED if own == head else own: tensor for own, tensor in found.items()}


def save_directory(network: SmolVLANetwork, sources: Sources, folder: Path, config: Mapping[str, Any]) -> None:
    """Write a LeRobot folder without statistics: weights, an adapter added to them, and description."""
    save_description(sources, folder, {**config, **({"use_peft": False} if config.get("use_peft") else {})})
    state = merged_state(network) if network.adapter_config else network.checkpoint_state()
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in sorted((state | network.unused).items())}
    write_tensors(folder / SINGLE, tensors)


def save_description(sources: Sources, folder: Path, config: Mapping[str, Any]) -> None:
    """Write such a folder without the weights: config.json, the processors where the source has them, the backbone's
    configuration and tokenizer. Raises `PolicyError` where the source is gone."""
    for source in (sources.described, sources.backbone):
        if not source.is_dir():
            raise PolicyError(f"{source} is gone, from which statistics or tokenizer of what is saved are to come")
    kinds = ("*.md", "train_config.json", PRE, POST, "policy_*processor_step_*.safetensors")
    copied = {path: folder / path.name for kind in kinds for path in sources.described.glob(kind)}
    (folder / BACKBONE).mkdir(parents=True, exist_ok=True)
    copied |= {sources.backbone / name: folder / BACKBONE / name for name in BACKBONE_FILES}
    for source, target in copied.items():
        if source.is_file() and source.resolve() != target.resolve():
            shutil.copyfile(source, target)
    write_json(folder / CONFIG, {name: value for name, value in config.items() if name not in OWN})


def write_units(folder: Path, units: RobotUnits, length: int) -> None:
    """Write new processors into a LeRobot folder, which normalise by the units; prompts are of `length` tokens."""
    write_processors_of(folder, length)
    write_lerobot(folder, units)


def write_processors_of(folder: Path, length: int) -> None:
    """Write new processors without statistics into a LeRobot folder; prompts are of `length` tokens."""
    config = read_json(folder / CONFIG)
    words = [
        (NEW_LINE, {}),
        ("tokenizer_processor", {
            "max_length": length, "task_key": "task", "padding_side": "right",
            "padding": config.get("pad_language_to", "longest"), "truncation": True,
            "tokenizer_name": config.get("vlm_model_name", PUBLISHED),
        }),
    ]  # fmt: skip
    write_processors(folder, config, words)
