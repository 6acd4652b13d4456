"""Tensors that one process lends to others of its machine: in shared memory of their size, written once, mapped by all.

Nothing of them passes through a store of fixed size. What was lent last stays as it is while the next is written: there
are two memories, which take turns. What was lent before that is written over, and says so when it is asked.
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

    def __init__(self, places: Mapping[str, _Place], name: str, ticket: int, block: Block | None = None) -> None:
        self.places, self._name, self.ticket = dict(places), name, ticket
        self._block = block

    def __reduce__(self) -> Any:
        # Who is sent them maps them at the first look: on another machine nobody can, and they are lent there again.
        return LentTensors, (self.places, self._name, self.ticket)

    def __getitem__(self, name: str) -> Tensor:
        return _view(self._mapped(), name, self.places[name])

    def __iter__(self) -> Iterator[str]:
        return iter(self.places)

    def __len__(self) -> int:
        return len(self.places)

    @property
    def nbytes(self) -> int:
        """Of all of them, as they lie."""
        return size_of(_tensor_fields(self.places))

    def require_unchanged(self) -> None:
        """Raise `LentOver` where their memory has been written again."""
        found = int(self._mapped().arrays[_TICKET][0])
        if found != self.ticket:
            raise LentOver(f"what was lent as number {self.ticket} has been written over by number {found}")

    def _mapped(self) -> Block:
        if self._block is None:
            self._block = Block.attach(_fields(self.places), self._name, private=True)
            self.require_unchanged()
        return self._block


class Lender:
    """Of one process. `names` are those of its two memories, where another process removes them when this one is
    killed; None: whatever they are."""

    def __init__(self, names: tuple[str, str] | None = None) -> None:
        self._names = names or (None, None)
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
        return LentTensors(places, str(block.name), self._lent, block)

    def part(self, ticket: int, first: int, last: int) -> np.ndarray:
        """Bytes `first` to `last - 1` of what was lent as this number, as it lies. Raises `LentOver` where it is no
        longer there."""
        memory = self._memories[(ticket - 1) % 2]
        if memory is None or memory[1].arrays[_TICKET][0] != ticket:
            raise LentOver(f"what was lent as number {ticket} has been written over")
        return memory[1].whole[first:last]

    def lend_again(self, lent: LentTensors, parts: Iterable[np.ndarray]) -> LentTensors:
        """Lend here what another machine's process has lent, which comes in these `parts`."""
        block = self._memory(self._lent % 2, lent.places)
        self._lent += 1
        block.arrays[_TICKET][0] = _UNFINISHED
        first = 0
        for part in parts:
            block.whole[first : first + len(part)] = part
            first += len(part)
        block.arrays[_TICKET][0] = self._lent
        return LentTensors(lent.places, str(block.name), self._lent, block)

    def close(self) -> None:
        """Remove the memories; who has mapped them keeps what is there."""
        for memory in self._memories:
            if memory is not None:
                memory[1].close()
        self._memories = [None, None]

    def _memory(self, half: int, places: dict[str, _Place]) -> Block:
        """Made at the first lending, and made again for tensors of other shapes."""
        kept = self._memories[half]
        if kept is not None:
            if kept[0] == places:
                return kept[1]
            kept[1].close()
        purpose = "the weights, on their way to those who act with them"
        block = Block.create(_fields(places), True, purpose, self._names[half])
        self._memories[half] = places, block
        return block


def _fields(places: Mapping[str, _Place]) -> dict[str, Field]:
    return {**_tensor_fields(places), _TICKET: Field((1,), "int64", _UNFINISHED)}


def _tensor_fields(places: Mapping[str, _Place]) -> dict[str, Field]:
    return {f"tensor.{name}": Field((max(place.nbytes, 1),), "uint8") for name, place in places.items()}


def _view(block: Block, name: str, place: _Place) -> Tensor:
    whole = torch.from_numpy(block.arrays[f"tensor.{name}"])
    return whole[: place.nbytes].view(place.dtype).view(place.shape)
