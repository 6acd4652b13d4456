"""Workers as Ray actors on this machine, or on the machine's node of a cluster.

Ray starts, places, watches and ends processes. It is not on the path of a step: farm and workers ring each
other through shared memory, and Ray carries one call per iteration.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import ray
from ray._private import ray_constants
from ray.exceptions import GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from embodied.runtime.handles import Handle
from sim_farm.contract import TaskInfo, TaskSpec
from sim_farm.farm import WorkerFailed, WorkerTimeout
from sim_farm.hosts import Handle as FarmHandle
from sim_farm.hosts import Host, make_worker
from sim_farm.memory import Block
from sim_farm.workers import WorkerSetup

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
OBJECT_STORE_BYTES = 512 * 2**20
"""Holds one iteration's trajectories on their way to the learner, and the weights on their way back."""
MAX_RESTARTS = 3
"""Replacements of one worker after which its death ends the run: then it is not an accident."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LP_NUM_THREADS": "1"}
"""A physics or render worker is one thread on one core; software rendering (llvmpipe) obeys the last."""


@ray.remote(num_cpus=0, max_restarts=0)
class _FarmActor:
    """A process for one physics or render worker."""

    def describe(self, task: TaskSpec) -> TaskInfo:
        from sim_farm.hosts import InProcess

        return InProcess().describe(task)

    def serve(self, setup: WorkerSetup) -> None:
        make_worker(setup).serve()

    def pid(self) -> int:
        return os.getpid()


@ray.remote(num_cpus=0, max_restarts=0)
class _WorkerActor:
    """A process for any other worker."""

    def __init__(self) -> None:
        importlib.import_module("embodied.workers")  # seconds, which pass while the farm is built

    def make(self, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
        # Not in the constructor: Ray would wrap its exception into the news of the actor's death.
        self._worker = make(*args)

    def run(self, method: str, *args: Any, **kwargs: Any) -> Any:
        # Arguments are spread out so that Ray replaces references by their values.
        return getattr(self._worker, method)(*args, **kwargs)


class RayRuntime:
    """Starts Ray (or joins it at `address`) and places workers as actors.

    During every wait it looks twice a second whether a worker of a farm has died, and replaces it.
    """

    def __init__(self, address: str, deadline_s: float) -> None:
        self._deadline_s = deadline_s
        self._actors: list[Any] = []
        self._spare: list[Any] = []
        self._hosts: dict[int, RayHost] = {}
        options: dict[str, Any] = {"address": address, "logging_level": logging.ERROR, "log_to_driver": False}
        if address == "local":
            # One logical CPU: our actors ask for none, and Ray would start an idle worker for each.
            options |= {
                "include_dashboard": False,
                "num_cpus": 1,
                "object_store_memory": OBJECT_STORE_BYTES,
                "_node_ip_address": LOOPBACK,
            }
        os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        # Ray's default lets every other process of the machine go before its workers (nice 15).
        os.environ.setdefault("RAY_worker_niceness", "0")
        if address == "local":
            # Ray replaces a loopback address by one that other machines reach, except where it knows that there
            # are none (as on macOS). Told so, all its servers listen on the loopback interface alone.
            ray_constants.ENABLE_RAY_CLUSTER = False
        terminated = signal.getsignal(signal.SIGTERM)
        ray.init(**options)
        # Ray installs a handler of its own, which would leave our shared memory and its own helpers behind.
        signal.signal(signal.SIGTERM, terminated)
        self._here = NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)

    def farm_host(self, physics_workers: int, render_workers: int) -> RayHost:
        """A host with that many processes; the processes of an earlier farm of the same size serve again."""
        workers = physics_workers + render_workers
        if workers not in self._hosts:
            self._hosts[workers] = RayHost(self, workers)
        return self._hosts[workers]

    def watch(self) -> None:
        for host in self._hosts.values():
            host.watch()

    def actor(self, cls: Any, env: dict[str, str], *args: Any) -> Any:
        """A new actor of this machine, ended by `close`."""
        actor = cls.options(scheduling_strategy=self._here, runtime_env={"env_vars": env}).remote(*args)
        self._actors.append(actor)
        return actor

    def prepare(self, workers: int) -> None:
        self._spare += [self.actor(_WorkerActor, {}) for _ in range(workers)]

    def place(self, name: str, make: Callable[..., T], *args: Any) -> Handle[T]:
        actor = self._spare.pop() if self._spare else self.actor(_WorkerActor, {})
        self.wait(actor.make.remote(make, args), name, "start", self._deadline_s)
        return RayHandle(name, self._deadline_s, runtime=self, actor=actor)

    def wait(self, reference: Any, name: str, what: str, deadline_s: float) -> Any:
        """The reference's value, waited for with a deadline and with an eye on the other workers."""
        begin = time.monotonic()
        while True:
            done, _ = ray.wait([reference], timeout=0.5)
            if done:
                return _get(reference, name, what)
            self.watch()
            if time.monotonic() - begin > deadline_s:
                raise WorkerTimeout(f"{name} did not finish {what!r} within {deadline_s:.0f} s")

    def end(self, actor: Any) -> None:
        """End an actor now, and with it its process and memory."""
        self._actors.remove(actor)
        ray.kill(actor)

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        self._spare.clear()
        ray.shutdown()


def _get(reference: Any, name: str, what: str) -> Any:
    """The value, or the worker's own exception without Ray's wrapping."""
    try:
        return ray.get(reference, timeout=60)
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except RayActorError as error:
        raise WorkerFailed(f"{name} died during {what!r}: {str(error).splitlines()[0]}") from error
    except GetTimeoutError as error:
        raise WorkerTimeout(f"the result of {name}'s {what!r} could not be fetched within 60 s") from error


@dataclass
class RayHandle(Handle[T]):
    """The worker is an actor."""

    runtime: Any = None
    actor: Any = None

    def end(self) -> None:
        self.runtime.end(self.actor)

    def fetch(self, reference: Any) -> Any:
        return self.runtime.wait(reference, self.name, "fetch a result", self.deadline_s)

    def _start(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.actor.run.remote(method, *args, **kwargs)

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.runtime.wait(self._start(method, args, kwargs), self.name, method, self.deadline_s)


class RayHost:
    """The farm's workers as actors; a dead one is replaced, and its successor finds all it needs in the slots."""

    shared = True

    def __init__(self, runtime: RayRuntime, workers: int) -> None:
        self._runtime = runtime
        # All at once: importing a simulator takes seconds, and they do it side by side.
        self._actors = [self._start() for _ in range(workers)]
        self._setups: dict[int, WorkerSetup] = {}
        self._serving: dict[int, Any] = {}
        self.restarts: dict[int, int] = {}

    def describe(self, task: TaskSpec) -> TaskInfo:
        return self._runtime.wait(self._actors[0].describe.remote(task), "physics 0", "describe the task", 300.0)

    def launch(self, setup: WorkerSetup, block: Block) -> FarmHandle:
        self._setups[setup.index] = setup
        self._serving[setup.index] = self._actors[setup.index].serve.remote(setup)
        return _RayFarmHandle(self, setup.index)

    def watch(self) -> None:
        """Replace workers whose process died. Raises `WorkerFailed` when one dies again and again."""
        for index, reference in list(self._serving.items()):
            done, _ = ray.wait([reference], timeout=0)
            if not done:
                continue
            try:
                ray.get(reference)
            except RayActorError:
                self._replace(index)
            # A worker that returned by itself has written its message into the slots: the farm raises it.

    def pids(self) -> list[int]:
        """Process ids of the workers; only while they serve no farm."""
        return ray.get([actor.pid.remote() for actor in self._actors], timeout=60)

    def end(self, index: int, deadline_s: float) -> None:
        """The worker leaves its farm; its process stays, with its simulator imported, for the next farm."""
        serving = self._serving.pop(index)
        done, _ = ray.wait([serving], timeout=deadline_s)
        if not done:  # stuck in a simulator: this process is of no more use
            ray.kill(self._actors[index])
            self._actors[index] = self._start()

    def _start(self) -> Any:
        return self._runtime.actor(_FarmActor, ONE_THREAD)

    def _replace(self, index: int) -> None:
        self.restarts[index] = self.restarts.get(index, 0) + 1
        setup = self._setups[index]
        if self.restarts[index] > MAX_RESTARTS:
            raise WorkerFailed(f"{setup.name} died {self.restarts[index]} times; see the system's log for the reason")
        self._actors[index] = self._start()
        self._serving[index] = self._actors[index].serve.remote(setup)


@dataclass(frozen=True)
class _RayFarmHandle:
    host: RayHost
    index: int

    def ring(self) -> None:
        """Not used: the farm rings in shared memory."""

    def close(self, deadline_s: float) -> None:
        self.host.end(self.index, deadline_s)


__all__ = ["Host", "RayHandle", "RayHost", "RayRuntime"]
