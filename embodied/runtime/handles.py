"""Typed handles: a worker is called through one whether it is in this process or an actor elsewhere.

worker: Handle[PolicyWorker] = runtime.place("policy", make_policy_worker, ...)
rollout = worker.call(PolicyWorker.rollout, 64)           # typed like the method itself
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from embodied.runtime.nodes import Link, NodeInfo
from sim_farm.hosts import Host, InProcess

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


@dataclass
class Timer:
    """Calls of one method and their summed duration, as the caller sees it."""

    calls: int = 0
    total_s: float = 0.0


@dataclass
class Handle(Generic[T]):
    """A worker called `name`. Every call has a deadline; a late one raises `WorkerTimeout` naming worker and method."""

    name: str
    deadline_s: float
    timers: dict[str, Timer] = field(default_factory=dict)

    def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the method on the worker and wait for its result."""
        begin = time.monotonic()
        try:
            return self._run(method.__name__, args, kwargs)
        finally:
            timer = self.timers.setdefault(method.__name__, Timer())
            timer.calls += 1
            timer.total_s += time.monotonic() - begin

    def refer(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Like `call`, but the result may stay where it is: it can only be handed on as an argument of a `call`.

        So trajectories and weights go from worker to worker without a stop in this process.
        """
        return self._start(method.__name__, args, kwargs)

    def fetch(self, reference: R) -> R:
        """The value of what `refer` or `feed` returned."""
        raise NotImplementedError

    def feed(
        self,
        method: Callable[Concatenate[T, Any, P], R],
        source: Handle[S],
        produce: Callable[[S], Any],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Begin the method with what `produce` makes on another worker, by the shortest way there is; see `fetch`."""
        return self._start(method.__name__, (source._start(produce.__name__, (), {}), *args), kwargs)

    def path_from(self, source: Handle[Any]) -> str:
        """The way that `feed` takes, in words."""
        raise NotImplementedError

    def end(self) -> None:
        """The worker is no longer needed; its memory may go."""
        raise NotImplementedError

    def _start(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError


@dataclass
class LocalHandle(Handle[T]):
    """The worker is an object in this process."""

    worker: Any = None

    def fetch(self, reference: R) -> R:
        return reference

    def path_from(self, source: Handle[Any]) -> str:
        return "by reference"

    def end(self) -> None:
        self.worker = None

    def _start(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._run(method, args, kwargs)

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return getattr(self.worker, method)(*args, **kwargs)


class Runtime(Protocol):
    """Places workers and ends them."""

    def farm_host(self, physics_workers: int, render_workers: int, physics_nodes: tuple[str, ...] = ()) -> Host:
        """Where the farm's workers will live."""
        ...

    def nodes(self) -> tuple[NodeInfo, ...]:
        """The machines that workers can be placed on, this one first; none where there is nothing to choose."""
        ...

    def link(self) -> Link:
        """The slowest of the links to the other machines, measured now."""
        ...

    def watch(self) -> None:
        """Replace farm workers that died. To be called while waiting for something else than a `call`."""
        ...

    def prepare(self, workers: int) -> None:
        """Start processes for workers that will be placed soon, so that they import while others build."""
        ...

    def place(self, name: str, make: Callable[..., T], *args: Any, beside: Handle[Any] | None = None) -> Handle[T]:
        """The worker `make(*args)` under a handle; in the process of the one that it is `beside`, if any."""
        ...

    def close(self) -> None:
        """End every worker, within seconds."""
        ...


class InlineRuntime:
    """Everything in this process, in order."""

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    def farm_host(self, physics_workers: int, render_workers: int, physics_nodes: tuple[str, ...] = ()) -> Host:
        return InProcess()

    def nodes(self) -> tuple[NodeInfo, ...]:
        return ()

    def link(self) -> Link:
        return Link(0.0, math.inf)

    def watch(self) -> None:
        """Nothing dies apart from this process."""

    def prepare(self, workers: int) -> None:
        """Everything is imported here anyway."""

    def place(self, name: str, make: Callable[..., T], *args: Any, beside: Handle[Any] | None = None) -> Handle[T]:
        return LocalHandle(name, self._deadline_s, worker=make(*args))

    def close(self) -> None:
        return None
