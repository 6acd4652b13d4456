"""Checkpoints of pi0 and pi0.5, openpi's directories and LeRobot's: found, compared with the task, read and written.

    weights       config.json with the network's sizes, safetensors
    adapter       adapter_config.json, adapter_model.safetensors (PEFT's layout), if there is one
    described     config.json, processors or statistics: the adapter's folder where it has them (LeRobot's `use_peft`),
                  else that of the weights

All that lies there is used, or is known to be of no meaning. The token embedding is stored once, as its tied `lm_head`.
The expert's `lm_head` is in every checkpoint and has no part in anything: it is kept aside, and written again. A policy
that is saved here adds `units.safetensors`.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from policies.contract import PolicyError
from policies.files import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    SINGLE,
    Shards,
    check_no_shards,
    checked,
    read_json,
    shown,
    write_json,
    write_tensors,
)
from policies.kinds import check_folders
from policies.lora import merged_state
from policies.pi0.config import (
    ARCHITECTURE,
    OWN_SIZES,
    Layout,
    Pi0Sizes,
    check_entries,
    layout_of,
    own_sizes,
    read_sizes,
)
from policies.pi0.inputs import TOKENIZER
from policies.pi0.network import PALIGEMMA, STATISTICS, UNUSED, Pi0Network, dtype_of, own_name, stored_name
from policies.pi0.processors import ACTION, POST, PRE, STATE, Feature, Processors, read_processors
from policies.pi0.sizes import draw_weights
from policies.random_weights import RANDOM_WEIGHTS, check_weights

EXTRAS = "units.safetensors"
"""File of a saved policy beside the checkpoint's weights."""
NORM_STATS = "norm_stats.json"
JUDGED = (".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".pkl", ".msgpack")
"""Endings of files that may have trained numbers, or say how these are used. Texts, pictures and logs have none."""
PASSED = {
    "train_config.json", "import.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "eval_info.json", "eval_results.json", "metrics.json", "all_results.json", "train_results.json",
    "optimizer.pt", "scheduler.pt", "metadata.pt", "training_args.bin", "trainer_state.json", "rng_state.pth",
}  # fmt: skip
"""Files that are known and not read: how it was trained and judged, with which optimiser, and forms of the tokenizer in
which `tokenizer.model` is too."""
PASSED_FOLDERS = {"training_state", "tokenizer", "optimizer", "__pycache__"}


@dataclass(frozen=True)
class Sources:
    """The folders of one checkpoint."""

    weights: Path
    adapter: Path | None
    described: Path
    config: Mapping[str, Any]
    """config.json of `described`."""
    processors: Processors | None
    """LeRobot's."""

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
    if saved:
        if is_adapter(Path(saved)):
            adapter = saved if adapter else ""
        else:
            checkpoint, adapter = saved, ""
    elif not checkpoint:
        raise PolicyError("pi0 needs a checkpoint: set policy.options.checkpoint to its directory")
    weights, hung = Path(checkpoint), Path(adapter).resolve() if adapter else None
    check_folders({"checkpoint": checkpoint, "adapter": adapter})
    weights = weights.resolve()
    if hung is None and is_adapter(weights) and not _has_weights(weights):
        weights, hung = _base_of(weights), weights
    if hung is not None and not is_adapter(hung):
        raise PolicyError(f"policy.options.adapter: {hung} has no {ADAPTER_CONFIG}: name a folder in PEFT's layout")
    described = hung if hung is not None and _describes(hung) else weights
    raw = read_json(weights / CONFIG)
    if not is_random(weights):
        Shards.find(weights)
    layout = layout_of(weights, raw)
    config = read_json(described / CONFIG)
    if layout_of(described, config) != layout:
        raise PolicyError(f"{described / CONFIG} is of another project than {weights / CONFIG}")
    for folder, said in ((weights, raw), (described, config)):
        check_entries(folder / CONFIG, said, layout)
    if config.get("use_peft") and hung is None:
        raise PolicyError(
            f"{described / CONFIG}: use_peft is true, and no {ADAPTER_CONFIG} is there: set policy.options.adapter to "
            "the adapter's folder, or use_peft to false if it was merged into the weights"
        )
    processors = read_processors(described, config) if layout == "lerobot" else None
    sources = Sources(weights, hung, described, config, processors)
    for folder in {weights, described, *([hung] if hung is not None else [])}:
        _check_files(sources, folder, ours=bool(saved))
    return sources


def is_adapter(folder: Path) -> bool:
    """True if a folder has an adapter in PEFT's layout."""
    return (folder / ADAPTER_CONFIG).is_file()


def is_random(folder: Path) -> bool:
    """True if the folder has no weights, and says from which seed they are drawn."""
    return RANDOM_WEIGHTS in read_json(folder / CONFIG) and not _has_weights(folder)


def _has_weights(folder: Path) -> bool:
    return any((folder / name).exists() for name in (INDEX, SINGLE))


def _base_of(adapter: Path) -> Path:
    """The folder that an adapter names as its base."""
    named = read_json(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    if isinstance(named, str) and named and "\0" not in named and len(named) < 1000 and Path(named).is_dir():
        return Path(named).resolve()
    raise PolicyError(
        f"{adapter} is an adapter, and its base {shown(named)} is not a folder here: set policy.options.checkpoint to "
        f"a copy of the base, and policy.options.adapter to {adapter}"
    )


def _describes(adapter: Path) -> bool:
    """True if an adapter's folder says, too, what its inputs and outputs are."""
    if not (adapter / CONFIG).is_file():
        if (adapter / PRE).exists() or (adapter / POST).exists() or any(adapter.rglob(NORM_STATS)):
            raise PolicyError(f"{adapter} has processors or statistics and no {CONFIG}: copy the base's there")
        return False
    return read_json(adapter / CONFIG).keys() >= {"type"} or "action_horizon" in read_json(adapter / CONFIG)


def _check_files(sources: Sources, folder: Path, ours: bool) -> None:
    """Raise `PolicyError` for a file that may have trained numbers, and is neither read nor known to be of none."""
    read = {folder / name for name in (CONFIG, INDEX, SINGLE)}
    if folder == sources.weights and (folder / INDEX).exists():
        read |= {folder / name for name in Shards.find(folder).files.values()}
        if (folder / SINGLE) not in {folder / name for name in Shards.find(folder).files.values()}:
            read -= {folder / SINGLE}
    if folder == sources.adapter:
        read |= {folder / ADAPTER, folder / ADAPTER_CONFIG}
    if folder != sources.described:
        # What an adapter was trained with takes their place.
        read |= {folder / PRE, folder / POST, *folder.glob("policy_*processor_step_*.safetensors")}
    elif sources.processors is not None:
        read |= {folder / PRE, folder / POST, *sources.processors.state_files}
    if ours:
        read |= {folder / EXTRAS}
    check_no_shards(folder)
    for path in own_files(folder):
        statistics = path.name == NORM_STATS and (sources.layout == "openpi" or folder != sources.described)
        if path in read or statistics or path.name in PASSED or path.suffix not in JUDGED or path.name.startswith("."):
            continue
        raise PolicyError(f"{path} is there, and nothing reads it: {_way(path)}")


def own_files(folder: Path) -> Iterator[Path]:
    """The files of a checkpoint: but for hidden folders, those that are known and not read, checkpoints of their own
    within it, and links to other folders, which may lead back."""
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            yield path
        elif not (path.name.startswith(".") or path.name in PASSED_FOLDERS or path.is_symlink() or _is_whole(path)):
            yield from own_files(path)


def _is_whole(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and _has_weights(folder)


def _way(path: Path) -> str:
    if path.name in (ADAPTER, ADAPTER_CONFIG, "adapter_model.bin"):
        return (
            f"set policy.options.adapter to {path.parent} if it is to be added to the weights, or move it away if it "
            "was merged into them"
        )
    if path.name == EXTRAS:
        return "the folder is of a policy that this project saved; embodied export writes a checkpoint of it"
    if path.name == NORM_STATS:
        return "statistics of LeRobot's policies are in their processors; move it away if these are right"
    return "move it away if the policy was trained without it"


# --- a LeRobot directory beside the task: cameras by name, numbers by count

IMAGES, EMPTY = "observation.images.", "observation.images.empty_camera_"


def check_numbers(sources: Sources, action_dim: int, proprio_dim: int) -> None:
    """Raise `PolicyError` unless the checkpoint's actions and states have the task's sizes.

    Base checkpoints give the sizes with padding, which fit any robot.
    """
    wanted = (("output_features", ACTION, action_dim, "max_action_dim"),
              ("input_features", STATE, proprio_dim, "max_state_dim"))  # fmt: skip
    for part, key, here, most in wanted:
        feature = _features(sources, part).get(key)
        if feature is None or not here:
            continue
        said, filled = feature.shape, sources.config.get(most, 32)
        if said not in ([here], [filled]):
            raise PolicyError(
                f"{sources.described / CONFIG}: {part} has {key} of {said}, and the task's has {here} numbers: take a "
                "checkpoint of this robot, or choose numbers with policy.options.transforms"
            )


def ordered_cameras(sources: Sources, cameras: tuple[str, ...]) -> tuple[str, ...]:
    """The task's cameras in the order in which the checkpoint reads its own. Cameras of other names are in the task's
    order: the first is the checkpoint's first.

    Raises `PolicyError` where the checkpoint has fewer, or knows some of the names and not the others.
    """
    said = _features(sources, "input_features")
    known = [key for key, feature in said.items() if feature.type == "VISUAL" and not key.startswith(EMPTY)]
    if not known:
        return cameras
    if len(cameras) > len(known):
        raise PolicyError(
            f"{sources.described / CONFIG}: the checkpoint reads {len(known)} cameras ({', '.join(known)}), the task "
            f"gives {', '.join(cameras)}: set env.cameras to as many"
        )
    found = {camera: _name(sources, camera, known) for camera in cameras}
    if not any(found.values()):
        return cameras
    lost = [camera for camera, key in found.items() if key is None]
    if lost:
        named = ", ".join(f"{camera} is {key}" for camera, key in found.items() if key is not None)
        raise PolicyError(
            f"{sources.described / PRE}: the checkpoint knows the camera {named}, and has none for {lost[0]!r}: it "
            f"reads {', '.join(known)}. Name all of them in rename_map, or none"
        )
    if len(set(found.values())) < len(cameras):
        raise PolicyError(
            f"{sources.described / PRE}: two of the task's cameras are one of the checkpoint's: "
            + ", ".join(f"{camera} is {key}" for camera, key in found.items())
        )
    return tuple(sorted(cameras, key=lambda camera: known.index(str(found[camera]))))


def _name(sources: Sources, camera: str, known: list[str]) -> str | None:
    """The checkpoint's name of a camera. Raises `PolicyError` where it is renamed to one that is not read."""
    assert sources.processors is not None, "LeRobot's"
    for key in (f"{IMAGES}{camera}", f"observation.{camera}", camera):
        new = sources.processors.renamed(key)
        if new in known:
            return new
        if new != key:
            raise PolicyError(
                f"{sources.described / PRE}: rename_map makes {shown(new)} of the camera {camera!r}, which the "
                f"checkpoint does not read: input_features in {CONFIG} has {', '.join(known)}"
            )
    return None


def _features(sources: Sources, part: str) -> dict[str, Feature]:
    """config.json's `input_features` or `output_features`, in their order."""
    path, said = sources.described / CONFIG, sources.config.get(part) or {}
    if not isinstance(said, dict) or not all(isinstance(each, dict) for each in said.values()):
        raise PolicyError(f"{path}: {part} is {shown(said)} in place of features by name")
    return {key: checked(path, Feature, each) for key, each in said.items()}


# --- the network, read and written

ADAPTIVE = "time_mlp_in.weight"
"""A tensor that pi0.5 alone has."""
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
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
    network = _empty(folder, sizes)
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
    weights = {name: own_name(name) for name in shards.files if not STATISTICS.match(name)}
    names = {own: stored for stored, own in weights.items()}
    if len(names) < len(weights):
        raise PolicyError(f"{shards.folder} holds a tensor more than once, under names of several layouts")
    unused = torch.empty(network.sizes.vocab_size, network.sizes.expert.width, device="meta")
    expected = network.state_dict() | {UNUSED: unused}
    wanted = {names.get(own, own): tensor for own, tensor in expected.items()}
    found = shards.read(wanted | shards.empty(name for name in shards.files if STATISTICS.match(name)))
    return {own: found[names.get(own, own)] for own in expected}


def _empty(folder: Path, sizes: Pi0Sizes) -> Pi0Network:
    """The network on the meta device. Raises `PolicyError` where its parts do not fit together."""
    try:
        with torch.device("meta"):
            network = Pi0Network(sizes)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        raise PolicyError(
            f"{folder / CONFIG} does not describe a network that can be built: {str(error)[:500]}"
        ) from error
    check_weights(folder / CONFIG, network)
    return network


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
    network = _empty(folder, sizes)
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
