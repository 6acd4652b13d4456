"""The runtime whose workers are Ray actors, on this machine or in a cluster of which this machine is a node."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, TypeVar

import ray
from ray.exceptions import RayError

from embodied.runtime.api import Args, args_of, check_group
from embodied.runtime.groups import WorkerGroup, rank_names
from embodied.runtime.handles import Handle
from embodied.runtime.ray.cluster import HERE, RayCluster
from embodied.runtime.ray.farm import RayHost
from embodied.runtime.ray.workers import TAKE_BACK_S, FarProcess, RayHandle, WorkerProcess, start_worker
from embodied.runtime.remote import Link, NodeInfo
from embodied.runtime.remote_physics import ANSWER_BYTES
from embodied.runtime.supervision import MemoryBudget, Replaced
from sim_farm.contract import FarmError
from sim_farm.render_devices import RenderDevice

T = TypeVar("T")

_Kind = tuple[tuple[str, ...], tuple[RenderDevice, ...], int]
"""Of a farm's task: the nodes of its workers, what they draw on, and how many only draw where that matters."""
SPARE = 2
"""Processes that wait for workers: as many as a run's policy worker and learner need when they are placed anew."""


DROP_S = 1.0
"""How long processes may take to forget their workers; one that is dead, stopped or busy is ended."""


class RayRuntime(RayCluster):
    """Places workers as actors; see `contract.Runtime`.

    During every wait it looks twice a second whether a worker of a farm has died or hangs, and replaces it.
    """

    def __init__(self, address: str, deadline_s: float, worker_gb: float | None = None) -> None:
        """`worker_gb`: memory that a worker's process may hold by itself (`memory_budget`)."""
        self._budget = MemoryBudget(worker_gb)
        self._processes: list[WorkerProcess] = []
        self._spare: list[WorkerProcess] = []
        self._hosts: list[tuple[_Kind, RayHost]] = []
        super().__init__(address, deadline_s)

    def link(self) -> Link:
        return slowest_link(self, [node for node in self.nodes() if not node.is_here])

    def farm_host(
        self,
        physics_workers: int,
        render_workers: int,
        physics_nodes: tuple[str, ...] = (),
        devices: tuple[RenderDevice, ...] = (),
    ) -> RayHost:
        """A host with that many processes, for one task of one farm until that is closed. The processes of an earlier
        farm's task of the same shape that draws on the same devices serve again.

        `physics_nodes` has for each physics worker the id of its node; '' or none is this one, where all others are.
        Raises `FarmError` for a node that is not there.
        """
        if len(physics_nodes) > physics_workers:
            raise FarmError(f"{len(physics_nodes)} nodes are named for {physics_workers} physics workers")
        places, known = self._known(physics_nodes)
        shape = (*places, *[HERE] * (physics_workers + render_workers - len(places)))
        kind = (shape, devices, render_workers if devices else 0)
        for other, host in self._hosts:
            if other == kind and not host.taken:
                host.taken = True
                return host
        host = RayHost(self, [known.get(place) for place in shape], self._budget)
        host.taken = True
        self._hosts.append((kind, host))
        self.watchers.append(host.watch)
        return host

    def _known(self, wanted: Sequence[str]) -> tuple[list[str], dict[str, NodeInfo]]:
        """Ids of nodes, this one's as HERE, and the nodes by id if one of them is another. Raises `FarmError` for one
        that is not there."""
        places = [HERE if node == self.here else node for node in wanted]
        known = {node.id: node for node in self.nodes()} if any(places) else {}
        for place in places:
            if place and place not in known:
                there = "; ".join(f"{node.id} is {node.name} at {node.address}" for node in known.values())
                raise FarmError(f"there is no node {place!r} in the cluster: {there}")
        return places, known

    def prepare(self, workers: int) -> None:
        self._spare += [self._process() for _ in range(workers - len(self._spare))]

    def place(self, name: str, make: Callable[..., T], *args: Any, beside: Handle[Any] | None = None) -> Handle[T]:
        return self._place(name, [name], make, [args], [beside], [HERE]).handles[0]

    def place_called(self, name: str, make: Callable[..., T], callers: int, *args: Any) -> WorkerGroup[T]:
        process = WorkerProcess(self, callers + 1)  # and this process
        self._processes.append(process)
        return self._start([process], [process], name, [name], make, [args])

    def place_group(
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
        return self._place(name, rank_names(name, size), make, args_of(args, size), beside or [None] * size, places)

    def _place(
        self,
        name: str,
        names: Sequence[str],
        make: Callable[..., T],
        args: Sequence[tuple[Any, ...]],
        beside: Sequence[Handle[Any] | None],
        nodes: Sequence[str],
    ) -> WorkerGroup[T]:
        """Each rank in a process of its own, or in that of the other."""
        new: list[WorkerProcess] = []
        processes = []
        for other, node in zip(beside, nodes, strict=True):
            if isinstance(other, RayHandle):
                processes.append(other.process)
                continue
            new.append(self._spare.pop() if self._spare and node == HERE else self._process(node))
            processes.append(new[-1])
        return self._start(processes, new, name, names, make, args)

    def _start(
        self,
        processes: Sequence[WorkerProcess],
        new: Sequence[WorkerProcess],
        name: str,
        names: Sequence[str],
        make: Callable[..., T],
        args: Sequence[tuple[Any, ...]],
    ) -> WorkerGroup[T]:
        """Start every rank in its process, then wait for all. Where one fails, the `new` processes are ended."""
        started = [
            start_worker(self, process, self._give_back, self._end, mine, make, its_args)
            for process, mine, its_args in zip(processes, names, args, strict=True)
        ]
        group: WorkerGroup[T] = WorkerGroup(name, tuple(handle for handle, _ in started))
        try:
            group.get([call for _, call in started])
        except BaseException:
            for process in new:
                self._end(process)
            for handle, _ in started:
                if handle.process not in new:
                    handle.process.workers.remove(handle.name)
                    handle.process.actor.drop.remote(handle.name)
            raise
        return group

    def take_replaced(self) -> list[Replaced]:
        found = [one for _, host in self._hosts for one in host.replaced]
        for _, host in self._hosts:
            host.replaced.clear()
        return found

    def too_large(self) -> Exception | None:
        for process in list(self._processes):
            wrong = self._budget.exceeded(" and ".join(process.workers), process.pid, process.watched)
            if wrong is None:
                continue
            if process.workers:
                process.of_use = False
                return wrong
            self._end(process)  # a spare one, which the next worker would grow
        return None

    def workers_by_process(self) -> dict[int, tuple[str, ...]]:
        """The workers that each process holds, by its number."""
        return {process.pid: tuple(process.workers) for process in list(self._processes)}

    def end_workers(self) -> None:
        if self.ray_processes.lost() is not None:
            self._begin_anew()
            return
        used = [process for process in self._processes if process not in self._spare]
        asked = {process.actor.drop_all.remote(): process for process in used if process.of_use}
        answered = ray.wait(list(asked), num_returns=len(asked), timeout=DROP_S)[0] if asked else []
        kept = [process for reference, process in asked.items() if reference in answered and _may_serve(reference)]
        for process in used:
            self._give_back(process, process in kept)

    def close(self) -> None:
        taking = [process.take_back() for process in self._processes if isinstance(process, FarProcess)]
        if taking:
            ray.wait(taking, num_returns=len(taking), timeout=TAKE_BACK_S)
        super().close()
        for process in self._processes:
            process.forget()
        self._processes.clear()
        self._spare.clear()

    def _begin_anew(self) -> None:
        """Without any of the processes that there were."""
        for process in self._processes:
            process.forget()
        for everything in (self._processes, self._spare, self._hosts, self.watchers):
            everything.clear()
        self.start_ray_again()

    def _process(self, node: str = HERE) -> WorkerProcess:
        self._processes.append(WorkerProcess(self) if node == HERE else FarProcess(self, node))
        return self._processes[-1]

    def _give_back(self, process: WorkerProcess, of_use: bool) -> None:
        """A process without workers waits for the next ones, its packages imported. More than a few are ended, and
        those that are of no use to others."""
        process.workers.clear()
        if of_use and len(self._spare) < SPARE and process.of_use:
            self._spare.append(process)
        else:
            self._end(process)

    def _end(self, process: WorkerProcess) -> None:
        if process in self._processes:
            self._processes.remove(process)
            if process in self._spare:
                self._spare.remove(process)
            process.kill()


def _may_serve(answered: Any) -> bool:
    """Whether the process that has answered lives and may serve other workers."""
    try:
        return bool(ray.get(answered))
    except RayError:
        return False


# --- How long messages take between machines: a few small calls of the kind that a relay makes.


CALLS = 25
"""Of each size; the median counts, since now and then a machine does something else."""
SMALL = 256


@ray.remote(num_cpus=0, max_restarts=0)
class _Echo:
    def echo(self, message: bytes) -> bytes:
        return message


def slowest_link(cluster: RayCluster, nodes: Sequence[NodeInfo]) -> Link:
    """The largest figures of the ways to these machines, from calls that carry as much there as back.

    Takes a process on each, which is the most of it, and some tens of milliseconds a machine. Raises what
    `RayCluster.wait` does.
    """
    actors = [cluster.actor(_Echo, {}, node.id) for node in nodes]
    try:
        started = [actor.echo.remote(b"") for actor in actors]
        for node, reference in zip(nodes, started, strict=True):
            cluster.wait(reference, f"a process on {node}", "start")
        reached = list(zip(actors, nodes, strict=True))
        small, large = (max(_call_s(cluster, *one, bytes(size)) for one in reached) for size in (SMALL, ANSWER_BYTES))
    finally:
        for actor in actors:
            cluster.kill(actor)
    return Link(small / 2, 2 * (ANSWER_BYTES - SMALL) / max(large - small, 1e-6))


def _call_s(cluster: RayCluster, actor: Any, node: NodeInfo, message: bytes) -> float:
    times = []
    for _ in range(CALLS):
        begin = time.perf_counter()
        cluster.wait(actor.echo.remote(message), f"a process on {node}", "answer")
        times.append(time.perf_counter() - begin)
    return median(times)
