"""One task of a farm: its workers, its groups of environments and its block of slots.

A `Group` requests actions of its environments and reads their results. A `TaskFarm` starts the workers, wakes them,
switches their renderers and says which one is late. `Farm` waits, for the groups of all tasks at once.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping, Sequence

import numpy as np

from sim_farm.catalogue import exact_split
from sim_farm.client import health
from sim_farm.client.observations import FramePlaces, Int, Observations, read
from sim_farm.contract import Bool, FarmError, Float32, TaskInfo, TaskSpec
from sim_farm.episodes import ANY
from sim_farm.observation_history import FrameRows
from sim_farm.shared_memory import slot_layout
from sim_farm.shared_memory.doorbell import Doorbell
from sim_farm.shared_memory.slot_layout import FINAL_FRAMES, FarmSpec, GroupSlots, WorkerMemory
from sim_farm.workers.hosts import Host, WorkerHandle
from sim_farm.workers.supervision import WorkerFailed
from sim_farm.workers.worker import WorkerSetup

RENDERER_START_S = 120.0
"""Longest start of a renderer: an EGL driver that hangs does so silently and for ever."""


class GroupState(enum.Enum):
    IDLE = "not yet reset"
    SUBMITTED = "submitted"
    COLLECTED = "collected"


class GroupError(FarmError):
    """A call out of order; the message names the call that must come first."""


class WorkerTimeout(FarmError):
    """A worker did not answer within the deadline."""


# --- groups of environments


class Group:
    """A group of environments of one task. It is either submitted or collected."""

    def __init__(self, task: TaskFarm, index: int, number: int, first_row: int) -> None:
        """`index` is the group's within its task, `number` within the farm. `first_row` is the first row of the frame
        memory that is the task's own."""
        self.task, self.number = task, number
        self.state = GroupState.IDLE
        self._slots = GroupSlots(task.spec, task.slots, index)
        self.envs: Int = self._slots.envs
        """[B] indices of the group's environments within their task, in the order of its rows."""
        self._workers = sorted({task.spec.worker_of(env) for env in self.envs.tolist()})
        self._ticket = 0
        self._history = task.spec.history
        self._own_rows = own_rows(task.spec, first_row)
        finals = first_row + self._own_rows.count + task.spec.num_envs * np.arange(1 + self._history.final)
        self._own_final_rows: Int = finals + self.envs[:, None]
        self._round = 0
        """Place of the next observations in the ring of the task's own rows."""
        # -1: without cameras.
        self._rows: Int = np.full((len(self.envs), 1 + len(self._history.kept)), -1)
        """[B, 1 + U] rows of the present observations, and of earlier ones that decisions may refer to."""
        self._final_rows: Int = np.full((len(self.envs), self._history.observations), -1)
        """[B, K] rows of the observations of an episode that has ended in the last chunk, its final one last."""

    def reset(self, rows: Int | None) -> None:
        """See `Farm.reset`."""
        if self.state is GroupState.SUBMITTED:
            raise GroupError(f"group {self.number} is submitted; collect it before a reset")
        self._require_renderers()
        if self.task.memory.frames is not None:
            own = self._own_rows.at_reset(self._round, self.envs)
            self._rows = self._checked("rows", own if rows is None else rows, self._rows.shape[1])
            self._slots.put("frame_row", self._rows[:, 0])
            self._slots.put("past_row", self._rows[:, 1:])
        self._request(slot_layout.RESET)

    def submit(self, actions: Float32, rows: Int | None, final_rows: Int | None, next_seeds: Int | None = None) -> None:
        """See `Farm.submit`."""
        if self.state is not GroupState.COLLECTED:
            raise GroupError(f"group {self.number} is {self.state.value}; collect it before submitting")
        self._require_renderers()
        self._put_actions(actions)
        self._place_frames(rows, final_rows)
        self._slots.put("next_start", np.full(len(self.envs), ANY) if next_seeds is None else next_seeds)
        self._request(slot_layout.STEP)

    def begin(self, which: Bool, seeds: Int, actions: Float32 | None) -> None:
        """See `Farm.begin`."""
        if self.state is GroupState.SUBMITTED:
            raise GroupError(f"group {self.number} is submitted; collect it before an episode is begun")
        if self.state is GroupState.IDLE and not which.all():
            raise GroupError(f"group {self.number} is not yet reset; begin an episode in all of its environments first")
        if self._history.observations > 1:
            raise GroupError("episodes are begun one by one where a decision is made on one observation: use `reset`")
        self._require_renderers()
        if actions is not None:
            self._put_actions(actions)
        self._place_frames(None, None)
        slots = self._slots
        slots.put("base_episode", slots.get("base_episode") + which)
        slots.put("base_step", np.where(which, 0, slots.get("base_step")))
        slots.put("base_start", np.where(which, seeds, slots.get("base_start")))
        slots.fill("next_start", ANY)
        op = np.where(which, slot_layout.RESET, slot_layout.STEP)
        self._request(op, which if actions is None else np.ones_like(which))

    def done(self) -> bool:
        """True if the results of the last request are complete."""
        slots = self._slots
        requested = slots.view("requested")
        # Both: a fused worker sets `drawn` first.
        return bool((slots.view("simulated") == requested).all() and (slots.view("drawn") == requested).all())

    def read(self) -> Observations:
        """The observations, once they are done; the group is then collected."""
        slots, task = self._slots, self.task
        fresh = slots.get("requested") == self._ticket
        begun = slots.get("episode_step") == 0
        self._rows[begun] = self._rows[begun, :1]  # the first observation stands for those before it
        rows = self._history.rows_of(self._rows)
        places = FramePlaces(task.memory.frames, task.info.cameras, rows, self._final_rows)
        seen = read(task.slots, slots, self._history, places, fresh)
        slots.put("base_episode", seen.episode)
        slots.put("base_step", seen.episode_step)
        slots.put("base_start", np.where(seen.active, seen.start, ANY))
        slots.put("collected", slots.get("requested"))
        self.state = GroupState.COLLECTED
        return seen

    def forget(self) -> None:
        """Forget the slots; the group can only be asked for its environments from now on."""
        self._slots.forget()

    def progress_ns(self) -> int:
        """The last progress of the worker that holds the group up: of those that have work of it, the one whose
        progress is longest ago. On the machine's monotonic clock; now, where the group waits for none."""
        since = [health.stuck_since_ns(self.task.slots, worker) for worker in self._awaited()]
        return min((begin_ns for begin_ns in since if begin_ns is not None), default=time.monotonic_ns())

    def late(self, deadline_s: float) -> WorkerTimeout:
        """Return, without raising it, the error that names the worker of the group whose progress is longest ago."""
        return self.task.late(self._awaited(), deadline_s)

    def _awaited(self) -> dict[int, str]:
        """The workers that have work of the group, and the work."""
        slots, found = self.task.slots, dict[int, str]()
        for env in self.envs.tolist():
            if slots["simulated"][env] != slots["requested"][env]:
                found.setdefault(int(slots["physics_of"][env]), f"with environment {env} to simulate")
            elif slots["drawn"][env] != slots["requested"][env]:
                found.setdefault(int(slots["renderer_of"][env]), f"with environment {env} to draw")
        return found

    def _require_renderers(self) -> None:
        if self.task.slots["away"][0]:
            raise GroupError("the renderers are away; load_renderers() before a group is reset or submitted")

    def _put_actions(self, actions: Float32) -> None:
        expected = (len(self.envs), self.task.spec.chunk, self.task.info.action_dim)
        if actions.shape != expected:
            raise FarmError(f"group {self.number} takes actions of shape {expected}, got {actions.shape}")
        self._slots.put("action", actions)

    def _request(self, op: int | Int, which: Bool | None = None) -> None:
        """Request `op`, of all environments or of `which` [B]; `op` may be one for each."""
        slots = self._slots
        ticket = int(self.task.slots["requested"].max()) + 1
        whole = np.ones(len(self.envs), np.bool_) if which is None else which
        slots.put("op", np.where(whole, op, slots.get("op")))
        slots.put("requested_ns", np.where(whole, time.monotonic_ns(), slots.get("requested_ns")))
        slots.put("requested", np.where(whole, ticket, slots.get("requested")))
        self._ticket = ticket
        self.state = GroupState.SUBMITTED
        self.task.ring(self._workers)

    def _place_frames(self, rows: Int | None, final_rows: Int | None) -> None:
        """Choose the rows of the next observations and, if an episode's end may be drawn, of the final ones."""
        if self.task.memory.frames is None:
            return
        history, slots = self._history, self._slots
        if self.task.spec.final_frames != "never":
            given = self._own_final_rows if final_rows is None else final_rows
            ends = self._checked("final_rows", given, 1 + history.final)
            slots.put("final_row", ends[:, 0])
            slots.put("final_past_row", ends[:, 1:] if history.final else np.full((len(ends), len(history.back)), -1))
            earlier = ends[:, 1:] if history.final else history.final_rows_of(self._rows)
            self._final_rows = np.concatenate([earlier, ends[:, :1]], axis=1)
        self._round = (self._round + 1) % self._own_rows.rounds
        own = self._own_rows.at(self._round, self.envs)
        drawn = self._checked("rows", own if rows is None else rows, 1 + history.new)
        self._rows = history.next_rows(self._rows, drawn)
        slots.put("frame_row", drawn[:, 0])
        slots.fill("past_row", -1)
        past = slots.get("past_row")
        past[:, : history.new] = drawn[:, 1:]
        slots.put("past_row", past)

    def _checked(self, argument: str, rows: Int, width: int) -> Int:
        """[B, width] rows of the frame memory; [B] where `width` is 1. Raises `FarmError` for any other."""
        assert self.task.memory.frames is not None
        there, count = self.task.memory.frames.rows, len(self.envs)
        shapes = [(count, width), *([(count,)] if width == 1 else [])]
        different = rows.shape in shapes and len(np.unique(rows)) == rows.size
        if not different or rows.min() < 0 or rows.max() >= there:
            raise FarmError(
                f"group {self.number} takes {count * width} different `{argument}` from 0 to {there - 1}, got "
                f"{rows.tolist()}: give others, or make the farm with more frame_rows"
            )
        return rows.reshape(count, width)


# --- the farm of one task


class TaskFarm:
    """See the module's docstring. `first_row` and `first_group` are the task's first row of the frame memory and the
    number of its first group in the farm."""

    def __init__(
        self,
        spec: FarmSpec,
        info: TaskInfo,
        memory: WorkerMemory,
        first_row: int = 0,
        first_group: int = 0,
        several: bool = False,
    ) -> None:
        self.spec, self.info, self.memory = spec, info, memory
        self.handles: list[WorkerHandle] = []
        """The workers, in the process that has launched them."""
        self.slots = memory.slots.arrays
        """See `slot_layout`."""
        self.groups = tuple(Group(self, i, first_group + i, first_row) for i in range(spec.groups))
        self._bells = [Doorbell(self.slots["bells"], worker) for worker in range(spec.workers)]
        self._several = several

    def launch(self, host: Host, cores: Sequence[int | None]) -> None:
        """Start the workers, worker i on core `cores[i % len(cores)]` if any are given."""
        spec, slots = self.spec, self.slots
        draws = spec.drawers if self.info.cameras else range(0)
        slots["draws"][draws.start : draws.stop] = True
        for env in range(spec.num_envs):
            slots["physics_of"][env] = spec.worker_of(env)
            if self.info.cameras and spec.render_workers:
                slots["renderer_of"][env] = spec.physics_workers + spec.renderer_of(env)
        for index in range(spec.workers if self.info.cameras else spec.physics_workers):
            core = cores[index % len(cores)] if cores else None
            setup = WorkerSetup(spec, self.info, index, self.memory.address, core, self._several)
            self.handles.append(host.launch(setup, self.memory))

    # --- renderers

    def request_renderers(self, away: bool) -> None:
        """Request that the workers that draw free their renderers, or build them. `switched` is true once all have."""
        if not self.info.cameras:
            return
        self.slots["moved_bytes"][:] = 0
        self.slots["away_ns"][0] = time.monotonic_ns()
        self.slots["away"][0] = away
        self.ring(self.spec.drawers)

    def switched(self) -> bool:
        """True if every worker that draws has done what `request_renderers` requested."""
        return not self._slow_to_switch()

    def moved_bytes(self) -> int:
        """Private memory of the workers that the last switch freed or took, in bytes."""
        return int(self.slots["moved_bytes"].sum())

    def late_to_switch(self, deadline_s: float) -> WorkerTimeout | None:
        """The error that names a worker that is still to switch; None if all have switched."""
        slow = self._slow_to_switch()
        if not slow:
            return None
        wish = "free" if self.slots["away"][0] else "start"
        return self.late(dict.fromkeys(slow, f"with its renderer to {wish}"), deadline_s)

    def _slow_to_switch(self) -> list[int]:
        left, away = self.slots["left"], self.slots["away"][0]
        return [worker for worker in self.spec.drawers if left[worker] != away] if self.info.cameras else []

    # --- workers

    def ring(self, workers: Sequence[int]) -> None:
        """Wake the workers. In one process that runs all of them: physics comes first, so that one pass also draws."""
        if self.memory.slots.name is not None:
            for worker in workers:
                self._bells[worker].ring()
            return
        for handle in self.handles:
            handle.ring()

    def check(self) -> None:
        """Raise `WorkerFailed` with the message of a worker that met an error, or whose renderer hangs at its start."""
        phases = self.slots["phase"]
        if phases.max() < slot_layout.FAILED:
            return
        for worker in np.flatnonzero(phases == slot_layout.OPENING).tolist():
            since_s = (time.monotonic_ns() - int(self.slots["since_ns"][worker])) / 1e9
            if since_s > RENDERER_START_S:
                raise WorkerFailed(
                    f"{self.worker_name(worker)} has been starting its renderer for {since_s:.0f} s and hangs, as "
                    "EGL does with a driver that does not fit: try MUJOCO_GL=osmesa, or another of farm.devices; "
                    "`embodied doctor` says what answers"
                )
        for worker in np.flatnonzero(phases == slot_layout.FAILED).tolist():
            raise WorkerFailed(bytes(self.slots["message"][worker]).rstrip(b"\0").decode(errors="replace"))

    def doing(self) -> list[str]:
        """Phase of each worker."""
        phases = self.slots["phase"].tolist()
        return [f"{self.worker_name(worker)} is {slot_layout.PHASES[phase]}" for worker, phase in enumerate(phases)]

    def worker_name(self, worker: int) -> str:
        return WorkerSetup(self.spec, self.info, worker, None, several=self._several).name

    def late(self, work: Mapping[int, str], deadline_s: float) -> WorkerTimeout:
        """The error that names, of the workers with that work, the one whose progress is longest ago."""
        worker = min(work, key=lambda worker: health.stuck_since_ns(self.slots, worker) or 0)
        doing = health.doing(self.slots, worker)
        return WorkerTimeout(
            f"{self.worker_name(worker)} did not answer within {deadline_s:.0f} s: it {doing}, {work[worker]}"
        )

    # --- the end

    def stop(self) -> None:
        """Request that the workers end; each ends when it next checks."""
        if self.slots:
            self.slots["stop"][0] = 1
            for bell in self._bells:
                bell.ring()

    def forget(self) -> None:
        """Forget the slots; in the process that created them they are removed."""
        for group in self.groups:
            group.forget()
        self.slots, self._bells = {}, []
        self.memory.slots.close()


def own_rows(spec: FarmSpec, first: int = 0) -> FrameRows:
    """A task's own rows of the frame memory, from `first` on: as many as its decisions look at."""
    return FrameRows(spec.history, spec.history.rounds + 1, spec.num_envs, first)


def count_own_rows(spec: FarmSpec) -> int:
    """Number of rows of the frame memory that a task has as its own: of observations, and of final ones."""
    return own_rows(spec).count + (1 + spec.history.final) * spec.num_envs


def check_spec(spec: FarmSpec) -> None:
    """Raise `FarmError` where the environments cannot be dealt out evenly, a number is out of its range, or the
    simulator's pictures depend on who draws them and render workers are to."""
    least = {
        "num_envs": 1, "chunk": 1, "groups": 1, "physics_workers": 1, "render_workers": 0, "observations": 1,
        "distance": 1,
    }  # fmt: skip
    for name, smallest in least.items():
        if getattr(spec, name) < smallest:
            raise FarmError(f"a farm's {name} is at least {smallest}, got {getattr(spec, name)}")
    if spec.final_frames not in FINAL_FRAMES:
        raise FarmError(f"final_frames is one of {', '.join(FINAL_FRAMES)}, got {spec.final_frames!r}")
    check_division(spec.num_envs, spec.physics_workers, spec.groups)
    if spec.render_workers and not exact_split(spec.task.name):
        raise FarmError(
            f"{spec.task.name} declares exact_split=False: another process draws another picture of a scene, so that "
            f"there are no render workers; set farm.render_workers to 0, got {spec.render_workers}"
        )


def check_division(num_envs: int, physics_workers: int, groups: int) -> None:
    """Raise `FarmError` where the environments cannot be dealt out evenly."""
    share = physics_workers * groups
    if num_envs % share:
        near = max(share, round(num_envs / share) * share)
        raise FarmError(
            f"{num_envs} environments do not divide into {physics_workers} physics workers x {groups} groups; use a "
            f"multiple of {share}, for example {near}"
        )


# --- snapshots

SNAPSHOT = ("base_episode", "base_step", "base_start", "history")
"""Arrays that say where every environment is: its episode, that one's start, and the actions executed in it."""
MOST = 2**40
"""Episodes of one environment, and starts: more than there will ever be."""


def check_snapshot(snapshot: Mapping[str, np.ndarray], slots: Mapping[str, np.ndarray], task: TaskSpec) -> None:
    """Raise `FarmError` where the snapshot is not of slots of these sizes and types, or says what cannot be."""
    for key in SNAPSHOT:
        if key not in snapshot and key == "base_start":
            continue  # written before starts could be drawn
        found = snapshot[key].shape if key in snapshot else None
        if found != slots[key].shape:
            raise FarmError(
                f"the snapshot's {key} of {task.name} has shape {found}, this farm's has {slots[key].shape}: resume "
                "with the same environments, tasks and chunk"
            )
        if not np.can_cast(snapshot[key].dtype, slots[key].dtype):  # older ones have narrower integers
            raise _wrong(task, f"{key} holds {snapshot[key].dtype}, and {slots[key].dtype} was written")
    steps, history = snapshot["base_step"], snapshot["history"]
    # A start may be none of this run's: episodes under way may be of other settings.
    bounds = {"base_episode": (0, MOST), "base_step": (0, history.shape[1] - 1), "base_start": (ANY, MOST)}
    for key, (least, most) in bounds.items():
        if key not in snapshot:
            continue
        bad = (snapshot[key] < least) | (snapshot[key] > most)
        if bad.any():
            env = int(bad.argmax())
            raise _wrong(task, f"{key} of environment {env} is {snapshot[key][env]}, and can be {least} to {most}")
    executed = np.arange(history.shape[1]) < steps[:, None]
    lost = executed & ~np.isfinite(history).all(axis=2)
    if lost.any():
        env, at = (int(i) for i in np.argwhere(lost)[0])
        raise _wrong(task, f"history of environment {env} has no finite action for step {at}, which it has executed")


def without_episodes_under_way(snapshot: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The snapshot of a simulator whose episodes cannot be replayed: instead of each that was under way the next
    begins."""
    begun = snapshot["base_step"] > 0
    return {
        "base_episode": snapshot["base_episode"] + begun,
        "base_step": np.zeros_like(snapshot["base_step"]),
        "base_start": np.where(begun, ANY, snapshot.get("base_start", ANY)),
        "history": snapshot["history"],
    }


def _wrong(task: TaskSpec, what: str) -> FarmError:
    return FarmError(f"the snapshot of {task.name} cannot be continued: its {what}; use an earlier checkpoint")
