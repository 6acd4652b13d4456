"""Workers as Ray actors on this machine, or in a cluster of which this machine is a node.

Ray starts, places, watches and ends processes. On one machine it is not on the path of a step: farm and workers
ring each other through shared memory, and Ray carries one call per iteration. A physics worker on another machine
has a relay here, a thread of this process, and costs one call per decision and stage.
"""

from __future__ import annotations

import importlib
import logging
import os
import signal
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import ray
from ray._private import ray_constants
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, RayActorError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch import Tensor

from embodied.errors import UserError
from embodied.runtime.handles import Handle
from embodied.runtime.nodes import Link, NodeInfo
from embodied.runtime.ray_farm import HERE, RayHost, cannot_start
from embodied.runtime.ray_links import slowest_link
from embodied.workers.devices import release, to_host
from sim_farm.contract import FarmError
from sim_farm.farm import WorkerFailed, WorkerTimeout

T = TypeVar("T")

LOOPBACK = "127.0.0.1"
JOIN_S = 10.0
"""Longest wait for the first sign of life of a cluster."""
WAITING = {"GOMP_SPINCOUNT": "1000"}
"""PyTorch's threads wait for each other by spinning, for milliseconds. Where a simulator shares their cores, the one
that is waited for cannot run then: an iteration of 0.2 s was seen to take 6 s. So they sleep after microseconds."""
SPARE = 2
"""Processes that wait for workers: as many as a run's policy worker and learner need when they are placed anew."""
OBJECT_STORE_BYTES = 512 * 2**20
"""Holds one iteration's trajectories on their way to the learner, and the weights on their way back."""


@ray.remote(num_cpus=0, max_restarts=0)
class _WorkerActor:
    """A process for other workers: one, or several that take turns and hand things to each other by reference."""

    def __init__(self) -> None:
        importlib.import_module("embodied.workers.makers")  # seconds, which pass while the farm is built
        self._workers: dict[str, Any] = {}

    def make(self, name: str, make: Callable[..., Any], args: tuple[Any, ...]) -> None:
        # Not in the constructor: Ray would wrap its exception into the news of the actor's death.
        self._workers[name] = make(*args)

    def run(self, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        # Arguments are spread out so that Ray replaces references by their values.
        return _portable(getattr(self._workers[name], method)(*args, **kwargs))

    def feed(self, source: str, produce: str, name: str, method: str, *args: Any, **kwargs: Any) -> Any:
        made = getattr(self._workers[source], produce)()
        return getattr(self._workers[name], method)(made, *args, **kwargs)

    def drop(self, name: str) -> int:
        """Forget a worker; how many are left."""
        del self._workers[name]
        release()
        return len(self._workers)


def _portable(result: Any) -> Any:
    """What a worker returned, as another process can have it: weights leave the GPU's memory."""
    if isinstance(result, dict) and any(isinstance(value, Tensor) for value in result.values()):
        return to_host(result)
    return result


def _worker_environment() -> dict[str, str]:
    """Environment variables of a process for a policy worker, the learner or an evaluator.

    They share GPUs as the plan says, and so ask Ray for none. Ray then neither deals any out nor hides them, and a
    number means the same GPU as where the command was typed, also where a cluster was started otherwise.
    """
    visible = {name: os.environ[name] for name in ("CUDA_VISIBLE_DEVICES",) if name in os.environ}
    return {**WAITING, "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO": "0", **visible}


class RayRuntime:
    """Starts Ray (or joins the cluster at `address`) and places workers as actors.

    During every wait it looks twice a second whether a worker of a farm has died, and replaces it. Raises `UserError`
    when no cluster answers at the address, or this machine is not one of its nodes.
    """

    def __init__(self, address: str, deadline_s: float) -> None:
        self.deadline_s = deadline_s
        self._actors: list[Any] = []
        self._spare: list[Any] = []
        self._hosts: list[tuple[tuple[str, ...], RayHost]] = []
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
        if address == "local" or address.startswith(f"{LOOPBACK}:"):
            # Ray replaces a loopback address by one that other machines reach, except where it knows that there
            # are none (as on macOS). Told so, all its servers listen on the loopback interface alone.
            ray_constants.ENABLE_RAY_CLUSTER = False
        terminated = signal.getsignal(signal.SIGTERM)
        try:
            _require_listener(address)
            ray.init(**options)
        except OSError as error:
            raise UserError(
                f"no Ray cluster with this machine as a node answers at {address!r}: start it with `ray start --head`, "
                "join it here with `ray start --address HOST:PORT`, and name that HOST:PORT; if it was started with "
                "RAY_AUTH_MODE=token, set that here too"
            ) from error
        # Ray installs a handler of its own, which would leave our shared memory and its own helpers behind.
        signal.signal(signal.SIGTERM, terminated)
        self._here: str = ray.get_runtime_context().get_node_id()

    def nodes(self) -> tuple[NodeInfo, ...]:
        """The cluster's living machines, this one first; where several have one name, with their ids in it."""
        found = [NodeInfo.of(entry, self._here) for entry in ray.nodes() if entry["Alive"]]
        names = [node.name for node in found]
        found = [n if names.count(n.name) < 2 else replace(n, name=f"{n.name}-{n.id[:8]}") for n in found]
        return tuple(sorted(found, key=lambda node: (not node.is_here, node.address, node.name, node.id)))

    def link(self) -> Link:
        return slowest_link(self, [node for node in self.nodes() if not node.is_here])

    def farm_host(self, physics_workers: int, render_workers: int, physics_nodes: tuple[str, ...] = ()) -> RayHost:
        """A host with that many processes; the processes of an earlier farm of the same shape serve again.

        `physics_nodes` has for each physics worker the id of its node; '' or none is this one, where all others are.
        Raises `FarmError` for a node that is not there.
        """
        if len(physics_nodes) > physics_workers:
            raise FarmError(f"{len(physics_nodes)} nodes are named for {physics_workers} physics workers")
        places = [HERE if node == self._here else node for node in physics_nodes]
        known = {node.id: node for node in self.nodes()} if any(places) else {}
        for place in places:
            if place and place not in known:
                there = "; ".join(f"{node.id} is {node.name} at {node.address}" for node in known.values())
                raise FarmError(f"there is no node {place!r} in the cluster: {there}")
        shape = (*places, *[HERE] * (physics_workers + render_workers - len(places)))
        for other, host in self._hosts:
            if other == shape and host.idle:
                return host
        self._hosts.append((shape, RayHost(self, [known.get(place) for place in shape])))
        return self._hosts[-1][1]

    def watch(self) -> None:
        for _, host in self._hosts:
            host.watch()

    def actor(self, cls: Any, env: dict[str, str], node: str = HERE, args: tuple[Any, ...] = ()) -> Any:
        """A new actor, on this machine or the node with that id, ended by `close`."""
        place = NodeAffinitySchedulingStrategy(node or self._here, soft=False)
        actor = cls.options(scheduling_strategy=place, runtime_env={"env_vars": env}).remote(*args)
        self._actors.append(actor)
        return actor

    def prepare(self, workers: int) -> None:
        self._spare += [self.actor(_WorkerActor, _worker_environment()) for _ in range(workers - len(self._spare))]

    def place(self, name: str, make: Callable[..., T], *args: Any, beside: Handle[Any] | None = None) -> Handle[T]:
        if isinstance(beside, RayHandle):
            actor = beside.actor
        else:
            actor = self._spare.pop() if self._spare else self.actor(_WorkerActor, _worker_environment())
        self.wait(actor.make.remote(name, make, args), name, "start", self.deadline_s)
        return RayHandle(name, self.deadline_s, runtime=self, actor=actor)

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
        """An actor without workers waits for the next ones, its packages imported; more than a few are ended."""
        if len(self._spare) < SPARE:
            self._spare.append(actor)
        else:
            self.kill(actor)

    def kill(self, actor: Any) -> None:
        self._actors.remove(actor)
        ray.kill(actor)

    def close(self) -> None:
        for actor in self._actors:
            ray.kill(actor)
        self._actors.clear()
        self._spare.clear()
        ray.shutdown()


def _require_listener(address: str) -> None:
    """Raise `OSError` soon if nothing listens at HOST:PORT: Ray would try for five minutes."""
    host, colon, port = address.rpartition(":")
    if colon and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=JOIN_S).close()


def _get(reference: Any, name: str, what: str) -> Any:
    """The value, or the worker's own exception without Ray's wrapping."""
    try:
        return ray.get(reference, timeout=60)
    except RayTaskError as error:
        raise (error.cause if isinstance(error.cause, Exception) else error) from None
    except RayActorError as error:
        if error.actor_init_failed:
            raise cannot_start(name, error) from error
        raise WorkerFailed(f"{name} died during {what!r}: {str(error).splitlines()[0]}") from error
    except ActorUnschedulableError as error:
        raise WorkerFailed(f"{name} cannot start: its machine has left the cluster") from error
    except GetTimeoutError as error:
        raise WorkerTimeout(f"the result of {name}'s {what!r} could not be fetched within 60 s") from error


@dataclass
class RayHandle(Handle[T]):
    """The worker is in an actor, perhaps with others."""

    runtime: Any = None
    actor: Any = None

    def end(self) -> None:
        left = self.runtime.wait(self.actor.drop.remote(self.name), self.name, "end", self.deadline_s)
        if not left:
            self.runtime.end(self.actor)

    def feed(self, method: Any, source: Handle[Any], produce: Any, *args: Any, **kwargs: Any) -> Any:
        if self._beside(source):
            return self.actor.feed.remote(source.name, produce.__name__, self.name, method.__name__, *args, **kwargs)
        return super().feed(method, source, produce, *args, **kwargs)

    def path_from(self, source: Handle[Any]) -> str:
        return "by reference" if self._beside(source) else "shared memory"

    def _beside(self, source: Handle[Any]) -> bool:
        return isinstance(source, RayHandle) and source.actor is self.actor

    def fetch(self, reference: Any) -> Any:
        return self.runtime.wait(reference, self.name, "fetch a result", self.deadline_s)

    def _start(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.actor.run.remote(self.name, method, *args, **kwargs)

    def _run(self, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return self.runtime.wait(self._start(method, args, kwargs), self.name, method, self.deadline_s)


__all__ = ["RayHandle", "RayHost", "RayRuntime"]
