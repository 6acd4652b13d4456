"""Physics and render workers: plain classes that watch their slots. Whoever hosts them calls `serve` (in a
process of its own) or `run_pending` (in the caller's process, when it rings).

A worker owns the slots whose environment index falls to it, and touches no other. It takes work in the order
of the tickets, so that the stage that was submitted first is answered first.
"""

from __future__ import annotations

import os
import time
import traceback
from dataclasses import dataclass

import numpy as np

from sim_farm import layout
from sim_farm.contract import EpisodeSpec, FarmError, Physics, PhysicsResult, TaskInfo
from sim_farm.doorbell import Doorbell
from sim_farm.layout import FarmSpec, slot_fields
from sim_farm.memory import Block
from sim_farm.painting import Painter
from sim_farm.private_memory import give_back, private_bytes
from sim_farm.registry import make_physics


@dataclass(frozen=True)
class WorkerSetup:
    """All a worker needs to start, anywhere: it can be sent to another process."""

    spec: FarmSpec
    info: TaskInfo
    index: int
    """Physics workers are 0 .. physics_workers - 1, render workers follow."""
    memory: str | None
    """Name of the shared block; None when the block is handed over directly."""
    core: int | None = None
    """CPU core the worker's process is pinned to."""

    @property
    def device(self) -> int | None:
        """The EGL device of a worker that draws."""
        devices = self.spec.devices
        return devices[self.spec.drawers.index(self.index) % len(devices)] if devices else None

    @property
    def is_physics(self) -> bool:
        return self.index < self.spec.physics_workers

    @property
    def draws(self) -> bool:
        return bool(self.info.cameras) and self.index in self.spec.drawers

    @property
    def name(self) -> str:
        kind = "physics" if self.is_physics else "render"
        return f"{kind} {self.index if self.is_physics else self.index - self.spec.physics_workers}"


class Worker:
    """What both kinds share: the block, the bells, and the report of what they are doing."""

    def __init__(self, setup: WorkerSetup, block: Block | None = None) -> None:
        self.setup = setup
        if setup.core is not None:
            os.sched_setaffinity(0, {setup.core})
        if block is None:
            assert setup.memory is not None
            block = Block.attach(slot_fields(setup.spec, setup.info), setup.memory)
        self.block = block
        self.slots = block.arrays
        bells = self.slots["bells"]
        self._mine = Doorbell(bells, setup.index + 1)
        self._painter: Painter | None = None
        self._client = Doorbell(bells, layout.CLIENT_BELL)

    def serve(self) -> None:
        """Build the environments and work until the farm stops. Errors are written where the client finds them."""
        try:
            self.build()
            while not self.slots["stop"][0]:
                self._progress()
                seen = self._mine.value()
                if not self.run_pending():
                    # The timeout only bounds how long a stop without a ring can go unnoticed.
                    self._mine.wait(seen, timeout_s=1.0)
        except Exception as error:
            self._fail(error)
        finally:
            self.close()

    def build(self) -> None:
        raise NotImplementedError

    def run_pending(self) -> int:
        """Do what is asked of this worker's renderer, then of its slots; the number of slots served."""
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError

    def _report_memory(self) -> None:
        if self.setup.memory is not None:  # else the process is the caller's
            self.slots["private_bytes"][self.setup.index] = private_bytes()

    def _place_renderer(self) -> None:
        """Have a renderer, or none while the client wants them away; then say so, and what that changed in memory.

        A worker that takes the place of a lost one comes through here too: the wish is a state, not an event.
        """
        if not self.setup.draws:
            return
        slots, index = self.slots, self.setup.index
        away = bool(slots["away"][0])
        if away != (self._painter is None):
            phase, before = int(slots["phase"][index]), private_bytes()
            if away:
                self._close_painter()
            else:
                self._open_painter()
            if self.setup.memory is not None:  # else the process is the caller's
                slots["moved_bytes"][index] = max(0, (private_bytes() - before) * (-1 if away else 1))
            self._report(phase)
        if bool(slots["left"][index]) != away:
            slots["left"][index] = away
            self._client.ring()

    def _open_painter(self) -> None:
        self._report(layout.OPENING)
        device = self.setup.device
        if device is not None:
            os.environ["MUJOCO_EGL_DEVICE_ID"] = str(device)
        self._painter = Painter(self.setup.spec.task, self.slots)

    def _close_painter(self) -> None:
        assert self._painter is not None
        self._report(layout.CLOSING)
        self._painter.close()
        self._painter = None
        give_back()

    def _report(self, phase: int) -> None:
        # The time first: who sees the new phase must not take the old one's beginning for it.
        self._progress()
        self.slots["phase"][self.setup.index] = phase

    def _progress(self) -> None:
        """Note the time: this worker has got something done, or looks for something to do."""
        self.slots["since_ns"][self.setup.index] = time.monotonic_ns()

    def _fail(self, error: Exception) -> None:
        """A message for a user's mistake, with the traceback only where it is our own."""
        text = str(error) if isinstance(error, FarmError) else traceback.format_exc()
        data = text.encode()[-layout.MESSAGE_BYTES :]
        row = self.slots["message"][self.setup.index]
        row[...] = 0
        row[: len(data)] = np.frombuffer(data, np.uint8)
        self._report(layout.FAILED)
        self._client.ring()

    def _pending(self, owned: np.ndarray, asked: str, done: str) -> list[int]:
        """Owned slots with work, oldest ticket first."""
        asked_now, done_now = self.slots[asked][owned], self.slots[done][owned]
        waiting = owned[asked_now > done_now]
        return sorted(waiting.tolist(), key=self.slots[asked].__getitem__)


class PhysicsWorker(Worker):
    """Steps its environments, and draws their frames too when the farm has no render workers."""

    def __init__(self, setup: WorkerSetup, block: Block | None = None) -> None:
        super().__init__(setup, block)
        spec = setup.spec
        self._envs = np.array([e for e in range(spec.num_envs) if spec.worker_of(e) == setup.index])
        self._physics: dict[int, Physics] = {}
        self._draws = bool(setup.info.cameras)
        bells = self.slots["bells"]
        self._next = {
            env: Doorbell(bells, 1 + spec.physics_workers + spec.renderer_of(env))
            for env in self._envs.tolist()
            if spec.render_workers and self._draws
        }

    def build(self) -> None:
        """Build every environment, and bring those that a predecessor had begun to where it left them."""
        self._report(layout.BUILDING)
        for env in self._envs.tolist():
            self._physics[env] = make_physics(self.setup.spec.task)
            self.slots["built"][self.setup.index] += 1
            self._progress()
            self._client.ring()
        self._place_renderer()
        for env in self._envs.tolist():
            if self.slots["simulated"][env]:
                self._replay(env)
                self._progress()
        self._report_memory()
        self._report(layout.WAITING)

    def run_pending(self) -> int:
        self._place_renderer()
        pending = self._pending(self._envs, "requested", "simulated")
        if pending:
            self._report(layout.WORKING)
        for position, env in enumerate(pending):
            self._serve_slot(env, last=self._last_of_stage(env, pending[position + 1 :]))
            self._progress()
        if pending:
            self._report(layout.WAITING)
        return len(pending)

    def close(self) -> None:
        for physics in self._physics.values():
            physics.close()
        if self._painter is not None:
            self._painter.close()

    def _last_of_stage(self, env: int, rest: list[int]) -> bool:
        stage = self.setup.spec.stage_of
        return all(stage(other) != stage(env) for other in rest)

    def _serve_slot(self, env: int, last: bool) -> None:
        slots, ticket = self.slots, self.slots["requested"][env]
        times = slots["times_ns"][env]
        times[layout.PHYSICS_START] = time.monotonic_ns()
        if slots["op"][env] == layout.RESET:
            self._begin(env, int(slots["base_episode"][env]))
        else:
            self._step(env)
        times[layout.PHYSICS_END] = time.monotonic_ns()
        drawn_here = self._painter is not None or not self._draws
        if self._painter is not None:
            self._painter.draw(env)
        if drawn_here:  # before `simulated`: who dies in between has not finished, and it is done again
            slots["drawn"][env] = ticket
        slots["simulated"][env] = ticket
        if drawn_here:
            if last:  # one wake-up per stage and worker; the client waits for the whole stage anyway
                self._client.ring()
        else:
            self._next[env].ring()

    def _begin(self, env: int, episode: int) -> None:
        """Start the environment's `episode`-th episode, or rest if there is none."""
        slots = self.slots
        spec = self._episode(env, episode)
        slots["episode"][env] = episode
        slots["episode_step"][env] = 0
        slots["active"][env] = spec is not None
        if slots["op"][env] == layout.RESET:
            self._rest(env)
        if spec is None:
            for key in ("state", "proprio"):
                slots[key][env] = 0
            return
        physics = self._physics[env]
        base = int(slots["base_step"][env]) if slots["op"][env] == layout.RESET else 0
        result = physics.reset(spec)
        if base:
            result = physics.step(slots["history"][env, :base])
            slots["episode_step"][env] = base
        self._observe(env, result)

    def _episode(self, env: int, number: int) -> EpisodeSpec | None:
        """What determines the environment's episode of that number; None where there is none, or none yet."""
        return self.setup.spec.episodes.spec(env, number) if number < self.slots["limit"][env] else None

    def _rest(self, env: int) -> None:
        """Nothing was executed: no step, no reward, no end of an episode."""
        for key in ("steps", "reward", "success", "terminated", "truncated", "draw_final"):
            self.slots[key][env] = 0

    def _step(self, env: int) -> None:
        slots = self.slots
        if not slots["active"][env]:
            self._rest(env)
            return
        base = int(slots["base_step"][env])
        result = self._physics[env].step(slots["action"][env])
        steps = result.steps
        slots["history"][env, base : base + steps] = slots["action"][env, :steps]
        slots["steps"][env] = steps
        slots["reward"][env] = 0
        slots["reward"][env, :steps] = result.reward
        slots["success"][env] = 0
        slots["success"][env, :steps] = result.success
        slots["terminated"][env] = result.terminated[-1]
        slots["truncated"][env] = result.truncated[-1]
        slots["episode_step"][env] = base + steps
        if not result.ended:
            slots["draw_final"][env] = 0
            self._observe(env, result)
            return
        slots["final_state"][env] = result.state
        slots["final_proprio"][env] = result.proprio
        slots["final_instruction"][env] = slots["instruction"][env]
        if self._draws:
            slots["final_scene"][env] = result.scene
        wanted = self.setup.spec.final_frames
        slots["draw_final"][env] = wanted == "ended" or (wanted == "truncated" and bool(result.truncated[-1]))
        self._begin(env, int(slots["episode"][env]) + 1)

    def _observe(self, env: int, result: PhysicsResult) -> None:
        slots = self.slots
        slots["state"][env] = result.state
        slots["proprio"][env] = result.proprio
        if self._draws:
            slots["scene"][env] = result.scene
        if slots["episode_step"][env] == 0 or slots["op"][env] == layout.RESET:
            self._instruct(env, result)

    def _instruct(self, env: int, result: PhysicsResult) -> None:
        """The instruction is constant during an episode, so it is written at its beginning only."""
        slots = self.slots
        text = result.instruction.encode()
        if len(text) > slots["instruction"].shape[1]:
            raise FarmError(
                f"the instruction {result.instruction!r} is longer than {slots['instruction'].shape[1]} bytes"
            )
        slots["instruction"][env] = 0
        slots["instruction"][env, : len(text)] = np.frombuffer(text, np.uint8)

    def _replay(self, env: int) -> None:
        """Bring a new environment to where a lost worker's was: its episode's seed and actions determine it.

        What is pending is done again from the state last collected, and what a half-done attempt has written is
        taken back. What was finished stays: the slot says where it led, and the client may collect it and ask for
        more while this runs.
        """
        slots, physics = self.slots, self._physics[env]
        pending = slots["simulated"][env] < slots["requested"][env]
        episode, step = ("base_episode", "base_step") if pending else ("episode", "episode_step")
        number, steps = int(slots[episode][env]), int(slots[step][env])
        spec = self._episode(env, number)
        if pending:
            slots["episode"][env] = number
            slots["active"][env] = spec is not None
        if spec is None:
            return
        physics.reset(spec)
        if steps:
            physics.step(slots["history"][env, :steps])


class RenderWorker(Worker):
    """Draws the scenes that physics workers leave in its slots."""

    def __init__(self, setup: WorkerSetup, block: Block | None = None) -> None:
        super().__init__(setup, block)
        mine = setup.index - setup.spec.physics_workers
        self._envs = np.array([e for e in range(setup.spec.num_envs) if setup.spec.renderer_of(e) == mine])

    def build(self) -> None:
        self._report(layout.BUILDING)
        self._place_renderer()
        self._report_memory()
        self.slots["built"][self.setup.index] = 1
        self._report(layout.WAITING)
        self._client.ring()

    def run_pending(self) -> int:
        self._place_renderer()
        pending = self._pending(self._envs, "simulated", "drawn")
        if pending:
            self._report(layout.WORKING)
        for env in pending:
            ticket = self.slots["simulated"][env]
            assert self._painter is not None, "nothing is submitted while renderers are away"
            self._painter.draw(env)
            self.slots["drawn"][env] = ticket
            self._progress()
            self._client.ring()
        if pending:
            self._report(layout.WAITING)
        return len(pending)

    def close(self) -> None:
        if self._painter is not None:
            self._painter.close()
