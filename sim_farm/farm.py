"""The farm's client: what a rollout speaks to.

    farm = Farm.create(spec, InProcess())
    for stage in range(spec.stages): farm.reset(stage)
    observations = farm.collect(stage)        # waits for the stage
    farm.submit(stage, actions)               # returns at once

A stage is either `submitted` or `collected`; any other order of calls is an error. Between two rounds the renderers
may leave the memory and come back: `unload_renderers`, `load_renderers`. Everything that decides *what* is computed is
in `FarmSpec` and the actions; hosts and workers only decide where and when.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim_farm import layout
from sim_farm.contract import FarmError, Float32, TaskInfo
from sim_farm.doorbell import Doorbell
from sim_farm.hosts import Handle, Host
from sim_farm.layout import FINAL_FRAMES, FarmSpec, slot_fields
from sim_farm.memory import Block
from sim_farm.observations import Int, Observations, read
from sim_farm.workers import WorkerSetup

RENDERER_START_S = 120.0
"""Longest start of a renderer: an EGL driver that hangs does so silently and for ever."""


class StageState(enum.Enum):
    IDLE = "not yet reset"
    SUBMITTED = "submitted"
    COLLECTED = "collected"


class StageError(FarmError):
    """A call out of turn: what must come first is named."""


class WorkerTimeout(FarmError):
    """A worker did not answer within the deadline."""


class WorkerFailed(FarmError):
    """A worker met an error of its own and ended."""


@dataclass(frozen=True)
class FarmAddress:
    """How another process reaches a farm: `Farm.attach`."""

    spec: FarmSpec
    info: TaskInfo
    memory: str


@dataclass(frozen=True)
class RendererSwitch:
    """What it took to let the renderers leave the memory, or to have them back."""

    bytes: int
    """Of the workers' private memory, freed or taken again; 0 of workers in this process. What a GPU's driver holds
    is not counted."""
    seconds: float


class Farm:
    """See the module's docstring. One process at a time may submit and collect."""

    def __init__(
        self,
        spec: FarmSpec,
        info: TaskInfo,
        block: Block,
        ring: Callable[[int], None],
        handles: list[Handle],
    ) -> None:
        self.spec, self.info, self.block = spec, info, block
        self._slots = block.arrays
        self._ring = ring
        self._handles = handles
        self._bell = Doorbell(self._slots["bells"], layout.CLIENT_BELL)
        self._envs = [
            np.array([e for e in range(spec.num_envs) if spec.stage_of(e) == stage]) for stage in range(spec.stages)
        ]
        self._state = [StageState.IDLE] * spec.stages
        self._ticket = 0

    @classmethod
    def create(cls, spec: FarmSpec, host: Host, cores: tuple[int | None, ...] = ()) -> Farm:
        """Reserve the slots and start the workers, worker i on core `cores[i % len(cores)]` if any are given.

        Raises `FarmError` when the environments cannot be dealt out evenly or memory is short.
        """
        check_spec(spec)
        info = host.describe(spec.task)
        block = Block.create(slot_fields(spec, info), host.shared)
        handles: list[Handle] = []
        try:
            for index in range(spec.workers if info.cameras else spec.physics_workers):
                core = cores[index % len(cores)] if cores else None
                handles.append(host.launch(WorkerSetup(spec, info, index, block.name, core), block))
        except BaseException:
            block.arrays["stop"][0] = 1
            for index, handle in enumerate(handles):
                Doorbell(block.arrays["bells"], index + 1).ring()
                handle.close(deadline_s=5.0)
            block.close()
            raise
        if host.shared:
            return cls(spec, info, block, _bell_ringer(block), handles)
        return cls(spec, info, block, lambda worker: _ring_all(handles), handles)

    @classmethod
    def attach(cls, address: FarmAddress) -> Farm:
        """The client in another process than the one that created the farm and watches its workers."""
        block = Block.attach(slot_fields(address.spec, address.info), address.memory)
        return cls(address.spec, address.info, block, _bell_ringer(block), [])

    @property
    def address(self) -> FarmAddress:
        assert self.block.name is not None, "an in-process farm has no address"
        return FarmAddress(self.spec, self.info, self.block.name)

    @property
    def in_process(self) -> bool:
        """Whether the workers are objects of this process, which a submit runs."""
        return self.block.name is None

    def private_bytes(self) -> Int:
        """int64 [workers]: what each worker's process had in memory by itself when it had built its environments or its
        renderer; 0 of workers in this process and of those on other machines."""
        return self._slots["private_bytes"].copy()

    def envs_of(self, stage: int) -> Int:
        """Indices of the stage's environments, in the order of its rows."""
        return self._envs[stage]

    @property
    def wire_bytes(self) -> int:
        """Bytes that crossed to and from physics workers on other machines so far."""
        return int(self._slots["wire_bytes"].sum())

    def built(self) -> int:
        """Environments built so far, over all workers."""
        return int(self._slots["built"][: self.spec.physics_workers].sum())

    def reset(self, stage: int) -> None:
        """Begin each environment's first episode (or, after `restore`, continue where the snapshot was taken)."""
        if self._state[stage] is StageState.SUBMITTED:
            raise StageError(f"stage {stage} is submitted; collect it before a reset")
        self._request(stage, layout.RESET)

    def submit(self, stage: int, actions: Float32) -> None:
        """Have the stage execute `actions` [B, C, A]. Returns at once; rows that are not active are ignored."""
        if self._state[stage] is not StageState.COLLECTED:
            raise StageError(f"stage {stage} is {self._state[stage].value}; collect it before submitting")
        envs = self._envs[stage]
        expected = (len(envs), self.spec.chunk, self.info.action_dim)
        if actions.shape != expected:
            raise FarmError(f"stage {stage} takes actions of shape {expected}, got {actions.shape}")
        self._slots["action"][envs] = actions
        self._request(stage, layout.STEP)

    def collect(self, stage: int, deadline_s: float = 300.0) -> Observations:
        """Wait for the stage, at most `deadline_s` seconds, and read it.

        Raises `WorkerTimeout` naming the worker and what it was doing, `WorkerFailed` with its message.
        """
        if self._state[stage] is not StageState.SUBMITTED:
            raise StageError(f"stage {stage} is {self._state[stage].value}; submit it before collecting")
        envs, slots = self._envs[stage], self._slots
        self._wait(lambda: self._done(envs), lambda: self.timeout(deadline_s, envs), deadline_s)
        slots["base_episode"][envs] = slots["episode"][envs]
        slots["base_step"][envs] = slots["episode_step"][envs]
        slots["collected"][envs] = slots["requested"][envs]
        self._state[stage] = StageState.COLLECTED
        return read(slots, self.info, envs)

    def snapshot(self) -> dict[str, np.ndarray]:
        """Where every environment is: its episode and the actions executed in it. All stages must be collected."""
        if any(state is not StageState.COLLECTED for state in self._state):
            raise StageError("collect every stage before taking a snapshot")
        return {key: self._slots[key].copy() for key in ("base_episode", "base_step", "history")}

    def restore(self, snapshot: Mapping[str, np.ndarray]) -> None:
        """Make the next `reset` continue from a snapshot: each episode is replayed from its seed and actions."""
        for key in ("base_episode", "base_step", "history"):
            if snapshot[key].shape != self._slots[key].shape:
                raise FarmError(
                    f"the snapshot's {key} has shape {snapshot[key].shape}, this farm's has {self._slots[key].shape}: "
                    "resume with the same environments, task and chunk"
                )
            self._slots[key][...] = snapshot[key]

    def hold(self, episodes: int) -> None:
        """Let every environment rest once it has ended so many episodes; `reset` after raising it begins the next."""
        if any(state is StageState.SUBMITTED for state in self._state):
            raise StageError("collect every stage before moving the limit of episodes")
        self._slots["limit"][:] = episodes

    def unload_renderers(self, deadline_s: float = 300.0) -> RendererSwitch:
        """Have the workers that draw free their renderers with the scene replicas. No stage may be reset or submitted
        before `load_renderers`. Nothing happens without cameras.

        Raises `StageError` unless every stage is collected, and what `collect` raises.
        """
        if any(state is not StageState.COLLECTED for state in self._state):
            raise StageError("collect every stage before the renderers leave")
        return self._switch_renderers(True, deadline_s)

    def load_renderers(self, deadline_s: float = 300.0) -> RendererSwitch:
        """Have the renderers back; what they draw equals, bit for bit, what those that left would have drawn.

        Nothing happens where they are. Raises what `collect` raises.
        """
        return self._switch_renderers(False, deadline_s)

    def stop(self) -> None:
        """Tell the workers to end; they do at their next look."""
        if self.block.arrays:
            self._slots["stop"][0] = 1
            for worker in range(self.spec.workers):
                Doorbell(self._slots["bells"], worker + 1).ring()

    def close(self, deadline_s: float = 5.0) -> None:
        """End the workers and, in the process that created the farm, remove its memory."""
        self.stop()
        for handle in self._handles:
            handle.close(deadline_s)
        self._slots = {}
        self.block.close()

    def _switch_renderers(self, away: bool, deadline_s: float) -> RendererSwitch:
        begin, slots, drawers = time.perf_counter(), self._slots, self.spec.drawers
        if not self.info.cameras:
            return RendererSwitch(0, 0.0)
        left = slots["left"][drawers.start : drawers.stop]
        slots["moved_bytes"][:] = 0
        slots["away"][0] = away
        for worker in drawers:
            self._ring(worker)

        def late() -> WorkerTimeout:
            worker = drawers[int(np.argmax(left != away))]
            return WorkerTimeout(self._late(worker, deadline_s, f"with its renderer to {'free' if away else 'start'}"))

        self._wait(lambda: bool((left == away).all()), late, deadline_s)
        return RendererSwitch(int(slots["moved_bytes"].sum()), time.perf_counter() - begin)

    def _request(self, stage: int, op: int) -> None:
        if self._slots["away"][0]:
            raise StageError("the renderers are away; load_renderers() before a stage is reset or submitted")
        envs = self._envs[stage]
        self._ticket = max(self._ticket, int(self._slots["requested"].max())) + 1
        self._slots["op"][envs] = op
        self._slots["requested"][envs] = self._ticket
        self._state[stage] = StageState.SUBMITTED
        for worker in sorted({self.spec.worker_of(env) for env in envs.tolist()}):
            self._ring(worker)

    def _wait(self, done: Callable[[], bool], late: Callable[[], WorkerTimeout], deadline_s: float) -> None:
        begin = time.monotonic()
        while True:
            seen = self._bell.value()
            if done():
                return
            self.check()
            if time.monotonic() - begin > deadline_s:
                raise late()
            self._bell.wait(seen, timeout_s=0.5)

    def _done(self, envs: Int) -> bool:
        # Both: a fused worker sets `drawn` first.
        slots, asked = self._slots, self._slots["requested"][envs]
        return bool((slots["drawn"][envs] == asked).all() and (slots["simulated"][envs] == asked).all())

    def _message(self, worker: int) -> str:
        return bytes(self._slots["message"][worker]).rstrip(b"\0").decode(errors="replace")

    def _worker_name(self, worker: int) -> str:
        return WorkerSetup(self.spec, self.info, worker, None).name

    def check(self) -> None:
        """Raise `WorkerFailed` with the message of a worker that met an error, or whose renderer hangs at its start."""
        opening = np.flatnonzero(self._slots["phase"] == layout.OPENING)
        for worker in opening.tolist():
            since_s = (time.monotonic_ns() - int(self._slots["since_ns"][worker])) / 1e9
            if since_s > RENDERER_START_S:
                raise WorkerFailed(
                    f"{self._worker_name(worker)} has been starting its renderer for {since_s:.0f} s and hangs, as "
                    "EGL does with a driver that does not fit: try MUJOCO_GL=osmesa, or another of farm.devices; "
                    "`embodied doctor` says what answers"
                )
        failed = np.flatnonzero(self._slots["phase"] == layout.FAILED)
        if len(failed):
            raise WorkerFailed(self._message(int(failed[0])))

    def timeout(self, deadline_s: float, envs: Int | None = None) -> WorkerTimeout:
        """The error that names the worker that is late with one of `envs`, or with building; not raised here."""
        if envs is not None:
            done = np.minimum(self._slots["drawn"][envs], self._slots["simulated"][envs])
            late = np.flatnonzero(done != self._slots["requested"][envs])
            return WorkerTimeout(self._who_is_late(int(envs[late[0]]), deadline_s))
        phases = self._slots["phase"].tolist()
        doing = "; ".join(f"{self._worker_name(i)} is {layout.PHASES[phase]}" for i, phase in enumerate(phases))
        return WorkerTimeout(f"the farm was not ready within {deadline_s:.0f} s: {doing}")

    def _who_is_late(self, env: int, deadline_s: float) -> str:
        slots, spec = self._slots, self.spec
        simulating = slots["simulated"][env] != slots["requested"][env]
        worker = spec.worker_of(env)
        if not simulating and spec.render_workers:
            worker = spec.physics_workers + spec.renderer_of(env)
        return self._late(worker, deadline_s, f"with environment {env} to {'simulate' if simulating else 'draw'}")

    def _late(self, worker: int, deadline_s: float, task: str) -> str:
        phase = layout.PHASES[int(self._slots["phase"][worker])]
        since_ns = int(self._slots["since_ns"][worker])
        since = (time.monotonic_ns() - since_ns) / 1e9 if since_ns else 0.0
        return (
            f"{self._worker_name(worker)} did not answer within {deadline_s:.0f} s: it has been {phase} for "
            f"{since:.1f} s, {task}"
        )


def check_spec(spec: FarmSpec) -> None:
    """Raise `FarmError` for a shape that no farm can have."""
    least = {"num_envs": 1, "chunk": 1, "stages": 1, "physics_workers": 1, "render_workers": 0}
    for name, smallest in least.items():
        if getattr(spec, name) < smallest:
            raise FarmError(f"a farm's {name} is at least {smallest}, got {getattr(spec, name)}")
    if spec.final_frames not in FINAL_FRAMES:
        raise FarmError(f"final_frames is one of {', '.join(FINAL_FRAMES)}, got {spec.final_frames!r}")
    share = spec.physics_workers * spec.stages
    if spec.num_envs % share:
        near = max(share, round(spec.num_envs / share) * share)
        raise FarmError(
            f"{spec.num_envs} environments do not divide into {spec.physics_workers} physics workers x "
            f"{spec.stages} stages; use a multiple of {share}, for example {near}"
        )


def _bell_ringer(block: Block) -> Callable[[int], None]:
    bells: dict[int, Doorbell] = {}

    def ring(worker: int) -> None:
        if worker not in bells:
            bells[worker] = Doorbell(block.arrays["bells"], worker + 1)
        bells[worker].ring()

    return ring


def _ring_all(handles: list[Any]) -> None:
    """In one process physics comes first in the list, so one pass also draws what was simulated."""
    for handle in handles:
        handle.ring()
