"""The layer between a task and its backend: conventions of a benchmark's protocol (settling, the gripper's meaning,
rotation), perturbations, and one check of tasks, episodes, actions and scenes for all simulators.

Backends know no convention, and of perturbations the single changes: every physics and renderer is wrapped
(`registry`). Nothing is broadcast, cut, or taken for something else: what is out of its range is refused before a
simulator sees it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from numbers import Integral
from typing import Any, get_args

import numpy as np

from sim_farm.contract import (
    AimedRenderer,
    Backend,
    EpisodeSpec,
    FarmError,
    Float32,
    Gripper,
    Orientation,
    PerturbedPhysics,
    Physics,
    PhysicsBatch,
    PhysicsResult,
    RecordedPhysics,
    Renderer,
    SettlingPhysics,
    SimulatorState,
    TaskInfo,
    TaskSpec,
    UInt8,
    new_frames,
)
from sim_farm.failures import failures_of
from sim_farm.perturbations import CAMERA, MARK, PICTURE, SCENE, Perturbation, generator, marked, unmarked
from sim_farm.pictures import PICTURES


def plain(spec: TaskSpec) -> TaskSpec:
    """The task without conventions: what a backend is asked for."""
    return replace(spec, settle_steps=0, orientation="upright", gripper="simulator")


def _with_conventions(info: TaskInfo, spec: TaskSpec) -> TaskInfo:
    named = replace(info.spec, settle_steps=spec.settle_steps, orientation=spec.orientation, gripper=spec.gripper)
    low, high = list(info.action_low), list(info.action_high)
    if spec.gripper == "inverted":
        low[-1], high[-1] = 0.0, 1.0
    scene_bytes = info.scene_bytes + (MARK.itemsize if spec.perturbations and info.cameras else 0)
    return replace(info, spec=named, action_low=tuple(low), action_high=tuple(high), scene_bytes=scene_bytes)


class TaskPhysics:
    """Physics whose episodes begin after settling, whose gripper element has the protocol's meaning, which applies what
    their perturbations change, and to which nothing gets that is out of its range."""

    def __init__(self, spec: TaskSpec, backend: Physics) -> None:
        """`backend` is made for `plain(spec)`. Raises `FarmError` where it cannot settle."""
        if spec.settle_steps and not isinstance(backend, SettlingPhysics):
            raise FarmError(f"{spec.name} has no rest action to settle with: leave settle_steps at 0")
        self._spec, self.backend = spec, backend
        self.info = _with_conventions(backend.info, spec)
        self._episode, self._step = EpisodeSpec(0), 0

    def reset(self, episode: EpisodeSpec) -> PhysicsResult:
        check_episode(self.info, episode)
        self._episode, self._step = episode, 0
        with failures_of(self._spec.name, f"the reset of the episode of seed {episode.seed}"):
            result = self.backend.reset(episode)
        change = _perturbation(self._spec, episode.perturbation)
        if change is not None and change.from_step == 0:
            result = self._change(result, change)
        if self._spec.settle_steps:
            assert isinstance(self.backend, SettlingPhysics)
            result = self.backend.settle(self._spec.settle_steps)
        return self._shown(result)

    def step(self, actions: Float32) -> PhysicsResult:
        chunk = _to_simulator(checked_actions(self.info, actions), self._spec)
        before = self.steps_to_change(len(chunk))
        if before is None:
            return self._shown(self._executed(chunk))
        first = self._executed(chunk[:before])
        change = _perturbation(self._spec, self._episode.perturbation)
        if first.ended or change is None:
            return self._shown(first)
        changed = self._change(first, change)
        if before == len(chunk):
            return self._shown(joined(first, changed))
        return self._shown(joined(first, self._executed(chunk[before:])))

    def steps_to_change(self, count: int) -> int | None:
        """Number of env steps after which the episode's perturbation changes the scene; None unless that is within the
        next `count`."""
        change = _perturbation(self._spec, self._episode.perturbation)
        before = 0 if change is None or not change.scene else change.from_step - self._step
        return before if 0 < before <= count else None

    @property
    def doing(self) -> str:
        """The env step that is next, in words."""
        return f"step {self._step} of the episode of seed {self._episode.seed}"

    def _executed(self, actions: Float32) -> PhysicsResult:
        """Result of the actions, in the simulator's convention, which are executed up to the episode's end."""
        with failures_of(self._spec.name, self.doing):
            return self._counted(self.backend.step(actions), len(actions))

    def executed(self, result: PhysicsResult, count: int) -> PhysicsResult:
        """The result of `step` for a chunk of `count` actions that the backend has executed."""
        return self._shown(self._counted(result, count))

    def _counted(self, result: PhysicsResult, count: int) -> PhysicsResult:
        self._step += result.steps
        if result.steps < count and not result.ended and self.info.turns == 1:
            raise FarmError(
                f"{self._spec.name} executed {result.steps} of {count} actions, and its episode goes on: `step` "
                "executes a whole chunk, or up to the episode's end, or of a turn where TaskInfo.turns says that there "
                "are some. Episodes are replayed in chunks, whatever policy.chunk is"
            )
        return result

    def go_on(self, episode: EpisodeSpec) -> None:
        check_episode(self.info, episode)
        if episode.perturbation is not None:
            raise FarmError("a recording is followed as it was made: leave the episode's perturbation None")
        self._episode, self._step = episode, 0
        self._recorded().go_on(episode)

    def begin_at(self, start: SimulatorState) -> PhysicsResult:
        return self._shown(self._recorded().begin_at(start))

    def place(self, recorded: SimulatorState) -> PhysicsResult:
        return self._shown(self._recorded().place(recorded))

    def deviation(self, recorded: SimulatorState) -> float:
        return self._recorded().deviation(recorded)

    def _recorded(self) -> RecordedPhysics:
        if not isinstance(self.backend, RecordedPhysics):
            raise FarmError(f"{self._spec.name} has no recordings of its simulator's own to be replayed")
        return self.backend

    def _change(self, result: PhysicsResult, change: Perturbation) -> PhysicsResult:
        """The scene's changes, and the result after them; `result` if there are none."""
        draw = generator(SCENE, self._episode.seed)
        for part in change.scene:
            assert isinstance(self.backend, PerturbedPhysics), "check_perturbations has seen the task"
            result = self.backend.perturb(part, draw)
        return result

    def _shown(self, result: PhysicsResult) -> PhysicsResult:
        """The result with the perturbation's instruction, and with all in its scene that determines the picture."""
        if not self._spec.perturbations:
            return result
        index, step = self._episode.perturbation, self._step
        change = _active(self._spec, index, step)
        told = result.instruction if change is None else change.told(result.instruction)
        scene = marked(result.scene, index, self._episode.seed, step) if self.info.cameras else result.scene
        return replace(result, scene=scene, instruction=told)

    def close(self) -> None:
        self.backend.close()


class TaskBatch:
    """Environments of one task that are stepped at once, as far as their simulator can: the results are those of
    `TaskPhysics.step`."""

    def __init__(self, physics: Sequence[TaskPhysics], backend: PhysicsBatch | None) -> None:
        """`backend` is made of what the physics wrap; None: they are stepped one by one."""
        self._physics, self._backend = tuple(physics), backend
        self._spec = physics[0].info.spec

    @property
    def shares(self) -> bool:
        """True if it takes less time to step environments at once."""
        return self._backend is not None and not self._backend.alone

    @property
    def alone(self) -> str:
        """See `PhysicsBatch.alone`; empty where the simulator has nothing to share."""
        return "" if self._backend is None else self._backend.alone

    def step(self, which: Sequence[int], actions: Float32) -> list[PhysicsResult]:
        """Results of the chunks `actions` [M, C, A] in the environments of `which` [M]."""
        physics = [self._physics[row] for row in which]
        count = actions.shape[1]
        shared = [i for i, one in enumerate(physics) if self._backend and one.steps_to_change(count) is None]
        found: dict[int, PhysicsResult] = {}
        if self._backend is not None and shared:
            given = actions[shared]
            checked = checked_actions(self._physics[0].info, given.reshape(-1, given.shape[-1])).reshape(given.shape)
            with failures_of(self._spec.name, f"one of {', '.join(physics[i].doing for i in shared)}"):
                results = self._backend.step([which[i] for i in shared], _to_simulator(checked, self._spec))
            found = {i: physics[i].executed(result, count) for i, result in zip(shared, results, strict=True)}
        return [found[i] if i in found else one.step(actions[i]) for i, one in enumerate(physics)]


def _perturbation(spec: TaskSpec, index: int | None) -> Perturbation | None:
    return None if index is None else spec.perturbations[index]


def _active(spec: TaskSpec, index: int | None, step: int) -> Perturbation | None:
    """The perturbation if it holds after `steps` env steps of the episode, else None."""
    change = _perturbation(spec, index)
    return change if change is not None and step >= change.from_step else None


def joined(first: PhysicsResult, then: PhysicsResult) -> PhysicsResult:
    """The result of two chunks, one after the other."""
    return replace(
        then,
        reward=np.concatenate((first.reward, then.reward)),
        success=np.concatenate((first.success, then.success)),
        terminated=np.concatenate((first.terminated, then.terminated)),
        truncated=np.concatenate((first.truncated, then.truncated)),
    )


def _to_simulator(actions: Float32, spec: TaskSpec) -> Float32:
    return with_own_gripper(actions, spec.gripper)


def with_own_gripper(actions: Float32, gripper: Gripper) -> Float32:
    """The actions [..., A] of this convention with the last element as the simulator itself takes it."""
    if gripper == "simulator":
        return actions
    actions = np.array(actions, np.float32)
    grip = actions[..., -1]
    # As the published protocols: sign(x) for x = 0 too, then -1 opens where OpenVLA's 1 does.
    actions[..., -1] = np.sign(grip) if gripper == "binary" else -np.sign(2 * grip - 1)
    return actions


def turns(orientation: Orientation, stock_upside_down: bool) -> tuple[int, int]:
    """Steps over the rows and the columns of an upright frame, 1 or -1 each, that give one of this orientation. Those
    of two orientations multiplied lead from the one to the other."""
    stock = -1 if stock_upside_down else 1
    return {"upright": (1, 1), "stock": (stock, 1), "rotated": (-stock, -1)}[orientation]


class TaskRenderer:
    """Renderer whose frames are turned as the protocol says and changed as their episodes' perturbations say, and which
    draws the task's own scenes alone."""

    def __init__(self, spec: TaskSpec, backend: Renderer) -> None:
        """`backend` is made for `plain(spec)`."""
        self.backend = backend
        self.info = _with_conventions(backend.info, spec)
        self._perturbations = spec.perturbations
        self._moves = any(change.cameras for change in spec.perturbations)
        self._stock, _ = turns("stock", backend.info.stock_upside_down)
        self._rows, self._columns = turns(spec.orientation, backend.info.stock_upside_down)

    def render(
        self, scenes: Sequence[UInt8], cameras: Sequence[str], out: Mapping[str, UInt8] | None = None
    ) -> Mapping[str, UInt8]:
        check_scenes(self.info, scenes, cameras)
        if self._perturbations:
            return self._render_perturbed(scenes, cameras, out)
        if self._rows == self._columns == 1:
            return self.backend.render(scenes, cameras, out)
        if out is None:
            out = new_frames(len(scenes), cameras, self.info.spec.image_size)
        turned = {name: frames[:, :: self._rows, :: self._columns] for name, frames in out.items()}
        for name, frames in self.backend.render(scenes, cameras, turned).items():
            if frames is not turned[name]:
                turned[name][...] = frames
        return out

    def _render_perturbed(
        self, scenes: Sequence[UInt8], cameras: Sequence[str], out: Mapping[str, UInt8] | None
    ) -> Mapping[str, UInt8]:
        """Each scene alone, with its cameras and its changes of the picture."""
        if out is None:
            out = new_frames(len(scenes), cameras, self.info.spec.image_size)
        for place, scene in enumerate(scenes):
            plain_scene, index, seed, step = unmarked(scene)
            if not -1 <= index < len(self._perturbations):
                raise FarmError(
                    f"scene {place} is of perturbation {index}, and the task has {len(self._perturbations)}"
                )
            change = _active(self.info.spec, None if index < 0 else index, step)
            if self._moves:
                assert isinstance(self.backend, AimedRenderer), "check_perturbations has seen the task"
                self.backend.aim(() if change is None else change.cameras, generator(CAMERA, seed))
            frames = self.backend.render([plain_scene], cameras)
            for name in cameras:
                upright = frames[name][0]
                if change is not None and change.picture:
                    stock = _changed(upright[:: self._stock], change, seed, step, name)
                    upright = stock[:: self._stock]
                out[name][place] = upright[:: self._rows, :: self._columns]
        return out

    def close(self) -> None:
        self.backend.close()


def _changed(frame: UInt8, change: Perturbation, seed: int, step: int, camera: str) -> UInt8:
    """The frame after the perturbation's changes of pictures; uint8 [H, W, 3]."""
    draw = generator(PICTURE, seed, step, camera)
    for part in change.picture:
        if part.cameras is None or camera in part.cameras:
            frame = PICTURES[part.function][0](np.ascontiguousarray(frame), part.values, draw)
    return frame


# --- limits of what enters a simulator

MAX_SEED = 2**31 - 1
MAX_IMAGE_SIZE = 4096
"""Pixels of a frame's side: a frame of this size is 50 MB."""
MAX_STEPS = 1_000_000
"""Env steps of an episode, of its settling, and resets before it."""


def check_task(spec: TaskSpec) -> None:
    """Raise `FarmError` for a number or a word that no simulator has a meaning for. Which cameras, control modes and
    rewards a task has, its backend says."""
    _whole("image_size", spec.image_size, 1, MAX_IMAGE_SIZE)
    _whole("settle_steps", spec.settle_steps, 0, MAX_STEPS)
    if spec.max_episode_steps is not None:
        _whole("max_episode_steps", spec.max_episode_steps, 1, MAX_STEPS)
    for name, value, valid in (
        ("orientation", spec.orientation, get_args(Orientation)),
        ("gripper", spec.gripper, get_args(Gripper)),
        ("reward", spec.reward, (None, "dense", "sparse")),
    ):
        if value not in valid:
            raise FarmError(f"{name} is one of {', '.join(map(str, valid))}, got {value!r}")
    if isinstance(spec.cameras, tuple):
        if not all(isinstance(name, str) for name in spec.cameras) or len(set(spec.cameras)) < len(spec.cameras):
            raise FarmError(f"cameras are names, each once, got {spec.cameras}")
    else:
        _whole("cameras, unless it is a tuple of names,", spec.cameras, 0, MAX_STEPS)


def check_perturbations(spec: TaskSpec, backend: Backend) -> None:
    """Raise `FarmError` for a perturbation that the simulator cannot apply, or that has a number without a meaning."""
    for change in spec.perturbations:
        what = f"the perturbation {change.axis} {change.level}"
        _whole(f"the env step from which {what} holds", change.from_step, 0, MAX_STEPS)
        for part in (*change.scene, *change.cameras):
            if part.axis not in backend.axes:
                raise FarmError(
                    f"{spec.name}: {what} needs the axis {part.axis}, and the simulator has "
                    f"{', '.join(backend.axes) or 'none'}"
                )
        for part in change.picture:
            count = PICTURES[part.function][1] if part.function in PICTURES else None
            if count != len(part.values):
                known = ", ".join(f"{name} ({numbers} values)" for name, (_, numbers) in PICTURES.items())
                raise FarmError(
                    f"{what}: no function of pictures is {part.function} with {len(part.values)} values; there are "
                    f"{known}"
                )
        if not all(map(math.isfinite, _numbers(asdict(change)))):
            raise FarmError(f"{what} has a number that is not finite")


def _numbers(data: Any) -> Iterator[float]:
    """All numbers in nested mappings and sequences."""
    if isinstance(data, (int, float)):
        yield data
    elif isinstance(data, (dict, list, tuple)):
        for item in data.values() if isinstance(data, dict) else data:
            yield from _numbers(item)


def check_episode(info: TaskInfo, episode: EpisodeSpec) -> None:
    """Raise `FarmError` for an episode that the task does not have."""
    _whole("an episode's seed", episode.seed, 0, MAX_SEED)
    for name in ("resets", "unseeded_resets"):
        given = _whole(f"an episode's {name}", getattr(episode, name), 0, MAX_STEPS)
        if given and not info.stream:
            raise FarmError(f"{info.spec.name} seeds every episode by itself: leave {name} at 0, got {given}")
    if episode.perturbation is not None:
        if not info.spec.perturbations:
            raise FarmError(f"{info.spec.name} was made without perturbations: leave perturbation None")
        _whole("an episode's perturbation", episode.perturbation, 0, len(info.spec.perturbations) - 1)
    if episode.init_state is None:
        return
    if not info.init_states:
        raise FarmError(f"{info.spec.name} has no recorded initial states: leave init_state None")
    _whole(f"the recorded initial state of {info.spec.name}", episode.init_state, 0, info.init_states - 1)


def checked_actions(info: TaskInfo, actions: Any) -> Float32:
    """The actions [C, A] as float32, C at least 1. Raises `FarmError` for another shape, numbers of another kind, or
    one that is not finite, which it names. Those beyond the bounds are clipped by the backend."""
    given = f"{info.spec.name} takes actions of shape [C, {info.action_dim}], C at least 1, of floating-point numbers"
    if not isinstance(actions, np.ndarray) or not np.issubdtype(actions.dtype, np.floating):
        raise FarmError(f"{given}, got {getattr(actions, 'dtype', type(actions).__name__)}")
    if actions.ndim != 2 or actions.shape[1] != info.action_dim or not len(actions):
        raise FarmError(f"{given}, got shape {list(actions.shape)}")
    with np.errstate(over="ignore"):
        chunk = actions.astype(np.float32, copy=False)
    if not np.isfinite(chunk).all():
        step, place = np.argwhere(~np.isfinite(chunk))[0].tolist()
        raise FarmError(
            f"{info.spec.name} was given an action that is not a finite number: actions[{step}, {place}] is "
            f"{actions[step, place]}"
        )
    return chunk


def check_scenes(info: TaskInfo, scenes: Sequence[UInt8], cameras: Sequence[str]) -> None:
    """Raise `FarmError` for a camera that was not asked for, or a scene of another task."""
    for name in cameras:
        if name not in info.cameras:
            raise FarmError(f"no camera {name!r} was asked for; valid: {', '.join(info.cameras)}")
    for index, scene in enumerate(scenes):
        if scene.dtype != np.uint8 or scene.shape != (info.scene_bytes,):
            raise FarmError(
                f"a scene of {info.spec.name} is uint8 of shape [{info.scene_bytes}], scene {index} is {scene.dtype} "
                f"of shape {list(scene.shape)}"
            )


def _whole(what: str, value: Any, low: int, high: int) -> int:
    """`value`, if it is a whole number within the bounds."""
    number = int(value) if isinstance(value, Integral) and not isinstance(value, bool) else low - 1
    if not low <= number <= high:
        raise FarmError(f"{what} is a whole number from {low} to {high}, got {value!r}")
    return number
