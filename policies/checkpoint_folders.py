"""The folders of one checkpoint in openpi's or LeRobot's layout, and files in them that nothing reads.

weights       config.json with the network's sizes, safetensors
adapter       adapter_config.json, adapter_model.safetensors (PEFT's layout), if there is one
described     config.json, processors or statistics: the adapter's folder where it has them (LeRobot's `use_peft`),
              else that of the weights
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.errors import PolicyError, shown
from policies.files import ADAPTER, ADAPTER_CONFIG, CONFIG, INDEX, SINGLE, Shards, check_no_shards, read_json
from policies.kinds import check_folders
from policies.lerobot.processors import POST, PRE, Processors
from policies.random_weights import RANDOM_WEIGHTS

EXTRAS = "units.safetensors"
"""File of a saved policy beside the checkpoint's weights."""
NORM_STATS = "norm_stats.json"
"""openpi's statistics."""
JUDGED = (".safetensors", ".json", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".pkl", ".msgpack")
"""Endings of files that may have trained numbers, or say how these are used. Texts, pictures and logs have none."""
PASSED = {
    "train_config.json", "import.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json",
    "eval_info.json", "eval_results.json", "metrics.json", "all_results.json", "train_results.json",
    "optimizer.pt", "scheduler.pt", "metadata.pt", "training_args.bin", "trainer_state.json", "rng_state.pth",
}  # fmt: skip
"""Files that are known and not read: how it was trained and judged, with which optimiser, and further forms of a
tokenizer."""
PASSED_FOLDERS = {"training_state", "tokenizer", "optimizer", "__pycache__"}


@dataclass(frozen=True)
class Folders:
    """The folders of one checkpoint."""

    weights: Path
    adapter: Path | None
    described: Path


@dataclass(frozen=True)
class DescribedFolders(Folders):
    """The folders, and what they say of a network's inputs and outputs."""

    config: Mapping[str, Any]
    """config.json of `described`."""
    processors: Processors | None
    """LeRobot's. None: before LeRobot 0.4, or another project's."""


def find_folders(kind: str, checkpoint: str, adapter: str = "", saved: str = "") -> Folders:
    """Folders named by a policy's options `checkpoint` and `adapter`. `saved` is the folder of a saved policy: it takes
    the adapter's place where it is one, else that of the checkpoint.

    Raises `PolicyError` if a folder is missing, or lacks its weights.
    """
    if saved:
        if is_adapter(Path(saved)):
            adapter = saved if adapter else ""
        else:
            checkpoint, adapter = saved, ""
    elif not checkpoint:
        raise PolicyError(f"{kind} needs a checkpoint: set policy.options.checkpoint to its directory")
    weights, hung = Path(checkpoint), Path(adapter).resolve() if adapter else None
    check_folders({"checkpoint": checkpoint, "adapter": adapter})
    weights = weights.resolve()
    if hung is None and is_adapter(weights) and not _has_weights(weights):
        weights, hung = _base_of(weights), weights
    if hung is not None and not is_adapter(hung):
        raise PolicyError(f"policy.options.adapter: {hung} has no {ADAPTER_CONFIG}: name a folder in PEFT's layout")
    described = hung if hung is not None and _describes(hung) else weights
    read_json(weights / CONFIG)
    if not is_random(weights):
        Shards.find(weights)
    return Folders(weights, hung, described)


def check_adapter_is_named(found: Folders) -> None:
    """Raise `PolicyError` if config.json says that an adapter was trained, and none is there."""
    if found.adapter is None and read_json(found.described / CONFIG).get("use_peft"):
        raise PolicyError(
            f"{found.described / CONFIG}: use_peft is true, and no {ADAPTER_CONFIG} is there: set "
            "policy.options.adapter to the adapter's folder, or use_peft to false if it was merged into the weights"
        )


def is_adapter(folder: Path) -> bool:
    """True if a folder has an adapter in PEFT's layout."""
    return (folder / ADAPTER_CONFIG).is_file()


def is_random(folder: Path) -> bool:
    """True if the folder has no weights, and says from which seed they are drawn."""
    return RANDOM_WEIGHTS in read_json(folder / CONFIG) and not _has_weights(folder)


def check_all_is_read(
    found: Folders,
    processors: Processors | None,
    *,
    saved: bool,
    further: Collection[Path] = (),
    passed_folders: Collection[str] = PASSED_FOLDERS,
) -> None:
    """Raise `PolicyError` for a file of the folders that may have trained numbers, and is neither read nor known to be
    of none. `saved`: a folder is of a policy that this project saved; `further` are files that the policy's kind reads
    beside weights and processors."""
    for folder in {found.weights, found.described, *([found.adapter] if found.adapter is not None else [])}:
        read = weight_files(folder) if folder == found.weights else {folder / name for name in (CONFIG, INDEX, SINGLE)}
        if folder == found.adapter:
            read |= {folder / ADAPTER, folder / ADAPTER_CONFIG}
        if folder != found.described:
            # What an adapter was trained with takes their place.
            read |= {folder / PRE, folder / POST, *folder.glob("policy_*processor_step_*.safetensors")}
        elif processors is not None:
            read |= {folder / PRE, folder / POST, *processors.state_files}
        if saved:
            read |= {folder / EXTRAS}
        check_no_shards(folder)
        for path in own_files(folder, passed_folders):
            passed = path.name in PASSED or path.suffix not in JUDGED or path.name.startswith(".")
            if not passed and path not in read and path not in further:
                raise PolicyError(f"{path} is there, and nothing reads it: {_way(path)}")


def weight_files(folder: Path) -> set[Path]:
    """config.json, and the files that hold a folder's weights."""
    read = {folder / name for name in (CONFIG, INDEX, SINGLE)}
    if (folder / INDEX).exists():
        files = {folder / name for name in Shards.find(folder).files.values()}
        read |= files
        if (folder / SINGLE) not in files:
            read -= {folder / SINGLE}
    return read


def own_files(folder: Path, passed_folders: Collection[str] = PASSED_FOLDERS) -> Iterator[Path]:
    """The files of a checkpoint: but for hidden folders, those that are known and not read, checkpoints of their own
    within it, and links to other folders, which may lead back."""
    for path in sorted(folder.iterdir()):
        if not path.is_dir():
            yield path
        elif not (path.name.startswith(".") or path.name in passed_folders or path.is_symlink() or _is_whole(path)):
            yield from own_files(path, passed_folders)


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


def _is_whole(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and _has_weights(folder)


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
