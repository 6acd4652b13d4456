"""The ranks of a learner: processes that share every update, as a group of torch.distributed.

Rank 0 listens, the others join it; then all have connections to all (gloo between CPUs, NCCL between GPUs). Every rank
calls the same operations in the same order. A group of one has no connections, and its operations do nothing.
"""

from __future__ import annotations

import json
import os
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, TypeVar

import psutil
import torch
import torch.distributed as dist
from torch import Tensor

from embodied.devices import CPU
from embodied.errors import PeerFailed, UserError

R = TypeVar("R")

CONNECT_S = 60.0
"""Longest time for all ranks to be connected."""
LOOK_S = 0.02
"""Interval of checks for missing ranks."""
BUCKET_BYTES = 256 * 2**20
"""Size of gradients that are summed at once: the flat copy takes as much memory."""
LOOPBACK = "127.0.0.1"
_bound: set[int] = set()
"""The ranks whose shards this process has had."""


def bind(rank: int) -> None:
    """Note that this process has the shards of that rank."""
    _bound.add(rank)


def is_bound() -> bool:
    """True if this process has had a rank's shards. It cannot become another rank of a group of the same size: torch
    2.13 remembers its part of a tensor beyond the group, and `torch.distributed.checkpoint` then leaves zeros."""
    return bool(_bound)


@dataclass
class Ranks:
    """The group as one of its ranks sees it. It begins without connections; `listen` and `join` make them."""

    name: str = "learner"
    """Name of the component, for messages."""
    rank: int = 0
    size: int = 1
    device: torch.device = CPU
    """Device of the rank's gradients."""
    addresses: tuple[str, ...] = ()
    """Addresses of all ranks, once they are connected."""
    _store: dist.TCPStore | None = field(default=None, repr=False)

    @property
    def first(self) -> bool:
        """True for rank 0, which writes checkpoints and publishes weights."""
        return self.rank == 0

    def called(self, rank: int) -> str:
        """Name of that rank in messages: the runtime's name of its worker."""
        return f"{self.name} {rank}"

    # --- connecting

    def listen(self, host: str = LOOPBACK) -> str:
        """Start to listen for the other ranks at this machine's address `host`; HOST:PORT for `join`. Rank 0 only."""
        listener = socket.create_server((host, 0))  # the store's own socket would be open to every network
        port = listener.getsockname()[1]
        self._store = dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=CONNECT_S),
        )  # fmt: skip
        return f"{host}:{port}"

    def join(self, address: str, timeout_s: float, connect_s: float = CONNECT_S) -> None:
        """Connect to all other ranks, through rank 0 at `address`; later waits for them end after `timeout_s`.

        Raises `PeerFailed`, which names both ends, where they are not all connected within `connect_s`; then nothing
        is left of the group. Raises `UserError` where ranks have different versions of torch.
        """
        if self.size == 1:
            return
        connect_s = min(connect_s, timeout_s)
        try:
            mine = self._own_host(address, connect_s)
            self._exchange_addresses(address, mine, connect_s)
            with _through(mine):
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                self._connect(mine, connect_s, timeout_s)
        except (RuntimeError, OSError) as error:  # torch's own errors of connections are RuntimeErrors
            self.leave()
            there = ", ".join(self._others()) or f"{self.called(0)} at {address}"
            raise PeerFailed(
                f"{self.called(self.rank)} of {self.size} on {socket.gethostname()} did not connect to {there} "
                f"within {connect_s:g} s: {_first_line(error)}"
            ) from error
        except BaseException:
            self.leave()
            raise

    def _connect(self, mine: str, connect_s: float, timeout_s: float) -> None:
        """Connect to all ranks in the store, from this machine's address."""
        if dist.is_initialized():  # of an earlier run that failed: the process serves another now
            dist.destroy_process_group()
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if self.device.type == "cuda" else "gloo",
            store=self._store, rank=self.rank, world_size=self.size, timeout=timedelta(seconds=connect_s),
        )  # fmt: skip
        # NCCL connects at its first operation.
        dist.all_reduce(torch.ones(1, device=self.device))
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_s))

    def another_group(self, timeout_s: float) -> dist.ProcessGroup:
        """Another group of all ranks, between CPUs, for concurrent operations. Every rank has to call this."""
        with self.waiting("connect once more"), _through(self.addresses[self.rank]):
            group = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
            assert isinstance(group, dist.ProcessGroup)
            return group

    def leave(self) -> None:
        """Close the connections."""
        if self.size > 1 and dist.is_initialized():
            with suppress(RuntimeError):  # the others may be gone
                dist.destroy_process_group()
        self._store = None

    def _own_host(self, address: str, connect_s: float) -> str:
        """This machine's address on the network that leads to rank 0."""
        host, _, port = address.rpartition(":")
        if self.first:
            return host
        with socket.create_connection((host, int(port)), timeout=connect_s) as connection:
            return str(connection.getsockname()[0])

    def _exchange_addresses(self, address: str, mine: str, connect_s: float) -> None:
        """Exchange the addresses of all ranks through the store."""
        host, _, port = address.rpartition(":")
        limit = timedelta(seconds=connect_s)
        if self._store is None:
            self._store = dist.TCPStore(host, int(port), is_master=False, timeout=limit, wait_for_workers=False)
        self._store.set(f"rank {self.rank}", json.dumps([mine, torch.__version__]))
        names = [f"rank {rank}" for rank in range(self.size)]
        missing, until = names, time.monotonic() + connect_s
        while missing:
            with suppress(RuntimeError):  # rank 0 has given up
                missing = [name for name in missing if not self._store.check([name])]
            if missing and time.monotonic() > until:
                raise PeerFailed(
                    f"{self.called(self.rank)} at {mine} waited {connect_s:g} s at {address} for "
                    f"{', '.join(self.called(names.index(name)) for name in missing)}: not there"
                )
            time.sleep(LOOK_S)
        found = [json.loads(self._store.get(name)) for name in names]
        self.addresses = tuple(where for where, _ in found)
        versions = {version for _, version in found}
        if len(versions) > 1:
            each = ", ".join(
                f"{self.called(rank)} at {where} has {version}" for rank, (where, version) in enumerate(found)
            )
            raise UserError(
                f"the ranks of the {self.name} have different versions of torch: {each}; install the same everywhere"
            )

    def _others(self) -> list[str]:
        return [f"{self.called(r)} at {where}" for r, where in enumerate(self.addresses) if r != self.rank]

    # --- shares of rows

    def share(self, index: Tensor) -> Tensor:
        """This rank's part of rows [N]: equal shares, the first ones a row longer where they cannot be."""
        return index if self.size == 1 else index.tensor_split(self.size)[self.rank]

    def largest_share(self, rows: int) -> int:
        """Rows of rank 0."""
        return -(-rows // self.size)

    def gather_rows(self, mine: Tensor, rows: int) -> Tensor:
        """[rows, ...] on the host from every rank's share of them, all padded at the end to `largest_share`."""
        if self.size == 1:
            return mine
        data = mine.contiguous().to(CPU)
        flat = data.reshape(-1).view(torch.uint8)  # gloo does not know every type
        found = [torch.empty_like(flat) for _ in range(self.size)]
        with self.waiting("gather rows"):
            dist.all_gather(found, flat)
        shares = [part.view(data.dtype).view(data.shape) for part in found]
        sizes = [len(part) for part in torch.arange(rows).tensor_split(self.size)]
        return torch.cat([share[:size] for share, size in zip(shares, sizes, strict=True)])

    # --- sums

    def sum_numbers(self, numbers: Mapping[str, float]) -> dict[str, float]:
        """The sum of each number over the ranks, in double precision: the same on all to the last bit."""
        if self.size == 1:
            return dict(numbers)
        mine = torch.tensor(list(numbers.values()), dtype=torch.float64)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        with self.waiting("add up statistics"):
            dist.all_gather(found, mine)
        # Each rank adds in the order of ranks.
        return dict(zip(numbers, torch.stack(found).sum(0).tolist(), strict=True))

    def sum_gradients(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        """Replace gradients by their sums over the ranks. All ranks have gradients of the same parameters."""
        if self.size == 1:
            return
        gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
        with self.waiting("add up gradients"), torch.no_grad():
            for bucket in _buckets(gradients):
                # Sums of 16-bit numbers would lose what single ranks contribute.
                flat = torch.cat([g.reshape(-1).to(torch.promote_types(g.dtype, torch.float32)) for g in bucket])
                dist.all_reduce(flat)
                for gradient, part in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    gradient.copy_(part.view_as(gradient))

    # --- from rank 0 to all

    def broadcast(self, tensor: Tensor) -> None:
        """Overwrite the tensor, of one shape on all ranks, by rank 0's."""
        if self.size == 1:
            return
        data = tensor.detach()
        sent = data.to(self.device).contiguous()
        with self.waiting("broadcast"):
            dist.broadcast(sent.reshape(-1).view(torch.uint8), 0)
        if sent.data_ptr() != data.data_ptr():
            data.copy_(sent)

    def broadcast_plain(self, data: Any) -> Any:
        """Rank 0's JSON-able data."""
        if self.size == 1:
            return data
        text = json.dumps(data).encode() if self.first else b""
        length = torch.tensor([len(text)])
        with self.waiting("broadcast"):
            dist.broadcast(length, 0)
            sent = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(int(length)).byte()
            dist.broadcast(sent, 0)
        return json.loads(bytes(sent.tolist()))

    def first_does(self, what: str, work: Callable[[], R]) -> R | None:
        """Do the work on rank 0 only, while the others wait. Raises `PeerFailed` on the others if it fails."""
        error: BaseException | None = None
        result: R | None = None
        if self.first:
            try:
                result = work()
            except BaseException as caught:
                error = caught
        failed = self.sum_numbers({"failed": float(error is not None)})["failed"]
        if error is not None:
            raise error
        if failed:
            raise PeerFailed(f"{self.called(0)} failed to {what}")
        return result

    def barrier(self) -> None:
        """Wait until every rank has called this."""
        self.sum_numbers({"here": 1.0})

    @contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """A block that waits for other ranks. Raises `PeerFailed` if one is gone or late, and leaves the group, so that
        the waits of the others end too."""
        try:
            yield
        except RuntimeError as error:
            if not _of_connections(error):
                raise
            self.leave()
            raise PeerFailed(
                f"{self.called(self.rank)} of {self.size} lost the others ({', '.join(self._others())}) "
                f"while they were to {what}: {_first_line(error)}"
            ) from error


def _buckets(tensors: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    bucket: list[Tensor] = []
    size = 0
    for tensor in tensors:
        if bucket and size + 4 * tensor.numel() > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append(tensor)
        size += 4 * tensor.numel()
    if bucket:
        yield bucket


@contextmanager
def _through(host: str) -> Iterator[None]:
    """A block in which gloo and NCCL connect through the network of that address; the user's own variables stay."""
    names = [name for name, known in psutil.net_if_addrs().items() if any(a.address == host for a in known)]
    wanted = dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), names[0]) if names else {}
    mine = {key: value for key, value in wanted.items() if key not in os.environ}
    os.environ.update(mine)
    try:
        yield
    finally:
        for key in mine:
            del os.environ[key]


def _of_connections(error: RuntimeError) -> bool:
    """True for an error of torch.distributed, and not of a computation meanwhile; gloo's errors have no class."""
    return isinstance(error, dist.DistError) or "gloo" in str(error).lower()


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]
