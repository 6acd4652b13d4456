"""Typed handles of workers, in this process or in an actor, and callers that a worker uses to call another."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from embodied.runtime.supervision import Deadline

Result = TypeVar("Result")


class Caller(Protocol):
    """A handle that can be sent to other workers, which then call this one by themselves.

    Raises what the worker raises, `WorkerFailed` where it is gone and `WorkerTimeout` where it does not answer.
    """

    @property
    def name(self) -> str:
        """The worker's name, for messages and the trace."""
        ...

    def call(self, method: Callable[..., Result], *args: Any) -> Result: ...

    def submit(self, method: Callable[..., Result], *args: Any) -> Future[Result]:
        """Start the method. The future raises as `call` does, and has no deadline; callbacks run in another thread."""
        ...


T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")


@dataclass
class Timer:
    """Calls of one method and their total duration, as the caller sees it."""

    calls: int = 0
    total_s: float = 0.0


@dataclass
class Handle(Generic[T]):
    """A worker called `name`.

    Every wait for it has a deadline. A worker that makes no progress for so long raises `WorkerTimeout` naming worker
    and method; one that dies raises `WorkerFailed`; an exception of the worker's method arrives as itself.
    """

    name: str
    deadline: Deadline
    timers: dict[str, Timer] = field(default_factory=dict)

    def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the method on the worker and return its result."""
        begin = time.monotonic()
        try:
            result: R = self.get(self._start(method.__name__, args, kwargs))
            return result
        finally:
            timer = self.timers.setdefault(method.__name__, Timer())
            timer.calls += 1
            timer.total_s += time.monotonic() - begin

    def submit(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Start the method on the worker and return a reference to its result.

        The reference may be given to `get`, or as an argument to another `call`, `submit` or `pipe`: the result then
        goes from worker to worker and never through this process. A worker runs its calls in the order of submission.
        """
        return self._start(method.__name__, args, kwargs)

    def publish(self, produce: Callable[[T], R], receivers: Sequence[Handle[Any]]) -> list[R]:
        """Start a method whose result only these workers receive, and use until two more were published; a reference
        for each of them.

        Tensors by name go through shared memory of their size, and no store. Each machine receives them once.
        """
        return [self._start(produce.__name__, (), {})] * len(receivers)

    def caller(self) -> Caller:
        """A caller for other workers, of a worker that was made with `start_called`."""
        raise NotImplementedError

    def get(self, reference: R) -> R:
        """Wait for a call of `submit` or `pipe` of this handle and return its result."""
        raise NotImplementedError

    def poll(self, reference: Any, timeout_s: float) -> bool:
        """Wait for a started call at most `timeout_s`; True if it has ended. Raises `WorkerTimeout` once it is late."""
        raise NotImplementedError

    def pipe(
        self,
        method: Callable[Concatenate[T, Any, P], R],
        source: Handle[S],
        produce: Callable[[S], Any],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        """Start the method with the result of `produce` on the source as its first argument; return a reference.

        The result takes the fastest transport from the source to this worker; `path_from` names it.
        """
        (made,) = source.publish(produce, (self,))
        return self._start(method.__name__, (made, *args), kwargs)

    def path_from(self, source: Handle[Any]) -> str:
        """The transport that `pipe` uses, in words."""
        raise NotImplementedError

    def end(self) -> None:
        """Drop the worker and free its memory."""
        raise NotImplementedError

    def abandon(self) -> None:
        """Drop the worker without waiting for its calls, with everything else in its process."""
        self.end()

    def _start(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        raise NotImplementedError
