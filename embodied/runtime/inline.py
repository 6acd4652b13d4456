"""The runtime whose workers are objects in this process and run when they are called, in order; for debugging."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from embodied.runtime.api import Args, Link, NodeInfo, args_of, check_group
from embodied.runtime.groups import WorkerGroup, naming, rank_names
from embodied.runtime.handles import Handle
from embodied.runtime.supervision import Deadline, Replaced
from sim_farm.render_devices import RenderDevice
from sim_farm.workers.hosts import Host, InProcess

T = TypeVar("T")
R = TypeVar("R")


@dataclass
class LocalHandle(Handle[T]):
    """The worker is an object in this process. A submitted call is run at once; its reference is its result."""

    worker: Any = field(kw_only=True)

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
    """All workers in this process; see `api.Runtime`."""

    def __init__(self, deadline_s: float) -> None:
        self.deadline = Deadline(deadline_s)

    def farm_host(
        self,
        physics_workers: int,
        render_workers: int,
        physics_nodes: tuple[str, ...] = (),
        devices: tuple[RenderDevice, ...] = (),
    ) -> Host:
        return InProcess()

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

    def take_replaced(self) -> list[Replaced]:
        return []

    def end_workers(self) -> None:
        return None

    def close(self) -> None:
        return None
