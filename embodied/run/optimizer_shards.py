"""The optimiser's tensors as shards: a folder into which every rank writes its own, and that any number of ranks reads.

torch.distributed.checkpoint does both, in safetensors: a file per rank, whose header names its part of every tensor.
Nothing is pickled, and no rank needs memory for more than its shards.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

from embodied.errors import PeerFailed, unreadable


def write(folder: Path, shards: Mapping[str, Tensor], writers: dist.ProcessGroup) -> None:
    """Write this rank's shards (`DTensor`) into the folder, which is made. Every rank must call it.

    `writers` is a process group of all ranks, for this alone. Raises `OSError` on all ranks where one of them cannot
    write, `PeerFailed` where one is gone.
    """
    storage = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        dcp.save(_not_empty(shards), storage_writer=storage, process_group=writers)
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {failure}") from error
    except RuntimeError as error:  # gloo's have no class
        raise PeerFailed(f"the ranks lost each other while they wrote into {folder}: {error}") from error


def require_whole(folder: Path, shapes: Mapping[str, torch.Size]) -> None:
    """Raise `OSError` unless the folder has every element of these tensors. Their values are not read."""
    known = _known(HuggingFaceStorageReader(str(folder)))
    for name, shape in shapes.items():
        numbers = _numbers(known[name]) if name in known else 0
        if numbers != shape.numel():
            raise OSError(f"{folder} has {numbers} of {shape.numel()} numbers of {name}: it lacks a rank's file")


def read_shards(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill this rank's shards from a folder that any number of ranks has written. Every rank must call it. Raises
    `CheckpointError`, on all of them."""
    try:
        dcp.load(_not_empty(into), storage_reader=HuggingFaceStorageReader(str(folder)))
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        raise unreadable(folder, f"rank {rank}: {failure}") from error


def _not_empty(shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The shards that have elements: torch's reader refuses empty ones."""
    return {
        name: shard
        for name, shard in shards.items()
        if (shard.to_local() if isinstance(shard, DTensor) else shard).numel()
    }


def read(folder: Path) -> dict[str, Tensor]:
    """The whole tensors, in the host's memory, by one process alone. Raises `CheckpointError`."""
    reader = HuggingFaceStorageReader(str(folder))
    try:
        known = _known(reader)
        for name, each in known.items():  # before a tensor of that size is made
            if _numbers(each) != each.size.numel():
                raise ValueError(f"it has {_numbers(each)} of {each.size.numel()} numbers of {name}")
        # Elements that no file fills stay NaN, which is refused later.
        found = {name: torch.full(each.size, torch.nan, dtype=each.properties.dtype) for name, each in known.items()}
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is meant
            dcp.load(dict(found), storage_reader=reader, no_dist=True)
    except (Exception, CheckpointException) as error:  # whatever a part of the reader raises
        raise unreadable(folder, error) from error
    return found


def _known(reader: HuggingFaceStorageReader) -> dict[str, TensorStorageMetadata]:
    known = reader.read_metadata().state_dict_metadata
    return {name: each for name, each in known.items() if isinstance(each, TensorStorageMetadata)}


def _numbers(tensor: TensorStorageMetadata) -> int:
    return sum(chunk.sizes.numel() for chunk in tensor.chunks)
