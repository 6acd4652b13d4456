"""Which folder has which part of a checkpoint, and whether all that lies there is used.

    weights       config.json with the network's sizes, safetensors
    adapter       adapter_config.json, adapter_model.safetensors (PEFT's layout), if there is one
    described     config.json, processors or statistics: the adapter's folder where it has them (LeRobot's `use_peft`),
                  else that of the weights
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from policies.contract import PolicyError
from policies.files import ADAPTER, ADAPTER_CONFIG, CONFIG, INDEX, SINGLE, Shards, check_no_shards, read_json, shown
from policies.pi0.config import Layout, check_entries, layout_of
from policies.pi0.inputs import TOKENIZER
from policies.pi0.steps import POST, PRE, Processors, read_processors
from policies.random_weights import RANDOM_WEIGHTS

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

    Raises `PolicyError` where a folder is missing or lacks something, and for files of which no option reads the
    numbers.
    """
    if saved:
        if is_adapter(Path(saved)):
            adapter = saved if adapter else ""
        else:
            checkpoint, adapter = saved, ""
    elif not checkpoint:
        raise PolicyError("pi0 needs a checkpoint: set policy.options.checkpoint to its directory")
    weights, hung = Path(checkpoint), Path(adapter).resolve() if adapter else None
    for name, folder in (("checkpoint", weights), ("adapter", hung)):
        if folder is not None and not folder.is_dir():
            raise PolicyError(
                f"policy.options.{name}: {folder} is not a folder here; name one of openpi's or LeRobot's "
                "(a name on the Hugging Face Hub goes into policy.path)"
            )
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
