"""Handles of workers in Ray actors, the calls that are submitted to them, and callers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

import ray
from ray.exceptions import GetTimeoutError

from embodied.runtime.deadlines import Wait
from embodied.runtime.handles import Caller, Handle
from embodied.runtime.ray.cluster import LOOK_S, RayCluster, unwrapped, value_within
from embodied.runtime.ray.worker_process import WorkerProcess
from sim_farm.client.farm import WorkerFailed, WorkerTimeout

T = TypeVar("T")
R = TypeVar("R")


@dataclass(eq=False)
class Call:
    """A call that was submitted."""

    reference: Any
    """Ray's, to its result."""
    method: str
    processes: tuple[WorkerProcess, ...]
    """Whose progress is the call's: the worker's own, and of those whose results it was given."""
    name: str
    """Of the worker that is called, for messages."""
    given: tuple[Call, ...] = ()
    """Those whose results it was given."""
    wait: Wait | None = None
    """Begins when somebody first waits for it."""

    def last_ns(self) -> int:
        return max(process.last_ns() for process in self.processes)


@dataclass
class RayHandle(Handle[T]):
    """The worker is in an actor, perhaps with others. A submitted call's reference is a `Call`."""

    cluster: RayCluster = field(kw_only=True)
    process: WorkerProcess = field(kw_only=True)
    spare: Callable[[WorkerProcess, bool], None] = field(kw_only=True)
    """Takes a process that has no worker any more, and whether it may serve others."""
    kill: Callable[[WorkerProcess], None] = field(kw_only=True)
    """Ends a process."""

    def get(self, reference: Any) -> Any:
        while not self.poll(reference, LOOK_S):
            pass
        try:
            return self.cluster.value(reference.reference, reference.name, reference.method)
        except WorkerFailed:
            for call in reference.given:  # where one of them has failed, that is the reason
                self.cluster.value(call.reference, call.name, call.method)
            raise

    def poll(self, reference: Any, timeout_s: float) -> bool:
        if reference.wait is None:
            reference.wait = Wait(self.deadline, reference.last_ns)
        try:
            return self.cluster.poll(reference.reference, reference.wait, reference.name, reference.method, timeout_s)
        except WorkerTimeout as error:
            late = [call for call in reference.given if not ray.wait([call.reference], timeout=0)[0]]
            if not late:
                raise
            whose = " and ".join(f"{call.name}'s {call.method!r}" for call in late)
            raise WorkerTimeout(f"{error}; it was to have the result of {whose} first") from error

    def pipe(self, method: Any, source: Handle[Any], produce: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._beside(source):
            return super().pipe(method, source, produce, *args, **kwargs)
        names = (source.name, produce.__name__, self.name, method.__name__)
        call = self._call(self.process.actor.pipe, method.__name__, names, args, kwargs)
        call.name = f"{source.name} and {self.name}, which share a process,"  # either may be what has failed
        return call

    def lend(self, produce: Any, takers: Sequence[Handle[Any]]) -> list[Any]:
        made = self._call(self.process.actor.lend, produce.__name__, (self.name, produce.__name__), (), {})
        there = {self.process.node: made}
        for taker in takers:
            if isinstance(taker, RayHandle) and taker.process.node not in there:
                timeout_s = self.deadline.inner().seconds
                args = (made, self.process.actor, self.name, timeout_s)
                remote = taker.process.actor.lend_again
                there[taker.process.node] = taker._call(remote, produce.__name__, (), args, {})
        return [there[taker.process.node] for taker in takers if isinstance(taker, RayHandle)]

    def caller(self) -> Caller:
        return RayCaller(self.name, self.process.actor, self.deadline.inner().seconds)

    def path_from(self, source: Handle[Any]) -> str:
        if self._beside(source):
            return "by reference"
        same = isinstance(source, RayHandle) and source.process.node == self.process.node
        return "shared memory" if same else "Ray, between machines"

    def end(self) -> None:
        left, of_use = self.get(self._call(self.process.actor.drop, "end", (self.name,), (), {}))
        self.process.workers.remove(self.name)
        if not left:
            self.spare(self.process, of_use)

    def abandon(self) -> None:
        self.kill(self.process)

    def _beside(self, source: Handle[Any]) -> bool:
        return isinstance(source, RayHandle) and source.process is self.process

    def _start(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self._call(self.process.actor.run, method, (self.name, method), args, kwargs)

    def _call(
        self, remote: Any, method: str, names: tuple[str, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, Call)]
        processes = dict.fromkeys([self.process, *(process for call in given for process in call.processes)])
        reference = remote.remote(*names, *map(_ray, args), **{key: _ray(value) for key, value in kwargs.items()})
        return Call(reference, method, tuple(processes), self.name, tuple(given))


def start_worker(
    cluster: RayCluster,
    process: WorkerProcess,
    spare: Callable[[WorkerProcess, bool], None],
    kill: Callable[[WorkerProcess], None],
    name: str,
    make: Callable[..., Any],
    args: tuple[Any, ...],
) -> tuple[RayHandle[Any], Call]:
    """A handle, and the call that makes its worker in the process."""
    process.workers.append(name)
    handle: RayHandle[Any] = RayHandle(name, cluster.deadline, cluster=cluster, process=process, spare=spare, kill=kill)
    return handle, Call(process.actor.make.remote(name, make, args), "start", (process,), name)


@dataclass(frozen=True)
class RayCaller:
    """`Caller` of a worker in an actor."""

    name: str
    actor: Any
    timeout_s: float

    def call(self, method: Callable[..., R], *args: Any) -> R:
        reference = self.actor.run.remote(self.name, method.__name__, *args)
        try:
            found: R = value_within(self.timeout_s, reference, self.name, method.__name__)
        except GetTimeoutError as error:
            raise WorkerTimeout(
                f"{self.name} did not answer {method.__name__!r} within {self.timeout_s:g} s"
            ) from error
        return found

    def submit(self, method: Callable[..., R], *args: Any) -> Future[R]:
        result: Future[R] = Future()

        def settle(done: Future[R]) -> None:
            error = done.exception()
            if error is None:
                result.set_result(done.result())
            else:
                own = unwrapped(error, self.name, method.__name__) if isinstance(error, Exception) else error
                result.set_exception(own)

        self.actor.run.remote(self.name, method.__name__, *args).future().add_done_callback(settle)
        return result


def _ray(value: Any) -> Any:
    """An argument as Ray takes it."""
    return value.reference if isinstance(value, Call) else value
