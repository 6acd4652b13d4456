"""The parts that physics and render workers share.

Workers are plain classes that watch their slots. A host calls `serve` (in the worker's process) or `run_pending` (in
the caller's process, when it rings).

A worker owns the slots of its environments, and touches no other. It takes work in the order
of the tickets, so that the group that was submitted first is answered first.
"""

from __future__ import annotations

import ctypes
import gc
import os
import time
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sim_farm.contract import FarmError, TaskInfo
from sim_farm.registry import make_renderer, resolve
from sim_farm.render_devices import RenderDevice
from sim_farm.shared_memory import slot_layout
from sim_farm.shared_memory.doorbell import Doorbell
from sim_farm.shared_memory.frame_memory import FrameMemory, stamp
from sim_farm.shared_memory.slot_layout import FarmSpec, MemoryAddress, WorkerMemory
from sim_farm.workers import faults


class FrameWriter:
    """Draws a slot's frames: the present observation, and the ended episode's last one where it is wanted."""

    def __init__(self, spec: FarmSpec, slots: dict[str, np.ndarray], memory: FrameMemory) -> None:
        """Make the renderer and let it draw once, so that a renderer that cannot start fails, or hangs,
        in this call."""
        self._renderer, self._history = make_renderer(spec.task), spec.history
        self._slots, self._memory = slots, memory
        self._renderer.render([], self._renderer.info.cameras)

    def close(self) -> None:
        """Free the renderer with its scene replicas. From the thread that made it: OpenGL's contexts are its own."""
        self._renderer.close()

    def draw(self, env: int) -> None:
        """Draw the environment's observation into its `frame_row`, and a wanted final one into its `final_row`. The
        row of an environment that rests is filled with zeros."""
        slots = self._slots
        times = slots["times_ns"][env]
        times[slot_layout.RENDER_START] = time.monotonic_ns()
        episode, row = int(slots["episode"][env]), int(slots["frame_row"][env])
        if slots["draw_final"][env]:
            last = int(slots["base_step"][env]) + int(slots["steps"][env])
            self._write(slots["final_scene"][env], int(slots["final_row"][env]), episode - 1, last)
            scenes = zip(
                self._history.back, slots["final_past_row"][env].tolist(), slots["final_past_scene"][env], strict=True
            )
            self._write_earlier(scenes, episode - 1, last)
        if slots["active"][env]:
            step = int(slots["episode_step"][env])
            self._write(slots["scene"][env], row, episode, step)
            if step:  # the first observation of an episode stands for those before it
                scenes = (*slots["past_scene"][env], *slots["redrawn_scene"][env])
                rows = slots["past_row"][env].tolist()
                self._write_earlier(zip(self._history.kept, rows, scenes, strict=True), episode, step)
        else:
            self._memory.frames[row] = 0
        times[slot_layout.RENDER_END] = time.monotonic_ns()

    def _write_earlier(self, scenes: Iterable[tuple[int, int, np.ndarray]], episode: int, step: int) -> None:
        """Draw earlier observations: how many env steps before `step` each is, its row (-1: it is drawn), its scene."""
        for back, row, scene in scenes:
            if row >= 0:
                self._write(scene, row, episode, max(0, step - back))

    def _write(self, scene: np.ndarray, row: int, episode: int, step: int) -> None:
        memory, cameras = self._memory, self._renderer.info.cameras
        stamp(memory.frames[row])
        places = {name: memory.frames[row : row + 1, i] for i, name in enumerate(cameras)}
        frames = self._renderer.render([scene], cameras, places)
        for name, place in places.items():
            if frames[name] is not place:  # a renderer that cannot draw into a given array
                place[...] = frames[name]
        memory.frames_of[row] = episode, step


@dataclass(frozen=True)
class WorkerSetup:
    """All that a worker needs to start; it can be sent to another process."""

    spec: FarmSpec
    info: TaskInfo
    index: int
    """Physics workers are 0 .. physics_workers - 1, render workers follow."""
    memory: MemoryAddress | None
    """Address of the shared memory; None if the worker is in the caller's process and is given the memory itself."""
    core: int | None = None
    """CPU core the worker's process is pinned to."""
    several: bool = False
    """True if the farm has other tasks too, so that the worker's name includes its task's."""

    @property
    def device(self) -> RenderDevice | None:
        """Device to draw on; None: the worker does not draw, or the driver chooses."""
        return self.spec.device_of(self.index) if self.draws else None

    @property
    def is_physics(self) -> bool:
        return self.index < self.spec.physics_workers

    @property
    def draws(self) -> bool:
        return bool(self.info.cameras) and self.index in self.spec.drawers

    @property
    def name(self) -> str:
        kind = "physics" if self.is_physics else "render"
        number = self.index if self.is_physics else self.index - self.spec.physics_workers
        return f"{kind} {number} of {self.spec.task.name}" if self.several else f"{kind} {number}"


class Worker:
    """Base of both kinds: the block, the bells, and the report of what they are doing."""

    def __init__(self, setup: WorkerSetup, memory: WorkerMemory | None = None) -> None:
        """`memory` is that of the address in `setup` if none is given."""
        self.setup = setup
        if setup.core is not None:
            os.sched_setaffinity(0, {setup.core})
        if memory is None:
            assert setup.memory is not None
            memory = WorkerMemory.attach(setup.spec, setup.info, setup.memory)
        self.memory = memory
        self.slots = memory.slots.arrays
        self._mine = Doorbell(self.slots["bells"], setup.index)
        self._client = memory.client
        self._frame_writer: FrameWriter | None = None

    def serve(self) -> None:
        """Build the environments and work until the farm stops. Errors are written where the client finds them."""
        try:
            self._report(slot_layout.BUILDING)
            resolve(self.setup.spec.task.name)  # imports the simulator
            # What is imported lives as long as the process. ManiSkill collects garbage whenever it builds a scene, in
            # some tasks at every reset, and would look at all of it each time.
            gc.collect()
            gc.freeze()
            self.build()
            while not self.slots["stop"][0]:
                seen = self._mine.value()
                if not self.run_pending():
                    # The timeout only bounds how long a stop without a ring can go unnoticed.
                    self._mine.wait(seen, timeout_s=1.0)
        except Exception as error:  # whatever a simulator raises is the client's to say
            self._fail(error)
        finally:
            self.close()

    def build(self) -> None:
        """Get ready to serve. Raises `FarmError` where the process cannot draw on the device that it was given."""
        raise NotImplementedError

    def run_pending(self) -> int:
        """Do what is asked of this worker's renderer, then of its slots; the number of slots served."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _report_memory(self) -> None:
        """Give back what building has freed, and report what the process keeps."""
        if self.setup.memory is not None:  # else the process is the caller's
            give_back()
            self.slots["private_bytes"][self.setup.index] = private_bytes()

    def _place_renderer(self) -> None:
        """Build the renderer, or free it while the client wants renderers away; then report it and the bytes.

        A replacement of a lost worker does this too: the request is a state in the slots, not an event.
        """
        if not self.setup.draws:
            return
        slots, index = self.slots, self.setup.index
        away = bool(slots["away"][0])
        if away != (self._frame_writer is None):
            phase, before = int(slots["phase"][index]), private_bytes()
            if away:
                self._close_frame_writer()
            else:
                self._open_frame_writer()
            if self.setup.memory is not None:  # else the process is the caller's
                slots["moved_bytes"][index] = max(0, (private_bytes() - before) * (-1 if away else 1))
            self._report(phase)
        if bool(slots["left"][index]) != away:
            slots["left"][index] = away
            self._client.ring()

    def _open_frame_writer(self) -> None:
        self._report(slot_layout.OPENING)
        self._strike("open")
        assert self.memory.frames is not None, "a worker that draws has a frame memory"
        self._frame_writer = FrameWriter(self.setup.spec, self.slots, self.memory.frames)

    def _close_frame_writer(self) -> None:
        assert self._frame_writer is not None
        self._report(slot_layout.CLOSING)
        self._strike("close")
        self._frame_writer.close()
        self._frame_writer = None
        give_back()

    def _report(self, phase: int) -> None:
        # The time first: who sees the new phase must not take the old one's beginning for it.
        self._progress()
        self.slots["phase"][self.setup.index] = phase

    def _strike(self, phase: str, data: npt.NDArray[Any] | None = None) -> None:
        """A point at which a fault may be injected."""
        faults.point(self.setup.name, phase, data)

    def _progress(self) -> None:
        """Record progress: the worker has finished something, or begins something else."""
        self.slots["since_ns"][self.setup.index] = time.monotonic_ns()

    def _fail(self, error: Exception) -> None:
        """The message of an error; a traceback is added unless it is a user's mistake."""
        text = str(error) if isinstance(error, FarmError) else traceback.format_exc()
        data = text.encode()[-slot_layout.MESSAGE_BYTES :]
        row = self.slots["message"][self.setup.index]
        row[...] = 0
        row[: len(data)] = np.frombuffer(data, np.uint8)
        self._report(slot_layout.FAILED)
        self._client.ring()

    def _pending(self, owned: slice, asked: str, done: str) -> list[int]:
        """Owned environments with work, oldest ticket first."""
        asked_now = self.slots[asked][owned]
        waiting = np.flatnonzero(asked_now > self.slots[done][owned])
        if not len(waiting):
            return []
        oldest_first = waiting[np.argsort(asked_now[waiting], kind="stable")]
        return (owned.start + owned.step * oldest_first).tolist()


# --- the memory that a process has by itself


def private_bytes(pid: int | None = None) -> int:
    """Bytes that a process, this one or another of the machine, has in memory and in no file or shared memory; 0 if the
    system does not say, also of one that has ended. What a fork has of its parent counts in both: counting what is
    shared takes the system a look at every page, and would make it grow when another fork ends."""
    try:
        pages = Path(f"/proc/{pid or 'self'}/statm").read_text().split()
    except OSError:
        return 0
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def give_back() -> None:
    """Return to the system what has been freed; glibc would keep most of it for the process's next wishes."""
    gc.collect()  # simulators are full of cycles
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
