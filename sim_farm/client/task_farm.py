"""One task of a farm: its environments and their workers, over a block of slots of its own.

A `TaskFarm` does for one task what a `Farm` does for all, except waiting: a farm waits for all tasks at once.
Groups and environments are numbered within the task.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Mapping, Sequence

import numpy as np

from sim_farm.client import health
from sim_farm.client.observations import Int, Observations, read
from sim_farm.contract import FarmError, Float32, TaskInfo, TaskSpec
from sim_farm.episodes import ANY, Float64
from sim_farm.shared_memory import layout
from sim_farm.shared_memory.doorbell import Doorbell
from sim_farm.shared_memory.layout import FINAL_FRAMES, FarmSpec, GroupSlots
from sim_farm.shared_memory.worker_memory import WorkerMemory
from sim_farm.workers.hosts import Host, WorkerHandle
from sim_farm.workers.workers import WorkerSetup

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


def _wrong(task: TaskSpec, what: str) -> FarmError:
    return FarmError(f"the snapshot of {task.name} cannot be continued: its {what}; use an earlier checkpoint")


# --- the farm of one task

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


class WorkerFailed(FarmError):
    """A worker met an error of its own and ended."""


class TaskFarm:
    """See the module's docstring. `first_group` is what the farm calls the task's group 0, in messages."""

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
        """See `layout`."""
        self._bells = [Doorbell(self.slots["bells"], worker) for worker in range(spec.workers)]
        self._groups = [GroupSlots(spec, self.slots, group) for group in range(spec.groups)]
        self._workers_of = [sorted({spec.worker_of(env) for env in group.envs.tolist()}) for group in self._groups]
        self._state = [GroupState.IDLE] * spec.groups
        self._tickets = [0] * spec.groups
        self._shares: Float64 | None = None
        self._draws: list[tuple[Int, Int]] = [(np.empty(0, np.int64),) * 2] * spec.groups
        """Numbers of the episodes whose starts were drawn last, and these starts, per group."""
        self._first_row, self._first_group, self._several = first_row, first_group, several

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

    # --- groups

    def envs_of(self, group: int) -> Int:
        """Indices of the group's environments, in the order of its rows."""
        return self._groups[group].envs

    def state_of(self, group: int) -> GroupState:
        return self._state[group]

    def all_collected(self) -> bool:
        return all(state is GroupState.COLLECTED for state in self._state)

    def reset(self, group: int, rows: Int | None) -> None:
        """`Farm.reset`."""
        if self._state[group] is GroupState.SUBMITTED:
            raise GroupError(f"group {self._name(group)} is submitted; collect it before a reset")
        self._require_renderers()
        self._place_frames(group, rows, None, ends=False)
        places = self._groups[group]
        begun, fresh = places.get("base_start"), places.get("base_step") == 0
        # What was executed in an episode belongs to the start that it began from, drawn or not.
        drawn = self._drawn(group, places.get("base_episode"))
        places.put("base_start", np.where((begun == ANY) & fresh, drawn, begun))
        self._request(group, layout.RESET)

    def submit(self, group: int, actions: Float32, rows: Int | None, final_rows: Int | None) -> None:
        """`Farm.submit`."""
        if self._state[group] is not GroupState.COLLECTED:
            state = self._state[group].value
            raise GroupError(f"group {self._name(group)} is {state}; collect it before submitting")
        expected = (len(self._groups[group].envs), self.spec.chunk, self.info.action_dim)
        if actions.shape != expected:
            raise FarmError(f"group {self._name(group)} takes actions of shape {expected}, got {actions.shape}")
        self._require_renderers()
        self._place_frames(group, rows, final_rows, ends=self.spec.final_frames != "never")
        self._groups[group].put("action", actions)
        self._groups[group].put("next_start", self._drawn(group, self._groups[group].get("base_episode") + 1))
        self._request(group, layout.STEP)

    def done(self, group: int) -> bool:
        """True if the results of the group's last request are complete."""
        rows, ticket = self._groups[group], self._tickets[group]
        # Both: a fused worker sets `drawn` first.
        return bool((rows.view("simulated") == ticket).all() and (rows.view("drawn") == ticket).all())

    def collect(self, group: int) -> Observations:
        """The group's observations, once it is done; see `Farm.collect`."""
        rows = self._groups[group]
        seen = read(self.slots, rows, self.info, self.memory.frames)
        rows.put("base_episode", seen.episode)
        rows.put("base_step", seen.episode_step)
        rows.put("base_start", np.where(seen.active, seen.start, ANY))
        rows.fill("collected", self._tickets[group])
        self._state[group] = GroupState.COLLECTED
        return seen

    def draw_starts(self, shares: Float64 | None) -> None:
        """`Farm.draw_starts`."""
        starts = self.spec.episodes.starts
        if shares is not None and (
            shares.shape != (starts,) or not np.isfinite(shares).all() or shares.min() < 0 or not shares.sum() > 0
        ):
            raise FarmError(
                f"{self.spec.task.name} begins from {starts} starts: their shares are as many numbers from 0, not all 0"
            )
        self._shares = None if shares is None else np.cumsum(shares)
        self._draws = [(np.empty(0, np.int64),) * 2] * self.spec.groups

    def _drawn(self, group: int, episode: Int) -> Int:
        """[B] the starts of those episodes of the group's environments, under the present shares."""
        if self._shares is None:
            return np.full(len(episode), ANY)
        known, starts = self._draws[group]
        if not np.array_equal(known, episode):
            envs, draw = self._groups[group].envs, self.spec.episodes.draw_start
            pairs = zip(envs.tolist(), episode.tolist(), strict=True)
            starts = np.array([draw(env, number, self._shares) for env, number in pairs])
            self._draws[group] = episode, starts
        return starts

    def _name(self, group: int) -> int:
        return self._first_group + group

    def _require_renderers(self) -> None:
        if self.slots["away"][0]:
            raise GroupError("the renderers are away; load_renderers() before a group is reset or submitted")

    def _request(self, group: int, op: int) -> None:
        rows = self._groups[group]
        ticket = int(self.slots["requested"].max()) + 1
        rows.fill("op", op)
        rows.fill("requested_ns", time.monotonic_ns())
        rows.fill("requested", ticket)
        self._tickets[group] = ticket
        self._state[group] = GroupState.SUBMITTED
        self.ring(self._workers_of[group])

    def _place_frames(self, group: int, rows: Int | None, final_rows: Int | None, ends: bool) -> None:
        """Say where the next observations and, if an episode's end may be drawn, the final ones go."""
        if self.memory.frames is None:
            return
        plain = self._first_row + self._groups[group].envs
        self._place(group, "frame_row", plain if rows is None else rows, "rows")
        if ends:
            final_plain = plain + self.spec.num_envs
            self._place(group, "final_row", final_plain if final_rows is None else final_rows, "final_rows")

    def _place(self, group: int, name: str, rows: Int, argument: str) -> None:
        assert self.memory.frames is not None
        there, count = self.memory.frames.rows, len(self._groups[group].envs)
        if rows.shape != (count,) or len(np.unique(rows)) < count or rows.min() < 0 or rows.max() >= there:
            raise FarmError(
                f"group {self._name(group)} takes {count} different `{argument}` from 0 to {there - 1}, got "
                f"{rows.tolist()}: give others, or make the farm with more frame_rows"
            )
        self._groups[group].put(name, rows)

    # --- snapshots and limits

    def snapshot(self) -> dict[str, np.ndarray]:
        """Copies of `SNAPSHOT`'s arrays. All groups must be collected."""
        if not self.all_collected():
            raise GroupError("collect every group before taking a snapshot")
        return {key: self.slots[key].copy() for key in SNAPSHOT}

    def check_snapshot(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Raise `FarmError` where the snapshot is not of this farm's sizes, or says what cannot be."""
        check_snapshot(snapshot, self.slots, self.spec.task)

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Make the next `reset` continue from a checked snapshot."""
        for key in SNAPSHOT:
            self.slots[key][...] = snapshot.get(key, ANY)

    def hold(self, episodes: int) -> None:
        """`Farm.hold`."""
        if any(state is GroupState.SUBMITTED for state in self._state):
            raise GroupError("collect every group before moving the limit of episodes")
        self.slots["limit"][:] = episodes

    # --- renderers

    def ask_renderers(self, away: bool) -> None:
        """Tell the workers that draw to free their renderers, or to build them. It is done when `switched` says so."""
        if not self.info.cameras:
            return
        self.slots["moved_bytes"][:] = 0
        self.slots["away_ns"][0] = time.monotonic_ns()
        self.slots["away"][0] = away
        self.ring(self.spec.drawers)

    def switched(self) -> bool:
        """True if every worker that draws has done what `ask_renderers` said."""
        return not self._slow_to_switch()

    def moved_bytes(self) -> int:
        """Private memory of the workers that the last switch freed or took, in bytes."""
        return int(self.slots["moved_bytes"].sum())

    def late_to_switch(self, deadline_s: float) -> WorkerTimeout | None:
        """The error that names the worker that has not switched; None if all have."""
        slow = self._slow_to_switch()
        if not slow:
            return None
        wish = "free" if self.slots["away"][0] else "start"
        return WorkerTimeout(self._late(self._least_progress(slow), deadline_s, f"with its renderer to {wish}"))

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

    def built(self) -> int:
        """Environments built so far."""
        return int(self.slots["built"][: self.spec.physics_workers].sum())

    def private_bytes(self) -> Int:
        """int64 [workers]; see `Farm.private_bytes`."""
        return self.slots["private_bytes"].copy()

    @property
    def wire_bytes(self) -> int:
        return int(self.slots["wire_bytes"].sum())

    def check(self) -> None:
        """Raise `WorkerFailed` with the message of a worker that met an error, or whose renderer hangs at its start."""
        phases = self.slots["phase"]
        if phases.max() < layout.FAILED:
            return
        for worker in np.flatnonzero(phases == layout.OPENING).tolist():
            since_s = (time.monotonic_ns() - int(self.slots["since_ns"][worker])) / 1e9
            if since_s > RENDERER_START_S:
                raise WorkerFailed(
                    f"{self.worker_name(worker)} has been starting its renderer for {since_s:.0f} s and hangs, as "
                    "EGL does with a driver that does not fit: try MUJOCO_GL=osmesa, or another of farm.devices; "
                    "`embodied doctor` says what answers"
                )
        for worker in np.flatnonzero(phases == layout.FAILED).tolist():
            raise WorkerFailed(bytes(self.slots["message"][worker]).rstrip(b"\0").decode(errors="replace"))

    def timeout(self, group: int, deadline_s: float) -> WorkerTimeout:
        """The error that names the worker that the group waits for: of the workers that have work of the group, the one
        whose last progress is longest ago."""
        awaited = self._awaited(group)
        worker = self._least_progress(list(awaited))
        return WorkerTimeout(self._late(worker, deadline_s, awaited[worker]))

    def progress_ns(self, group: int) -> int:
        """The last progress of the worker that holds the group up: of those that have work of it, the one whose
        progress is longest ago. On the machine's monotonic clock; now, where the group waits for nobody."""
        since = [health.stuck_since_ns(self.slots, worker) for worker in self._awaited(group)]
        return min((begin_ns for begin_ns in since if begin_ns is not None), default=time.monotonic_ns())

    def _awaited(self, group: int) -> dict[int, str]:
        """The workers that have work of the group, and what it is."""
        slots, found = self.slots, dict[int, str]()
        for env in self._groups[group].envs.tolist():
            if slots["simulated"][env] != slots["requested"][env]:
                found.setdefault(int(slots["physics_of"][env]), f"with environment {env} to simulate")
            elif slots["drawn"][env] != slots["requested"][env]:
                found.setdefault(int(slots["renderer_of"][env]), f"with environment {env} to draw")
        return found

    def doing(self) -> list[str]:
        """Phase of each worker."""
        phases = self.slots["phase"].tolist()
        return [f"{self.worker_name(worker)} is {layout.PHASES[phase]}" for worker, phase in enumerate(phases)]

    def worker_name(self, worker: int) -> str:
        return WorkerSetup(self.spec, self.info, worker, None, several=self._several).name

    def _least_progress(self, workers: list[int]) -> int:
        return min(workers, key=lambda worker: health.stuck_since_ns(self.slots, worker) or 0)

    def _late(self, worker: int, deadline_s: float, task: str) -> str:
        doing = health.doing(self.slots, worker)
        return f"{self.worker_name(worker)} did not answer within {deadline_s:.0f} s: it {doing}, {task}"

    # --- the end

    def stop(self) -> None:
        """Tell the workers to end; they end when they next check."""
        if self.slots:
            self.slots["stop"][0] = 1
            for bell in self._bells:
                bell.ring()

    def join(self, deadline_s: float) -> None:
        """Wait for the end of the stopped workers, at most so long for each."""
        for handle in self.handles:
            handle.close(deadline_s)

    def forget(self) -> None:
        """Forget the slots; in the process that created them they are removed."""
        self.slots, self._groups, self._bells = {}, [], []
        self.memory.slots.close()


def check_spec(spec: FarmSpec) -> None:
    """Raise `FarmError` where the environments cannot be dealt out evenly, or a number is out of its range."""
    least = {"num_envs": 1, "chunk": 1, "groups": 1, "physics_workers": 1, "render_workers": 0}
    for name, smallest in least.items():
        if getattr(spec, name) < smallest:
            raise FarmError(f"a farm's {name} is at least {smallest}, got {getattr(spec, name)}")
    if spec.final_frames not in FINAL_FRAMES:
        raise FarmError(f"final_frames is one of {', '.join(FINAL_FRAMES)}, got {spec.final_frames!r}")
    share = spec.physics_workers * spec.groups
    if spec.num_envs % share:
        near = max(share, round(spec.num_envs / share) * share)
        raise FarmError(
            f"{spec.num_envs} environments do not divide into {spec.physics_workers} physics workers x "
            f"{spec.groups} groups; use a multiple of {share}, for example {near}"
        )
