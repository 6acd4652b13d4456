"""Ray actors that run workers: their processes, the handles through which they are called, and their progress.

A process reports progress through shared memory where it is on this machine, and in answers to calls where it is not.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from embodied import progress
from embodied.devices import release, to_host
from embodied.runtime.deadlines import Wait
from embodied.runtime.handles import Handle
from embodied.runtime.ranks import is_bound
from embodied.runtime.ray.cluster import HERE, LOOK_S, WAITING, RayCluster, unwrapped, value_within
from embodied.runtime.remote import CALL_BYTES, require_software, slices, software
from embodied.runtime.rounding import kernels
from embodied.runtime.shared_tensors import SharedTensors, TensorPublisher
from sim_farm.client.farm import WorkerFailed, WorkerTimeout
from sim_farm.shared_memory import memory
from sim_farm.shared_memory.memory import Block, Field
from sim_farm.workers import faults
from sim_farm.workers.supervision import MemoryChecks

T = TypeVar("T")
R = TypeVar("R")

PROGRESS = {
    "last_ns": Field((1,), "int64", 0),
    "pid": Field((1,), "int64", 0),
}
"""Time of the process's last progress, by the machine's monotonic clock, which all its processes share; and its pid."""
SETTLES = 2
"""Checks of a process's memory, one per iteration; the first comes before the first update."""
REMOVE_S = 1.0
"""Longest wait for processes on other machines to remove their shared tensors."""


# --- in the actor's process


class _Workers:
    """The workers of one process: one, or several that take turns and pass results to each other by reference."""

    def __init__(self, block: str | None, environment: Mapping[str, str]) -> None:
        """`environment`: variables that are to be set. Modules are looked for in the folders of PYTHONPATH first."""
        os.environ.update(environment)
        path = environment.get("PYTHONPATH", "").split(os.pathsep)
        sys.path[:] = dict.fromkeys(filter(None, (*path, *sys.path)))
        self._memory = Block.create(PROGRESS, shared=False) if block is None else Block.attach(PROGRESS, block)
        self._memory.arrays["pid"][0] = os.getpid()
        progress.install(self._report)
        importlib.import_module("embodied.rollout.policy_worker")  # seconds, which pass while the farm is built
        self._workers: dict[str, Any] = {}
        self._publisher = TensorPublisher(None if block is None else _published_names(block))

    def make(self, name: str, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
        # Not in the constructor: Ray would wrap its exception into the news of the actor's death.
        self._report()
        faults.point(name, "make")
        self._workers[name] = make(*args)

    def run(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        # Arguments are spread out so that Ray replaces references by their values.
        self._report()  # a call that has waited for its turn begins now
        return _portable(self._method(name, method)(*args, **kwargs))

    def pipe(self, source: str, produce: str, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        """Run a method of one worker with the result of another worker's method, by reference."""
        self._report()
        made = self._method(source, produce)()
        return _portable(self._method(name, method)(made, *args, **kwargs))

    def publish(self, name: str, method: str) -> Any:
        """Run a method and publish the tensors that it returns on this machine; other results as they are."""
        self._report()
        result = self._method(name, method)()
        return self._publisher.publish(result) if _has_tensors(result) else result

    def published_part(self, version: int, first: int, last: int) -> Any:
        self._report()
        return self._publisher.part(version, first, last)

    def publish_copy(self, original: Any, source: RayCaller) -> Any:
        """Publish on this machine the tensors of a process on another one; other results as they are."""
        self._report()
        if not isinstance(original, SharedTensors):
            return original
        return self._publisher.publish_copy(original, _parts(original, source))

    def drop(self, name: str) -> tuple[int, bool]:
        """Remove a worker, if it was made; the number of workers left, and True if the process may serve others."""
        self._workers.pop(name, None)
        release()
        if not self._workers:
            self._publisher.close()
        return len(self._workers), not is_bound()

    def drop_all(self) -> bool:
        """Remove every worker; True if the process may serve others."""
        for name in list(self._workers):
            self.drop(name)
        return not is_bound()

    def _method(self, name: str, method: str) -> Any:
        """A worker's method, which is called now."""
        faults.point(name, method)
        return getattr(self._workers[name], method)

    def _report(self) -> None:
        self._memory.arrays["last_ns"][0] = time.monotonic_ns()


_WorkerActor: Any = ray.remote(num_cpus=0, max_restarts=0)(_Workers)  # type: ignore[call-overload]


@ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"looks": 1})  # type: ignore[call-overload]
class _FarActor(_Workers):
    """The workers of one process on another machine."""

    def __init__(self, expected: Mapping[str, str]) -> None:
        super().__init__(None, {})
        self._expected = expected

    def make(self, name: str, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
        require_software(self._expected)
        super().make(name, make, args)

    @ray.method(concurrency_group="looks")
    def remove_published(self) -> None:
        """Remove the shared tensors; processes that have mapped them keep them."""
        self._publisher.close()

    @ray.method(concurrency_group="looks")
    def silent_ns(self) -> int:
        """Time since the last progress; -1 before the first."""
        last = int(self._memory.arrays["last_ns"][0])
        return time.monotonic_ns() - last if last else -1

    @ray.method(concurrency_group="looks")
    def kernels(self) -> dict[str, str]:
        """Digests of this machine's kernels (`rounding.kernels`)."""
        return kernels()


def _portable(result: Any) -> Any:
    """A worker's result as another process can receive it: weights leave the GPU's memory."""
    return to_host(result) if _has_tensors(result) else result


def _has_tensors(result: Any) -> bool:
    """True for tensors by name."""
    return isinstance(result, dict) and any(isinstance(value, Tensor) for value in result.values())


def _parts(tensors: SharedTensors, source: RayCaller) -> Iterator[np.ndarray]:
    """The bytes of shared tensors on the machine of `source`, part by part; two calls are in flight at a time.

    Raises what `RayCaller.result` does, and `Overwritten` where the source has published newer tensors.
    """

    def start(part: slice) -> Any:
        return source.actor.published_part.remote(tensors.version, part.start, part.stop)

    following = slices(tensors.nbytes, 1, CALL_BYTES)
    in_flight = deque(start(part) for part in islice(following, 2))
    while in_flight:
        yield source.result(in_flight.popleft(), "publish")
        progress.report()
        in_flight.extend(start(part) for part in islice(following, 1))


@dataclass(frozen=True)
class RayCaller:
    """`Caller` of a worker in an actor."""

    name: str
    actor: Any
    timeout_s: float

    def call(self, method: Callable[..., R], *args: Any) -> R:
        found: R = self.result(self.actor.run.remote(self.name, method.__name__, *args), method.__name__)
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

    def result(self, reference: Any, method: str) -> Any:
        """The result of a call. Raises `WorkerTimeout` where it does not arrive in time, `WorkerFailed` where the
        worker is gone."""
        try:
            return value_within(self.timeout_s, reference, self.name, method)
        except GetTimeoutError as error:
            raise WorkerTimeout(f"{self.name} did not answer {method!r} within {self.timeout_s:g} s") from error


# --- its process, as this one knows it


def _environment() -> dict[str, str]:
    """Environment variables of a process for a policy worker, the learner or an evaluator.

    They share GPUs as the plan says, and so ask Ray for none. Ray then neither deals any out nor hides them, and a
    number means the same GPU as where the command was typed, also if the cluster was started differently.
    """
    visible = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
    return {**WAITING, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", **visible}


class WorkerProcess:
    """A process for workers, with a block of shared memory in which it reports its progress."""

    node = HERE
    """Id of the machine that runs it. Processes share memory only on one machine."""

    def __init__(self, cluster: RayCluster, threads: int = 0) -> None:
        """`threads`: number of calls by other workers that run concurrently, if any."""
        self._cluster = cluster
        self.workers: list[str] = []
        """Names of its present workers."""
        self.memory_checks = MemoryChecks(SETTLES)
        self.reusable = not threads
        """True if it may serve other workers later."""
        self._memory = Block.create(PROGRESS, shared=True)
        self._last, self._pid = (self._memory.arrays[name] for name in PROGRESS)
        # Ray kills processes with all that they have started, also what would clean up after them.
        self._published = _published_names(str(self._memory.name))
        for name in self._published:
            memory.adopt(name)
        environment = _environment() | cluster.environment()
        arguments = self._memory.name, environment
        self.actor = cluster.actor(_WorkerActor, environment, args=arguments, threads=threads)

    def last_ns(self) -> int:
        """Time of its last progress (`time.monotonic_ns`); 0 before the first."""
        return int(self._last[0])

    @property
    def pid(self) -> int:
        """Id of the worker's process; 0 until the process has started."""
        return int(self._pid[0])

    def forget(self) -> None:
        """Remove the process's shared memory and published tensors; the process has ended, or is about to.

        This also ends a stopped process, which does not respond to Ray.
        """
        if self.pid and _is_stopped(self.pid):
            os.kill(self.pid, signal.SIGKILL)
        for name in self._published:
            memory.remove(name)
        self._memory.close()

    def kill(self) -> None:
        self._cluster.kill(self.actor)
        self.forget()


class FarProcess(WorkerProcess):
    """A process for workers on another machine, the node with that id. Calls ask for its progress."""

    reusable = False

    def __init__(self, cluster: RayCluster, node: str) -> None:
        self._cluster, self.node = cluster, node
        self.workers, self.memory_checks = [], MemoryChecks(SETTLES)
        self._known_ns = 0
        self.actor = cluster.actor(_FarActor, _environment(), node, (software(),))
        self._silent = self.actor.silent_ns.remote()
        cluster.compare_kernels(node, self.actor.kernels.remote())

    def last_ns(self) -> int:
        """Time of its last known progress, by this machine's clock."""
        done, _ = ray.wait([self._silent], timeout=0)
        if done:
            try:
                silent_ns = ray.get(self._silent)
            except RayError:  # it has died: a wait for its work raises that
                return self._known_ns
            if silent_ns >= 0:
                self._known_ns = max(self._known_ns, time.monotonic_ns() - silent_ns)
            self._silent = self.actor.silent_ns.remote()
        return self._known_ns

    @property
    def pid(self) -> int:
        return 0  # its process id is another machine's

    def remove_published(self) -> Any:
        """Start to remove its shared tensors: no other process on its machine would do that once it is killed."""
        return self.actor.remove_published.remote()

    def forget(self) -> None:
        """It has no memory on this machine."""

    def kill(self) -> None:
        ray.wait([self.remove_published()], timeout=REMOVE_S)
        super().kill()


def _published_names(block: str) -> tuple[str, str]:
    """Names of the memories in which the process with this block publishes tensors."""
    return f"{block}-0", f"{block}-1"


def _is_stopped(pid: int) -> bool:
    """True if a process of this machine has been stopped by a signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended
        return False


# --- handles


@dataclass(eq=False)
class Call:
    """A call that was submitted."""

    reference: Any
    """Ray's reference to its result."""
    method: str
    processes: tuple[WorkerProcess, ...]
    """Processes whose progress is the call's: the worker's own, and those whose results are its arguments."""
    name: str
    """Name of the worker that is called, for messages."""
    given: tuple[Call, ...] = ()
    """Calls whose results are its arguments."""
    wait: Wait | None = None
    """The wait for the result; None before it is first waited for."""

    def last_ns(self) -> int:
        return max(process.last_ns() for process in self.processes)


@dataclass
class RayHandle(Handle[T]):
    """The worker is in an actor, perhaps with others. A submitted call's reference is a `Call`."""

    cluster: RayCluster = field(kw_only=True)
    process: WorkerProcess = field(kw_only=True)
    give_back: Callable[[WorkerProcess, bool], None] = field(kw_only=True)
    """Called with a process that has no worker any more, and True if it may serve others."""
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

    def publish(self, produce: Any, receivers: Sequence[Handle[Any]]) -> list[Any]:
        method = produce.__name__
        by_node = {
            self.process.node: self._call(self.process.actor.publish, method, (self.name, method), (), {}),
        }
        for receiver in receivers:
            if isinstance(receiver, RayHandle) and receiver.process.node not in by_node:
                args = (by_node[self.process.node], self.caller())
                copy = receiver._call(receiver.process.actor.publish_copy, method, (), args, {})
                by_node[receiver.process.node] = copy
        return [by_node[receiver.process.node] for receiver in receivers if isinstance(receiver, RayHandle)]

    def caller(self) -> RayCaller:
        return RayCaller(self.name, self.process.actor, self.deadline.inner().seconds)

    def path_from(self, source: Handle[Any]) -> str:
        if self._beside(source):
            return "by reference"
        same = isinstance(source, RayHandle) and source.process.node == self.process.node
        return "shared memory" if same else "Ray, between machines"

    def end(self) -> None:
        left, reusable = self.get(self._call(self.process.actor.drop, "end", (self.name,), (), {}))
        self.process.workers.remove(self.name)
        if not left:
            self.give_back(self.process, reusable)

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


def _ray(value: Any) -> Any:
    """An argument as Ray takes it."""
    return value.reference if isinstance(value, Call) else value
