"""Conventions of a benchmark's protocol between policy and simulator: settling, the gripper's meaning, rotation.

Backends do not know them: physics and renderer are wrapped where a task has one of them.
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
    Renderer,
    TaskInfo,
    TaskSpec,
    UInt8,
    new_frames,
)


def plain(spec: TaskSpec) -> TaskSpec:
    """The task without conventions: what a backend is asked for. Settling needs steps of its own."""
    limit = spec.max_episode_steps
    return replace(
        spec,
        settle_steps=0,
        orientation="upright",
        gripper="simulator",
        max_episode_steps=None if limit is None else limit + spec.settle_steps,
    )


def conventional_physics(spec: TaskSpec, physics: Physics) -> Physics:
    """`physics`, made for `plain(spec)`, with the conventions of `spec`. Raises `FarmError` if one is impossible."""
    return physics if plain(spec) == spec else _ConventionalPhysics(spec, physics)


def conventional_renderer(spec: TaskSpec, renderer: Renderer) -> Renderer:
    """`renderer`, made for `plain(spec)`, with the orientation of `spec`."""
    return renderer if plain(spec) == spec else _ConventionalRenderer(spec, renderer)


def _with_conventions(info: TaskInfo, spec: TaskSpec) -> TaskInfo:
    limit = info.max_episode_steps if spec.max_episode_steps is None else spec.max_episode_steps
    named = replace(
        info.spec,
        settle_steps=spec.settle_steps,
        orientation=spec.orientation,
        gripper=spec.gripper,
        max_episode_steps=limit,
    )
    low, high = list(info.action_low), list(info.action_high)
    if spec.gripper == "inverted":
        low[-1], high[-1] = 0.0, 1.0
    return replace(info, spec=named, max_episode_steps=limit, action_low=tuple(low), action_high=tuple(high))


class _ConventionalPhysics:
    """Physics whose episodes begin after settling, and whose gripper element has the protocol's meaning."""

    def __init__(self, spec: TaskSpec, physics: Physics) -> None:
        if spec.settle_steps < 0:
            raise FarmError(f"settle_steps is at least 0, got {spec.settle_steps}")
        if spec.settle_steps and not physics.info.rest_action:
            raise FarmError(f"{spec.name} has no rest action to settle with: leave settle_steps at 0")
        if spec.settle_steps and spec.max_episode_steps is None:
            raise FarmError("settle_steps needs max_episode_steps: say how long an episode is after settling")
        self._spec, self._physics = spec, physics
        self.info = _with_conventions(physics.info, spec)

    def reset(self, episode: EpisodeSpec) -> PhysicsResult:
        result = self._physics.reset(episode)
        if not self._spec.settle_steps:
            return result
        rest = np.tile(np.array(self._physics.info.rest_action, np.float32), (self._spec.settle_steps, 1))
        settled = self._physics.step(rest)
        if settled.ended:
            raise FarmError(
                f"{episode} of {self._spec.name} is solved within its {self._spec.settle_steps} settling steps: "
                "leave it out, or settle less"
            )
        none = settled.reward[:0], settled.success[:0], settled.terminated[:0], settled.truncated[:0]
        return replace(settled, reward=none[0], success=none[1], terminated=none[2], truncated=none[3])

    def step(self, actions: Float32) -> PhysicsResult:
        return self._physics.step(_to_simulator(actions, self._spec))

    def close(self) -> None:
        self._physics.close()


def _to_simulator(actions: Float32, spec: TaskSpec) -> Float32:
    if spec.gripper == "simulator":
        return actions
    actions = np.array(actions, np.float32)
    grip = actions[:, -1]
    # As the published protocols: sign(x) for x = 0 too, then -1 opens where OpenVLA's 1 does.
    actions[:, -1] = np.sign(grip) if spec.gripper == "binary" else -np.sign(2 * grip - 1)
    return actions


class _ConventionalRenderer:
    """Renderer whose frames are turned as the protocol says."""

    def __init__(self, spec: TaskSpec, renderer: Renderer) -> None:
        self._renderer = renderer
        self.info = _with_conventions(renderer.info, spec)
        # Steps over rows and columns of an upright frame.
        stock = -1 if renderer.info.stock_upside_down else 1
        self._rows, self._columns = {"upright": (1, 1), "stock": (stock, 1), "rotated": (-stock, -1)}[spec.orientation]

    def render(
        self, scenes: Sequence[UInt8], cameras: Sequence[str], out: Mapping[str, UInt8] | None = None
    ) -> Mapping[str, UInt8]:
        if out is None:
            out = new_frames(len(scenes), cameras, self.info.spec.image_size)
        turned = {name: frames[:, :: self._rows, :: self._columns] for name, frames in out.items()}
        for name, frames in self._renderer.render(scenes, cameras, turned).items():
            if frames is not turned[name]:
                turned[name][...] = frames
        return out

    def close(self) -> None:
        self._renderer.close()
