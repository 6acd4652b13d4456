"""Processes for workers, as Ray actors, and how they report progress: on this machine through shared memory, on others
when they are asked."""

from __future__ import annotations

import importlib
import os
import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError
from torch import Tensor

from embodied import progress
from embodied.devices import release, to_host
from embodied.runtime.lent_tensors import Lender, LentTensors
from embodied.runtime.memory_budget import Watched
from embodied.runtime.nodes import require_software, software
from embodied.runtime.ranks import is_bound
from embodied.runtime.ray.cluster import HERE, RayCluster
from embodied.runtime.ray.lending import parts_of
from sim_farm.shared_memory import memory
from sim_farm.shared_memory.memory import Block, Field
from sim_farm.workers import faults

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
