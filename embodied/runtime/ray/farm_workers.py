"""The farm's workers as Ray actors: in shared memory on this machine, physics on other machines behind relays."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError

from embodied.runtime.api import NodeInfo
from embodied.runtime.ray.cluster import HERE, RayCluster, cannot_start
from embodied.runtime.remote import FarLost, FarPhysics, Relay, require_software, software
from embodied.runtime.rounding import kernels
from embodied.runtime.supervision import Event, LimitTooSmall, MemoryChecks, MemoryLimit, Replaced, State, Supervised
from sim_farm.client.farm import WorkerFailed
from sim_farm.client.health import done_by, hung, restarted
from sim_farm.contract import FarmError, TaskInfo, TaskSpec
from sim_farm.shared_memory import slot_layout
from sim_farm.shared_memory.memory import Block
from sim_farm.shared_memory.slot_layout import WorkerMemory
from sim_farm.workers.hosts import WorkerHandle, make_worker
from sim_farm.workers.worker import WorkerSetup

_log = logging.getLogger(__name__)

NODE_CHECK_S = 1.0
"""Interval of checks that the nodes of far workers are still there; a check takes a millisecond or two."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "LP_NUM_THREADS": "1"}
"""A physics or render worker is one thread on one core; the last variable is for software rendering (llvmpipe)."""


@ray.remote(num_cpus=0, max_restarts=0)
class _FarmActor:
    """A process for one physics or render worker."""

    def __init__(self) -> None:
        self._cores = sorted(os.sched_getaffinity(0))
        self._far: FarPhysics | None = None

    def describe(self, task: TaskSpec) -> TaskInfo:
        from sim_farm.workers.hosts import InProcess

        return InProcess().describe(task)

    def serve(self, setup: WorkerSetup) -> None:
        make_worker(setup).serve()

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

    def pid(self) -> int:
        return os.getpid()


class RayHost:
    """The farm's workers as actors. A worker that died or hangs is replaced; its successor finds all it needs in the
    slots. A worker that is lost again and again without new work is given up (`supervision`).

    The worker of index i is on `nodes[i]`; None is the client's node. A physics worker on another node has a relay
    here, and needs render workers here if there are cameras. A node that is lost raises `WorkerFailed`.
    """

    shared = True

    def __init__(self, cluster: RayCluster, nodes: list[NodeInfo | None], limit: MemoryLimit) -> None:
        self._cluster, self._limit = cluster, limit
        self._nodes = nodes
        self._memory_checks: dict[int, MemoryChecks] = {}
        """Checks of each process's memory."""
        # All at once: importing a simulator takes seconds, and they do it concurrently.
        self._actors = [self._start(index) for index in range(len(nodes))]
        # Per worker of the present farm: its setup, its slots, its process id, the call in which it serves.
        self._setups: dict[int, WorkerSetup] = {}
        self._blocks: dict[int, Block] = {}
        self._memories: dict[int, Block] = {}
        self._pids: dict[int, Any] = {}
        self._serving: dict[int, Any] = {}
        self._relays: dict[int, threading.Thread] = {}
        self._workers: dict[int, Supervised] = {}
        self._why: dict[int, str] = {}
        """Reason of each loss whose successor does not serve yet."""
        self.replaced: list[Replaced] = []
        """Replacements that `take_replaced` has not returned yet."""
        self._checked = time.monotonic()
        # A worker has less time than the collection from the farm, and that less than a call.
        self._deadline = cluster.deadline.inner().inner()
        self.taken = False
        """True while it serves a farm that has not been closed."""
        self.restarts: dict[int, int] = {}

    def describe(self, task: TaskSpec) -> TaskInfo:
        return self._cluster.wait(self.call(0, "describe", task), self.name(0), "describe the task")

    def launch(self, setup: WorkerSetup, memory: WorkerMemory) -> WorkerHandle:
        """Raises `FarmError` where a physics worker on another node would have to draw."""
        index, node = setup.index, self._nodes[setup.index]
        self._workers[index], self._memories[index] = Supervised(), memory.slots
        if node is None:
            self._setups[index], self._blocks[index] = setup, memory.slots
            self._serve(index)
        else:
            if setup.info.cameras and not setup.spec.render_workers:
                raise FarmError(
                    f"{setup.name} is to be on {node}, and frames do not cross machines: set farm.render_workers to 1 "
                    "or more, so that they are drawn where the policy is, or leave the physics workers here"
                )
            rank = self._nodes[:index].count(node)
            self._setups[index] = replace(setup, memory=None, core=None if setup.core is None else rank)
            relay = Relay(replace(setup, core=None), memory, _RayFarEnd(self, index), self._cluster.deadline.inner())
            self._relays[index] = threading.Thread(target=relay.serve, name=f"relay of {setup.name}", daemon=True)
            self._relays[index].start()
        return _RayFarmHandle(self, index)

    def watch(self) -> None:
        """Replace workers whose process died, and those on this machine that have made no progress for too long, or
        use too much memory.

        Raises `WorkerFailed` when one is lost again and again, or with its node, and `LimitTooSmall`.
        """
        for index, reference in list(self._serving.items()):
            done, _ = ray.wait([reference], timeout=0)
            if not done:
                self._check(index)
                continue
            try:
                ray.get(reference)
            except RayActorError:
                self._replace(index, "its process died")
            # A worker that returned by itself has written its message into the slots: the farm raises that.
        if self._relays and time.monotonic() - self._checked > NODE_CHECK_S:
            self._checked = time.monotonic()
            self._require_nodes([node for index in self._relays if (node := self._nodes[index]) is not None])

    def pids(self) -> list[int]:
        """Process ids of the workers, each of its own machine; only while they serve no farm."""
        return [
            self._cluster.wait(actor.pid.remote(), self.name(index), "start")
            for index, actor in enumerate(self._actors)
        ]

    def end(self, index: int, deadline_s: float) -> None:
        """The worker leaves its farm; its process stays, with its simulator imported, for the next farm."""
        if (why := self._why.pop(index, None)) is not None:  # lost, and its successor has not served
            down_s = time.monotonic() - self._workers[index].losses[-1].at_s
            self.replaced.append(Replaced(self.name(index), why, down_s))
        if self._cluster.ray_processes.lost() is not None:
            self._serving.pop(index, None)  # it is gone
            self._blocks.pop(index, None)
            return
        if index in self._relays:
            self._relays.pop(index).join(deadline_s)
            serving = self._actors[index].leave.remote()
        else:
            serving = self._serving.pop(index)
        self.taken = bool(self._serving or self._relays)
        done, _ = ray.wait([serving], timeout=deadline_s)
        if not done:  # stopped, or stuck in a simulator: this process cannot serve again
            if index in self._blocks:
                self._kill_process(index)
            self._cluster.kill(self._actors[index])
            self._actors[index] = self._start(index)
        self._blocks.pop(index, None)

    def name(self, index: int) -> str:
        """Name of the worker in messages, with its node where that is another."""
        setup, node = self._setups.get(index), self._nodes[index]
        name = setup.name if setup is not None else f"physics {index}"
        return name if node is None else f"{name} on {node}"

    def call(self, index: int, method: str, *args: Any) -> Any:
        """Start a call of the worker's process; Ray's reference to its result."""
        return getattr(self._actors[index], method).remote(*args)

    def open(self, index: int, opening: bytes) -> Any:
        """Start to build the far end of a relay."""
        opened = self.call(index, "open", self._setups[index], opening, software())
        node = self._nodes[index]
        assert node is not None
        self._cluster.compare_kernels(node.id, self.call(index, "kernels"))  # answered after `open`: all is imported
        return opened

    def restart(self, index: int, why: str) -> None:
        """Start a new process for a far worker that was lost, on the same node if that is still there."""
        node = self._nodes[index]
        assert node is not None
        self._require_nodes([node])
        self._start_again(index, why)

    def _require_nodes(self, needed: list[NodeInfo]) -> None:
        present = {node.id for node in self._cluster.nodes()}
        for node in needed:
            if node.id not in present:
                lost = [setup.name for index, setup in sorted(self._setups.items()) if self._nodes[index] == node]
                raise WorkerFailed(
                    f"the node {node} has left the cluster, and with it {', '.join(lost)}: bring it back with `ray "
                    "start --address HOST:PORT`, or do without it, and go on with --resume auto"
                )

    def _start(self, index: int) -> Any:
        node = self._nodes[index]
        self._memory_checks[index] = MemoryChecks(settles=1)  # once built it has all that it needs
        return self._cluster.actor(_FarmActor, ONE_THREAD, HERE if node is None else node.id)

    def _serve(self, index: int) -> None:
        # First: it answers no calls while it serves.
        self._pids[index] = self._actors[index].pid.remote()
        self._serving[index] = self._actors[index].serve.remote(self._setups[index])

    def _start_again(self, index: int, why: str) -> None:
        """Start a new process in the place of a lost one, and log it."""
        self.restarts[index] = self.restarts.get(index, 0) + 1
        slots = self._memories[index].arrays
        worker = self._workers[index].lost(time.monotonic(), done_by(slots, index) if slots else 0)
        if worker.hopeless:
            raise WorkerFailed(
                f"{self.name(index)} was lost {self.restarts[index]} times, at last because {why}; see the system's "
                "log for the reason"
            )
        _log.warning("%s", f"{self.name(index)} was lost and is replaced: {why}")
        self._cluster.kill(self._actors[index])  # a far one may only have been out of reach
        self._actors[index] = self._start(index)
        self._workers[index], self._why[index] = worker.after(Event.STARTED, time.monotonic()), why

    def _replace(self, index: int, why: str) -> None:
        self._start_again(index, why)
        if slots := self._blocks[index].arrays:  # none where the farm is closing
            restarted(slots, index)
        self._serve(index)

    def _check(self, index: int) -> None:
        """Update the worker's state from its slots, and replace it if it hangs or uses too much memory."""
        slots = self._blocks[index].arrays
        if not slots:
            return
        deadline_s = self._deadline.seconds
        if (doing := hung(slots, index, deadline_s)) is not None:
            self._kill_process(index)
            self._replace(index, doing)
            return
        late = hung(slots, index, deadline_s / 2)
        if late is not None and self._workers[index].state is State.HEALTHY:
            _log.warning("%s", f"{late}; it is replaced after {deadline_s:g} s")
        self._note(index, Event.LATE if late is not None else Event.PROGRESS)
        phase = int(slots["phase"][index])
        if self._workers[index].state is State.RESTARTING and phase not in (slot_layout.STARTING, slot_layout.BUILDING):
            self._note(index, Event.BUILT)
        if self._workers[index].state is State.STALE and phase != slot_layout.REPLAYING:
            self._serves_again(index)
        built = phase not in (slot_layout.STARTING, slot_layout.BUILDING, slot_layout.REPLAYING)
        if built and (large := self._too_large(index)) is not None:
            self._kill_process(index)
            self._replace(index, large)

    def _too_large(self, index: int) -> str | None:
        error = self._limit.exceeded(self.name(index), self._pid(index), self._memory_checks[index])
        if isinstance(error, LimitTooSmall):
            raise error
        return None if error is None else str(error)

    def _note(self, index: int, event: Event) -> None:
        self._workers[index] = self._workers[index].after(event, time.monotonic())

    def opened(self, index: int) -> None:
        """Note that a far worker is built, and has replayed the episodes of its predecessor."""
        if self._workers[index].state is State.RESTARTING:
            self._note(index, Event.BUILT)
            self._serves_again(index)

    def _serves_again(self, index: int) -> None:
        """Note that the successor of a lost worker has the episodes of its predecessor."""
        self._note(index, Event.CURRENT)
        down_s = self._workers[index].down_s
        assert down_s is not None
        self.replaced.append(Replaced(self.name(index), self._why.pop(index), down_s))

    def _kill_process(self, index: int) -> None:
        """End a worker's process on this machine by a signal: a stopped process does not hear Ray."""
        if pid := self._pid(index):
            with suppress(ProcessLookupError):  # it has died meanwhile
                os.kill(pid, signal.SIGKILL)

    def _pid(self, index: int) -> int:
        """Process id of a worker on this machine; 0 until its process has answered, or if it died before."""
        known = self._pids[index]
        if isinstance(known, int):
            return known
        answered, _ = ray.wait([known], timeout=0)
        if not answered:
            return 0
        try:
            self._pids[index] = found = int(ray.get(answered[0]))
        except RayActorError:
            return 0
        return found


@dataclass(frozen=True)
class _RayFarEnd:
    """The far end of a relay, as calls of its actor."""

    host: RayHost
    index: int

    def open(self, opening: bytes) -> Future[None]:
        opened = _future(self.host.open(self.index, opening), self.host.name(self.index))
        opened.add_done_callback(lambda done: self.host.opened(self.index) if done.exception() is None else None)
        return opened

    def exchange(self, request: bytes) -> Future[bytes]:
        return _future(self.host.call(self.index, "exchange", request), self.host.name(self.index))

    def restart(self, why: str) -> None:
        self.host.restart(self.index, why)


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


@dataclass(frozen=True)
class _RayFarmHandle:
    host: RayHost
    index: int

    def ring(self) -> None:
        """Nothing to do: the farm rings in shared memory."""

    def close(self, deadline_s: float) -> None:
        self.host.end(self.index, deadline_s)
