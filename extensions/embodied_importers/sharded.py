"""Checkpoints of data-parallel trainings, converted to a Hugging Face directory beside the base of the training.

verl    model_world_size_N_rank_R.pt    state dict of rank R: DTensors; `huggingface/` has config.json and tokenizer
        extra_state_world_size_*, optim_world_size_*    not read; `lora_adapter/`: the adapter's alpha is read
RLinf   model_state_dict/full_weights.pt    state dict, whole
        local_shard_checkpoint/checkpoint_rank_R.pt    {"model": local tensors, ...}, cut along the first dimension
        dcp_checkpoint/    torch.distributed.checkpoint: its `.metadata` is a pickle, which is not read

Sources: FSDPCheckpointManager.save_checkpoint and model_merger/fsdp_model_merger.py of verl;
hybrid_engines/fsdp/strategy/base.py and utils/ckpt_convertor/fsdp_convertor of RLinf.
"""

from __future__ import annotations

import math
import re
import shutil
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policies import lora
from policies.contract import PolicyError
from policies.files import (
    ADAPTER,
    ADAPTER_CONFIG,
    CONFIG,
    INDEX,
    LOCAL_RANK,
    SINGLE,
    VERL_RANK,
    WEIGHT_SUFFIXES,
    WEIGHTS,
    Shards,
    check_finite,
    layout,
    read_json,
    shown,
    trained_shards,
    unpickled,
    write_json,
    write_tensors,
)

FSDP_CONFIG = "fsdp_config.json"
HUGGINGFACE = "huggingface"
LORA_FOLDER = "lora_adapter"
WRAPPERS = re.compile(r"(?:(?<=\.)|^)(?:_fsdp_wrapped_module|_checkpoint_wrapped_module|_orig_mod|base_layer)\.")
"""Parts that module wrappers add to the names of tensors."""
LEADS = ("", "module.", "base_model.model.", "module.base_model.model.", "model.", "module.model.")
"""Prefixes that programs add to all tensor names."""
NESTED = (("fsdp_checkpoint", "model"), ("state_dict",), ("model_state_dict",), ("model",), ("module",))
"""Keys under which a state dict is found in a larger file. RLinf's converter looks in the same places."""
LORA = re.compile(r"(.+)\.lora_(A|B)\.(?:(\w+)\.)?weight")
VALUE_HEAD = "value_head."
"""Tensors of a training alone: no policy acts with them, and the base has none."""
LARGEST_FILE = 5 * 10**9
"""Bytes of one file where no base says how the tensors are spread."""
OWN_PROGRAM = "convert it with the program that wrote it (verl: python -m verl.model_merger merge --backend fsdp)"


class _Record:
    """Stands for a class of PyTorch's distributed tensors, and keeps what a pickle says of an object."""

    def __init__(self, *given: Any) -> None:
        self.given = given

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Shard(_Record):
    pass


class _Replicate(_Record):
    pass


class _Spec(_Record):
    pass


class _Meta(_Record):
    """TensorMeta: a named tuple, which is made with its entries."""

    def __new__(cls, *given: Any) -> _Meta:
        return super().__new__(cls)


class _Passed(_Record):
    """An entry that is never read."""

    def __new__(cls, *given: Any) -> _Passed:
        return super().__new__(cls)


class _Local(Tensor):
    """Stands for a DTensor: `_local_tensor` and `_spec` are what its rank has of it."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise PolicyError(f"a distributed tensor cannot be computed with: {func}")


_TENSOR = "torch.distributed.tensor"
STAND_INS: tuple[tuple[type, str], ...] = (
    *((_Local, f"{module}.DTensor") for module in (_TENSOR, f"{_TENSOR}._api", "torch.distributed._tensor.api")),
    *(
        (known, f"{module}.{name}")
        for module in (f"{_TENSOR}.placement_types", "torch.distributed._tensor.placement_types")
        for known, name in ((_Shard, "Shard"), (_Replicate, "Replicate"), (_Passed, "Partial"),
                            (_Passed, "_Partial"), (_Passed, "_StridedShard"))
    ),
    *(
        (known, f"{module}.{name}")
        for module in (f"{_TENSOR}._dtensor_spec", f"{_TENSOR}.placement_types",
                       "torch.distributed._tensor._dtensor_spec", "torch.distributed._tensor.placement_types")
        for known, name in ((_Spec, "DTensorSpec"), (_Meta, "TensorMeta"), (_Passed, "ShardOrderEntry"))
    ),
    (_Record, "torch.distributed.device_mesh.DeviceMesh"),
    (_Record, "torch.distributed._tensor.device_mesh.DeviceMesh"),
    (_Passed, "torch.distributed._mesh_layout._MeshLayout"),
    (_Passed, "torch.distributed._mesh_layout._FlatLayout"),
    # States of random generators, in files that hold more than the weights.
    *((_Passed, f"numpy.{name}") for name in ("ndarray", "dtype", "core.multiarray._reconstruct",
                                              "_core.multiarray._reconstruct")),
)  # fmt: skip
"""Stand-in for each class that such a file may name. Nothing of PyTorch's own is made, which would want the
processes that wrote it."""
_ALONE = threading.Lock()


@contextmanager
def _only_stand_ins() -> Iterator[None]:
    """Within, PyTorch's reader with `weights_only` makes tensors and these alone, whatever else was allowed before:
    importing `torch.distributed.tensor` allows its own."""
    with _ALONE:
        before = torch.serialization.get_safe_globals()
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(list(STAND_INS))
        try:
            yield
        finally:
            torch.serialization.clear_safe_globals()
            torch.serialization.add_safe_globals(before)


@dataclass(frozen=True)
class Part:
    """The part of a tensor that one rank has."""

    local: Tensor
    shape: tuple[int, ...] | None = None
    """Shape of the whole tensor; None if the file does not give it."""
    dim: int | None = None
    """Dimension along which it is cut; None: this is all of it."""
    place: int = 0
    """Which of the pieces along `dim` this is."""


@dataclass(frozen=True)
class Source:
    """Files of one checkpoint."""

    kind: str
    files: tuple[Path, ...]
    """Files by rank, or the only one."""
    folder: Path
    left_alone: tuple[str, ...] = ()
    """Files that lie there and are not read: optimizer, random states."""


@dataclass
class Conversion:
    """The result of `convert`, as plain data."""

    kind: str
    tensors: int = 0
    changed: int | None = None
    """Tensors that differ from the base's; None without weights of a base."""
    merged: int = 0
    """Matrices into which an adapter was merged."""
    left_out: list[str] = field(default_factory=list)
    """Tensors and entries that the base has not and no policy acts with."""
    left_alone: list[str] = field(default_factory=list)
    """Files of the checkpoint and of the base that were not read or not copied."""


def recognises(path: Path) -> bool:
    """True for a file in PyTorch's format, or a folder with shards; also for those of which `find` says what to do.
    Raises nothing."""
    try:
        if path.is_dir():
            return trained_shards(path) is not None
        with path.open("rb") as file:
            head = file.read(4)
        if path.suffix == ".distcp" or path.name == ".metadata":
            return True
        return path.suffix in (".pt", ".pth", ".bin", ".ckpt") and (head == b"PK\3\4" or head[:1] == b"\x80")
    except OSError:
        return False


def find(path: Path) -> Source:
    """The files that hold the weights of the checkpoint at `path`. Raises `PolicyError`."""
    if path.is_file():
        found, folder = path, path.parent
    else:
        found_shards = trained_shards(path)
        if found_shards is None:
            raise PolicyError(f"{path} holds no shards: neither full_weights.pt nor model_world_size_N_rank_R.pt")
        found, folder = found_shards, found_shards.parent
    if found.name == ".metadata" or found.suffix == ".distcp":
        file = folder.with_name(f"{folder.name}.pt")
        raise PolicyError(
            f"{folder} is torch.distributed.checkpoint's: its .metadata is a pickle, which is not read. On the machine "
            f"that wrote it run `python -m torch.distributed.checkpoint.format_utils dcp_to_torch {folder} {file}`, "
            f"then `embodied import {file} --base BASE --out FOLDER`"
        )
    others = tuple(sorted(entry.name for entry in folder.iterdir()))
    if not path.is_file() and VERL_RANK.fullmatch(found.name):
        files = _ranks(folder, VERL_RANK)
        return Source("verl's shards", files, folder, _left(others, files))
    if not path.is_file() and LOCAL_RANK.fullmatch(found.name):
        files = _ranks(folder, LOCAL_RANK)
        return Source("RLinf's local shards", files, folder, _left(others, files))
    for pattern in (VERL_RANK, LOCAL_RANK):
        if pattern.fullmatch(found.name):
            raise PolicyError(f"{found} is the part of one rank: name the folder, {folder}")
    return Source("a whole state dict", (found,), folder, _left(others, (found,)) if path.is_dir() else ())


def _left(names: Sequence[str], files: Sequence[Path]) -> tuple[str, ...]:
    used = {path.name for path in files} | {FSDP_CONFIG, HUGGINGFACE, LORA_FOLDER, ADAPTER_CONFIG}
    return tuple(name for name in names if name not in used)


def _ranks(folder: Path, pattern: re.Pattern[str]) -> tuple[Path, ...]:
    """The files of all ranks, in order. Raises `PolicyError` where one is missing."""
    matches = [match for entry in sorted(folder.iterdir()) if (match := pattern.fullmatch(entry.name))]
    found: dict[int, Path] = {}
    sizes = sorted({int(match.groupdict().get("world", 0)) for match in matches})
    if len(sizes) > 1:
        raise PolicyError(
            f"{folder} holds shards of trainings with {' and '.join(str(n) for n in sizes)} ranks: leave those of one "
            "of them there"
        )
    for match in matches:
        path, rank = folder / match[0], int(match["rank"])
        if found.setdefault(rank, path) != path:
            raise PolicyError(f"{path} and {found[rank].name} are of one rank: move one of them away")
    world = sizes[0] or len(found)
    if sizes[0] and (folder / FSDP_CONFIG).exists():
        said = read_json(folder / FSDP_CONFIG).get("world_size")
        if said != world:
            raise PolicyError(
                f"{folder / FSDP_CONFIG} says world_size {shown(said)}, and the shards are of {world} ranks: copy the "
                "folder again from where it was saved"
            )
    missing = [rank for rank in range(min(world, 10**5)) if rank not in found]
    if missing or len(found) != world:
        which = ", ".join(str(rank) for rank in missing[:5]) or f"beyond {world - 1}"
        raise PolicyError(
            f"{folder} lacks the shards of {len(missing)} of {world} ranks ({which}): copy all of them from where they "
            "were saved; each rank's machine may have its own"
        )
    return tuple(found[rank] for rank in range(world))


def _read(path: Path, rank: int) -> tuple[dict[str, Part], list[str]]:
    """The parts of a rank's file by name, and the entries of the file beside them. Raises `PolicyError`."""
    parts: dict[str, Part] = {}
    beside: list[str] = []

    def check(content: Any, size: int) -> None:
        state, others = _state(path, content)
        parts.clear()
        beside[:] = others
        for name, value in state.items():
            if not isinstance(name, str):
                raise PolicyError(f"{path} is not a state dict: {shown(name)} is not the name of a tensor")
            part = _part(path, name, value, rank)
            tensor = part.local
            if tensor.layout != torch.strided or tensor.is_quantized or tensor.dtype not in WEIGHTS:
                raise PolicyError(f"{path}: {shown(name)} is {layout(tensor)}; only floating-point weights are read")
            if tensor.numel() * tensor.element_size() > size:
                raise PolicyError(f"{path} has {size} bytes, and {shown(name)} asks for more")
            parts[name] = part

    with _only_stand_ins():
        unpickled(path, check, mapped=True)
    return parts, beside


def _state(path: Path, content: Any) -> tuple[Mapping[Any, Any], list[str]]:
    """The state dict in a file's content, and the names of what else is there."""
    if not isinstance(content, dict):
        raise PolicyError(f"{path} is not a state dict: it holds a {type(content).__name__}")
    for way in NESTED:
        inner, beside = content, list[str]()
        for key in way:
            if not isinstance(inner, dict) or not isinstance(inner.get(key), dict):
                break
            beside += [str(other)[:100] for other in inner if other != key]
            inner = inner[key]
        else:
            if any(isinstance(value, Tensor) for value in inner.values()):
                return inner, beside
    if not any(isinstance(value, Tensor) for value in content.values()):
        raise PolicyError(f"{path} holds no tensors by name: its entries are {shown(list(content)[:5])}")
    return content, []


def _part(path: Path, name: str, value: Any, rank: int) -> Part:
    if not isinstance(value, Tensor):
        raise PolicyError(f"{path}: {shown(name)} is a {type(value).__name__}, and not a tensor")
    if not isinstance(value, _Local):
        return Part(value.detach())
    spec, local = value.__dict__.get("_spec"), value.__dict__.get("_local_tensor")
    if not isinstance(spec, _Spec) or not isinstance(local, Tensor) or isinstance(local, _Local):
        raise PolicyError(f"{path}: {shown(name)} is a distributed tensor of an unknown layout: {OWN_PROGRAM}")
    said = _entries(spec)
    placements = said.get("placements")
    if not isinstance(placements, tuple) or not all(isinstance(p, (_Shard, _Replicate)) for p in placements):
        raise PolicyError(
            f"{path}: {shown(name)} is laid out in another way than cut along a dimension (Shard) or whole on each "
            f"rank (Replicate): {OWN_PROGRAM}"
        )
    cut = [i for i, placement in enumerate(placements) if isinstance(placement, _Shard)]
    if len(cut) > 1:
        raise PolicyError(f"{path}: {shown(name)} is cut along several dimensions of the mesh: {OWN_PROGRAM}")
    shape = tuple(value.shape)
    if not cut:
        return Part(local.detach(), shape)
    dim = _entries(placements[cut[0]]).get("dim")
    if not isinstance(dim, int) or not 0 <= dim < len(shape):
        raise PolicyError(f"{path}: {shown(name)}, {list(shape)}, is cut along the dimension {shown(dim)}")
    return Part(local.detach(), shape, dim, _place(_entries(said.get("mesh")), cut[0], rank))


def _entries(record: Any) -> Mapping[str, Any]:
    """The attributes of an object, as its pickle says them."""
    state = getattr(record, "state", None)
    if isinstance(state, tuple) and len(state) == 2:  # of a class with slots
        state = {**(state[0] or {}), **(state[1] or {})}
    return state if isinstance(state, dict) else {}


def _place(mesh: Mapping[str, Any], axis: int, rank: int) -> int:
    """The rank's coordinate along an axis of the device mesh."""
    own = mesh.get("_coordinate_on_dim")
    if isinstance(own, (list, tuple)) and axis < len(own) and isinstance(own[axis], int):
        return int(own[axis])
    ranks = next((mesh[key] for key in ("mesh", "_mesh") if isinstance(mesh.get(key), Tensor)), None)
    if ranks is None or ranks.is_meta or axis >= ranks.dim():
        return rank
    found = (ranks == rank).nonzero()
    return int(found[0, axis]) if len(found) == 1 else rank


def _whole(where: Path, name: str, parts: Sequence[Part], shape: tuple[int, ...] | None) -> Tensor:
    """The tensor of these parts, by rank. `shape` is the base's; None where there is none. Raises `PolicyError`."""
    said = {(part.shape, part.dim) for part in parts}
    if len(said) > 1 or len({part.local.dtype for part in parts}) > 1:
        raise PolicyError(f"{where}: the ranks disagree on the layout of {shown(name)}: are they of one training?")
    first = parts[0]
    if first.shape is None:
        locals_ = [part.local for part in parts]
        if shape is None or all(tuple(local.shape) == shape for local in locals_):
            return _same(where, name, locals_)
        cut = first.local.dim() > 0 and all(local.shape[1:] == first.local.shape[1:] for local in locals_)
        found = torch.cat(locals_) if cut else first.local
    elif first.dim is None:
        found = _same(where, name, [part.local for part in parts])
    else:
        by_place: dict[int, list[Tensor]] = defaultdict(list)
        for part in parts:
            by_place[part.place].append(part.local)
        if sorted(by_place) != list(range(len(by_place))) or len({len(copies) for copies in by_place.values()}) > 1:
            raise PolicyError(
                f"{where}: parts of {shown(name)} are missing, or there twice: the files are not those of all ranks; "
                "copy them again from where they were saved"
            )
        pieces = [_same(where, name, by_place[i]) for i in range(len(by_place))]
        rest = {(*piece.shape[: first.dim], *piece.shape[first.dim + 1 :]) for piece in pieces if piece.numel()}
        if len(rest) > 1:
            raise PolicyError(f"{where}: the parts of {shown(name)} do not fit together; copy the files again")
        found = torch.cat([piece for piece in pieces if piece.numel()] or pieces[:1], first.dim)
    wanted = first.shape or shape
    if wanted is not None and tuple(found.shape) != wanted:
        raise PolicyError(
            f"{where}: the parts of {shown(name)} are together {list(found.shape)}, expected {list(wanted)}: the files "
            "are not those of all ranks, or --base names another model"
        )
    if shape is not None and tuple(found.shape) != shape:
        raise PolicyError(
            f"{where}: {shown(name)} is {list(found.shape)}, expected {list(shape)}: --base names another model"
        )
    return found


def _same(where: Path, name: str, copies: Sequence[Tensor]) -> Tensor:
    if not all(torch.equal(copies[0], copy) for copy in copies[1:]):
        raise PolicyError(f"{where}: the ranks have different copies of {shown(name)}: they are of different steps")
    return copies[0]


@dataclass(frozen=True)
class _Adapter:
    a: str
    b: str
    """Names of the two matrices in the shards."""


def _named(where: Path, names: Sequence[str], base: set[str] | None) -> dict[str, str]:
    """The base's name of each tensor, without what wrappers put in. Raises `PolicyError` if two get the same."""

    def mapped(lead: str, added: str) -> dict[str, str]:
        return {name: added + WRAPPERS.sub("", name).removeprefix(lead) for name in names}

    ways = [mapped(lead, added) for lead in LEADS for added in ("", "model.")] if base else [mapped("module.", "")]
    best = max(ways, key=lambda way: len(base.intersection(way.values()))) if base else ways[0]
    taken: dict[str, str] = {}
    for name, new in best.items():
        if taken.setdefault(new, name) != name:
            raise PolicyError(f"{where}: {shown(name)} and {shown(taken[new])} are both {shown(new)} without wrappers")
    return best


def convert(path: Path, base: Path | None, out: Path) -> Conversion:
    """Write the weights at `path` into the folder `out`, with the names and shapes of the checkpoint in `base` and with
    what else lies there. Dtypes are those of the shards.

    `base` may be None where a `huggingface` folder lies beside the shards. Raises `PolicyError` unless every tensor
    of the base is there in its shape, finite, and nothing else that acts.
    """
    source = find(path)
    base = _base(source, base)
    shards = Shards.find(base) if any((base / name).exists() for name in (INDEX, SINGLE)) else None
    shapes: dict[str, tuple[int, ...] | None] | None = None
    if shards is not None:
        shapes = {name: tuple(tensor.shape) for name, tensor in shards.empty(shards.files).items()}
    read = [_read(file, rank) for rank, file in enumerate(source.files)]
    where = source.files[0] if len(source.files) == 1 else source.folder
    ranks = [parts for parts, _ in read]
    for file, parts in zip(source.files, ranks, strict=True):
        if parts.keys() != ranks[0].keys():
            name = min(parts.keys() ^ ranks[0].keys())
            raise PolicyError(f"{file} and {source.files[0].name} are of different trainings: {shown(name)} is in one")
    names = _named(where, list(ranks[0]), None if shapes is None else set(shapes))
    stored = {new: name for name, new in names.items()}
    result = Conversion(source.kind, left_out=sorted({entry for _, beside in read for entry in beside}))

    def whole(new: str, shape: tuple[int, ...] | None) -> Tensor:
        return _whole(where, stored[new], [parts[stored[new]] for parts in ranks], shape)

    pairs = _adapters(where, stored)
    merge = _merge(source, where, pairs, whole) if pairs else None
    if not pairs:
        _check_no_adapter(source)
    result.merged = len(pairs)
    adapters = {name for pair in pairs.values() for name in (pair.a, pair.b)}
    rest = [name for name in stored if name not in adapters]
    wanted = shapes or dict.fromkeys(name for name in rest if not _of_value_head(name))
    tied = _tied(ranks, [stored[name] for name in rest if name not in wanted], list(names))
    _check_names(where, base, rest, wanted, {names[name] for name in tied}, result)
    files = dict(shards.files) if shards is not None else _spread(wanted, whole)
    strange = sorted(pairs.keys() - wanted.keys())
    if strange:
        raise PolicyError(f"{where}: an adapter is of {shown(strange[0])}, which the base has not")
    by_file: dict[str, list[str]] = defaultdict(list)
    for name in wanted:
        by_file[files[name]].append(name)
    total, changed = 0, 0
    for part, inside in sorted(by_file.items()):
        tensors: dict[str, Tensor] = {}
        for name in inside:
            tensor = whole(name, wanted[name])
            tensors[name] = (merge(name, tensor) if merge and name in pairs else tensor).contiguous()
            total += tensors[name].numel() * tensors[name].element_size()
            changed += shards is not None and not torch.equal(tensors[name].float(), shards.tensor(name).float())
        check_finite(where, tensors)
        # Of one file, tensors may share their memory, which safetensors refuses.
        write_tensors(out / part, {name: tensor.clone() for name, tensor in tensors.items()})
    if set(by_file) != {SINGLE}:
        write_json(out / INDEX, {"metadata": {"total_size": total}, "weight_map": dict(sorted(files.items()))})
    result.tensors, result.changed = len(wanted), changed if shards is not None else None
    result.left_alone = [*source.left_alone, *_copy(base, out, set(shards.files.values()) if shards else set())]
    return result


def _base(source: Source, base: Path | None) -> Path:
    if base is not None:
        if not base.is_dir():
            raise PolicyError(f"--base: {base} is not a folder here; name the checkpoint that the training began from")
        if not (base / CONFIG).is_file():
            raise PolicyError(f"--base: {base} has no {CONFIG}; name a Hugging Face directory")
        read_json(base / CONFIG)
        return base
    beside = source.folder / HUGGINGFACE
    if not (beside / CONFIG).is_file():
        raise PolicyError(
            f"{source.folder} does not say of which model the weights are: give the checkpoint that the training began "
            "from, with --base FOLDER"
        )
    read_json(beside / CONFIG)
    return beside


def _adapters(where: Path, stored: Mapping[str, str]) -> dict[str, _Adapter]:
    """The pairs of low-rank matrices by the name of the tensor that they are added to."""
    found: dict[str, dict[str, str]] = defaultdict(dict)
    adapters: set[str | None] = set()
    for name in stored:
        match = LORA.fullmatch(name)
        if match:
            adapters.add(match[3])
            found[f"{match[1]}.weight"][match[2]] = name
    if len(adapters) > 1:
        raise PolicyError(f"{where} holds several adapters ({shown(sorted(map(str, adapters)))}): merge them with PEFT")
    for name, pair in found.items():
        if len(pair) != 2:
            raise PolicyError(f"{where}: {shown(name)} has one of the adapter's matrices lora_A and lora_B alone")
    return {name: _Adapter(pair["A"], pair["B"]) for name, pair in found.items()}


def _adapter_folders(source: Source) -> list[Path]:
    return [f for f in (source.folder / LORA_FOLDER, source.folder) if (f / ADAPTER_CONFIG).exists()]


def _check_no_adapter(source: Source) -> None:
    for folder in _adapter_folders(source):
        raise PolicyError(
            f"{folder / ADAPTER_CONFIG} lies beside the weights, and these hold no adapter: act with both by "
            f"policy.options.adapter, or move it away if it was merged into them"
        )


def _merge(
    source: Source,
    where: Path,
    pairs: Mapping[str, _Adapter],
    whole: Callable[[str, tuple[int, ...] | None], Tensor],
) -> Callable[[str, Tensor], Tensor]:
    """A function that adds the adapter's product to a tensor of the base. The sum is rounded once. Raises
    `PolicyError` where nothing says by how much it counts."""
    folders = _adapter_folders(source)
    if not folders:
        raise PolicyError(
            f"{where} holds an adapter (LoRA), and nothing says its alpha: write what it was trained with into "
            f'{source.folder / ADAPTER_CONFIG}, e.g. {{"peft_type": "LORA", "r": 32, "lora_alpha": 32}} '
            "(RLinf trains with lora_alpha equal to r)"
        )
    file = folders[0] / ADAPTER_CONFIG
    config = lora.read_adapter_config(folders[0])
    if config.get("rank_pattern") or config.get("alpha_pattern"):
        raise PolicyError(f"{file}: rank_pattern and alpha_pattern are not supported here: merge it with PEFT")
    if "r" not in config or "lora_alpha" not in config:
        raise PolicyError(f"{file} must say r and lora_alpha")
    rank, alpha = config["r"], float(config["lora_alpha"])
    if not rank:
        raise PolicyError(f"{file}: r must be at least 1")
    scaling = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)

    def merge(name: str, tensor: Tensor) -> Tensor:
        if tensor.dim() != 2:
            raise PolicyError(f"{where}: {shown(name)} is {list(tensor.shape)}; only adapters of matrices are merged")
        try:
            a = whole(pairs[name].a, (rank, tensor.shape[1])).float()
            b = whole(pairs[name].b, (tensor.shape[0], rank)).float()
        except PolicyError as error:
            raise PolicyError(f"{error}; {file} says that r is {rank}") from error
        return (tensor.float() + scaling * (b @ a)).to(tensor.dtype)

    return merge


def _of_value_head(name: str) -> bool:
    return name.startswith(VALUE_HEAD) or f".{VALUE_HEAD}" in name


def _check_names(
    where: Path,
    base: Path,
    names: Sequence[str],
    wanted: Mapping[str, tuple[int, ...] | None],
    tied: set[str],
    result: Conversion,
) -> None:
    """Raise `PolicyError` unless the names are the base's, but for value heads and second names of tied tensors, which
    are noted in `result`."""
    missing, extra = sorted(wanted.keys() - set(names)), sorted(set(names) - wanted.keys())
    beside = [name for name in extra if _of_value_head(name) or name in tied]
    others = [name for name in extra if name not in beside]
    if missing or others:
        said = [
            f"{len(which)} {what}: {', '.join(shown(name) for name in which[:3])}{', ...' if len(which) > 3 else ''}"
            for what, which in (("of the base are missing", missing), ("are not in the base", others))
            if which
        ]
        raise PolicyError(
            f"{where} does not hold the tensors of {base}: {'; '.join(said)}. Name with --base the checkpoint that the "
            "training began from"
        )
    result.left_out += beside


def _tied(ranks: Sequence[Mapping[str, Part]], extra: Sequence[str], names: Sequence[str]) -> set[str]:
    """Names of `extra` tensors that are second names of others, whose numbers they have. A constant is none."""
    found = set()
    for name in extra:
        tensor = ranks[0][name].local
        if not tensor.numel() or tensor.min() == tensor.max():
            continue
        for other in names:
            if other not in extra and all(torch.equal(parts[name].local, parts[other].local) for parts in ranks):
                found.add(name)
    return found


def _spread(
    wanted: Mapping[str, tuple[int, ...] | None], whole: Callable[[str, tuple[int, ...] | None], Tensor]
) -> dict[str, str]:
    """Which file each tensor goes to, where no base says it."""
    numbers, used, file = dict[str, int](), 0, 1
    for name in wanted:
        tensor = whole(name, None)
        size = tensor.numel() * tensor.element_size()
        if used and used + size > LARGEST_FILE:
            used, file = 0, file + 1
        used, numbers[name] = used + size, file
    if file == 1:
        return dict.fromkeys(wanted, SINGLE)
    return {name: f"model-{number:05}-of-{file:05}.safetensors" for name, number in numbers.items()}


def _copy(base: Path, out: Path, weights: set[str]) -> list[str]:
    """Copy what lies in the base beside its weights: configuration, tokenizer, statistics, processors. Returns the
    names of the base's files that are not copied: pickles and adapters."""
    left = []
    for path in sorted(base.iterdir()):
        name = path.name
        if name in weights or name == INDEX or name.startswith("."):
            continue
        if path.is_dir() and not path.is_symlink() and not any(p.suffix in WEIGHT_SUFFIXES for p in path.rglob("*")):
            # Files may be links, as in Hugging Face's cache; folders that are links may lead back.
            shutil.copytree(path, out / name, ignore=_linked_folders, ignore_dangling_symlinks=True)
        elif path.is_file() and name not in (ADAPTER, ADAPTER_CONFIG) and _is_description(path):
            shutil.copyfile(path, out / name)
        else:
            left.append(f"{base / name}")
    return left


def _linked_folders(folder: str, names: list[str]) -> list[str]:
    return [name for name in names if (Path(folder) / name).is_symlink() and (Path(folder) / name).is_dir()]


def _is_description(path: Path) -> bool:
    """True for what says how the weights are used; of LeRobot's processors some are in safetensors."""
    return path.suffix not in WEIGHT_SUFFIXES or bool(re.fullmatch(r"policy_.*processor.*\.safetensors", path.name))
