"""The runtime whose policy workers and learners are Ray actors, on this machine or in a cluster that it is part of."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from embodied.runtime.api import Args, Link, NodeInfo, args_of, check_group
from embodied.runtime.handles import Handle, WorkerGroup, rank_names
from embodied.runtime.ray.actors import REMOVE_S, Call, FarProcess, RayHandle, WorkerProcess
from embodied.runtime.ray.cluster import HERE, RayCluster
from embodied.runtime.ray.far_physics import FarHost
from embodied.runtime.remote import ANSWER_BYTES
from sim_farm.contract import FarmError
from sim_farm.workers.processes import Processes
from sim_farm.workers.supervision import MemoryLimit

T = TypeVar("T")

SPARE = 2
"""Processes that wait for workers: enough for a run's policy worker and learner when they are placed again."""
DROP_S = 1.0
"""Longest wait for processes to drop their workers; a dead, stopped or busy one is ended."""
LINK_CALLS = 25
"""Calls of each size that measure a link; the median counts, since a machine is sometimes busy with something else."""
SMALL_BYTES = 256


class RayRuntime(RayCluster):
    """Starts workers as actors; see `api.Runtime`.

    Every wait checks twice a second for farm workers that died or hang, and replaces them.
    """

    def __init__(self, address: str, deadline_s: float, worker_gb: float | None = None) -> None:
        """`worker_gb`: private memory that a worker's process may use (`supervision.MemoryLimit`)."""
        super().__init__(address, deadline_s)
        self._limit = MemoryLimit(worker_gb, "runtime.worker_gb")
        self._processes: list[WorkerProcess] = []
        self._spare: list[WorkerProcess] = []
        # A worker has less time than the collection from the farm, and that less than a call.
        self.host = Processes(deadline_s, self.deadline.inner().inner().seconds, self._limit, shows_output=False)
        self.watchers.append(self.host.watch)
        self._far_idle: dict[str, list[Any]] = {}

    def link(self) -> Link:
        """The slowest of the links to the other machines, from calls that carry as much there as back.

        Starts a process on each, which takes most of the time, and then some tens of milliseconds per machine. Raises
        what `RayCluster.wait` does.
        """
        nodes = [node for node in self.nodes() if not node.is_here]
        actors = [self.actor(_Echo, {}, node.id) for node in nodes]
        try:
            started = [actor.echo.remote(b"") for actor in actors]
            for node, reference in zip(nodes, started, strict=True):
                self.wait(reference, f"a process on {node}", "start")
            small_s, large_s = (
                max(self._echo_s(actor, node, bytes(size)) for actor, node in zip(actors, nodes, strict=True))
                for size in (SMALL_BYTES, ANSWER_BYTES)
            )
        finally:
            for actor in actors:
                self.kill(actor)
        return Link(small_s / 2, 2 * (ANSWER_BYTES - SMALL_BYTES) / max(large_s - small_s, 1e-6))

    def _echo_s(self, actor: Any, node: NodeInfo, message: bytes) -> float:
        times = []
        for _ in range(LINK_CALLS):
            begin = time.perf_counter()
            self.wait(actor.echo.remote(message), f"a process on {node}", "answer")
            times.append(time.perf_counter() - begin)
        return median(times)

    def far_host(self, physics_nodes: Sequence[str]) -> FarHost:
        places, known = self._known(physics_nodes)
        return FarHost(self, [known.get(place) for place in places], self.host, self._far_idle)

    def _known(self, wanted: Sequence[str]) -> tuple[list[str], dict[str, NodeInfo]]:
        """Ids of nodes, with HERE for this one, and the nodes by id if one of them is another. Raises `FarmError` for
        an unknown node."""
        places = [HERE if node == self.here else node for node in wanted]
        known = {node.id: node for node in self.nodes()} if any(places) else {}
        for place in places:
            if place and place not in known:
                there = "; ".join(f"{node.id} is {node.name} at {node.address}" for node in known.values())
                raise FarmError(f"there is no node {place!r} in the cluster: {there}")
        return places, known

    def prepare(self, workers: int) -> None:
        self._spare += [self._process() for _ in range(workers - len(self._spare))]

    def start(self, name: str, make: Callable[..., T], *args: Any, beside: Handle[Any] | None = None) -> Handle[T]:
        return self.start_group(name, make, 1, args, [beside]).handles[0]

    def start_called(self, name: str, make: Callable[..., T], callers: int, *args: Any) -> WorkerGroup[T]:
        process = WorkerProcess(self, callers + 1)  # and this process
        self._processes.append(process)
        return self._start(name, make, [args], [process], new=[process])

    def start_group(
        self,
        name: str,
        make: Callable[..., T],
        size: int,
        args: Args = (),
        beside: Sequence[Handle[Any] | None] = (),
        nodes: Sequence[str] = (),
    ) -> WorkerGroup[T]:
        check_group(name, size, beside)
        places, _ = self._known(nodes or [HERE] * size)
        new: list[WorkerProcess] = []
        processes = []
        for other, node in zip(beside or [None] * size, places, strict=True):
            if isinstance(other, RayHandle):
                processes.append(other.process)
                continue
            new.append(self._spare.pop() if self._spare and node == HERE else self._process(node))
            processes.append(new[-1])
        return self._start(name, make, args_of(args, size), processes, new)

    def _start(
        self,
        name: str,
        make: Callable[..., T],
        args: Sequence[tuple[Any, ...]],
        processes: Sequence[WorkerProcess],
        new: Sequence[WorkerProcess],
    ) -> WorkerGroup[T]:
        """Start every rank in its process, then wait for all. Where one fails, the `new` processes are ended."""
        handles: list[RayHandle[T]] = []
        started = []
        for process, its_name, its_args in zip(processes, rank_names(name, len(processes)), args, strict=True):
            process.workers.append(its_name)
            handles.append(
                RayHandle(
                    its_name, self.deadline, cluster=self, process=process, give_back=self._give_back, kill=self._end
                )
            )
            started.append(Call(process.actor.make.remote(its_name, make, its_args), "start", (process,), its_name))
        group: WorkerGroup[T] = WorkerGroup(name, tuple(handles))
        try:
            group.get(started)
        except BaseException:
            for process in new:
                self._end(process)
            for handle in handles:
                if handle.process not in new:
                    handle.process.workers.remove(handle.name)
                    handle.process.actor.drop.remote(handle.name)
            raise
        return group

    def too_large(self) -> Exception | None:
        for process in list(self._processes):
            error = self._limit.exceeded(" and ".join(process.workers), process.pid, process.memory_checks)
            if error is None:
                continue
            if process.workers:
                process.reusable = False
                return error
            self._end(process)  # a spare one, which the next worker would grow
        return None

    def workers_by_process(self) -> dict[int, tuple[str, ...]]:
        """Names of the workers in each process, by process id."""
        return {process.pid: tuple(process.workers) for process in list(self._processes)}

    def end_workers(self) -> None:
        if self.ray_processes.lost() is not None:
            self._begin_anew()
            return
        used = [process for process in self._processes if process not in self._spare]
        calls = {process.actor.drop_all.remote(): process for process in used if process.reusable}
        answered = ray.wait(list(calls), num_returns=len(calls), timeout=DROP_S)[0] if calls else []
        kept = [process for reference, process in calls.items() if reference in answered and _may_serve(reference)]
        for process in used:
            self._give_back(process, process in kept)

    def close(self) -> None:
        self.host.close()
        removing = [process.remove_published() for process in self._processes if isinstance(process, FarProcess)]
        if removing:
            ray.wait(removing, num_returns=len(removing), timeout=REMOVE_S)
        super().close()
        for process in self._processes:
            process.forget()
        self._processes.clear()
        self._spare.clear()

    def _begin_anew(self) -> None:
        """Start Ray again, without any of the earlier processes."""
        for process in self._processes:
            process.forget()
        for everything in (self._processes, self._spare, self._far_idle, self._kernels):
            everything.clear()
        self.start_ray_again()

    def _process(self, node: str = HERE) -> WorkerProcess:
        self._processes.append(WorkerProcess(self) if node == HERE else FarProcess(self, node))
        return self._processes[-1]

    def _give_back(self, process: WorkerProcess, reusable: bool) -> None:
        """Keep a process without workers for the next ones, its packages imported. Processes beyond `SPARE`, and those
        that may not serve others, are ended."""
        process.workers.clear()
        if reusable and len(self._spare) < SPARE and process.reusable:
            self._spare.append(process)
        else:
            self._end(process)

    def _end(self, process: WorkerProcess) -> None:
        if process in self._processes:
            self._processes.remove(process)
            if process in self._spare:
                self._spare.remove(process)
            process.kill()


@ray.remote(num_cpus=0, max_restarts=0)
class _Echo:
    """Answers calls of the kind that a relay makes."""

    def echo(self, message: bytes) -> bytes:
        return message


def _may_serve(answered: Any) -> bool:
    """True if the process that has answered lives and may serve other workers."""
    try:
        return bool(ray.get(answered))
    except RayError:
        return False
