"""Physics workers on other machines of a Ray cluster: an actor on the other machine, behind a relay on this one."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from embodied.runtime.api import NodeInfo
from embodied.runtime.ray.cluster import RayCluster, cannot_start
from embodied.runtime.remote import FarLost, FarPhysics, Relay, require_software, software
from embodied.runtime.rounding import kernels
from sim_farm.client.episode_replay import FilmRequest
from sim_farm.client.farm import WorkerFailed
from sim_farm.client.health import done_by
from sim_farm.contract import FarmError, TaskInfo, TaskSpec, UInt8
from sim_farm.render_devices import RenderDevice
from sim_farm.shared_memory.slot_layout import WorkerMemory
from sim_farm.workers.fork_server import ONE_THREAD
from sim_farm.workers.hosts import WorkerHandle
from sim_farm.workers.processes import Processes
from sim_farm.workers.supervision import Event, Replaced, State, Supervision
from sim_farm.workers.worker import WorkerSetup

NODE_CHECK_S = 1.0
"""Seconds between checks that the nodes of far workers still exist; a check takes one or two milliseconds."""


@ray.remote(num_cpus=0, max_restarts=0)
class _FarActor:
    """A process for one physics worker on another machine."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._far: FarPhysics | None = None

    def open(self, setup: WorkerSetup, opening: bytes, expected: Mapping[str, str]) -> None:
        """Become the far end of a relay, if this machine has the expected software."""
        require_software(expected)
        # Cores are numbered per machine: the setup's number counts the farm's workers on this one.
        cores = self._cores if setup.core is None else [self._cores[setup.core % len(self._cores)]]
        os.sched_setaffinity(0, cores)
        self._far = FarPhysics(replace(setup, core=None), opening)

    def exchange(self, request: bytes) -> bytes:
        assert self._far is not None, "opened before its first request"
        return self._far.exchange(request)

    def kernels(self) -> dict[str, str]:
        """Digests of this machine's kernels, with PyTorch's if the simulator computes with it."""
        return kernels()

    def leave(self) -> None:
        """Leave the farm; the process may serve another."""
        if self._far is not None:
            self._far.close()
        self._far = None


class FarHost:
    """A host that runs the workers of one farm's task on several machines.

    Physics worker i runs on node `nodes[i]`. If that is None, it runs on this machine, in a process of `here`, as all
    render workers do. If there are cameras, a far physics worker needs render workers on this machine.

    A worker that dies or does not answer is replaced on its node, as `supervision.Supervision` decides. A lost node
    raises `WorkerFailed`.
    """

    shared = True

    def __init__(
        self, cluster: RayCluster, nodes: Sequence[NodeInfo | None], here: Processes, idle: dict[str, list[Any]]
    ) -> None:
        """`idle` holds the processes of earlier farms by node id, and receives the processes of this farm."""
        self.cluster, self._nodes, self._here, self._idle = cluster, nodes, here, idle
        self._workers: list[_FarWorker] = []
        self._checked_s = time.monotonic()

    def prepare(self, processes: Sequence[tuple[TaskSpec, RenderDevice | None]]) -> None:
        self._here.prepare(processes[sum(node is not None for node in self._nodes) :])

    def describe(self, task: TaskSpec) -> TaskInfo:
        return self._here.describe(task)

    def films(self, requests: Sequence[FilmRequest], processes: int) -> Iterator[list[UInt8]]:
        return self._here.films(requests, processes)

    def launch(self, setup: WorkerSetup, memory: WorkerMemory) -> WorkerHandle:
        """Raises `FarmError` where a physics worker on another node would have to draw."""
        node = self._nodes[setup.index] if setup.index < len(self._nodes) else None
        if node is None:
            return self._here.launch(setup, memory)
        if setup.info.cameras and not setup.spec.render_workers:
            raise FarmError(
                f"{setup.name} is to be on {node}, and frames do not cross machines: set farm.render_workers to 1 "
                "or more, so that they are drawn where the policy is, or leave the physics workers here"
            )
        rank = self._nodes[: setup.index].count(node)
        far = replace(setup, memory=None, core=None if setup.core is None else rank)
        worker = _FarWorker(self, far, memory, node, self._here.replaced)
        if not self._workers:
            self.cluster.watchers.append(self.watch)
        self._workers.append(worker)
        return worker

    def watch(self) -> None:
        """Check that the far nodes still exist. Raises `WorkerFailed` for a lost one."""
        if time.monotonic() - self._checked_s > NODE_CHECK_S:
            self._checked_s = time.monotonic()
            self.require(list(self._workers))

    def take_replaced(self) -> list[Replaced]:
        return self._here.take_replaced()

    def close(self) -> None:
        """Nothing to end: the cluster ends the actors, and the maker of `here` its processes."""

    def start(self, node: NodeInfo) -> Any:
        """A process on the node; one of an earlier farm, if there is one."""
        idle = self._idle.get(node.id)
        return idle.pop() if idle else self.cluster.actor(_FarActor, ONE_THREAD, node.id)

    def require(self, workers: Sequence[_FarWorker]) -> None:
        """Raise `WorkerFailed` if the node of one of them has left the cluster."""
        present = {node.id for node in self.cluster.nodes()}
        for node in (worker.node for worker in workers):
            if node.id not in present:
                lost = sorted(worker.setup.name for worker in self._workers if worker.node == node)
                raise WorkerFailed(
                    f"the node {node} has left the cluster, and with it {', '.join(lost)}: bring it back with `ray "
                    "start --address HOST:PORT`, or do without it, and go on with --resume auto"
                )

    def release(self, worker: _FarWorker, actor: Any, deadline_s: float) -> None:
        """The worker leaves its farm; its process stays for the next one, unless it is stuck."""
        self._workers.remove(worker)
        if not self._workers:
            self.cluster.watchers.remove(self.watch)
        if self.cluster.ray_processes.lost() is not None:
            return
        try:
            ray.get(actor.leave.remote(), timeout=deadline_s)
        except RayError:
            self.cluster.kill(actor)
        else:
            self._idle.setdefault(worker.node.id, []).append(actor)


class _FarWorker:
    """A physics worker on another node: the handle of its relay, and the relay's far end, as calls of an actor."""

    def __init__(
        self, host: FarHost, setup: WorkerSetup, memory: WorkerMemory, node: NodeInfo, replaced: list[Replaced]
    ) -> None:
        self.setup, self.node = setup, node
        self._host, self._actor, self._slots = host, host.start(node), memory.slots
        self.supervision = Supervision(f"{setup.name} on {node}", replaced)
        own = replace(setup, memory=memory.address, core=None)
        relay = Relay(own, memory, self, host.cluster.deadline.inner())
        self._relay = threading.Thread(target=relay.serve, name=f"relay of {setup.name}", daemon=True)
        self._relay.start()

    # --- the farm's handle

    def ring(self) -> None:
        """Nothing to do: the farm rings in shared memory."""

    def close(self, deadline_s: float) -> None:
        if self._host.cluster.ray_processes.lost() is None:
            self._relay.join(deadline_s)
        self.supervision.end()
        self._host.release(self, self._actor, deadline_s)

    # --- the far end of the relay, in its thread

    def open(self, opening: bytes) -> Future[None]:
        opened = self._actor.open.remote(self.setup, opening, software())
        # Answered after `open`: all is imported.
        self._host.cluster.compare_kernels(self.node.id, self._actor.kernels.remote())
        future = _future(opened, self.supervision.name)
        future.add_done_callback(lambda done: self._opened() if done.exception() is None else None)
        return future

    def exchange(self, request: bytes) -> Future[bytes]:
        return _future(self._actor.exchange.remote(request), self.supervision.name)

    def restart(self, why: str) -> None:
        self._host.require([self])
        slots = self._slots.arrays
        self.supervision.lost(why, done_by(slots, self.setup.index) if slots else 0)
        self._host.cluster.kill(self._actor)  # it may only have been out of reach
        self._actor = self._host.start(self.node)

    def _opened(self) -> None:
        """Note that the successor of a lost worker is built, and has replayed the episodes."""
        if self.supervision.state is State.RESTARTING:
            self.supervision.note(Event.BUILT)
            self.supervision.serves_again()


def _future(reference: Any, name: str) -> Future[Any]:
    """The call's result; Ray's exceptions become `FarLost`, or the far worker's own where it has a message."""
    answer: Future[Any] = Future()

    def settle(done: Future[Any]) -> None:
        error = done.exception()
        if error is None:
            answer.set_result(done.result())
        elif isinstance(error, RayTaskError):
            # For other errors, Ray's wrapping contains the far traceback.
            answer.set_exception(error.cause if isinstance(error.cause, FarmError) else error)
        elif isinstance(error, RayActorError) and error.actor_init_failed:
            answer.set_exception(cannot_start(name, error))
        elif isinstance(error, RayError):
            answer.set_exception(FarLost(str(error).splitlines()[0]))
        else:
            answer.set_exception(error)

    reference.future().add_done_callback(settle)
    return answer
