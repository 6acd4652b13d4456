"""The learner and those who act on GPUs of their own, as a group in which weights are broadcast.

header: names, types, shapes -> all agree that they are theirs -> bucket after bucket -> all agree that they have all

What arrives is kept beside what acts until all have everything: nobody acts with a part, and either all have the new
weights or all keep the old ones.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from embodied.errors import PeerFailed, UserError
from embodied.runtime.ranks import Ranks

BUCKET_BYTES = 256 * 2**20
"""So much is sent at once: the learner needs this much memory besides its weights."""
ALIGNED = 16
"""Bytes at whose multiples tensors begin in a bucket."""

Bucket = list[tuple[str, int]]
"""Names, and where each tensor begins."""


@dataclass
class WeightsGroup(Ranks):
    """The group as one of its members sees it; rank 0 is the learner. `listen` and `join` connect it.

    It lies beside the group of the learner's ranks, and knows nothing of it.
    """

    name: str = "weights"
    names: tuple[str, ...] = ()
    """What messages call the members."""
    _group: Any = field(default=None, repr=False)
    _limit: timedelta = timedelta(0)

    def called(self, rank: int) -> str:
        return self.names[rank]

    def leave(self) -> None:
        """Close the connections; who waits for this member learns of it."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            with suppress(RuntimeError):  # the others may be gone
                group.abort()

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """Of rank 0: give them to all others, which `receive`. The tensors may be on any device.

        Raises `PeerFailed` where one of them refuses or is gone; then none has taken them.
        """
        layout = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        with self._handing_over():
            self._header(layout)
            self._agree()
            for bucket, size in _buckets(layout):
                flat = torch.zeros(size, dtype=torch.uint8, device=self.device)
                for name, start in bucket:
                    _part(flat, start, layout[name]).copy_(tensors[name].detach())
                self._broadcast(flat)
            self._agree()

    def receive(self, check: Callable[[Mapping[str, Tensor]], None]) -> dict[str, Tensor]:
        """What rank 0 sends, on this member's device. `check` is shown names, types and shapes, and raises a
        `UserError` where something is wrong.

        Raises that, and `PeerFailed` where another member has refused or is gone: nobody may take anything
        then.
        """
        found: dict[str, Tensor] = {}
        with self._handing_over():
            layout = self._header(None)
            wrong = _wrong(check, layout)
            self._agree(wrong)
            for bucket, size in _buckets(layout):
                flat = torch.empty(size, dtype=torch.uint8, device=self.device)
                self._broadcast(flat)
                found |= {name: _part(flat, start, layout[name]) for name, start in bucket}
            self._agree()
        return {name: found[name] for name in layout}

    def _connect(self, mine: str, connect_s: float, timeout_s: float) -> None:
        assert self._store is not None
        store = dist.PrefixStore("weights", self._store)
        self._limit = timedelta(seconds=connect_s)
        if self.device.type == "cuda":
            options = dist.ProcessGroupNCCL.Options()
            # Its own watch ends the process; that of a wait, which is shorter, raises.
            options._timeout = timedelta(seconds=2 * timeout_s)
            self._group = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo
            options = gloo._Options()
            options._devices, options._timeout = [gloo.create_device(hostname=mine)], self._limit
            self._group = gloo(store, self.rank, self.size, options)
        self._agree()  # NCCL connects when it is first asked for something
        self._limit = timedelta(seconds=timeout_s)
        if self.device.type != "cuda":
            self._group._set_default_timeout(self._limit)

    def _header(self, layout: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Rank 0's names, types and shapes, as tensors without memory."""
        rows = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in (layout or {}).items()]
        text = torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8).to(self.device)
        length = torch.tensor([len(text)], device=self.device)
        self._broadcast(length)
        sent = text if self.first else torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self._broadcast(sent)
        found = json.loads(bytes(sent.tolist()))
        return {name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, dtype, shape in found}

    @contextmanager
    def _handing_over(self) -> Iterator[None]:
        """Within, all do their part. Who cannot leaves, so that the others learn of it; those who only do not agree
        stay together."""
        try:
            with self.waiting("hand over weights"):
                yield
        except UserError:
            raise
        except BaseException:
            self.leave()
            raise

    def _agree(self, wrong: UserError | None = None) -> None:
        """Raise `PeerFailed` on every member where one of them finds something wrong; on that one what it is."""
        said = torch.zeros(self.size, dtype=torch.int32, device=self.device)
        said[self.rank] = int(wrong is not None)
        self._await(self._group_now().allreduce([said]))
        if wrong is not None:
            raise wrong
        if who := [self.called(rank) for rank, no in enumerate(said.tolist()) if no]:
            raise PeerFailed(f"{', '.join(who)} refused the weights of {self.called(0)}; nobody has taken them")

    def _broadcast(self, flat: Tensor) -> None:
        self._await(self._group_now().broadcast(flat, 0))

    def _await(self, work: Any) -> None:
        try:
            work.wait(self._limit)
        except RuntimeError as error:  # gloo's have no class
            raise dist.DistError(str(error)) from error
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def _group_now(self) -> Any:
        if self._group is None:
            raise PeerFailed(f"{self.called(self.rank)} is not connected to {', '.join(self.names)} any more")
        return self._group


def _wrong(check: Callable[[Mapping[str, Tensor]], None], layout: Mapping[str, Tensor]) -> UserError | None:
    try:
        check(layout)
    except UserError as error:
        return error
    return None


def _buckets(layout: Mapping[str, Tensor]) -> Iterator[tuple[Bucket, int]]:
    """Tensors that are sent together, and their bytes: not more than `BUCKET_BYTES`, unless one alone is larger."""
    bucket, size = Bucket(), 0
    for name, tensor in layout.items():
        own = -(-tensor.numel() * tensor.element_size() // ALIGNED) * ALIGNED
        if bucket and size + own > BUCKET_BYTES:
            yield bucket, size
            bucket, size = [], 0
        bucket.append((name, size))
        size += own
    if bucket:
        yield bucket, size


def _part(flat: Tensor, start: int, like: Tensor) -> Tensor:
    """A tensor of this type and shape in a bucket."""
    part = flat[start : start + like.numel() * like.element_size()]
    return part.view(like.dtype).view(like.shape)
