"""The worker that steps environments, and brings those of a lost predecessor to where they were, if their simulator can
be replayed; else their episodes end."""

from __future__ import annotations

import logging
import time
from collections import deque
from functools import reduce

import numpy as np

from sim_farm import render_devices
from sim_farm.contract import EpisodeSpec, FarmError, Float32, Physics, PhysicsResult
from sim_farm.conventions import TaskBatch, TaskPhysics, joined
from sim_farm.registry import make_batch, make_physics
from sim_farm.shared_memory import slot_layout
from sim_farm.shared_memory.doorbell import Doorbell
from sim_farm.shared_memory.slot_layout import WorkerMemory
from sim_farm.workers.worker import Worker, WorkerSetup

_log = logging.getLogger(__name__)


class PhysicsWorker(Worker):
    """Steps its environments, and draws their frames too when the farm has no render workers."""

    def __init__(self, setup: WorkerSetup, memory: WorkerMemory | None = None) -> None:
        super().__init__(setup, memory)
        spec = setup.spec
        self._owned = slice(setup.index, spec.num_envs, spec.physics_workers)
        self._envs = range(spec.num_envs)[self._owned]
        self._physics: dict[int, TaskPhysics] = {}
        self._batches: dict[int, tuple[list[int], TaskBatch]] = {}
        """Of each group: its environments here, and what steps them at once."""
        self._ahead: dict[int, PhysicsResult] = {}
        """Results of chunks that were executed together with another environment's."""
        self._due: list[int] = []
        """Environments of this pass that are still to be served."""
        self._explained = setup.index != 0  # the first worker speaks for all
        self._draws = bool(setup.info.cameras)
        self._broken: set[int] = set()
        """Environments whose episode began with an observation that is not finite."""
        self._lost: set[int] = set()
        """Environments whose episode was lost with a predecessor, and ends with its next chunk."""
        self._history = spec.history
        self._seen: dict[int, deque[PhysicsResult]] = {}
        """The last observations of each environment's episode, where decisions are made on more than the present one.
        """
        self._told: dict[int, str] = {}
        """The instruction in each environment's slot, as far as this worker has written it."""
        bells = self.slots["bells"]
        self._next = {
            env: Doorbell(bells, spec.physics_workers + spec.renderer_of(env))
            for env in self._envs
            if spec.render_workers and self._draws
        }

    def build(self) -> None:
        """Build every environment, and bring the episodes of a lost predecessor to the state in which it left them."""
        self._report(slot_layout.BUILDING)
        self._strike("start")
        render_devices.ask(self.setup.device)
        for env in self._envs:
            self._physics[env] = make_physics(self.setup.spec.task)
            self.slots["built"][self.setup.index] += 1
            self._progress()
            self._client.ring()
        for group in range(self.setup.spec.groups):
            envs = [env for env in self._envs if self.setup.spec.group_of(env) == group]
            batch = make_batch(self.setup.spec.task, [self._physics[env] for env in envs])
            self._batches[group] = envs, batch
        self._place_renderer()
        if self.setup.info.inexact:
            self._lose_all()
        else:
            self._replay_all()
        self._report_memory()
        self._report(slot_layout.WAITING)

    def run_pending(self) -> int:
        self._place_renderer()
        pending = self._pending(self._owned, "requested", "simulated")
        if pending:
            self._report(slot_layout.WORKING)
        last = {self.setup.spec.group_of(env): env for env in pending}
        for place, env in enumerate(pending):
            self._due = pending[place:]
            self._serve_slot(env, last=last[self.setup.spec.group_of(env)] == env)
            self._progress()
        if pending:
            self._report(slot_layout.WAITING)
        return len(pending)

    def close(self) -> None:
        for physics in self._physics.values():
            physics.close()
        if self._frame_writer is not None:
            self._frame_writer.close()

    def _serve_slot(self, env: int, last: bool) -> None:
        slots, ticket = self.slots, self.slots["requested"][env]
        times = slots["times_ns"][env]
        times[slot_layout.PHYSICS_START] = time.monotonic_ns()
        if slots["op"][env] == slot_layout.RESET:
            self._strike("reset")
            self._begin(env, int(slots["base_episode"][env]))
        else:
            self._strike("step")
            self._step(env)
        times[slot_layout.PHYSICS_END] = time.monotonic_ns()
        drawn_here = self._frame_writer is not None or not self._draws
        if self._frame_writer is not None:
            self._frame_writer.draw(env)
        if drawn_here:  # before `simulated`: who dies in between has not finished, and it is done again
            slots["drawn"][env] = ticket
        slots["simulated"][env] = ticket
        if drawn_here:
            if last:  # one wake-up per group and worker; the client waits for the whole group anyway
                self._client.ring()
        else:
            self._next[env].ring()

    def _begin(self, env: int, episode: int) -> None:
        """Start the environment's `episode`-th episode, or rest if there is none."""
        slots = self.slots
        start = int(slots["base_start" if slots["op"][env] == slot_layout.RESET else "next_start"][env])
        spec = self._episode(env, episode, start)
        self._lost.discard(env)
        slots["episode"][env] = episode
        slots["start"][env] = start
        slots["episode_step"][env] = 0
        slots["active"][env] = spec is not None
        if slots["op"][env] == slot_layout.RESET:
            self._rest(env)
        if spec is None:
            for key in ("state", "proprio", "past_state", "past_proprio", "retold"):
                slots[key][env] = 0
            return
        base = int(slots["base_step"][env]) if slots["op"][env] == slot_layout.RESET else 0
        result = self._bring_to(env, spec, base)
        slots["episode_step"][env] = base
        self._note_beginning(env, result)
        self._observe(env, result)

    def _bring_to(self, env: int, spec: EpisodeSpec, steps: int) -> PhysicsResult:
        """Begin the episode and execute its first `steps` actions again; the observation there."""
        physics, actions = self._physics[env], self.slots["history"][env, :steps]
        result = physics.reset(spec)
        if self._history.observations == 1:
            return replayed(physics, actions) if steps else result
        seen = self._seen[env] = deque([result], self._history.observations_kept)
        unseen = max(0, steps - self._history.observations_kept)
        if unseen:
            seen[0] = replayed(physics, actions[:unseen])
        for action in actions[unseen:]:
            seen.append(physics.step(action[None]))
        return seen[-1]

    def _executed(self, env: int, action: Float32) -> PhysicsResult:
        """The result of a chunk [C, A]; where decisions look back, of its env steps one by one."""
        physics = self._physics[env]
        if self._history.observations == 1:
            if env not in self._ahead:
                self._execute_together(env)
            return self._ahead.pop(env)
        taken: list[PhysicsResult] = []
        while not (taken and taken[-1].ended) and len(taken) < len(action):
            taken.append(physics.step(action[len(taken)][None]))
            self._seen[env].append(taken[-1])
        if not all(map(_finite, taken)):
            self._broken.add(env)
        return reduce(joined, taken)

    def _execute_together(self, env: int) -> None:
        """Execute the environment's chunk, and, where that takes less time, those of the others of its group that are
        to be served in this pass. Else frames of the first can be drawn while the next is simulated."""
        slots = self.slots
        envs, batch = self._batches[self.setup.spec.group_of(env)]
        due = [
            one
            for one in (self._due if batch.shares else [env])
            if one in envs and slots["op"][one] != slot_layout.RESET and slots["active"][one] and one not in self._lost
        ]
        results = batch.step([envs.index(one) for one in due], slots["action"][due])
        self._ahead.update(zip(due, results, strict=True))
        if batch.alone and not self._explained:
            self._explained = True
            _log.warning(
                "%s: a worker's environments are stepped one by one: %s", self.setup.spec.task.name, batch.alone
            )

    def _earlier(self, env: int, back: int) -> PhysicsResult:
        """The observation that many env steps before the last one; the episode's first stands for those before it."""
        seen = self._seen[env]
        return seen[max(0, len(seen) - 1 - back)]

    def _note_beginning(self, env: int, result: PhysicsResult) -> None:
        """An episode that begins with an observation that is not finite ends with its first chunk, as a broken one."""
        (self._broken.discard if _finite(result) else self._broken.add)(env)

    def _episode(self, env: int, number: int, start: int) -> EpisodeSpec | None:
        """The spec of the environment's episode of that number; None where there is none, or none yet."""
        return self.setup.spec.episodes.spec(env, number, start) if number < self.slots["limit"][env] else None

    def _rest(self, env: int) -> None:
        """Nothing was executed: no step, no reward, no end of an episode."""
        for key in ("steps", "reward", "success", "terminated", "truncated", "draw_final"):
            self.slots[key][env] = 0

    def _step(self, env: int) -> None:
        slots = self.slots
        if not slots["active"][env]:
            self._rest(env)
            slots["retold"][env] = False
            return
        if env in self._lost:
            self._end_lost(env)
            return
        base, action = int(slots["base_step"][env]), slots["action"][env]
        result = self._executed(env, action)
        self._strike("state", result.state)
        steps, broken = result.steps, env in self._broken or not _finite(result)
        slots["history"][env, base : base + steps] = action[:steps]
        slots["steps"][env] = steps
        for key, values in (("reward", result.reward), ("success", result.success)):
            row = slots[key][env]
            row[:steps] = values
            row[steps:] = 0
        slots["terminated"][env] = result.terminated[-1] or broken
        slots["truncated"][env] = result.truncated[-1] and not broken
        slots["episode_step"][env] = base + steps
        if not result.ended and not broken:
            slots["draw_final"][env] = 0
            self._observe(env, result)
            return
        if broken:  # a reward that is not finite leaves the episode out; nothing else of it is shown
            slots["reward"][env, steps - 1], slots["success"][env] = np.nan, False
        self._put_fault(env, result.fault)
        slots["final_state"][env] = 0 if broken else result.state
        slots["final_proprio"][env] = 0 if broken else result.proprio
        slots["final_instruction"][env] = slots["instruction"][env]
        if self._draws and not broken:
            slots["final_scene"][env] = result.scene
        for place, back in enumerate(self._history.back):
            earlier = self._earlier(env, back)
            slots["final_past_state"][env, place] = 0 if broken else earlier.state
            slots["final_past_proprio"][env, place] = 0 if broken else earlier.proprio
            if self._draws and not broken:
                slots["final_past_scene"][env, place] = earlier.scene
        wanted = self.setup.spec.final_frames
        wanted_now = wanted == "ended" or (wanted == "truncated" and bool(result.truncated[-1]))
        slots["draw_final"][env] = wanted_now and not broken
        self._begin(env, int(slots["episode"][env]) + 1)

    def _end_lost(self, env: int) -> None:
        """Nothing is executed: an env step whose reward is not finite ends the episode, as a broken one."""
        slots, base = self.slots, int(self.slots["base_step"][env])
        self._rest(env)
        slots["history"][env, base] = slots["action"][env][0]
        slots["steps"][env], slots["reward"][env, 0], slots["terminated"][env] = 1, np.nan, True
        for key in ("final_state", "final_proprio", "final_past_state", "final_past_proprio"):
            slots[key][env] = 0
        slots["final_instruction"][env] = slots["instruction"][env]
        self._put_fault(env, "")
        self._begin(env, int(slots["episode"][env]) + 1)

    def _put_fault(self, env: int, fault: str) -> None:
        """Write why the episode that has ended is broken; the end of a long text is cut off."""
        row = self.slots["fault"][env]
        data = fault.encode()[: len(row)].decode(errors="ignore").encode()
        row[...] = 0
        row[: len(data)] = np.frombuffer(data, np.uint8)

    def _observe(self, env: int, result: PhysicsResult) -> None:
        slots = self.slots
        slots["state"][env] = 0 if env in self._broken else result.state
        slots["proprio"][env] = 0 if env in self._broken else result.proprio
        if self._draws:
            slots["scene"][env] = result.scene
        for place, back in enumerate(self._history.back):
            earlier = self._earlier(env, back)
            slots["past_state"][env, place] = 0 if env in self._broken else earlier.state
            slots["past_proprio"][env, place] = 0 if env in self._broken else earlier.proprio
        if self._draws:
            self._show_earlier(env)
        slots["retold"][env] = result.instruction != self._told.get(env)
        if slots["retold"][env]:
            self._instruct(env, result)

    def _show_earlier(self, env: int) -> None:
        """Write the scenes of earlier observations that are to be drawn: of the last chunk, or after a reset in the
        middle of an episode all that decisions refer to."""
        slots, history = self.slots, self._history
        for place, back in enumerate(history.kept[: history.new]):
            slots["past_scene"][env, place] = self._earlier(env, back).scene
        if slots["op"][env] == slot_layout.RESET:
            for place, back in enumerate(history.kept[history.new :]):
                slots["redrawn_scene"][env, place] = self._earlier(env, back).scene

    def _instruct(self, env: int, result: PhysicsResult) -> None:
        slots, self._told[env] = self.slots, result.instruction
        text = result.instruction.encode()
        if len(text) > slots["instruction"].shape[1]:
            raise FarmError(
                f"the instruction {result.instruction!r} is longer than {slots['instruction'].shape[1]} bytes"
            )
        slots["instruction"][env] = 0
        slots["instruction"][env, : len(text)] = np.frombuffer(text, np.uint8)

    def _replay_all(self) -> None:
        begun = [env for env in self._envs if self.slots["simulated"][env]]
        if begun:
            self._report(slot_layout.REPLAYING)
        for env in begun:
            self._strike("replay")
            self._replay(env)
            self._progress()

    def _lose_all(self) -> None:
        """The episodes of a lost worker, whose simulator cannot be replayed, are over: none is continued.

        What is pending ends them, or is a reset that begins another; finished work stays, and the next chunk does.
        """
        for env in self._envs:
            if self.slots["simulated"][env]:
                self._lost.add(env)
                if self.slots["simulated"][env] < self.slots["requested"][env]:
                    self._take_back(env)

    def _take_back(self, env: int) -> EpisodeSpec | None:
        """Undo partial results of pending work; the spec of the episode that it belongs to, None where there is
        none."""
        slots = self.slots
        number, start = int(slots["base_episode"][env]), int(slots["base_start"][env])
        spec = self._episode(env, number, start)
        slots["episode"][env] = number
        slots["start"][env] = start
        slots["active"][env] = spec is not None
        return spec

    def _replay(self, env: int) -> None:
        """Bring a new environment to the state of a lost worker's: the episode's seed and actions determine it.

        Pending work is done again from the state that was last collected, and partial results are undone. Finished
        work stays: its results are in the slot, and the client may collect them and submit more while this runs.
        """
        slots = self.slots
        if slots["simulated"][env] < slots["requested"][env]:
            steps, spec = int(slots["base_step"][env]), self._take_back(env)
        else:
            steps = int(slots["episode_step"][env])
            spec = self._episode(env, int(slots["episode"][env]), int(slots["start"][env]))
        if spec is None:
            return
        self._note_beginning(env, self._bring_to(env, spec, steps))


def replayed(physics: Physics, actions: Float32) -> PhysicsResult:
    """Execute the actions [n, A] of an episode, n at least 1, turn by turn. Returns the last result."""
    done = 0
    while True:
        result = physics.step(actions[done:])
        done += result.steps
        if done == len(actions):
            return result


def _finite(result: PhysicsResult) -> bool:
    """True if state and proprioception are finite, so that a policy may see them."""
    return bool(np.isfinite(result.state).all() and np.isfinite(result.proprio).all())
