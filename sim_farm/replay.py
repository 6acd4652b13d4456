"""Films and records of episodes. An episode is its spec and its actions, so both are made afterwards, of selected
episodes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from sim_farm.contract import (
    Bool,
    EpisodeSpec,
    FarmError,
    Float32,
    Physics,
    PhysicsResult,
    Renderer,
    TaskInfo,
    TaskSpec,
    UInt8,
)
from sim_farm.registry import make_physics, make_renderer


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


class Replayer:
    """Replays episodes of one task: to the record of everything that a policy would have seen, or to a film."""

    def __init__(self, task: TaskSpec) -> None:
        self._physics: Physics = make_physics(task)
        self._renderer: Renderer | None = make_renderer(task) if self._physics.info.cameras else None

    def describe(self) -> TaskInfo:
        return self._physics.info

    def replay(self, episode: EpisodeSpec, actions: Float32) -> ReplayedEpisode:
        """The episode under `actions` [n, A], n at least 1; the actions after its end are left out."""
        seen = self._run(episode, actions)
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
        if self._renderer is not None:
            self._renderer.close()

    def _run(self, episode: EpisodeSpec, actions: Float32) -> list[PhysicsResult]:
        """What there is at the start and after each action, up to the episode's end."""
        seen = [self._physics.reset(episode)]
        for action in actions:
            seen.append(self._physics.step(np.asarray(action, np.float32)[None]))
            if seen[-1].ended:
                break
        return seen
