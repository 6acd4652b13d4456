"""The farm's client, which a rollout calls. A farm has one or several tasks, and groups of environments of each.

    farm = Farm.create([spec, other_spec], InProcess())
    for group in range(farm.groups): farm.reset(group)
    group = farm.wait_ready(deadline_s=300)   # the first that is done, whatever its task
    observations = farm.collect(group)
    farm.submit(group, actions)               # returns at once

Groups have consecutive numbers: those of the first task, then those of the second, and so on. A group is either
`submitted` or `collected`; any other order of calls is an error. Between two rounds the renderers may leave the memory
and come back: `unload_renderers`, `load_renderers`. Everything that decides *what* is computed is in the tasks'
`FarmSpec` and the actions; hosts, workers and the order in which groups are served only decide where and when.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from sim_farm.client.observations import Int, Observations
from sim_farm.client.task_farm import (
    RENDERER_START_S,
    SNAPSHOT,
    Group,
    GroupError,
    GroupState,
    TaskFarm,
    WorkerFailed,
    WorkerTimeout,
    check_snapshot,
    check_spec,
    count_own_rows,
    without_episodes_under_way,
)
from sim_farm.contract import Bool, FarmError, Float32, TaskInfo
from sim_farm.episodes import ANY
from sim_farm.shared_memory.frame_memory import FrameAddress, FrameMemory, nbytes_of
from sim_farm.shared_memory.memory import Block, require, size_of
from sim_farm.shared_memory.slot_layout import BELL, FarmSpec, WorkerMemory, slot_fields
from sim_farm.workers.hosts import Host

__all__ = [
    "RENDERER_START_S",
    "Farm",
    "FarmAddress",
    "GroupError",
    "GroupState",
    "RendererSwitch",
    "TaskFarm",
    "WorkerFailed",
    "WorkerTimeout",
]


@dataclass(frozen=True)
class FarmAddress:
    """Address of a farm for another process of the machine: `Farm.attach`."""

    specs: tuple[FarmSpec, ...]
    infos: tuple[TaskInfo, ...]
    slots: tuple[str, ...]
    """Name of each task's block."""
    bell: str
    frames: FrameAddress | None


@dataclass(frozen=True)
class RendererSwitch:
    """The cost of an offload of the renderers, or of their return."""

    bytes: int
    """Private memory of the workers that was freed or taken again; 0 of workers in this process. Memory of a GPU's
    driver is not counted."""
    seconds: float


class Farm:
    """See the module's docstring. One process at a time may submit and collect; others that have attached may look."""

    def __init__(
        self,
        specs: tuple[FarmSpec, ...],
        infos: tuple[TaskInfo, ...],
        slots: Sequence[Block],
        bell: Block,
        frames: FrameMemory | None,
    ) -> None:
        self.specs, self.infos, self.frames = specs, infos, frames
        self._bell_block = bell
        tasks, first_row, first_group = [], 0, 0
        for spec, info, block in zip(specs, infos, slots, strict=True):
            memory = WorkerMemory(block, bell, frames)
            tasks.append(TaskFarm(spec, info, memory, first_row, first_group, several=len(specs) > 1))
            first_row += count_own_rows(spec)
            first_group += spec.groups
        self.tasks: tuple[TaskFarm, ...] = tuple(tasks)
        self._groups: tuple[Group, ...] = tuple(group for task in tasks for group in task.groups)
        self._bell = self.tasks[0].memory.client

    @classmethod
    def create(
        cls,
        specs: FarmSpec | Sequence[FarmSpec],
        host: Host | Sequence[Host],
        cores: Sequence[tuple[int | None, ...]] = (),
        frame_rows: int | Callable[[tuple[TaskInfo, ...]], int] | None = None,
    ) -> Farm:
        """Reserve the memory and start the workers of all tasks, one task after the other.

        `host` is one for all tasks or one for each. Worker j of task i is pinned to core `cores[i][j % len(cores[i])]`
        if any are given. `frame_rows` is the size of the frame memory, or finds it from what the tasks answer; None has
        every task's own rows: two for every environment, one for its observation and one for the final observation of
        an episode; more where decisions look back.

        Raises `FarmError`, before a worker is started, when a task's environments cannot be dealt out evenly, tasks
        differ in what they must share, or memory is short.
        """
        specs = (specs,) if isinstance(specs, FarmSpec) else tuple(specs)
        if not specs:
            raise FarmError("a farm has one task or more; give a FarmSpec for each")
        hosts = tuple(host) if isinstance(host, Sequence) else (host,) * len(specs)
        check_lengths(len(specs), hosts, cores)
        for spec in specs:
            check_spec(spec)
        for each in {id(one): one for one in hosts}.values():
            each.prepare([one for spec, its in zip(specs, hosts, strict=True) if its is each for one in spec.processes])
        infos = tuple(each.describe(spec.task) for each, spec in zip(hosts, specs, strict=True))
        check_alike(infos)
        for spec, info in zip(specs, infos, strict=True):
            if spec.observations > 1 and info.turns > 1:
                raise FarmError(
                    f"{spec.task.name} has episodes of {info.turns} turns, whose ends cut chunks short, and decisions "
                    f"on {spec.observations} observations follow whole chunks: take a policy of one observation"
                )
        rows = frame_rows(infos) if callable(frame_rows) else frame_rows
        farm = cls(specs, infos, *reserve(specs, infos, hosts[0].shared, rows))
        try:
            for task, each, pinned in zip(farm.tasks, hosts, cores or ((),) * len(specs), strict=True):
                task.launch(each, pinned)
        except BaseException:
            farm.close()
            raise
        return farm

    @classmethod
    def attach(cls, address: FarmAddress) -> Farm:
        """The client in another process than the one that created the farm and watches its workers."""
        fields = (slot_fields(spec, info) for spec, info in zip(address.specs, address.infos, strict=True))
        slots = [Block.attach(each, name) for each, name in zip(fields, address.slots, strict=True)]
        frames = None if address.frames is None else FrameMemory.attach(address.frames)
        return cls(address.specs, address.infos, slots, Block.attach(BELL, address.bell), frames)

    @property
    def address(self) -> FarmAddress:
        assert not self.in_process, "an in-process farm has no address"
        slots = tuple(str(task.memory.slots.name) for task in self.tasks)
        frames = None if self.frames is None else self.frames.address
        return FarmAddress(self.specs, self.infos, slots, str(self._bell_block.name), frames)

    @property
    def in_process(self) -> bool:
        """True if the workers are objects of this process, which a submit runs."""
        return self._bell_block.name is None

    # --- groups

    @property
    def groups(self) -> int:
        """Number of groups, over all tasks."""
        return len(self._groups)

    def task_of(self, group: int) -> int:
        """Index of the group's task."""
        return self.tasks.index(self._groups[group].task)

    def envs_of(self, group: int) -> Int:
        """Indices of the group's environments within their task, in the order of its rows."""
        return self._groups[group].envs

    def reset(self, group: int, rows: Int | None = None) -> None:
        """Begin each environment's first episode (or, after `restore`, continue where the snapshot was taken).

        `rows` [B] are as for `submit`; where decisions look back they are [B, 1 + U] (`FrameRows.at_reset`).
        """
        self._groups[group].reset(rows)

    def submit(
        self,
        group: int,
        actions: Float32,
        rows: Int | None = None,
        final_rows: Int | None = None,
        next_seeds: Int | None = None,
    ) -> None:
        """Have the group execute `actions` [B, C, A]. Returns at once; rows that are not active are ignored.

        `rows` [B] says into which rows of the frame memory the environments' next observations are drawn, `final_rows`
        [B] where the final observation of an episode goes that ends in this chunk. None: the environments' own rows,
        which are the first ones of the memory. Where decisions look back (`FarmSpec.observations`), `rows` are
        [B, 1 + J] and `final_rows` [B, 1 + F], with rows for the earlier observations that are drawn too
        (`FrameRows.at`, `ObservationHistory.final`).

        `next_seeds` [B], of `SeededEpisodes` alone, are the seeds of the episodes that begin where one ends in this
        chunk. None: those environments rest until `begin`.
        """
        self._groups[group].submit(actions, rows, final_rows, next_seeds)

    def begin(self, group: int, which: Bool, seeds: Int, actions: Float32 | None = None) -> None:
        """Begin an episode of `SeededEpisodes` in the environments of `which` [B], wherever they are, from its seed of
        `seeds` [B]. The others execute their action of `actions` [B, C, A], or are left as they are if that is None.
        Returns at once. An environment whose episode ends rests.

        The observations of those that are left are what they were. Raises `GroupError` if the group has not been
        collected, or if not all begin at first.
        """
        self._groups[group].begin(which, seeds, actions)

    def ready(self) -> list[int]:
        """Submitted groups whose results are there, the lowest number first."""
        return [group.number for group in self._submitted() if group.done()]

    def wait_ready(self, deadline_s: float = 300.0) -> int:
        """Wait until a submitted group is done, at most `deadline_s` seconds without progress of any; of several,
        return the lowest number.

        Raises `GroupError` where none is submitted, and what `collect` raises.
        """
        submitted = self._submitted()
        if not submitted:
            raise GroupError("no group is submitted; submit one before waiting")
        self.wait(
            lambda: any(group.done() for group in submitted),
            lambda: self.late(deadline_s),
            deadline_s,
            self.progress_ns,
        )
        return next(group.number for group in submitted if group.done())

    def progress_ns(self) -> int:
        """The last progress of a submitted group, on the machine's monotonic clock; 0 where none is submitted."""
        return max((group.progress_ns() for group in self._submitted()), default=0)

    def late(self, deadline_s: float) -> WorkerTimeout:
        """Return, without raising it, the error that names the worker of the submitted group whose progress is longest
        ago."""
        return min(self._submitted(), key=lambda group: group.progress_ns()).late(deadline_s)

    def collect(self, group: int, deadline_s: float = 300.0) -> Observations:
        """Wait for the group, at most `deadline_s` seconds without progress of a worker that it waits for, and read it.

        Raises `WorkerTimeout` naming the worker and what it was doing, `WorkerFailed` with its message.
        """
        awaited = self._groups[group]
        if awaited.state is not GroupState.SUBMITTED:
            raise GroupError(f"group {group} is {awaited.state.value}; submit it before collecting")
        self.wait(awaited.done, lambda: awaited.late(deadline_s), deadline_s, awaited.progress_ns)
        return awaited.read()

    def ring_client(self) -> None:
        """Wake the client: what it waits for in `wait`, beside groups, may have come."""
        self._bell.ring()

    @property
    def frame_copies(self) -> int:
        """Number of frames that this client has copied out of the frame memory so far."""
        return 0 if self.frames is None else self.frames.copies

    def _submitted(self) -> list[Group]:
        return [group for group in self._groups if group.state is GroupState.SUBMITTED]

    def wait(
        self,
        done: Callable[[], bool],
        late: Callable[[], Exception],
        deadline_s: float,
        progress_ns: Callable[[], int] = lambda: 0,
    ) -> None:
        """Wait until it is done: a group, or something else for which the client is rung (`ring_client`).

        From the last progress, whose time is `progress_ns`, the deadline counts anew. Raises what `late` returns once
        it has passed, and `WorkerFailed`.
        """
        begin_ns = time.monotonic_ns()
        while True:
            seen = self._bell.value()
            if done():
                return
            self.check()
            late_ns = time.monotonic_ns() - deadline_s * 1e9
            if begin_ns < late_ns and progress_ns() < late_ns and not done():
                raise late()
            self._bell.wait(seen, timeout_s=0.5)

    # --- snapshots and limits

    def snapshot(self) -> dict[str, np.ndarray]:
        """State of every environment: its episode and the actions executed in it. All groups must be collected.

        Arrays of task 0 have their own names, those of task i begin with `"{i}."`.
        """
        if any(group.state is not GroupState.COLLECTED for group in self._groups):
            raise GroupError("collect every group before taking a snapshot")
        return {_prefix(i) + key: task.slots[key].copy() for i, task in enumerate(self.tasks) for key in SNAPSHOT}

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Make the next `reset` continue from a snapshot: each episode is replayed from its seed and actions. Where a
        task's cannot be (`TaskInfo.inexact`), the next episodes begin."""
        parts = []
        for i, task in enumerate(self.tasks):
            prefix = _prefix(i)
            parts.append({key: snapshot[prefix + key] for key in SNAPSHOT if prefix + key in snapshot})
            check_snapshot(parts[-1], task.slots, task.spec.task)
            if task.info.inexact:
                parts[-1] = without_episodes_under_way(parts[-1])
        for task, part in zip(self.tasks, parts, strict=True):
            for key in SNAPSHOT:
                task.slots[key][...] = part.get(key, ANY)

    def hold(self, episodes: int, task: int | None = None) -> None:
        """Let every environment, of one task or of all, rest once it has ended `episodes` episodes. After a higher
        limit, `reset` begins the next episode."""
        for each in self._of(task):
            if any(group.state is GroupState.SUBMITTED for group in each.groups):
                raise GroupError("collect every group before moving the limit of episodes")
            each.slots["limit"][:] = episodes

    # --- renderers

    def unload_renderers(self, deadline_s: float = 300.0, task: int | None = None) -> RendererSwitch:
        """Have the workers that draw, of one task or of all, free their renderers with the scene replicas. None of
        their groups may be reset or submitted before `load_renderers`. Does nothing without cameras.

        Raises `GroupError` unless every group is collected, and what `collect` raises.
        """
        if any(group.state is not GroupState.COLLECTED for each in self._of(task) for group in each.groups):
            raise GroupError("collect every group before the renderers leave")
        return self._switch_renderers(True, deadline_s, task)

    def load_renderers(self, deadline_s: float = 300.0, task: int | None = None) -> RendererSwitch:
        """Build the renderers again. Their frames equal, bit for bit, those that the freed renderers would have drawn.

        Does nothing where they were not freed. Raises what `collect` raises.
        """
        return self._switch_renderers(False, deadline_s, task)

    def _switch_renderers(self, away: bool, deadline_s: float, task: int | None) -> RendererSwitch:
        begin, tasks = time.perf_counter(), self._of(task)
        if self.frames is None:
            return RendererSwitch(0, 0.0)
        for each in tasks:
            each.request_renderers(away)

        def late() -> WorkerTimeout:
            return next(filter(None, (each.late_to_switch(deadline_s) for each in tasks)))

        self.wait(lambda: all(each.switched() for each in tasks), late, deadline_s)
        return RendererSwitch(sum(each.moved_bytes() for each in tasks), time.perf_counter() - begin)

    def _of(self, task: int | None) -> tuple[TaskFarm, ...]:
        return self.tasks if task is None else (self.tasks[task],)

    # --- workers

    def built(self) -> int:
        """Environments built so far, over all tasks."""
        return sum(int(task.slots["built"][: task.spec.physics_workers].sum()) for task in self.tasks)

    def private_bytes(self) -> tuple[Int, ...]:
        """Private memory of each worker's process after building, in bytes, int64 [workers] per task; 0 of workers in
        this process and on other machines."""
        return tuple(task.slots["private_bytes"].copy() for task in self.tasks)

    @property
    def wire_bytes(self) -> int:
        """Bytes that crossed to and from physics workers on other machines so far."""
        return sum(int(task.slots["wire_bytes"].sum()) for task in self.tasks)

    def check(self) -> None:
        """Raise `WorkerFailed` with the message of a worker that met an error, or whose renderer hangs at its start."""
        for task in self.tasks:
            task.check()

    def timeout(self, deadline_s: float) -> WorkerTimeout:
        """Return, without raising it, the error that lists the work of each worker while the farm is not ready."""
        doing = "; ".join(each for task in self.tasks for each in task.doing())
        return WorkerTimeout(f"the farm was not ready within {deadline_s:.0f} s: {doing}")

    def stop(self) -> None:
        """Tell the workers to end; they end when they next check."""
        for task in self.tasks:
            task.stop()

    def close(self, deadline_s: float = 5.0) -> None:
        """End the workers and, in the process that created the farm, remove its memory."""
        self.stop()
        for task in self.tasks:
            for handle in task.handles:
                handle.close(deadline_s)
        self.detach()

    def detach(self) -> None:
        """Forget the farm's memory and leave the workers as they are: the end of a client that has attached."""
        for task in self.tasks:
            task.forget()
        self._bell_block.close()
        if self.frames is not None:
            self.frames.close()


def _prefix(task: int) -> str:
    return f"{task}." if task else ""


# --- before a farm starts: what is checked, and the memory that is reserved


def reserve(
    specs: Sequence[FarmSpec], infos: Sequence[TaskInfo], shared: bool, frame_rows: int | None
) -> tuple[list[Block], Block, FrameMemory | None]:
    """Each task's slots, the client's bell, and the frame memory where there are cameras; of `frame_rows`, or with the
    tasks' own rows.

    Raises `FarmError`, before any is taken, unless all of it fits.
    """
    cameras, size = len(infos[0].cameras), infos[0].spec.image_size
    rows = sum(map(count_own_rows, specs)) if frame_rows is None else frame_rows
    fields = [slot_fields(spec, info) for spec, info in zip(specs, infos, strict=True)]
    if shared:
        needs = {"the farm's slots": sum(size_of(each) for each in fields)}
        if cameras:
            needs[f"the frame memory ({rows:,} rows of {cameras} x {size} x {size} pixels)"] = nbytes_of(
                rows, cameras, size
            )
        require(needs)
    frames = FrameMemory.create(rows, cameras, size, shared) if cameras else None
    return [Block.create(each, shared) for each in fields], Block.create(BELL, shared), frames


def check_lengths(tasks: int, hosts: Sequence[Host], cores: Sequence[tuple[int | None, ...]]) -> None:
    """Raise `FarmError` unless there are hosts and cores for the tasks, and hosts of one kind."""
    if len(hosts) != tasks or (cores and len(cores) != tasks):
        raise FarmError(
            f"a farm of {tasks} tasks takes one host or {tasks}, and cores for none or for each task; got "
            f"{len(hosts)} hosts and cores for {len(cores)} tasks"
        )
    if len({host.shared for host in hosts}) > 1:
        raise FarmError("the workers of a farm are all in this process, or none is: give hosts of one kind")


def check_alike(infos: Sequence[TaskInfo]) -> None:
    """Raise `FarmError` where the tasks cannot share one policy and one frame memory."""
    first = infos[0]
    for other in infos[1:]:
        for what, one, two, remedy in (
            ("actions of size", first.action_dim, other.action_dim, "choose a control mode with as many in both"),
            ("cameras:", len(first.cameras), len(other.cameras), "name as many cameras for both"),
            ("an image size of", first.spec.image_size, other.spec.image_size, "give both the same image_size"),
        ):
            if one != two:
                raise FarmError(
                    f"{first.spec.name} has {what} {one} and {other.spec.name} has {what} {two}, and the tasks of one "
                    f"farm share them: {remedy}, or train the tasks in runs of their own"
                )
