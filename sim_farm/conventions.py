"""The layer between a task and its backend: conventions of a benchmark's protocol (settling, the gripper's meaning,
rotation), and the check of all that enters.

Backends know neither: every physics and renderer is wrapped (`registry`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from sim_farm.contract import (
    EpisodeSpec,
    FarmError,
    Float32,
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
from sim_farm.limits import check_episode, check_scenes, checked_actions


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
        return self.backend.step(_to_simulator(checked_actions(self.info, actions), self._spec))

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
