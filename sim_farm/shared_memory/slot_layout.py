"""Slots: the layout of the memory that farm, physics workers and render workers of a task share, and that memory.

One slot per environment, addressed by the environment's index within its task. Each process writes its own fields:

    client   requested, op, limit, action, next_start, base_*, collected, *_row
                                                        then rings the physics worker
    physics  results, observation, past_*, scene, final_*
                                                        then sets `simulated` and rings renderer or client
    render   those rows of the frame memory             then sets `drawn` and rings the client

    client   away                                       then rings the workers that draw
    drawing  moved_bytes                                then sets `left` and rings the client (the workers that draw)

`requested`, `simulated`, `drawn` and `collected` hold tickets: numbers that only grow. A slot belongs to the client
while all four are equal, to physics while simulated < requested, to render while drawn < simulated. The data of a step
is written before its ticket, so a process that sees the ticket sees the data. The frames are in a memory of their own
(`frame_memory`), and so is the client's bell, because both are shared by the tasks of a farm.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from sim_farm.contract import TaskInfo, TaskSpec, UInt8
from sim_farm.episodes import ANY, Episodes
from sim_farm.observation_history import ObservationHistory
from sim_farm.render_devices import RenderDevice
from sim_farm.shared_memory.doorbell import Doorbell
from sim_farm.shared_memory.frame_memory import FrameAddress, FrameMemory
from sim_farm.shared_memory.memory import Block, Field

STEP, RESET = 0, 1
PHYSICS_START, PHYSICS_END, RENDER_START, RENDER_END = range(4)
STARTING, BUILDING, WAITING, WORKING, FAILED, OPENING, CLOSING, REPLAYING = range(8)
PHASES = (
    "starting", "building its environments", "waiting for work", "working", "failed", "starting its renderer",
    "freeing its renderer", "replaying the episodes of a lost one",
)  # fmt: skip
MESSAGE_BYTES = 4096
FINAL_FRAMES = ("never", "truncated", "ended")
NO_LIMIT = 2**62
FAULT_BYTES = 512
"""Longest reason why an episode is broken, in bytes."""


@dataclass(frozen=True)
class FarmSpec:
    """One task's share of a farm. Equal tasks, seeds and actions give equal results, whatever the workers."""

    task: TaskSpec
    episodes: Episodes
    num_envs: int
    chunk: int = 1
    groups: int = 1
    """Groups of environments; one is simulated while another is inferred."""
    physics_workers: int = 1
    render_workers: int = 0
    """0: physics workers draw their own frames (fused)."""
    devices: tuple[RenderDevice, ...] = ()
    """Devices of the workers that draw, dealt out in turn: GPUs by CUDA's numbers, or `cpu` (software); none: what the
    driver gives first. Two renderers' pictures of one scene differ in rounding: what equals is drawn on equal ones."""
    final_frames: str = "truncated"
    """Episodes whose last observation is drawn before the next begins: `never`, `truncated` or `ended`."""
    observations: int = 1
    """K: observations that a decision is made on, the present one among them (`ObservationHistory`)."""
    distance: int = 1
    """Env steps from each of the K observations to the next."""

    @cached_property
    def history(self) -> ObservationHistory:
        """Observations that a decision is made on."""
        return ObservationHistory(self.observations, self.distance, self.chunk)

    def worker_of(self, env: int) -> int:
        return env % self.physics_workers

    def group_of(self, env: int) -> int:
        return env // self.physics_workers % self.groups

    def renderer_of(self, env: int) -> int:
        """Index of the render worker that draws the environment."""
        return env % max(self.render_workers, 1)

    @property
    def workers(self) -> int:
        """Physics workers come first, then render workers; the bell of worker i is the i-th."""
        return self.physics_workers + self.render_workers

    @property
    def processes(self) -> list[tuple[TaskSpec, RenderDevice | None]]:
        """The task with the device to draw on, for each worker that there is: render workers only where there are
        cameras."""
        if not self.task.cameras:
            return [(self.task, None)] * self.physics_workers
        return [(self.task, self.device_of(worker)) for worker in range(self.workers)]

    def device_of(self, worker: int) -> RenderDevice | None:
        """Device that the worker draws on, where there are cameras; None: it does not draw, or the driver chooses."""
        if not self.devices or worker not in self.drawers:
            return None
        return self.devices[self.drawers.index(worker) % len(self.devices)]

    @property
    def drawers(self) -> range:
        """The workers that draw, where there are cameras."""
        return range(self.physics_workers if self.render_workers else 0, self.workers)


def slot_fields(spec: FarmSpec, info: TaskInfo) -> dict[str, Field]:
    """The arrays of the farm's block. E environments, C actions a chunk, A action dimensions; K - 1 earlier
    observations of a decision, U whose pictures it or a later one refers to (`ObservationHistory`)."""
    envs, chunk, actions = spec.num_envs, spec.chunk, info.action_dim
    earlier, kept = len(spec.history.back), len(spec.history.kept)
    return {
        "bells": Field((spec.workers,), "int32", 0),
        "stop": Field((1,), "int32", 0),
        "phase": Field((spec.workers,), "int32", STARTING),
        # When each worker last changed its phase or served an environment; when the client asked for what is pending.
        "since_ns": Field((spec.workers,), "int64", 0),
        "requested_ns": Field((envs,), "int64", 0),
        # Which worker simulates each environment, which one draws it where that is another (else -1), and who draws.
        "physics_of": Field((envs,), "int32", -1),
        "renderer_of": Field((envs,), "int32", -1),
        "draws": Field((spec.workers,), "bool", 0),
        "built": Field((spec.workers,), "int32", 0),
        # Of a process that serves this farm alone: its private memory when it has built.
        "private_bytes": Field((spec.workers,), "int64", 0),
        # Whether renderers shall be away, and since when; which of them are, and what that last changed in memory.
        "away": Field((1,), "int32", 0),
        "away_ns": Field((1,), "int64", 0),
        "left": Field((spec.workers,), "int32", 0),
        "moved_bytes": Field((spec.workers,), "int64", 0),
        "message": Field((spec.workers, MESSAGE_BYTES), "uint8", 0),
        "requested": Field((envs,), "int64", 0),
        "simulated": Field((envs,), "int64", 0),
        "drawn": Field((envs,), "int64", 0),
        "collected": Field((envs,), "int64", 0),
        "op": Field((envs,), "int32", 0),
        # Episodes from this number on wait until the client raises it and resets.
        "limit": Field((envs,), "int64", NO_LIMIT),
        # The start of the episode that begins where one ends in this chunk (`Episodes.spec`).
        "next_start": Field((envs,), "int64", ANY),
        "action": Field((envs, chunk, actions), "float32", float("nan")),
        # The episode, its start and its executed actions as of `collected`: what a replacement worker replays.
        "base_episode": Field((envs,), "int64", 0),
        "base_step": Field((envs,), "int64", 0),
        "base_start": Field((envs,), "int64", ANY),
        "history": Field((envs, info.max_episode_steps, actions), "float32", float("nan")),
        "steps": Field((envs,), "int64", 0),
        "reward": Field((envs, chunk), "float32", float("nan")),
        "success": Field((envs, chunk), "bool", 0),
        "terminated": Field((envs,), "bool", 0),
        "truncated": Field((envs,), "bool", 0),
        "active": Field((envs,), "bool", 0),
        "episode": Field((envs,), "int64", 0),
        "start": Field((envs,), "int64", ANY),
        "episode_step": Field((envs,), "int64", 0),
        "state": Field((envs, info.state_dim), "float32", float("nan")),
        "proprio": Field((envs, info.proprio_dim), "float32", float("nan")),
        "instruction": Field((envs, info.instruction_bytes), "uint8", 0),
        # Whether the last chunk, or reset, has written it: it stays while episodes are told the same.
        "retold": Field((envs,), "bool", 0),
        "scene": Field((envs, info.scene_bytes), "uint8"),
        # The earlier observations [E, K - 1] of a decision; the scenes of those to draw, [E, J] of a chunk and the
        # others [E, U - J] after a reset in the middle of an episode; and their rows, -1: drawn.
        "past_state": Field((envs, earlier, info.state_dim), "float32", float("nan")),
        "past_proprio": Field((envs, earlier, info.proprio_dim), "float32", float("nan")),
        "past_scene": Field((envs, spec.history.new, info.scene_bytes), "uint8"),
        "redrawn_scene": Field((envs, kept - spec.history.new, info.scene_bytes), "uint8"),
        "past_row": Field((envs, kept), "int64", -1),
        "final_state": Field((envs, info.state_dim), "float32", float("nan")),
        "final_proprio": Field((envs, info.proprio_dim), "float32", float("nan")),
        "final_instruction": Field((envs, info.instruction_bytes), "uint8", 0),
        "final_scene": Field((envs, info.scene_bytes), "uint8"),
        "final_past_state": Field((envs, earlier, info.state_dim), "float32", float("nan")),
        "final_past_proprio": Field((envs, earlier, info.proprio_dim), "float32", float("nan")),
        "final_past_scene": Field((envs, earlier, info.scene_bytes), "uint8"),
        "final_past_row": Field((envs, earlier), "int64", -1),
        "draw_final": Field((envs,), "bool", 0),
        # Why the episode that ended in the last chunk is broken, where that is known: read with a reward that is none.
        "fault": Field((envs, FAULT_BYTES), "uint8", 0),
        # Rows of the frame memory for the next observation and for a final one.
        "frame_row": Field((envs,), "int64", -1),
        "final_row": Field((envs,), "int64", -1),
        "times_ns": Field((envs, 4), "int64", 0),
        # Sent to and received from a physics worker on another machine.
        "wire_bytes": Field((spec.workers, 2), "int64", 0),
    }


# --- slots of one group of environments, as views without an index

Slots = Mapping[str, npt.NDArray[Any]]


class GroupSlots:
    """Views of a group's B rows, made once. An index array would cost more than a small array's copy."""

    def __init__(self, spec: FarmSpec, slots: Slots, group: int) -> None:
        # As `FarmSpec.group_of`: environments are dealt out to the physics workers first, then to the groups.
        share = spec.groups * spec.physics_workers
        dealt = (spec.num_envs // share, spec.groups, spec.physics_workers)
        self.envs: npt.NDArray[np.int64] = np.arange(spec.num_envs).reshape(dealt)[:, group].ravel()
        """[B] the group's environments, in the order of its rows."""
        self._shapes = {
            name: (len(self.envs), *array.shape[1:]) for name, array in slots.items() if len(array) == spec.num_envs
        }
        self._views = {name: slots[name].reshape(*dealt, *shape[1:])[:, group] for name, shape in self._shapes.items()}
        self._instructions: tuple[bytes, tuple[str, ...]] = b"", ()

    def view(self, name: str) -> npt.NDArray[Any]:
        """The group's rows where they lie: [B / physics workers, physics workers, ...]."""
        return self._views[name]

    def get(self, name: str) -> npt.NDArray[Any]:
        """A copy of the group's rows [B, ...]."""
        return self._views[name].copy().reshape(self._shapes[name])

    def put(self, name: str, rows: npt.NDArray[Any]) -> None:
        """Write the group's rows [B, ...]."""
        view = self._views[name]
        view[...] = rows.reshape(view.shape)

    def fill(self, name: str, value: int) -> None:
        """Write one value into all of the group's rows."""
        self._views[name][...] = value

    def forget(self) -> None:
        """Drop the views, without which the memory cannot be unmapped."""
        self._views.clear()

    def instructions(self) -> tuple[str, ...]:
        """[B] the instructions, decoded only where one has changed since the last call."""
        data = self._views["instruction"].tobytes()
        if data != self._instructions[0]:
            self._instructions = data, texts(self.get("instruction"))
        return self._instructions[1]


def texts(rows: UInt8) -> tuple[str, ...]:
    """The texts that rows of UTF-8 bytes hold, up to the zeros at their ends."""
    return tuple(bytes(row).rstrip(b"\0").decode() for row in rows)


# --- the memory that the workers of a task map: its slots, the client's bell and the frame memory

BELL = {"bell": Field((1,), "int32", 0)}
"""The block with the client's bell."""


@dataclass(frozen=True)
class MemoryAddress:
    """Address of the memory for another process of this machine: `WorkerMemory.attach`."""

    slots: str
    bell: str
    frames: FrameAddress | None


@dataclass(frozen=True)
class WorkerMemory:
    """Memory of the workers of one task. `frames` is None if nothing is drawn."""

    slots: Block
    bell: Block
    frames: FrameMemory | None

    @classmethod
    def attach(cls, spec: FarmSpec, info: TaskInfo, address: MemoryAddress) -> WorkerMemory:
        frames = None if address.frames is None else FrameMemory.attach(address.frames)
        slots = Block.attach(slot_fields(spec, info), address.slots)
        return cls(slots, Block.attach(BELL, address.bell), frames)

    @classmethod
    def private(cls, spec: FarmSpec, info: TaskInfo) -> WorkerMemory:
        """Memory of this process alone, without frames: for a physics worker at the far end of a relay."""
        return cls(Block.create(slot_fields(spec, info), False), Block.create(BELL, False), None)

    @property
    def address(self) -> MemoryAddress | None:
        """None where it is this process's own."""
        if self.slots.name is None or self.bell.name is None:
            return None
        return MemoryAddress(self.slots.name, self.bell.name, None if self.frames is None else self.frames.address)

    @property
    def client(self) -> Doorbell:
        """The client's bell."""
        return Doorbell(self.bell.arrays["bell"], 0)
