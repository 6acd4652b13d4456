"""The contract of a runtime, which starts workers, supervises them and ends them, and the plainest one.

`InlineRuntime` has every worker in this process (`runtime.mode: inline`); `ray.runtime.RayRuntime` has them as actors,
on this machine or several.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

from embodied.runtime.deadlines import Deadline
from embodied.runtime.handles import Handle, WorkerGroup, naming, rank_names
from sim_farm.client.farm import WorkerFailed
from sim_farm.workers.hosts import Host, InProcess

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")

Args = tuple[Any, ...] | Callable[[int], tuple[Any, ...]]
"""Arguments of a group's workers: the same for all, or made from the rank."""


class RuntimeLost(WorkerFailed):
    """The runtime's own processes have died, and all workers with them; no worker's computation is the cause."""


@dataclass(frozen=True)
class NodeInfo:
    """One machine of the cluster, as Ray knows it."""

    id: str
    """Ray's id of the node: hexadecimal, new with every start."""
    name: str
    """The name from `ray start --node-name`, or else the host's name."""
    address: str
    cores: int
    """CPU cores that Ray may give to workers on the node; on the client's node, cores that this process may use."""
    accelerators: int
    memory_bytes: int
    """Memory that Ray may give to workers: the machine's memory less the object store."""
    is_here: bool
    """True for the client's node: that of this process, where policy, learner and render workers run."""

    def __str__(self) -> str:
        return f"{self.name} ({self.address}, {self.id[:8]})"

    @classmethod
    def of(cls, entry: Mapping[str, Any], here: str) -> NodeInfo:
        """The node of an entry of `ray.nodes()`; `here` is the id of the client's node."""
        resources = entry["Resources"]
        address = entry["NodeManagerAddress"]
        given, is_here = entry["NodeName"], entry["NodeID"] == here
        return cls(
            id=entry["NodeID"],
            name=given if given not in ("", address) else entry["NodeManagerHostname"],
            address=address,
            cores=len(os.sched_getaffinity(0)) if is_here else int(resources.get("CPU", 0)),
            accelerators=int(resources.get("GPU", 0)),
            memory_bytes=int(resources.get("memory", 0)),
            is_here=is_here,
        )


@dataclass(frozen=True)
class Link:
    """Speed of calls between two machines."""

    message_s: float
    """Time of a small message, one direction."""
    bytes_per_s: float
    """Rate of longer messages, beyond that time."""


class Runtime(Protocol):
    """Starts workers, supervises them and ends them."""

    @property
    def deadline(self) -> Deadline:
        """Deadline of a call of a worker. Its `inner` is for what a worker waits for: its farm."""
        ...

    @property
    def started(self) -> bool:
        """True once Ray runs, or where it is not needed."""
        ...

    @property
    def host(self) -> Host:
        """Starts the physics and render workers of this machine; no other process is needed for it."""
        ...

    def far_host(self, physics_nodes: Sequence[str]) -> Host:
        """A host for one task of a farm whose physics worker i is on the node with the id `physics_nodes[i]` ('': this
        one); the other workers are `host`'s. Raises `FarmError` for an unknown node."""
        ...

    def nodes(self) -> tuple[NodeInfo, ...]:
        """The machines that workers can run on, this one first; none where there is nothing to choose."""
        ...

    def link(self) -> Link:
        """The slowest of the links to the other machines, measured now."""
        ...

    def watch(self) -> None:
        """Replace farm workers that died or hang. Called during waits for something else than a call."""
        ...

    def prepare(self, workers: int) -> None:
        """Start processes for workers that will be started soon, so that they import while others build."""
        ...

    def start(self, name: str, make: Callable[..., T], *args: Any, beside: Handle[Any] | None = None) -> Handle[T]:
        """Make the worker `make(*args)` and return its handle; in the process of `beside`, if that is given."""
        ...

    def start_called(self, name: str, make: Callable[..., T], callers: int, *args: Any) -> WorkerGroup[T]:
        """Make the worker `make(*args)`, a group of one, which up to `callers` other workers call concurrently
        (`Handle.caller`), in threads of its process."""
        ...

    def start_group(
        self,
        name: str,
        make: Callable[..., T],
        size: int,
        args: Args = (),
        beside: Sequence[Handle[Any] | None] = (),
        nodes: Sequence[str] = (),
    ) -> WorkerGroup[T]:
        """Make `size` workers concurrently, rank r from `make(*args)` or `make(*args(r))`.

        Rank r is in the process of the worker `beside[r]`, if that is given; else in a separate process, on the
        node with the id `nodes[r]` ('' or none: this one). When one cannot be made, its exception is raised with its
        name, and none is left. Raises `ValueError` for a size below 1 and for a `beside` of another length.
        """
        ...

    def too_large(self) -> Exception | None:
        """The error of a worker outside the farm whose process exceeds its memory limit, or None. `end_workers` ends
        that process. Processes on other machines are not checked."""
        ...

    def end_workers(self) -> None:
        """End every started worker, within seconds, even a busy one; the farm's stay."""
        ...

    def close(self) -> None:
        """End every worker, within seconds."""
        ...


def args_of(args: Args, size: int) -> list[tuple[Any, ...]]:
    """The arguments of each rank."""
    return [args(rank) if callable(args) else args for rank in range(size)]


def check_group(name: str, size: int, beside: Sequence[Handle[Any] | None]) -> None:
    """Raise `ValueError` for a group that cannot be started."""
    if size < 1:
        raise ValueError(f"{name} has at least one rank, got {size}")
    if beside and len(beside) != size:
        raise ValueError(f"{name} has {size} ranks, got what to be beside for {len(beside)}")


# --- every worker in this process


@dataclass
class LocalHandle(Handle[T]):
    """The worker is an object in this process. A submitted call is run at once; its reference is its result."""

    worker: Any = field(kw_only=True)

    def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        result: R = getattr(self.worker, method.__name__)(*args, **kwargs)
        return result

    def get(self, reference: R) -> R:
        return reference

    def poll(self, reference: Any, timeout_s: float) -> bool:
        return True

    def path_from(self, source: Handle[Any]) -> str:
        return "by reference"

    def end(self) -> None:
        self.worker = None

    def _start(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self.worker, method)(*args, **kwargs)


class InlineRuntime:
    """Workers are objects in this process and run when they are called, in order; for debugging. See `Runtime`."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline, self.host, self.started = Deadline(deadline_s), InProcess(), True

    def far_host(self, physics_nodes: Sequence[str]) -> Host:
        return self.host  # there is no other machine

    def nodes(self) -> tuple[NodeInfo, ...]:
        return ()

    def link(self) -> Link:
        return Link(0.0, math.inf)

    def too_large(self) -> Exception | None:
        return None  # this process cannot be replaced

    def watch(self) -> None:
        """No worker dies apart from this process."""

    def prepare(self, workers: int) -> None:
        """Everything is imported here anyway."""

    def start(self, name: str, make: Callable[..., T], *args: Any, beside: Handle[Any] | None = None) -> Handle[T]:
        return LocalHandle(name, self.deadline, worker=make(*args))

    def start_called(self, name: str, make: Callable[..., T], callers: int, *args: Any) -> WorkerGroup[T]:
        return WorkerGroup(name, (self.start(name, make, *args),))

    def start_group(
        self,
        name: str,
        make: Callable[..., T],
        size: int,
        args: Args = (),
        beside: Sequence[Handle[Any] | None] = (),
        nodes: Sequence[str] = (),
    ) -> WorkerGroup[T]:
        check_group(name, size, beside)
        names = rank_names(name, size)
        handles = []
        for mine, its_args in zip(names, args_of(args, size), strict=True):
            with naming(mine, name):
                handles.append(self.start(mine, make, *its_args))
        return WorkerGroup(name, tuple(handles))

    def end_workers(self) -> None:
        return None

    def close(self) -> None:
        return None
