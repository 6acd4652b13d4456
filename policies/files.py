"""A Hugging Face checkpoint directory, read and written as data: JSON and safetensors, nothing that is executed.

FOLDER/config.json                          sizes, statistics of the datasets
FOLDER/model.safetensors.index.json         which file holds which tensor
FOLDER/model-0000i-of-0000n.safetensors     or one model.safetensors without an index
FOLDER/preprocessor_config.json, tokenizer.json, dataset_statistics.json, ...
"""

from __future__ import annotations

import json
import pickle
import shutil
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from policies.contract import PolicyError
from policies.finite import check_finite

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file. Raises `PolicyError` if there is none."""
    try:
        data = json.loads(path.read_text())
    except FileNotFoundError:
        raise PolicyError(f"incomplete checkpoint: {path} is missing") from None
    except (OSError, ValueError, RecursionError) as error:  # the last: nested too deeply
        raise PolicyError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise PolicyError(f"{path} must hold an object, it holds a {type(data).__name__}")
    return data


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def layout(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@dataclass(frozen=True)
class Shards:
    """Where each tensor of a directory is."""

    folder: Path
    files: Mapping[str, str]
    """Tensor name to file name."""

    @classmethod
    def find(cls, folder: Path) -> Shards:
        """Read the index, or the names in the only file. Raises `PolicyError` where something is missing."""
        if not folder.is_dir():
            raise PolicyError(f"no checkpoint here: {folder} is not a folder")
        if (folder / INDEX).exists():
            files = read_json(folder / INDEX).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
                raise PolicyError(f"{folder / INDEX} has no weight_map from tensors to files")
            for file in set(files.values()):
                # An index is somebody else's text: it must not lead out of its folder.
                if Path(file).name != file or not file.endswith(".safetensors"):
                    raise PolicyError(f"{folder / INDEX} names {file!r}, which is no safetensors file beside it")
            return cls(folder, files)
        if not (folder / SINGLE).exists():
            pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
            there = f"; {pickles[0]} is a pickle, which is not read: convert it to safetensors" if pickles else ""
            raise PolicyError(f"no weights in {folder}: neither {INDEX} nor {SINGLE} is there{there}")
        return cls(folder, dict.fromkeys(_names(folder / SINGLE), SINGLE))

    def read(self, expected: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """All tensors, on the CPU: exactly those expected, by name and shape; their dtype is the file's.

        Raises `PolicyError` before a tensor is used if a file is missing, damaged or no safetensors file, if a
        tensor is missing, not expected, of another shape or not finite, or if the index and the files disagree.
        """
        _check_names(self.folder, set(self.files), set(expected))
        by_file: dict[str, list[str]] = defaultdict(list)
        for name, file in self.files.items():
            by_file[file].append(name)
        found: dict[str, Tensor] = {}
        for file, names in sorted(by_file.items()):
            path = self.folder / file
            stored = set(_names(path))
            if stored != set(names):
                name = min(stored ^ set(names))
                where = "is in the index, but not in it" if name in names else "is in it, but not in the index"
                raise PolicyError(f"{path} and the index disagree: {name!r} {where}")
            with safe_open(path, framework="pt") as shard:
                tensors = {name: shard.get_tensor(name) for name in names}
            check_shapes(self.folder, tensors, {name: expected[name] for name in names})
            check_finite(path, tensors)
            found |= tensors
        return found

    def empty(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors of the shapes that these have, on the meta device. Raises `PolicyError` for a damaged file."""
        found = {}
        for name in names:
            _names(self.folder / self.files[name])
            with safe_open(self.folder / self.files[name], framework="pt") as shard:
                found[name] = torch.empty(shard.get_slice(name).get_shape(), device="meta")
        return found

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors into `folder`, in as many files as they are in here, with an index."""
        by_file: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in tensors.items():
            by_file[self.files[name]][name] = tensor.detach().cpu().contiguous()
        for file, part in by_file.items():
            write_tensors(folder / file, part)
        if set(by_file) != {SINGLE}:
            size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
            write_json(
                folder / INDEX, {"metadata": {"total_size": size}, "weight_map": dict(sorted(self.files.items()))}
            )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of one safetensors file, finite. Raises `PolicyError`."""
    names = _names(path)
    with safe_open(path, framework="pt") as file:
        tensors = {name: file.get_tensor(name) for name in names}
    check_finite(path, tensors)
    return tensors


def write_tensors(path: Path, tensors: Mapping[str, Tensor], aliases: Mapping[str, str] | None = None) -> None:
    """Write a safetensors file, replacing an old one as a whole. `aliases` are further names of tensors in it, by which
    safetensors' `load_model` fills parameters that are tied.

    Tensors that were read are windows into their file: overwriting that in place would pull it from under them.
    """
    aside = path.with_name(f".{path.name}.partial")
    # Other readers of this layout ask the metadata which framework wrote it.
    save_file(dict(tensors), aside, metadata={"format": "pt", **(aliases or {})})
    aside.replace(path)


def read_state(path: Path) -> dict[str, Tensor]:
    """A plain state dict in PyTorch's own format, without the prefix of data-parallel training.

    Read with `weights_only`, which makes tensors and containers and nothing else. Raises `PolicyError`.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise PolicyError(f"incomplete checkpoint: {path} is missing") from None
    except pickle.UnpicklingError as error:
        raise PolicyError(f"{path} holds more than tensors, and is not read: {str(error).splitlines()[0]}") from error
    except (OSError, RuntimeError, EOFError, ValueError) as error:
        raise PolicyError(f"{path} is damaged: {error}") from error
    if not isinstance(state, dict) or not all(isinstance(t, Tensor) for t in state.values()):
        raise PolicyError(f"{path} is not a state dict: it must map names to tensors")
    check_finite(path, state)
    return {name.removeprefix("module."): tensor for name, tensor in state.items()}


def one_file(folder: Path, pattern: str) -> Path:
    """The only file that matches. Raises `PolicyError` if there is none, or more than one."""
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        names = ", ".join(path.name for path in found) or "none"
        raise PolicyError(f"{folder} must hold one file {pattern}, found: {names}")
    return found[0]


def check_tensors(source: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise `PolicyError` unless names and shapes agree."""
    _check_names(source, set(found), set(expected))
    check_shapes(source, found, expected)


def check_shapes(source: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            shapes = f"{list(found[name].shape)}, expected {list(tensor.shape)}"
            raise PolicyError(f"{source}: {name!r} is {shapes}: the tensors are of another model than config.json says")
        if not found[name].is_floating_point():
            raise PolicyError(f"{source}: {name!r} is {layout(found[name])}; quantised weights are not supported")


def copy_other_files(source: Path, target: Path) -> None:
    """What is neither tensor nor index nor configuration: tokenizer, preprocessor, statistics, remote code (unread)."""
    kinds, others = {".json", ".model", ".py", ".md"}, {CONFIG, INDEX, ADAPTER_CONFIG}
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in kinds and path.name not in others:
            shutil.copyfile(path, target / path.name)


def _names(path: Path) -> list[str]:
    try:
        with safe_open(path, framework="pt") as file:
            return list(file.keys())
    except FileNotFoundError:
        raise PolicyError(f"incomplete checkpoint: {path} is missing") from None
    except (OSError, SafetensorError) as error:
        raise PolicyError(f"{path} is damaged or no safetensors file: {error}") from error


def _check_names(source: Path, found: set[str], expected: set[str]) -> None:
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    if missing or unexpected:
        parts = [
            f"{len(names)} {what}: {', '.join(repr(name) for name in names[:3])}{', ...' if len(names) > 3 else ''}"
            for names, what in ((missing, "missing"), (unexpected, "unexpected"))
            if names
        ]
        raise PolicyError(f"{source} does not hold the tensors that it should: {'; '.join(parts)}")
