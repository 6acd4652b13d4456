"""Steps one Gymnasium environment; draws its pictures too, for nobody else can."""

from __future__ import annotations

import warnings

import numpy as np

from sim_farm.backends.gymnasium.environment import id_of, open_environment
from sim_farm.backends.gymnasium.instance import Seen
from sim_farm.backends.gymnasium.observation import RENDER, resized
from sim_farm.contract import EpisodeOver, EpisodeSpec, Float32, PhysicsResult, TaskSpec, UInt8


class GymnasiumPhysics:
    """One environment of Gymnasium's registry.

    An episode is what `env.reset(seed=...)` and the actions make it. A discrete action is a whole number from 0, of
    whatever the space begins with; others are rounded. Only the process that steps an environment can draw it: the
    scene is the pictures of the cameras themselves, one after the other, each resized to [size, size, 3]. There is no
    proprioception.
    """

    def __init__(self, spec: TaskSpec) -> None:
        opened = open_environment(spec)
        self._instance, self._parts, self.info = opened.instance, opened.observation, opened.info
        self._low = np.array(self.info.action_low, np.float32)
        self._high = np.array(self.info.action_high, np.float32)
        self._again = opened.again
        self._under_way = False
        self._said = False

    def reset(self, episode: EpisodeSpec) -> PhysicsResult:
        if self._again is not None:
            self._instance.close()
            self._instance = self._again()
        seen = self._instance.reset(episode.seed)
        self._under_way = True
        return self._result([], seen)

    def step(self, actions: Float32) -> PhysicsResult:
        if not self._under_way:
            raise EpisodeOver(f"the episode of {self.info.spec.name} is over or never began: call reset")
        steps: list[Seen] = []
        for action in np.clip(actions, self._low, self._high):
            steps.append(self._instance.step(action))
            if steps[-1].solved is not None and not self.info.has_success:
                self._say_late_success()
            if steps[-1].terminated or steps[-1].truncated:
                self._under_way = False
                break
        return self._result(steps, steps[-1])

    def close(self) -> None:
        self._instance.close()
        self._under_way = False

    def _say_late_success(self) -> None:
        """A run that began without success continues without it: its measure is fixed."""
        if not self._said:
            warnings.warn(
                f"{self.info.spec.name} reports success now, and did not in the episodes by which it was described: it "
                "stays measured by its return. Put is_success into every info, False where it is not solved",
                stacklevel=3,
            )
        self._said = True

    def _result(self, steps: list[Seen], last: Seen) -> PhysicsResult:
        with self._instance.reading():
            state, scene = self._parts.state_of(last.observation), self._scene(last)
        return PhysicsResult(
            reward=np.array([seen.reward for seen in steps], np.float32),
            success=np.array([self.info.has_success and bool(seen.solved) for seen in steps], np.bool_),
            terminated=np.array([seen.terminated for seen in steps], np.bool_),
            truncated=np.array([seen.truncated and not seen.terminated for seen in steps], np.bool_),
            proprio=np.zeros(0, np.float32),
            state=state,
            scene=scene,
            instruction=self._parts.text_of(last.observation) or id_of(self.info.spec),
        )

    def _scene(self, seen: Seen) -> UInt8:
        cameras, size = self.info.cameras, self.info.spec.image_size
        if not cameras:
            return np.zeros(0, np.uint8)
        frames = self._parts.frames_of(seen.observation)
        if RENDER in cameras:
            frames[RENDER] = self._instance.draw()
        return np.concatenate([resized(frames[name], size).reshape(-1) for name in cameras])
