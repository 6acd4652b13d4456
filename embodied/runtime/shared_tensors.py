"""Tensors that one process publishes in shared memory, for all processes of its machine; copies for other machines.

A `TensorPublisher` writes them once, whatever their size; a receiver gets `SharedTensors` and maps them. On another
machine a process fetches their bytes in parts and publishes them on that machine.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.devices import await_devices
from sim_farm.contract import FarmError
from sim_farm.shared_memory.memory import Block, Field, size_of

_VERSION = "version"
_UNFINISHED = -1


class Overwritten(FarmError):
    """The memory of shared tensors contains a newer version."""


@dataclass(frozen=True)
class _Layout:
    """Type and shape of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class SharedTensors(Mapping[str, Tensor]):
    """Tensors by name in the shared memory of one machine, as a `TensorPublisher` wrote them. Writing into them changes
    private copies only."""

    def __init__(self, layouts: Mapping[str, _Layout], memory: str, version: int, block: Block | None = None) -> None:
        self.layouts, self.memory, self.version = dict(layouts), memory, version
        self._block = block

    def __reduce__(self) -> Any:
        # The receiver maps the memory at its first access. On another machine that is impossible: see `publish_copy`.
        return SharedTensors, (self.layouts, self.memory, self.version)

    def __getitem__(self, name: str) -> Tensor:
        return _view(self._mapped(), name, self.layouts[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.layouts)

    def __len__(self) -> int:
        return len(self.layouts)

    @property
    def nbytes(self) -> int:
        """Size of all tensors in memory."""
        return size_of(_tensor_fields(self.layouts))

    def require_unchanged(self) -> None:
        """Raise `Overwritten` if the memory contains a newer version."""
        found = int(self._mapped().arrays[_VERSION][0])
        if found != self.version:
            raise Overwritten(f"version {self.version} of the shared tensors has been overwritten by version {found}")

    def _mapped(self) -> Block:
        if self._block is None:
            self._block = Block.attach(_fields(self.layouts), self.memory, private=True)
            self.require_unchanged()
        return self._block


class TensorPublisher:
    """Writes tensors of one process into shared memory, once, for all processes of the machine.

    No store of fixed size is involved. Two memories alternate: the last version stays as it is while the next is
    written. `names` are those of the two memories, where another process removes them when this one is killed; None:
    any names.
    """

    def __init__(self, names: tuple[str, str] | None = None) -> None:
        self._names = names or (None, None)
        self._memories: list[tuple[dict[str, _Layout], Block] | None] = [None, None]
        self._version = 0

    def publish(self, tensors: Mapping[str, Tensor]) -> SharedTensors:
        """Write the tensors, from any device. Valid until two more versions are published.

        Raises `FarmError` where shared memory does not suffice.
        """
        layouts = {name: _Layout(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        block = self._begin(layouts)
        for name, tensor in tensors.items():
            _view(block, name, layouts[name]).copy_(tensor, non_blocking=True)
        await_devices(tensors.values())
        return self._finish(layouts, block)

    def part(self, version: int, first: int, last: int) -> np.ndarray:
        """Bytes `first` to `last - 1` of a published version. Raises `Overwritten` if it is gone."""
        memory = self._memories[(version - 1) % 2]
        if memory is None or memory[1].arrays[_VERSION][0] != version:
            raise Overwritten(f"version {version} of the shared tensors has been overwritten")
        return memory[1].whole[first:last]

    def publish_copy(self, original: SharedTensors, parts: Iterable[np.ndarray]) -> SharedTensors:
        """Publish on this machine the tensors of a process on another one, whose bytes arrive in `parts`."""
        block = self._begin(original.layouts)
        first = 0
        for part in parts:
            block.whole[first : first + len(part)] = part
            first += len(part)
        return self._finish(original.layouts, block)

    def close(self) -> None:
        """Remove the memories; processes that have mapped them keep what they contain."""
        for memory in self._memories:
            if memory is not None:
                memory[1].close()
        self._memories = [None, None]

    def _begin(self, layouts: dict[str, _Layout]) -> Block:
        """The memory of the next version; made at its first use, and made again for tensors of other shapes."""
        half = self._version % 2
        self._version += 1
        memory = self._memories[half]
        if memory is not None and memory[0] != layouts:
            memory[1].close()
            memory = None
        if memory is None:
            purpose = "the weights, on their way to the policy workers"
            memory = layouts, Block.create(_fields(layouts), True, purpose, self._names[half])
            self._memories[half] = memory
        memory[1].arrays[_VERSION][0] = _UNFINISHED
        return memory[1]

    def _finish(self, layouts: dict[str, _Layout], block: Block) -> SharedTensors:
        block.arrays[_VERSION][0] = self._version
        return SharedTensors(layouts, str(block.name), self._version, block)


def _fields(layouts: Mapping[str, _Layout]) -> dict[str, Field]:
    return {**_tensor_fields(layouts), _VERSION: Field((1,), "int64", _UNFINISHED)}


def _tensor_fields(layouts: Mapping[str, _Layout]) -> dict[str, Field]:
    return {f"tensor.{name}": Field((max(layout.nbytes, 1),), "uint8") for name, layout in layouts.items()}


def _view(block: Block, name: str, layout: _Layout) -> Tensor:
    whole = torch.from_numpy(block.arrays[f"tensor.{name}"])
    return whole[: layout.nbytes].view(layout.dtype).view(layout.shape)
