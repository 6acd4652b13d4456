"""Tensors that one process lends to others of its machine: in shared memory of their size, written once, mapped by all.

Nothing of them passes through a store of fixed size. What was lent last stays as it is while the next is written: there
are two memories, which take turns. What was lent before that is written over, and says so when it is asked.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from embodied.workers.devices import await_devices
from sim_farm.contract import FarmError
from sim_farm.memory import Block, Field

_TICKET = "ticket"
_UNFINISHED = -1


class LentOver(FarmError):
    """What was lent is no longer there: its memory holds something newer."""


@dataclass(frozen=True)
class _Place:
    """Of one tensor."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * self.dtype.itemsize


class LentTensors(Mapping[str, Tensor]):
    """Tensors by name, where their lender has written them. What is written into them here stays here."""

    def __init__(self, places: Mapping[str, _Place], block: Block, ticket: int) -> None:
        self._places, self._block, self._ticket = dict(places), block, ticket

    def __reduce__(self) -> Any:
        # Who is sent them, maps them.
        return _mapped, (self._places, str(self._block.name), self._ticket)

    def __getitem__(self, name: str) -> Tensor:
        return _view(self._block, name, self._places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self._places)

    def __len__(self) -> int:
        return len(self._places)

    def require_unchanged(self) -> None:
        """Raise `LentOver` where their memory has been written again."""
        found = int(self._block.arrays[_TICKET][0])
        if found != self._ticket:
            raise LentOver(f"what was lent as number {self._ticket} has been written over by number {found}")


class Lender:
    """Of one process. `names` uint8 [2, N] is told the names of its two memories, so that another process can remove
    them when this one is killed."""

    def __init__(self, names: np.ndarray) -> None:
        self._names = names
        self._memories: list[tuple[dict[str, _Place], Block] | None] = [None, None]
        self._lent = 0

    def lend(self, tensors: Mapping[str, Tensor]) -> LentTensors:
        """Write them, from whatever device they are on. Valid until two more are lent.

        Raises `FarmError` where shared memory does not suffice.
        """
        places = {name: _Place(tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()}
        block = self._memory(self._lent % 2, places)
        self._lent += 1
        ticket = block.arrays[_TICKET]
        ticket[0] = _UNFINISHED
        for name, tensor in tensors.items():
            _view(block, name, places[name]).copy_(tensor, non_blocking=True)
        await_devices(tensors.values())
        ticket[0] = self._lent
        return LentTensors(places, block, self._lent)

    def close(self) -> None:
        """Remove the memories; who has mapped them keeps what is there."""
        for memory in self._memories:
            if memory is not None:
                memory[1].close()
        self._memories, self._names[...] = [None, None], 0

    def _memory(self, half: int, places: dict[str, _Place]) -> Block:
        """Made at the first lending, and made again for tensors of other shapes."""
        kept = self._memories[half]
        if kept is not None:
            if kept[0] == places:
                return kept[1]
            kept[1].close()
        block = Block.create(_fields(places), True, "the weights, on their way to those who act with them")
        name = str(block.name).encode()
        self._names[half] = 0
        self._names[half, : len(name)] = np.frombuffer(name, np.uint8)
        self._memories[half] = places, block
        return block


def _mapped(places: Mapping[str, _Place], name: str, ticket: int) -> LentTensors:
    lent = LentTensors(places, Block.attach(_fields(places), name, private=True), ticket)
    lent.require_unchanged()
    return lent


def _fields(places: Mapping[str, _Place]) -> dict[str, Field]:
    tensors = {f"tensor.{name}": Field((max(place.nbytes, 1),), "uint8") for name, place in places.items()}
    return {_TICKET: Field((1,), "int64", _UNFINISHED), **tensors}


def _view(block: Block, name: str, place: _Place) -> Tensor:
    whole = torch.from_numpy(block.arrays[f"tensor.{name}"])
    return whole[: place.nbytes].view(place.dtype).view(place.shape)
