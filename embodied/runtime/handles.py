"""Typed handles of workers, in this process or in an actor: of one (`Handle`) and of a group (`WorkerGroup`).

    learner: WorkerGroup[Learner] = runtime.start_group("learner", make_learner, 2, args)
    stepped = learner.call_all(Learner.step, batch)           # one result per rank, in rank order

A worker calls another by a `Caller`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from typing import Any, Concatenate, Generic, ParamSpec, Protocol, TypeVar

from embodied.errors import PeerFailed
from embodied.runtime.deadlines import Deadline
from sim_farm.client.farm import WorkerTimeout

T = TypeVar("T")
P = ParamSpec("P")
R = TypeVar("R")
S = TypeVar("S")
Result = TypeVar("Result")


class Caller(Protocol):
    """A handle that can be sent to other workers, which then call this one directly.

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


@dataclass
class Handle(Generic[T]):
    """A worker called `name`.

    Every wait for it has a deadline. A worker that makes no progress for so long raises `WorkerTimeout` naming worker
    and method; one that dies raises `WorkerFailed`; an exception of the worker's method arrives as itself.
    """

    name: str
    deadline: Deadline

    def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Run the method on the worker and return its result."""
        result: R = self.get(self._start(method.__name__, args, kwargs))
        return result

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


# --- several workers of one class

POLL_S = 0.5
"""Delay until the failure of one rank is noticed while others work. Success of all is noticed at once."""
CAUSE_S = 10.0
"""Longest wait for the failure that caused another rank's failure, to raise the cause instead."""


def rank_names(name: str, size: int) -> list[str]:
    """The names of the group's workers: `learner 0`, `learner 1`; of a group of one just `learner`."""
    return [name] if size == 1 else [f"{name} {rank}" for rank in range(size)]


@contextmanager
def naming(worker: str, group: str, unfinished: Sequence[str] = ()) -> Iterator[None]:
    """Raise an error of the block with the worker's name at the beginning of its message, unless that is also its
    group's name, as in a group of one.

    If the worker is late, the message also names the `unfinished` others: the worker may wait for one of them.
    """
    try:
        yield
    except Exception as error:  # every error of a worker arrives as itself, with its name
        if worker != group:
            more = f"; not finished either: {', '.join(unfinished)}" if unfinished else ""
            _name(error, worker, more if isinstance(error, WorkerTimeout) else "")
        raise


def _name(error: Exception, worker: str, more: str) -> None:
    if len(error.args) != 1 or not isinstance(error.args[0], str):  # its message is made of other arguments
        error.add_note(f"in {worker}")
        return
    (text,) = error.args
    error.args = (f"{text if text.startswith(worker) else f'{worker}: {text}'}{more}",)


@dataclass(frozen=True)
class WorkerGroup(Generic[T]):
    """The workers of one component, in rank order.

    A failure of one rank is raised at once, with the worker's name at the beginning of its message. A rank that failed
    because another did (`PeerFailed`) is raised only if the other's own failure does not arrive. The calls of the other
    ranks are then abandoned: their results are dropped, and their next calls wait until they have finished, under the
    usual deadline. A group of one behaves as its only worker does.
    """

    name: str
    handles: tuple[Handle[T], ...]

    @property
    def size(self) -> int:
        return len(self.handles)

    def some(self, ranks: Iterable[int]) -> WorkerGroup[T]:
        """A group of some of the ranks. They are the same workers, and end with this group."""
        return replace(self, handles=tuple(self.handles[rank] for rank in ranks))

    def first(self, count: int = 1) -> WorkerGroup[T]:
        """The first ranks, as `some`."""
        return self.some(range(count))

    # --- call: start and wait

    def call(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of the only worker. Raises `ValueError` in a larger group."""
        return self._only().call(method, *args, **kwargs)

    def call_one(self, rank: int, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """The result of one rank."""
        with self._naming(rank):
            return self.handles[rank].call(method, *args, **kwargs)

    def call_all(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """The results of all ranks, which work concurrently on the same arguments."""
        if self.size == 1:
            with self._naming(0):
                return [self.handles[0].call(method, *args, **kwargs)]
        return self.get(self.submit_all(method, *args, **kwargs))

    def scatter(self, method: Callable[..., R], per_rank_args: Sequence[tuple[Any, ...]]) -> list[R]:
        """The results of all ranks, each with its own arguments. Raises `ValueError` unless there is one per rank."""
        return self.get(self.submit_scattered(method, per_rank_args))

    # --- submit: start now, wait later

    def submit(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Start the method on the only worker; see `get_one`. Raises `ValueError` in a larger group."""
        return self._only().submit(method, *args, **kwargs)

    def submit_one(self, rank: int, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> R:
        """Start the method on one rank; see `get_one`."""
        with self._naming(rank):  # inline, work is done when it is submitted
            return self.handles[rank].submit(method, *args, **kwargs)

    def submit_all(self, method: Callable[Concatenate[T, P], R], *args: P.args, **kwargs: P.kwargs) -> list[R]:
        """Start the method on every rank; references in rank order, see `get`."""
        return [self.submit_one(rank, method, *args, **kwargs) for rank in range(self.size)]

    def submit_scattered(self, method: Callable[..., R], per_rank_args: Sequence[tuple[Any, ...]]) -> list[R]:
        """Start the method on every rank, each with its arguments; references in rank order, see `get`."""
        if len(per_rank_args) != self.size:
            raise ValueError(f"{self.name} has {self.size} ranks, got arguments for {len(per_rank_args)}")
        return [self.submit_one(rank, method, *args) for rank, args in enumerate(per_rank_args)]

    def get(self, references: Sequence[R]) -> list[R]:
        """Wait for the calls of `submit_all`, `submit_scattered` or `pipe`; results in rank order."""
        if len(references) != self.size:
            raise ValueError(f"{self.name} has {self.size} ranks, got {len(references)} references")
        results: dict[int, R] = {}
        waiting = list(range(self.size))
        lost: PeerFailed | None = None
        until = math.inf
        while waiting and time.monotonic() < until:
            # When the last rank ends, the polled one has ended too: success is never noticed late.
            for rank in list(waiting):
                try:
                    with self._naming(rank, [other for other in waiting if other != rank]):
                        if self.handles[rank].poll(references[rank], POLL_S / len(waiting)):
                            results[rank] = self.handles[rank].get(references[rank])
                            waiting.remove(rank)
                except PeerFailed as error:
                    lost, until = lost or error, min(until, time.monotonic() + CAUSE_S)
                    waiting.remove(rank)
        if lost is not None:
            raise lost
        return [results[rank] for rank in range(self.size)]

    def get_one(self, rank: int, reference: R) -> R:
        """Wait for a call of `submit_one`."""
        with self._naming(rank):
            return self.handles[rank].get(reference)

    def answers(self, references: Sequence[Any], timeout_s: float) -> bool:
        """True if all started calls end within the time. Raises the failure of a call that has ended with one."""
        until = time.monotonic() + timeout_s
        for rank, reference in enumerate(references):
            with self._naming(rank):
                while not self.handles[rank].poll(reference, POLL_S):
                    if time.monotonic() > until:
                        return False
                self.handles[rank].get(reference)
        return True

    def check(self, references: Sequence[Any]) -> None:
        """Raise the failure of a rank whose started call has ended with one, without waiting."""
        for rank, reference in enumerate(references):
            with self._naming(rank):
                if self.handles[rank].poll(reference, 0.0):
                    self.handles[rank].get(reference)

    # --- from group to group

    def pipe(
        self,
        method: Callable[Concatenate[T, Any, P], R],
        source: WorkerGroup[S],
        produce: Callable[[S], Any],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> list[R]:
        """Start the method on every rank with the result of `produce` on the source; references in rank order.

        Between groups of one size, rank to rank. From a group of one to all ranks, made once. Raises `ValueError` for
        other sizes.
        """
        if source.size == self.size:
            pairs = zip(self.handles, source.handles, strict=True)
            return [mine.pipe(method, its, produce, *args, **kwargs) for mine, its in pairs]
        self._require_one(source)
        made = source.handles[0].publish(produce, self.handles)
        return [self.submit_one(rank, method, made[rank], *args, **kwargs) for rank in range(self.size)]

    def path_from(self, source: WorkerGroup[Any]) -> str:
        """The transport that `pipe` uses, in words."""
        if source.size != self.size:
            self._require_one(source)
        theirs = source.handles if source.size == self.size else source.handles * self.size
        paths = [mine.path_from(its) for mine, its in zip(self.handles, theirs, strict=True)]
        return " and ".join(dict.fromkeys(paths))

    def end(self) -> None:
        """Drop every worker. Raises the first failure after all were tried."""
        failures = []
        for handle in self.handles:
            try:
                handle.end()
            except Exception as error:  # the others are dropped too
                failures.append(error)
        if failures:
            raise failures[0]

    def abandon(self) -> None:
        """Drop every worker without waiting for its calls, with everything else in its process."""
        for handle in self.handles:
            handle.abandon()

    def _only(self) -> Handle[T]:
        if self.size != 1:
            raise ValueError(
                f"{self.name} has {self.size} ranks: name one with call_one, or call all with call_all or scatter"
            )
        return self.handles[0]

    def _require_one(self, source: WorkerGroup[Any]) -> None:
        if source.size != 1:
            raise ValueError(
                f"{source.name} has {source.size} ranks and {self.name} {self.size}: pipe goes rank to rank between "
                "groups of one size, or from a group of one to all"
            )

    def _naming(self, rank: int, unfinished: Sequence[int] = ()) -> AbstractContextManager[None]:
        return naming(self.handles[rank].name, self.name, [self.handles[other].name for other in unfinished])
