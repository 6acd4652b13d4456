"""Processes for workers, as Ray actors, and how they report progress: on this machine through shared memory, on others
when they are asked."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import ray
from ray.exceptions import GetTimeoutError, RayError
from torch import Tensor

from embodied import progress
from embodied.devices import release, to_host
from embodied.runtime.handles import Caller, Handle
from embodied.runtime.ranks import is_bound
from embodied.runtime.ray.cluster import HERE, LOOK_S, RayCluster, value_within
from embodied.runtime.remote import Lender, LentTensors, require_software, software
from embodied.runtime.supervision import Wait, Watched
from sim_farm import faults, memory
from sim_farm.farm import WorkerFailed, WorkerTimeout
from sim_farm.memory import Block, Field

WAITING = {"GOMP_SPINCOUNT": "1000"}
"""PyTorch's threads wait for each other by spinning, for milliseconds. Where a simulator shares their cores, the one
that is waited for cannot run then: an iteration of 0.2 s was seen to take 6 s. So they sleep after microseconds."""
PROGRESS = {
    "last_ns": Field((1,), "int64", 0),
    "pid": Field((1,), "int64", 0),
}
"""When the process last reported progress, by the machine's monotonic clock, which all its processes share; and its
number."""

SETTLES = 2
"""Looks at a process's memory, one in each iteration, of which the first comes before the first update."""
TAKE_BACK_S = 1.0
"""How long processes on other machines are waited for, to remove what they have lent."""


class _WorkerProcess:
    """A process for other workers: one, or several that take turns and hand things to each other by reference."""

    def __init__(self, block: str | None) -> None:
        self._memory = Block.create(PROGRESS, shared=False) if block is None else Block.attach(PROGRESS, block)
        self._memory.arrays["pid"][0] = os.getpid()
        progress.install(self._report)
        importlib.import_module("embodied.execution.makers")  # seconds, which pass while the farm is built
        self._workers: dict[str, Any] = {}
        self._lender = Lender(None if block is None else _lent_names(block))

    def make(self, name: str, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
        # Not in the constructor: Ray would wrap its exception into the news of the actor's death.
        self._report()
        faults.point(name, "make")
        self._workers[name] = make(*args)

    def run(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        # Arguments are spread out so that Ray replaces references by their values.
        self._report()  # a call that has waited for its turn begins now
        return _portable(self._of(name, method)(*args, **kwargs))

    def lend(self, name: str, method: str) -> Any:
        self._report()
        result = self._of(name, method)()
        return self._lender.lend(result) if _has_tensors(result) else result

    def lent_part(self, ticket: int, first: int, last: int) -> Any:
        self._report()
        return self._lender.part(ticket, first, last)

    def lend_again(self, lent: Any, lender: Any, name: str, timeout_s: float) -> Any:
        """What a worker called `name` of the process `lender`, on another machine, has lent, lent on this one."""
        self._report()
        if not isinstance(lent, LentTensors):
            return lent
        return self._lender.lend_again(lent, parts_of(lent, lender, name, timeout_s))

    def pipe(self, source: str, produce: str, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        self._report()
        made = self._of(source, produce)()
        return _portable(self._of(name, method)(made, *args, **kwargs))

    def drop(self, name: str) -> tuple[int, bool]:
        """Forget a worker, if it was made. How many are left, and whether the process may serve others."""
        self._workers.pop(name, None)
        release()
        if not self._workers:
            self._lender.close()
        return len(self._workers), not is_bound()

    def _of(self, name: str, method: str) -> Any:
        """A worker's method, which is called now."""
        faults.point(name, method)
        return getattr(self._workers[name], method)

    def drop_all(self) -> bool:
        """Forget every worker; whether the process may serve others."""
        for name in list(self._workers):
            self.drop(name)
        return not is_bound()

    def _report(self) -> None:
        self._memory.arrays["last_ns"][0] = time.monotonic_ns()


_WorkerActor: Any = ray.remote(num_cpus=0, max_restarts=0)(_WorkerProcess)  # type: ignore[call-overload]


@ray.remote(num_cpus=0, max_restarts=0, concurrency_groups={"looks": 1})  # type: ignore[call-overload]
class _FarActor(_WorkerProcess):
    """Such a process on another machine."""

    def __init__(self, expected: Mapping[str, str]) -> None:
        super().__init__(None)
        self._expected = expected

    def make(self, name: str, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
        require_software(self._expected)
        super().make(name, make, args)

    @ray.method(concurrency_group="looks")  # type: ignore[untyped-decorator]
    def take_back(self) -> None:
        """Remove what was lent; who has mapped it keeps it."""
        self._lender.close()

    @ray.method(concurrency_group="looks")  # type: ignore[untyped-decorator]
    def silent_ns(self) -> int:
        """How long ago it reported progress; -1 if it never did."""
        last = int(self._memory.arrays["last_ns"][0])
        return time.monotonic_ns() - last if last else -1


def _portable(result: Any) -> Any:
    """What a worker returned, as another process can have it: weights leave the GPU's memory."""
    return to_host(result) if _has_tensors(result) else result


def _has_tensors(result: Any) -> bool:
    """Whether it is tensors by name."""
    return isinstance(result, dict) and any(isinstance(value, Tensor) for value in result.values())


def _environment() -> dict[str, str]:
    """Environment variables of a process for a policy worker, the learner or an evaluator.

    They share GPUs as the plan says, and so ask Ray for none. Ray then neither deals any out nor hides them, and a
    number means the same GPU as where the command was typed, also where a cluster was started otherwise.
    """
    visible = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
    return {**WAITING, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", **visible}


class WorkerProcess:
    """A process for workers, with a block of shared memory in which it reports its progress."""

    node = HERE
    """Id of the machine that it is on, to which, where it is another, no memory of this one leads."""

    def __init__(self, cluster: RayCluster, threads: int = 0) -> None:
        """`threads`: so many calls of others run side by side, where there are any."""
        self._cluster = cluster
        self.workers: list[str] = []
        """Names of those that it has now."""
        self.watched = Watched(SETTLES)
        self.of_use = not threads
        """Whether it may serve other workers later."""
        self._memory = Block.create(PROGRESS, shared=True)
        self._last, self._pid = (self._memory.arrays[name] for name in PROGRESS)
        # Ray kills processes with all that they have started, also what would clear up after them.
        self._lends = _lent_names(str(self._memory.name))
        for name in self._lends:
            memory.adopt(name)
        self.actor = cluster.actor(_WorkerActor, _environment(), args=(self._memory.name,), threads=threads)

    def last_ns(self) -> int:
        """When it last reported progress (`time.monotonic_ns`); 0 if it never did."""
        return int(self._last[0])

    @property
    def pid(self) -> int:
        """The system's number of the process; 0 until it has begun."""
        return int(self._pid[0])

    def forget(self) -> None:
        """Remove the memory, and what it lent; the process has ended, or is about to.

        One that is stopped, and does not hear Ray, is ended here.
        """
        if self.pid and _is_stopped(self.pid):
            os.kill(self.pid, signal.SIGKILL)
        for name in self._lends:
            memory.remove(name)
        self._memory.close()

    def kill(self) -> None:
        self._cluster.kill(self.actor)
        self.forget()


class FarProcess(WorkerProcess):
    """A process for workers on another machine, the node with that id. It is asked for its progress."""

    of_use = False

    def __init__(self, cluster: RayCluster, node: str) -> None:
        self._cluster, self.node = cluster, node
        self.workers, self.watched = [], Watched(SETTLES)
        self._known_ns = 0
        self.actor = cluster.actor(_FarActor, _environment(), node, (software(),))
        self._asked = self.actor.silent_ns.remote()

    def last_ns(self) -> int:
        """When it last reported progress, as far as it has answered; in this machine's time."""
        done, _ = ray.wait([self._asked], timeout=0)
        if done:
            try:
                silent_ns = ray.get(self._asked)
            except RayError:  # it has died, which whoever waits for its work will be told
                return self._known_ns
            if silent_ns >= 0:
                self._known_ns = max(self._known_ns, time.monotonic_ns() - silent_ns)
            self._asked = self.actor.silent_ns.remote()
        return self._known_ns

    @property
    def pid(self) -> int:
        return 0  # no number of this machine's

    def take_back(self) -> Any:
        """Start to remove what it has lent, which nobody else on its machine would do once it is killed."""
        return self.actor.take_back.remote()

    def forget(self) -> None:
        """Nothing of it is here."""

    def kill(self) -> None:
        ray.wait([self.take_back()], timeout=TAKE_BACK_S)
        super().kill()


def _lent_names(block: str) -> tuple[str, str]:
    """Of the memories in which the process with this block lends tensors."""
    return f"{block}-0", f"{block}-1"


def _is_stopped(pid: int) -> bool:
    """Whether a process of this machine has been stopped by a signal."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:  # it has ended
        return False


# --- Tensors that were lent on another machine, fetched in parts: so they pass through Ray's object stores, which
# have a fixed size, whatever their own.


PART_BYTES = 32 * 2**20
"""Of one part. Two are under way at a time."""


def parts_of(lent: LentTensors, lender: Any, name: str, timeout_s: float) -> Iterator[np.ndarray]:
    """The bytes of what the worker `name` in the actor `lender` has lent, part by part.

    Raises `WorkerTimeout` where one does not come within `timeout_s`, `WorkerFailed` where the lender is gone and
    `LentOver` where it has lent something newer.
    """

    def ask(first: int) -> Any:
        return lender.lent_part.remote(lent.ticket, first, min(first + PART_BYTES, lent.nbytes))

    begins = list(range(0, lent.nbytes, PART_BYTES))
    coming = ask(begins[0])
    for following in (*begins[1:], None):
        reference, coming = coming, None if following is None else ask(following)
        try:
            part: np.ndarray = value_within(timeout_s, reference, name, "lend")
        except GetTimeoutError as error:
            raise WorkerTimeout(f"{name} did not hand on its weights: no part came for {timeout_s:g} s") from error
        yield part
        progress.report()


# --- Handles of workers in Ray actors, the calls that are submitted to them, and callers.


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


def _ray(value: Any) -> Any:
    """An argument as Ray takes it."""
    return value.reference if isinstance(value, Call) else value
