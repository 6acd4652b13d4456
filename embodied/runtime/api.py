"""What a runtime is: it places workers, watches them and ends them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from embodied.runtime.deadlines import Deadline
from embodied.runtime.groups import WorkerGroup
from embodied.runtime.handles import Handle
from embodied.runtime.nodes import Link, NodeInfo
from embodied.runtime.supervision import Replaced
from sim_farm.client.farm import WorkerFailed
from sim_farm.render_devices import RenderDevice
from sim_farm.workers.hosts import Host

T = TypeVar("T")

Args = tuple[Any, ...] | Callable[[int], tuple[Any, ...]]
"""Arguments of a group's workers: the same for all, or made from the rank."""


class RuntimeLost(WorkerFailed):
    """The runtime's own processes do not live, and with them no worker: by nothing that a worker computes."""


class Runtime(Protocol):
    """Places workers and ends them."""

    @property
    def deadline(self) -> Deadline:
        """Of a call of a worker. Its `inner` is for what a worker waits for: its farm."""
        ...

    def farm_host(
        self,
        physics_workers: int,
        render_workers: int,
        physics_nodes: tuple[str, ...] = (),
        devices: tuple[RenderDevice, ...] = (),
    ) -> Host:
        """Where the workers of one task of a farm will live. No other task has that host until the farm is closed.

        `devices` are the farm's: a process draws on one, and serves no farm later that draws on others.
        """
        ...

    def nodes(self) -> tuple[NodeInfo, ...]:
        """The machines that workers can be placed on, this one first; none where there is nothing to choose."""
        ...

    def link(self) -> Link:
        """The slowest of the links to the other machines, measured now."""
        ...

    def watch(self) -> None:
        """Replace farm workers that died or hang. To be called while waiting for something else than a call."""
        ...

    def prepare(self, workers: int) -> None:
        """Start processes for workers that will be placed soon, so that they import while others build."""
        ...

    def place(self, name: str, make: Callable[..., T], *args: Any, beside: Handle[Any] | None = None) -> Handle[T]:
        """Make the worker `make(*args)` and return its handle; in the process of `beside`, if that is given."""
        ...

    def place_called(self, name: str, make: Callable[..., T], callers: int, *args: Any) -> WorkerGroup[T]:
        """Make the worker `make(*args)`, a group of one, which so many other workers may call side by side
        (`Handle.caller`), in threads of its process."""
        ...

    def place_group(
        self,
        name: str,
        make: Callable[..., T],
        size: int,
        args: Args = (),
        beside: Sequence[Handle[Any] | None] = (),
        nodes: Sequence[str] = (),
    ) -> WorkerGroup[T]:
        """Make `size` workers side by side, rank r from `make(*args)` or `make(*args(r))`.

        Rank r is in the process of the worker `beside[r]`, if that is given; else it has a process of its own, on the
        node with the id `nodes[r]` ('' or none: this one). When one cannot be made, its exception is raised with its
        name, and none is left. Raises `ValueError` for a size below 1 and for a `beside` of another length.
        """
        ...

    def take_replaced(self) -> list[Replaced]:
        """Farm workers that were lost and serve again, of which this has not told before."""
        ...

    def too_large(self) -> Exception | None:
        """What is wrong with a worker outside the farm that holds more memory than it may; None where none does. Its
        process ends with `end_workers`. Processes on other machines are not looked at."""
        ...

    def end_workers(self) -> None:
        """End every worker that was placed, within seconds, whatever it does; the farm's hosts stay."""
        ...

    def close(self) -> None:
        """End every worker, within seconds."""
        ...


def args_of(args: Args, size: int) -> list[tuple[Any, ...]]:
    """The arguments of each rank."""
    return [args(rank) if callable(args) else args for rank in range(size)]


def check_group(name: str, size: int, beside: Sequence[Handle[Any] | None]) -> None:
    """Raise `ValueError` for a group that cannot be placed."""
    if size < 1:
        raise ValueError(f"{name} has at least one rank, got {size}")
    if beside and len(beside) != size:
        raise ValueError(f"{name} has {size} ranks, got what to be beside for {len(beside)}")
