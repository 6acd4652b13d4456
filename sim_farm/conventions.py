"""The layer between a task and its backend: conventions of a benchmark's protocol (settling, the gripper's meaning,
rotation), and one check of tasks, episodes, actions and scenes for all simulators.

Backends know neither: every physics and renderer is wrapped (`registry`). Nothing is broadcast, cut, or taken for
something else: what is out of its range is refused before a simulator sees it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from numbers import Integral
from typing import Any, get_args

import numpy as np

from sim_farm.contract import (
    EpisodeSpec,
    FarmError,
    Float32,
    Gripper,
    Orientation,
    Physics,
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


def plain(spec: TaskSpec) -> TaskSpec:
    """The task without conventions: what a backend is asked for."""
    return replace(spec, settle_steps=0, orientation="upright", gripper="simulator")


def _with_conventions(info: TaskInfo, spec: TaskSpec) -> TaskInfo:
    named = replace(info.spec, settle_steps=spec.settle_steps, orientation=spec.orientation, gripper=spec.gripper)
    low, high = list(info.action_low), list(info.action_high)
    if spec.gripper == "inverted":
        low[-1], high[-1] = 0.0, 1.0
    return replace(info, spec=named, action_low=tuple(low), action_high=tuple(high))


class TaskPhysics:
    """Physics whose episodes begin after settling, whose gripper element has the protocol's meaning, and to which
    nothing gets that is out of its range."""

    def __init__(self, spec: TaskSpec, backend: Physics) -> None:
        """`backend` is made for `plain(spec)`. Raises `FarmError` where it cannot settle."""
        if spec.settle_steps and not isinstance(backend, SettlingPhysics):
            raise FarmError(f"{spec.name} has no rest action to settle with: leave settle_steps at 0")
        self._spec, self.backend = spec, backend
        self.info = _with_conventions(backend.info, spec)

    def reset(self, episode: EpisodeSpec) -> PhysicsResult:
        check_episode(self.info, episode)
        result = self.backend.reset(episode)
        if self._spec.settle_steps:
            assert isinstance(self.backend, SettlingPhysics)
            result = self.backend.settle(self._spec.settle_steps)
        return result

    def step(self, actions: Float32) -> PhysicsResult:
        result = self.backend.step(_to_simulator(checked_actions(self.info, actions), self._spec))
        if result.steps < len(actions) and not result.ended:
            raise FarmError(
                f"{self._spec.name} executed {result.steps} of {len(actions)} actions, and its episode goes on: `step` "
                "executes a whole chunk, or up to the episode's end. Episodes are replayed in chunks, whatever "
                "policy.chunk is"
            )
        return result

    def go_on(self, episode: EpisodeSpec) -> None:
        check_episode(self.info, episode)
        self._recorded().go_on(episode)

    def begin_at(self, start: SimulatorState) -> PhysicsResult:
        return self._recorded().begin_at(start)

    def deviation(self, recorded: SimulatorState) -> float:
        return self._recorded().deviation(recorded)

    def _recorded(self) -> RecordedPhysics:
        if not isinstance(self.backend, RecordedPhysics):
            raise FarmError(f"{self._spec.name} has no recordings of its simulator's own to be replayed")
        return self.backend

    def close(self) -> None:
        self.backend.close()


def _to_simulator(actions: Float32, spec: TaskSpec) -> Float32:
    if spec.gripper == "simulator":
        return actions
    actions = np.array(actions, np.float32)
    grip = actions[:, -1]
    # As the published protocols: sign(x) for x = 0 too, then -1 opens where OpenVLA's 1 does.
    actions[:, -1] = np.sign(grip) if spec.gripper == "binary" else -np.sign(2 * grip - 1)
    return actions


class TaskRenderer:
    """Renderer whose frames are turned as the protocol says, and which draws the task's own scenes alone."""

    def __init__(self, spec: TaskSpec, backend: Renderer) -> None:
        """`backend` is made for `plain(spec)`."""
        self.backend = backend
        self.info = _with_conventions(backend.info, spec)
        # Steps over rows and columns of an upright frame.
        stock = -1 if backend.info.stock_upside_down else 1
        self._rows, self._columns = {"upright": (1, 1), "stock": (stock, 1), "rotated": (-stock, -1)}[spec.orientation]

    def render(
        self, scenes: Sequence[UInt8], cameras: Sequence[str], out: Mapping[str, UInt8] | None = None
    ) -> Mapping[str, UInt8]:
        check_scenes(self.info, scenes, cameras)
        if self._rows == self._columns == 1:
            return self.backend.render(scenes, cameras, out)
        if out is None:
            out = new_frames(len(scenes), cameras, self.info.spec.image_size)
        turned = {name: frames[:, :: self._rows, :: self._columns] for name, frames in out.items()}
        for name, frames in self.backend.render(scenes, cameras, turned).items():
            if frames is not turned[name]:
                turned[name][...] = frames
        return out

    def close(self) -> None:
        self.backend.close()


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


def check_episode(info: TaskInfo, episode: EpisodeSpec) -> None:
    """Raise `FarmError` for an episode that the task does not have."""
    _whole("an episode's seed", episode.seed, 0, MAX_SEED)
    for name in ("resets", "unseeded_resets"):
        given = _whole(f"an episode's {name}", getattr(episode, name), 0, MAX_STEPS)
        if given and not info.stream:
            raise FarmError(f"{info.spec.name} seeds every episode by itself: leave {name} at 0, got {given}")
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
