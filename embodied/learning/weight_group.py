"""Weights between GPUs: broadcast to several (NCCL), or mapped by another process on the same GPU (CUDA IPC).

A broadcast: header (names, types, shapes) -> all agree that it fits -> bucket after bucket -> all agree that they have
everything. What arrives is kept apart from the acting weights until then: either all receivers have the new weights or
all keep the old ones.
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
from torch.multiprocessing.reductions import reduce_tensor

from embodied.devices import await_devices
from embodied.errors import PeerFailed, UserError
from embodied.runtime.ranks import Ranks

BUCKET_BYTES = 256 * 2**20
"""Bytes sent at once, for which the learner needs memory besides its weights."""
ALIGNED = 16
"""Alignment of tensors in a bucket, in bytes."""

Bucket = list[tuple[str, int]]
"""Names of tensors, and the byte at which each begins."""


@dataclass
class WeightGroup(Ranks):
    """A learner, rank 0, and the policy workers that it broadcasts to, as one member sees them. `listen` and `join`
    connect them. The learner's own ranks are another group.
    """

    name: str = "weights"
    names: tuple[str, ...] = ()
    """Names of the members, for messages."""
    _group: Any = field(default=None, repr=False)
    _limit: timedelta = timedelta(0)

    def called(self, rank: int) -> str:
        return self.names[rank]

    def leave(self) -> None:
        """Close the connections; a wait for this member then fails."""
        group, self._group, self._store = self._group, None, None
        if group is not None:
            with suppress(RuntimeError):  # the others may be gone
                group.abort()

    def send(self, tensors: Mapping[str, Tensor]) -> None:
        """On rank 0: broadcast the tensors, from any device, to all others, which `receive`.

        Raises `PeerFailed` where one of them refuses or is gone; then none has loaded them.
        """
        layout = {name: torch.empty_like(tensor, device="meta") for name, tensor in tensors.items()}
        with self._transfer():
            self._header(layout)
            self._agree()
            for bucket, size in _buckets(layout):
                flat = torch.zeros(size, dtype=torch.uint8, device=self.device)
                for name, start in bucket:
                    _part(flat, start, layout[name]).copy_(tensors[name].detach())
                self._broadcast(flat)
            self._agree()

    def receive(self, check: Callable[[Mapping[str, Tensor]], None]) -> dict[str, Tensor]:
        """The tensors that rank 0 sends, on this member's device.

        `check` is called with names, types and shapes, and raises a `UserError` where one is wrong. That is raised, and
        `PeerFailed` where another member has refused or is gone: none may load anything then.
        """
        found: dict[str, Tensor] = {}
        with self._transfer():
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
        self._agree()  # NCCL connects at its first operation
        self._limit = timedelta(seconds=timeout_s)
        if self.device.type != "cuda":
            self._group._set_default_timeout(self._limit)

    def _header(self, layout: Mapping[str, Tensor] | None) -> dict[str, Tensor]:
        """Names, types and shapes that rank 0 sends, as tensors without memory."""
        rows = [[name, str(t.dtype).removeprefix("torch."), list(t.shape)] for name, t in (layout or {}).items()]
        text = torch.frombuffer(bytearray(json.dumps(rows).encode()), dtype=torch.uint8).to(self.device)
        length = torch.tensor([len(text)], device=self.device)
        self._broadcast(length)
        sent = text if self.first else torch.empty(int(length), dtype=torch.uint8, device=self.device)
        self._broadcast(sent)
        found = json.loads(bytes(sent.tolist()))
        return {name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta") for name, dtype, shape in found}

    @contextmanager
    def _transfer(self) -> Iterator[None]:
        """A transfer in the block. A member that fails leaves, so that the others' waits fail too; one that refuses the
        weights stays."""
        try:
            with self.waiting("transfer weights"):
                yield
        except UserError:
            raise
        except BaseException:
            self.leave()
            raise

    def _agree(self, wrong: UserError | None = None) -> None:
        """Raise `PeerFailed` on every member if one refuses; on that one, `wrong`."""
        refused = torch.zeros(self.size, dtype=torch.int32, device=self.device)
        refused[self.rank] = int(wrong is not None)
        self._await(self._group_now().allreduce([refused]))
        if wrong is not None:
            raise wrong
        if members := [self.called(rank) for rank, no in enumerate(refused.tolist()) if no]:
            raise PeerFailed(f"{', '.join(members)} refused the weights of {self.called(0)}; none has loaded them")

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


# --- tensors that another process on the same GPU maps


@dataclass(frozen=True)
class GpuTensors:
    """Handles of tensors on a GPU, for other processes. They are valid as long as their owner keeps the tensors."""

    handles: Mapping[str, tuple[Callable[..., Tensor], tuple[Any, ...]]]
    """By name: the function that makes the tensor in another process, and its arguments."""

    def mapped(self) -> dict[str, Tensor]:
        """The tensors themselves, which their owner may change later. Raises `UserError` where the GPU's driver does
        not let this process map them."""
        try:
            return {name: make(*arguments) for name, (make, arguments) in self.handles.items()}
        except RuntimeError as error:
            raise UserError(
                f"the learner's weights cannot be mapped by another process on the same GPU: {error}. Give both GPUs "
                "of their own, or one process (a collocated plan)"
            ) from error


def share_on_gpu(tensors: Mapping[str, Tensor]) -> GpuTensors:
    """Handles of the tensors, once they are computed."""
    found = {name: reduce_tensor(tensor.detach()) for name, tensor in tensors.items()}
    await_devices(tensors.values())
    return GpuTensors(found)


def gpu_name(device: torch.device) -> str:
    """The GPU's name, the same in every process; '' for the host."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
