"""Sessions: a started runtime, with farms and replayers on it, for training, evaluation and recording."""

from __future__ import annotations

import os
import socket
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from embodied.config.schema import Config
from embodied.devices import find_device
from embodied.errors import UserError
from embodied.execution.assignment import FarmAssignment, configured_farm
from embodied.imports import uncollected
from embodied.reporting.live import steps
from embodied.runtime.api import InlineRuntime, Runtime
from embodied.runtime.handles import Handle
from sim_farm.client.episode_replay import Replayer
from sim_farm.client.farm import Farm, FarmAddress
from sim_farm.contract import TaskInfo, TaskSpec
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers import faults


@dataclass(frozen=True)
class Session:
    """A runtime, and the farms on it. Ray is started while simulators import: for the descriptions of their tasks
    (`describe`) if they are asked for them, else for the first farm."""

    config: Config
    runtime: Runtime
    cores: tuple[int, ...]

    @property
    def nodes(self) -> dict[str, str]:
        """Ids of the cluster's machines by name and by address; '' for this one."""
        if self.config.runtime.address == "local":
            return {} if self.config.runtime.mode == "inline" else {socket.gethostname(): "", "127.0.0.1": ""}
        found: dict[str, str] = {}
        for node in self.runtime.nodes():
            ident = "" if node.is_here else node.id
            found |= {node.name: ident, node.address: ident}
        return found

    def describe(self, tasks: Sequence[TaskSpec], farms: Sequence[FarmSpec], workers: int) -> tuple[TaskInfo, ...]:
        """Ask the simulators for descriptions of the tasks, before a farm is built. While the processes for the workers
        of `farms` import their simulators, Ray is started, with processes for as many `workers`."""
        host = self.runtime.host
        host.prepare([one for farm in farms for one in farm.processes])
        self._prepare(workers)
        return tuple(map(host.describe, tasks))

    @contextmanager
    def farm(
        self,
        specs: FarmSpec | Sequence[FarmSpec],
        assignments: Sequence[FarmAssignment] = (),
        frame_rows: Callable[[tuple[TaskInfo, ...]], int] | None = None,
        workers: int = 0,
    ) -> Iterator[Farm]:
        """A farm with all its environments built; its workers and memory are gone when the block ends.

        `assignments` of each task; none: as configured, for as many workers as the farm has. While environments are
        built, processes are started for the `workers` that the block will start.
        """
        specs = (specs,) if isinstance(specs, FarmSpec) else tuple(specs)
        placed = assignments or [self._configured(spec) for spec in specs]
        hosts = [
            self.runtime.far_host(place.physics_nodes) if any(place.physics_nodes) else self.runtime.host
            for place in placed
        ]
        cores = () if self.config.runtime.mode == "inline" else tuple(place.cores for place in placed)
        farm = Farm.create(specs, hosts, cores, frame_rows)
        try:
            self._prepare(workers)
            _await_built(farm, self.runtime)
            yield farm
        finally:
            farm.close()

    def reach(self, farm: Farm) -> Farm | FarmAddress:
        """The farm as a worker of this runtime can be given it."""
        return farm if farm.in_process else farm.address

    def _prepare(self, workers: int) -> None:
        """Start processes for workers, and Ray before the first."""
        if workers and not self.runtime.started:
            with steps("Starting Ray", None):
                self.runtime.prepare(workers)
        else:
            self.runtime.prepare(workers)

    def _configured(self, spec: FarmSpec) -> FarmAssignment:
        workers = {"physics_workers": spec.physics_workers, "render_workers": spec.render_workers}
        config = self.config.model_copy(update={"farm": self.config.farm.model_copy(update=workers)})
        return configured_farm(config, self.cores, self.nodes)


@contextmanager
def open_session(config: Config) -> Iterator[Session]:
    """The runtime that the configuration names; whatever happens in the block, no worker outlives it.

    Raises `UserError` where the policy's device is not there, or the faults to be injected cannot be read: workers
    would say so too, but only after minutes.
    """
    find_device(config.policy.device)
    if named := os.environ.get(faults.VARIABLE):
        try:
            faults.read(Path(named))
        except ValueError as error:
            raise UserError(str(error)) from error
    cores = tuple(sorted(os.sched_getaffinity(0)))
    runtime: Runtime
    if config.runtime.mode == "inline":
        runtime = InlineRuntime(config.runtime.deadline_s)
    else:
        with uncollected():
            from embodied.runtime.ray.runtime import RayRuntime

        runtime = RayRuntime(config.runtime.address, config.runtime.deadline_s, config.runtime.worker_gb)
    try:
        yield Session(config, runtime, cores)
    finally:
        runtime.close()


def _await_built(farm: Farm, runtime: Runtime) -> None:
    """Show how the environments come into being; the farm itself notices workers that fail at it.

    Raises `WorkerTimeout` when none has come into being for the runtime's deadline.
    """
    deadline_s, last, total = runtime.deadline.seconds, time.monotonic(), sum(spec.num_envs for spec in farm.specs)
    names = ", ".join(dict.fromkeys(spec.task.name for spec in farm.specs))
    with steps(f"Building {total} environments of {names}", total) as bar:
        known = 0
        while known < total:
            farm.check()
            runtime.watch()
            now = farm.built()
            if now > known:
                bar.advance(now - known)
                known, last = now, time.monotonic()
            elif time.monotonic() - last > deadline_s:
                raise farm.timeout(deadline_s)
            time.sleep(0.05)  # building takes tens of milliseconds and more


# --- replayers: episodes replayed by several workers at once, for datasets


Item = TypeVar("Item")
Result = TypeVar("Result")
Worker = TypeVar("Worker")


def replayers_of(first: Handle[Replayer], task: TaskSpec, session: Session, episodes: int) -> list[Handle[Replayer]]:
    """Replayers, `first` among them: one per core, at most one per episode; one if everything runs in this process."""
    count = min(len(session.cores), episodes) if session.config.runtime.mode == "ray" else 1
    session.runtime.prepare(count - 1)
    return [first, *(session.runtime.start(f"replayer {i}", Replayer, task) for i in range(1, count))]


def in_order(
    workers: Sequence[Handle[Worker]], items: Sequence[Item], submit: Callable[[Handle[Worker], Item], Result]
) -> Iterator[tuple[Item, Result]]:
    """Each item with its result, in order; every worker is at work while the caller deals with one.

    `submit` starts an item on a worker and returns the reference that its handle's `submit` does.
    """
    pending: deque[tuple[Handle[Worker], Item, Result]] = deque()
    for number, item in enumerate(items):
        worker = workers[number % len(workers)]
        pending.append((worker, item, submit(worker, item)))
        if len(pending) > len(workers):
            done, finished, reference = pending.popleft()
            yield finished, done.get(reference)
    for done, finished, reference in pending:
        yield finished, done.get(reference)
