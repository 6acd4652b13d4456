"""A Hugging Face checkpoint directory, read and written as data: JSON and safetensors, nothing that is executed.

FOLDER/config.json                          sizes, statistics of the datasets
FOLDER/model.safetensors.index.json         which file holds which tensor
FOLDER/model-0000i-of-0000n.safetensors     or one model.safetensors without an index
FOLDER/preprocessor_config.json, tokenizer.json, dataset_statistics.json, ...
"""

from __future__ import annotations

import json
import pickle
import re
import shutil
import zipfile
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ValidationError
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from policies.errors import PolicyError, shown

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
          "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool"}  # fmt: skip
"""safetensors' names, and torch's."""
WEIGHT_SUFFIXES = (".bin", ".ckpt", ".pt", ".pth", ".safetensors")
FULL = re.compile(r"full_weights\.pt")
VERL_RANK = re.compile(r"model_world_size_(?P<world>\d{1,5})_rank_(?P<rank>\d{1,5})\.pt")
LOCAL_RANK = re.compile(r"checkpoint_rank_(?P<rank>\d{1,5})\.pt")
DCP_PART = re.compile(r".*\.distcp")
"""Files that RLinf, verl and torch.distributed.checkpoint write, in order of preference."""
SHARD_FOLDERS = ("actor", "model_state_dict", "local_shard_checkpoint", "dcp_checkpoint")
"""Folders within a checkpoint's in which they lie."""
TRAINING_STATE = re.compile(r"(optimizer|optim|scheduler|scaler|rng_state|random_states|training_args)(_?\d+)*\..*")
"""Names of files that programs keep for resuming a training: no policy needs them to act."""
LARGEST_JSON = 2**27
"""Bytes; a tokenizer has some millions."""
SHOWN_ERROR = 500
"""Characters of a library's message."""
WEIGHTS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file. Raises `PolicyError` if there is none."""
    try:
        size = path.stat().st_size
        if size > LARGEST_JSON:
            raise PolicyError(f"{path} has {size} bytes; at most {LARGEST_JSON} are read")
        text = path.read_text(encoding="utf-8")
        data = json.loads(text)
        if "\\ud" in text.lower():
            json.dumps(data, ensure_ascii=False).encode()  # half a pair of surrogates is no text
    except FileNotFoundError:
        hint = import_hint(path.parent) if path.name == CONFIG else ""
        raise PolicyError(f"incomplete checkpoint: {path} is missing{hint}") from None
    except RecursionError:
        raise PolicyError(f"{path} cannot be read: it is nested too deeply") from None
    except (OSError, ValueError) as error:
        raise PolicyError(f"{path} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise PolicyError(f"{path} must hold an object, it holds a {type(data).__name__}")
    return data


M = TypeVar("M", bound=BaseModel)


def checked(path: Path, schema: type[M], raw: Mapping[str, Any]) -> M:
    """Content of the file, checked by the schema. Raises `PolicyError`, which names the first wrong entry."""
    try:
        return schema.model_validate(raw)
    except ValidationError as error:
        found = error.errors(include_url=False)[0]
        where, what = ".".join(str(part) for part in found["loc"]), found["msg"][:SHOWN_ERROR]
        raise PolicyError(
            f"{path} lacks an entry or has one of the wrong type: {shown(where)}: {what} (got {shown(found['input'])})"
        ) from None


def write_json(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n")


def layout(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


@dataclass(frozen=True)
class Shards:
    """File of each tensor of a directory."""

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
                # An index is outside data: it must not lead out of its folder.
                if Path(file).name != file or not file.endswith(".safetensors") or "\0" in file:
                    raise PolicyError(f"{folder / INDEX} names {shown(file)}, which is no safetensors file beside it")
            return cls(folder, files)
        if not (folder / SINGLE).exists():
            there = import_hint(folder)
            pickles = sorted(path.name for pattern in PICKLES for path in folder.glob(pattern))
            if pickles and not there:
                there = f"; {pickles[0]} is a pickle, which is not read: convert it to safetensors"
            raise PolicyError(f"no weights in {folder}: neither {INDEX} nor {SINGLE} is there{there}")
        return cls(folder, dict.fromkeys(_names(folder / SINGLE), SINGLE))

    def read(self, expected: Mapping[str, Tensor], unread: Collection[str] = ()) -> dict[str, Tensor]:
        """All tensors but those `unread`, on the CPU: exactly those expected, by name and shape; their dtype is the
        file's.

        Raises `PolicyError` before a tensor is used if a file is missing, damaged or no safetensors file, if a
        tensor is missing, not expected, of another shape or not finite, or if the index and the files disagree.
        """
        _check_names(self.folder, self.files.keys() - set(unread), set(expected))
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
            names = [name for name in names if name in expected]
            tensors = _tensors(path, names)
            check_shapes(self.folder, tensors, {name: expected[name] for name in names})
            check_finite(path, tensors)
            found |= tensors
        return found

    def tensor(self, name: str) -> Tensor:
        """One tensor, unchecked. Raises `PolicyError` for a damaged file."""
        return _tensors(self.folder / self.files[name], [name])[name]

    def empty(self, names: Iterable[str]) -> dict[str, Tensor]:
        """Tensors of the shapes that these have, on the meta device. Raises `PolicyError` for a damaged file."""
        found = {}
        for name in names:
            path = self.folder / self.files[name]
            if name not in _names(path):
                raise PolicyError(f"{path} and the index disagree: {shown(name)} is in the index, but not in it")
            with safe_open(path, framework="pt") as shard:
                found[name] = torch.empty(shard.get_slice(name).get_shape(), device="meta")
        return found

    def write(self, folder: Path, tensors: Mapping[str, Tensor]) -> None:
        """Write the tensors into `folder`, divided into files as they are in this folder, with an index."""
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


def trained_shards(folder: Path, deeper: int = 2) -> Path | None:
    """The first file of weights that RLinf, verl or torch.distributed.checkpoint left in the folder, or in one of those
    that they make in it; None if there is none. Raises nothing."""
    try:
        names = sorted(entry.name for entry in folder.iterdir())
    except OSError:
        return None
    for pattern in (FULL, VERL_RANK, LOCAL_RANK, DCP_PART):
        for name in names:
            if re.fullmatch(pattern, name):
                return folder / name
    inner = (trained_shards(folder / name, deeper - 1) for name in SHARD_FOLDERS if name in names and deeper)
    return next((found for found in inner if found), None)


def import_hint(folder: Path) -> str:
    """The end of a message about a folder that lacks weights: how to convert those of a training that lie in it or, if
    it is verl's `huggingface`, beside it. Empty where there are none."""
    places = (folder, folder.parent) if folder.name == "huggingface" else (folder,)
    found = next((place for place in places if trained_shards(place)), None)
    if found is None:
        return ""
    return (
        f"; {found} holds what a training left, which has to be made a checkpoint together with its base first "
        "(docs/openvla.md)"
    )


def check_no_shards(folder: Path) -> None:
    """Raise `PolicyError` if weights of a training that RLinf or verl left lie beside those in the folder."""
    trained = trained_shards(folder)
    if trained is not None:
        raise PolicyError(
            f"{trained} lies beside the weights, and nothing says what it is for. If it holds what was trained, the "
            "others may be its base alone: make a checkpoint of both first (docs/openvla.md). Move it into another "
            "folder if it does not belong to this one"
        )


def check_no_other_weights(shards: Shards, known: Iterable[str] = ()) -> None:
    """Raise `PolicyError`, which names the first, if files of weights lie beside the shards that nothing would read.

    `known` are names of files that other code reads. The folder may also hold training state (optimizer,
    random numbers).
    """
    folder, expected = shards.folder, {*shards.files.values(), *known}
    check_no_shards(folder)
    for path in sorted(folder.iterdir()):
        if path.suffix not in WEIGHT_SUFFIXES or path.name in expected or TRAINING_STATE.fullmatch(path.name):
            continue
        which = INDEX if (folder / INDEX).exists() else SINGLE
        raise PolicyError(
            f"{path} lies beside the weights, and nothing says what it is for: {which} does not name it. If it "
            "holds what was trained, the others may be its base alone: what RLinf, verl and FSDP leave is made a "
            "checkpoint first (docs/openvla.md). Move a file that does not belong to the checkpoint into another folder"
        )


def read_tensors(path: Path) -> dict[str, Tensor]:
    """Every tensor of one safetensors file, finite. Raises `PolicyError`."""
    tensors = _tensors(path, _names(path))
    check_finite(path, tensors)
    return tensors


def layouts(path: Path) -> dict[str, str]:
    """Shape and dtype of each tensor of a safetensors file; no tensor is read. Raises `PolicyError`."""
    names = _names(path)
    with safe_open(path, framework="pt") as file:
        slices = {name: file.get_slice(name) for name in names}
        return {name: f"{DTYPES.get(s.get_dtype(), s.get_dtype())} {s.get_shape()}" for name, s in slices.items()}


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
    """A plain state dict, without the prefix of data-parallel training: PyTorch's own format, or safetensors.

    PyTorch's is read with `weights_only`, which makes tensors and containers and nothing else, and never takes more
    memory than the file has bytes. Raises `PolicyError`.
    """
    state = read_tensors(path) if path.suffix == ".safetensors" else _unpickled(path)
    check_finite(path, state)
    plain = {name.removeprefix("module."): tensor for name, tensor in state.items()}
    if len(plain) != len(state):
        twice = next(name for name in state if f"module.{name}" in state)
        raise PolicyError(f"{path} holds {shown(twice)} twice, with and without the prefix 'module.'")
    return plain


def _unpickled(path: Path) -> dict[str, Tensor]:
    return dict(unpickled(path, lambda state, size: _check_state(path, state, size)))


def unpickled(path: Path, check: Callable[[Any, int], None], *, mapped: bool = False) -> Any:
    """Content of a file in PyTorch's format, on the CPU. `check` gets it first without its numbers, on the meta device,
    and then with them, each time with the file's size in bytes. `mapped` leaves the numbers in the file until they are
    asked for, where it is an archive. Raises `PolicyError`."""
    try:
        size = path.stat().st_size
        if not size:
            raise PolicyError(f"{path} is empty: copy it again from where it was saved")
        stored = _check_archive(path, size)
        # Sizes first: a tensor's record may ask for more numbers than the file has.
        described = torch.load(path, map_location="meta", weights_only=True)
        check(described, size)
        state = torch.load(path, map_location="cpu", mmap=mapped and stored, weights_only=True)
    except PolicyError:
        raise
    except FileNotFoundError:
        raise PolicyError(f"incomplete checkpoint: {path} is missing") from None
    except pickle.UnpicklingError as error:
        raise PolicyError(
            f"{path} holds more than tensors, and is not read: {_why_not(error)}; save its tensors alone, as a state "
            "dict or as safetensors"
        ) from error
    except (
        Exception
    ) as error:  # an archive of a program for a machine of its own: what is damaged in it raises anything
        raise PolicyError(f"{path} is damaged: {str(error)[:SHOWN_ERROR]}") from error
    check(state, size)
    return state


def _why_not(error: pickle.UnpicklingError) -> str:
    """Message of PyTorch's reader of tensors, without its advice to read the file as code."""
    named = str(error).partition("WeightsUnpickler error:")[2].strip().splitlines()
    return named[0][:SHOWN_ERROR] if named else "it names code"


def _check_archive(path: Path, size: int) -> bool:
    """True for an archive that is not compressed. Raises `PolicyError` for one that unpacks to more than it has."""
    if not zipfile.is_zipfile(path):
        return False
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > size:
        raise PolicyError(f"{path} is compressed: it has {size} bytes and asks for {unpacked}; save it again")
    return all(entry.compress_type == zipfile.ZIP_STORED for entry in entries)


def _check_state(path: Path, state: Any, size: int) -> None:
    if not isinstance(state, dict) or not all(isinstance(n, str) and isinstance(t, Tensor) for n, t in state.items()):
        raise PolicyError(f"{path} is not a state dict: it must map names to tensors")
    for name, tensor in state.items():
        if tensor.layout != torch.strided or tensor.is_quantized:
            raise PolicyError(f"{path}: {shown(name)} is sparse or quantised, which is not supported")
    # A tensor may be a view that repeats few numbers; a dozen of them may share one storage.
    wanted = max((tensor.numel() * tensor.element_size() for tensor in state.values()), default=0)
    if wanted > size:
        raise PolicyError(f"{path} has {size} bytes, and a tensor in it asks for {wanted}")


def check_tensors(source: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    """Raise `PolicyError` unless names and shapes agree."""
    _check_names(source, set(found), set(expected))
    check_shapes(source, found, expected)


def check_shapes(source: Path, found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    for name, tensor in expected.items():
        if found[name].shape != tensor.shape:
            shapes = f"{list(found[name].shape)}, expected {list(tensor.shape)}"
            raise PolicyError(f"{source}: {name!r} is {shapes}: the tensors are of another model than config.json says")
        if found[name].dtype not in (*WEIGHTS, tensor.dtype):  # a batch norm counts its batches in whole numbers
            raise PolicyError(f"{source}: {name!r} is {layout(found[name])}; quantised weights are not supported")


def copy_other_files(source: Path, target: Path) -> None:
    """Files beside tensors, index and configuration: tokenizer, preprocessor, statistics, remote code (not read)."""
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
        raise PolicyError(f"{path} is damaged or no safetensors file: {str(error)[:SHOWN_ERROR]}") from error


def _tensors(path: Path, names: Iterable[str]) -> dict[str, Tensor]:
    """The named tensors of the file. Raises `PolicyError`."""
    try:
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (
        OSError,
        SafetensorError,
        AttributeError,
        RuntimeError,
        TypeError,
        ValueError,
    ) as error:  # strange types, sizes
        raise PolicyError(f"{path} is damaged: {str(error)[:SHOWN_ERROR]}") from error


def _check_names(source: Path, found: set[str], expected: set[str]) -> None:
    missing, unexpected = sorted(expected - found), sorted(found - expected)
    if missing or unexpected:
        parts = [
            f"{len(names)} {what}: {', '.join(shown(name) for name in names[:3])}{', ...' if len(names) > 3 else ''}"
            for names, what in ((missing, "missing"), (unexpected, "unexpected"))
            if names
        ]
        raise PolicyError(f"{source} does not hold the tensors that it should: {'; '.join(parts)}")


# --- Weights and statistics that are not finite: refused where they are read, for a policy would act on them
# silently.


def check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise `PolicyError`, which names the first such tensor, if one read from `path` has NaN or infinite numbers."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if tensor.element_size() < 2:  # of 8 bits, of which torch knows no extremes
            tensor = tensor.float()
        # The extremes take one pass and no memory; NaN is both of them wherever there is one.
        low, high = torch.aminmax(tensor)
        if not (low.isfinite() and high.isfinite()):
            raise PolicyError(
                f"{path}: {name[:200]!r} has numbers that are not finite: a policy cannot act with it. Use an earlier "
                "checkpoint, or train again (a smaller learning rate is the usual remedy)"
            )
