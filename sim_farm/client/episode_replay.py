"""Films and records of episodes. An episode is its spec and its actions, so both are made afterwards, of selected
episodes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from sim_farm.contract import (
    Bool,
    EpisodeSpec,
    FarmError,
    Float32,
    PhysicsResult,
    Renderer,
    SimulatorState,
    TaskInfo,
    TaskSpec,
    UInt8,
)
from sim_farm.conventions import TaskPhysics
from sim_farm.registry import make_physics, make_renderer

LONGEST = 100_000
"""Limit in env steps of the environment in which recordings continue one another."""


@dataclass(frozen=True)
class ReplayedEpisode:
    """An episode step by step: row i is what there was before action i, and what the action brought. n steps."""

    proprio: Float32
    """[n, P]"""
    state: Float32
    """[n, S]"""
    frames: Mapping[str, UInt8]
    """[n, H, W, 3] of each of the task's cameras."""
    actions: Float32
    """[n, A] as they were given: not clipped, in the task's convention."""
    reward: Float32
    """[n]"""
    success: Bool
    """[n] solved after the step."""
    done: Bool
    """[n] the step ended the episode, by the task or by the limit."""
    instruction: str

    @property
    def steps(self) -> int:
        return len(self.reward)


@dataclass(frozen=True)
class FilmRequest:
    """An episode to film."""

    task: TaskSpec
    """The task that is simulated. Its first camera films."""
    episode: EpisodeSpec
    actions: Float32
    """[n, A]"""
    every: int = 1
    """Env steps from one frame to the next."""


@dataclass(frozen=True)
class Recording:
    """An episode of n env steps as the simulator's own recorder wrote it."""

    spec: EpisodeSpec
    """Seed of the reset before it, as far as it is known: the scene's geometry is drawn from it."""
    start: SimulatorState
    """State before the first action; empty: the one that the reset leads to."""
    actions: Float32
    """[n, A] in the task's convention."""
    states: Mapping[str, npt.NDArray[np.generic]]
    """Arrays [m, ...] of the states after the first m actions, m at most n, by the names that the backend knows."""
    success: npt.NDArray[np.int8]
    """[n] 1 where the recording says that the task is solved after the step, 0 where it says it is not, else -1."""

    def state(self, step: int) -> SimulatorState:
        """The recorded state after the action `step`; empty where there is none."""
        return {name: rows[step] for name, rows in self.states.items() if step < len(rows)}


@dataclass(frozen=True)
class Followed:
    """Outcome of a recording whose actions were executed again."""

    replay: ReplayedEpisode | None
    """The episode, to the recording's end; None if its outcome differed, or it was not wanted."""
    deviation: float
    """Largest deviation of a state from the recorded one (`sim_farm.contract.RecordedPhysics.deviation`)."""
    reproduced: bool
    """Success and states were as recorded, at every step that the recording says them of."""
    why_not: str
    """Difference from the recording, or reason to leave the episode out; else empty."""
    from_seed: bool = False
    """True if the seed alone leads to the recorded first state."""
    corrected: int = 0
    """Env steps after which the recorded state took the place of one that was too far from it."""


class Replayer:
    """Replays episodes of one task: to the record of everything that a policy would have seen, or to a film."""

    def __init__(self, task: TaskSpec) -> None:
        self._task = task
        self._physics = make_physics(task)
        self._recorder: TaskPhysics | None = None
        """The environment in which recordings continue one after the other."""
        self._renderer: Renderer | None = make_renderer(task) if self._physics.info.cameras else None

    def describe(self) -> TaskInfo:
        return self._physics.info

    def replay(self, episode: EpisodeSpec, actions: Float32) -> ReplayedEpisode:
        """The episode under `actions` [n, A], n at least 1; the actions after its end are left out."""
        return self._record(self._run(episode, actions), actions)

    def _record(self, seen: Sequence[PhysicsResult], actions: Float32) -> ReplayedEpisode:
        before, after = seen[:-1], seen[1:]
        cameras = self._physics.info.cameras
        return ReplayedEpisode(
            proprio=np.stack([result.proprio for result in before]),
            state=np.stack([result.state for result in before]),
            frames=self._renderer.render([result.scene for result in before], cameras) if self._renderer else {},
            actions=np.asarray(actions[: len(after)], np.float32),
            reward=np.concatenate([result.reward for result in after]),
            success=np.concatenate([result.success for result in after]),
            done=np.concatenate([result.terminated | result.truncated for result in after]),
            instruction=seen[0].instruction,
        )

    def follow(
        self,
        recording: Recording,
        tolerance: float,
        keep: Bool | None = None,
        only_solved: bool = False,
        goes_on: bool = False,
        correct: bool = False,
    ) -> Followed:
        """Execute the recording's actions and compare success and states with it after every step.

        `tolerance` bounds the deviation. Where `keep` [n] is given, the episode that is returned executes only those of
        the actions, from the same start, and must end as the whole does. With `only_solved` it must end solved. With
        `goes_on` it begins where the recording of the last such call ended, or that of `pass_through`, as it did when
        its recorder went on in one environment. With `correct` a state beyond the tolerance is no difference: the
        recorded one takes its place, from which the next action continues.
        """
        physics = self._going_on() if goes_on else self._physics
        try:
            seen, from_seed = _begin(physics, recording, goes_on)
        except FarmError as error:
            return Followed(None, float("inf"), False, str(error))
        furthest, corrected, why_not = 0.0, 0, ""
        for step, action in enumerate(recording.actions):
            seen.append(physics.step(action[None]))
            if not why_not:
                away = _deviation(physics, recording, step)
                furthest = max(furthest, away)
                if correct and away > tolerance:
                    placed = physics.place(recording.state(step))
                    seen[-1] = replace(seen[-1], proprio=placed.proprio, state=placed.state, scene=placed.scene)
                    away, corrected = 0.0, corrected + 1
                why_not = _difference(recording, step, bool(seen[-1].success[-1]), away, tolerance)
            if why_not and not goes_on:  # else the next one goes on from this one's end
                break
        if why_not:
            return Followed(None, furthest, False, why_not)
        if only_solved and not seen[-1].success[-1]:
            return Followed(None, furthest, True, "it does not end solved")
        actions = recording.actions
        if keep is not None and not keep.all():
            solved = bool(seen[-1].success[-1])
            actions = actions[keep]
            if not len(actions):
                return Followed(None, furthest, True, "all of its actions are idle")
            seen, _ = _begin(self._physics, recording, goes_on=False)
            seen += [self._physics.step(action[None]) for action in actions]
            if bool(seen[-1].success[-1]) != solved:
                return Followed(None, furthest, True, f"without its idle actions it ends {'un' * solved}solved")
        replay = self._record(seen, actions)
        ends = np.arange(replay.steps) == replay.steps - 1  # where the recording ends, whatever the task says
        return Followed(replace(replay, done=ends), furthest, True, "", from_seed, corrected)

    def pass_through(self, recording: Recording) -> None:
        """Execute the recording for the recordings that continue it (`follow`), if it can be executed."""
        physics = self._going_on()
        with suppress(FarmError):
            _begin(physics, recording, goes_on=True)
            for action in recording.actions:
                physics.step(action[None])

    def _going_on(self) -> TaskPhysics:
        if self._recorder is None:
            self._recorder = make_physics(replace(self._task, max_episode_steps=LONGEST))
        return self._recorder

    def film(self, episode: EpisodeSpec, actions: Float32, every: int = 1) -> list[UInt8]:
        """Frames uint8 [H, W, 3] of the task's first camera: at the start, after every `every`-th of the actions
        [n, A], and at the end. Raises `FarmError` if the task has no camera."""
        if self._renderer is None:
            raise FarmError(f"{self._physics.info.spec.name} has no camera to film with")
        camera = self._physics.info.cameras[0]
        *seen, last = self._run(episode, actions)
        scenes = [result.scene for result in (*seen[::every], last)]
        return list(self._renderer.render(scenes, [camera])[camera])

    def close(self) -> None:
        self._physics.close()
        if self._recorder is not None:
            self._recorder.close()
        if self._renderer is not None:
            self._renderer.close()

    def _run(self, episode: EpisodeSpec, actions: Float32) -> list[PhysicsResult]:
        """Observations at the start and after each action, up to the episode's end. Raises `FarmError` where another
        episode would come out."""
        if self._physics.info.inexact:
            raise FarmError(f"{self._task.name} cannot be replayed: {self._physics.info.inexact}")
        seen = [self._physics.reset(episode)]
        for action in actions:
            seen.append(self._physics.step(np.asarray(action, np.float32)[None]))
            if seen[-1].ended:
                break
        return seen


class Filmer:
    """Films episodes, and makes a task's simulator anew only where the episode before was another task's."""

    def __init__(self) -> None:
        self._task: TaskSpec | None = None
        self._replayer: Replayer | None = None

    def film(self, request: FilmRequest) -> list[UInt8]:
        """The frames of `Replayer.film`."""
        if self._replayer is None or request.task != self._task:
            self.close()
            self._replayer, self._task = Replayer(request.task), request.task
        return self._replayer.film(request.episode, request.actions, request.every)

    def close(self) -> None:
        if self._replayer is not None:
            self._replayer.close()
        self._replayer = None


def _begin(physics: TaskPhysics, recording: Recording, goes_on: bool) -> tuple[list[PhysicsResult], bool]:
    """The result at the recording's start, and whether a new environment's reset to its seed leads to the episode."""
    if goes_on:
        physics.go_on(recording.spec)
    else:
        physics.reset(recording.spec)
    from_seed = not goes_on and (not recording.start or physics.deviation(recording.start) == 0)
    return [physics.begin_at(recording.start)], from_seed


def _deviation(physics: TaskPhysics, recording: Recording, step: int) -> float:
    """Deviation of the state after the action `step` from the recorded one; 0.0 if none is recorded."""
    state = recording.state(step)
    return physics.deviation(state) if state else 0.0


def _difference(recording: Recording, step: int, solved: bool, away: float, tolerance: float) -> str:
    """First difference from the recording after the action `step`; empty if there is none."""
    said = int(recording.success[step])
    if said >= 0 and bool(said) != solved:
        words = ("solved", "not solved") if said else ("not solved", "solved")
        return f"step {step}: recorded as {words[0]}, replayed as {words[1]}"
    return "" if away <= tolerance else f"step {step}: a state is {away:.3g} from the recorded one"
