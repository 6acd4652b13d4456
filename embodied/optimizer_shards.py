"""The optimiser's tensors as shards: a folder into which every rank writes what it holds, and that any number of ranks
reads.

torch.distributed.checkpoint does both, in safetensors: a file per rank, and in each file's header which part of every
tensor it has. Nothing is pickled, and no rank holds more than its share.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import CheckpointException, HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.tensor import DTensor

FOLDER = "optimizer"
"""In a checkpoint, instead of `optimizer.safetensors`."""


def write(folder: Path, shards: Mapping[str, Tensor]) -> None:
    """Write this rank's shards (`DTensor`) into the folder, which is made. Every rank has to be asked.

    Raises `OSError` on all ranks where one of them cannot write.
    """
    try:
        dcp.save(_of_something(shards), storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True))
    except CheckpointException as error:
        rank, (failure, _) = next(iter(error.failures.items()))
        raise OSError(f"rank {rank}: {failure}") from error


def read_shards(folder: Path, into: Mapping[str, Tensor]) -> None:
    """Fill this rank's shards from a folder that any number of ranks has written. Every rank has to be asked."""
    dcp.load(_of_something(into), storage_reader=HuggingFaceStorageReader(str(folder)))


def _of_something(shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Without those of which this rank has no number: torch's reader refuses them."""
    return {
        name: shard
        for name, shard in shards.items()
        if (shard.to_local() if isinstance(shard, DTensor) else shard).numel()
    }


def read(folder: Path) -> dict[str, Tensor]:
    """The whole tensors, in the host's memory, by one process alone."""
    reader = HuggingFaceStorageReader(str(folder))
    known = reader.read_metadata().state_dict_metadata
    found = {
        name: torch.empty(each.size, dtype=each.properties.dtype)
        for name, each in known.items()
        if isinstance(each, TensorStorageMetadata)
    }
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")  # which is meant
        dcp.load(dict(found), storage_reader=reader, no_dist=True)
    return found
