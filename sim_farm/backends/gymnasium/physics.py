"""Steps one Gymnasium environment; draws its picture too, for nobody else can."""

from __future__ import annotations

from typing import Any

import numpy as np
from gymnasium import spaces
from PIL import Image

from sim_farm.backends.gymnasium.environment import flat_state, id_of, is_solved, open_environment, picture
from sim_farm.contract import EpisodeOver, EpisodeSpec, Float32, PhysicsResult, TaskSpec, UInt8


class GymnasiumPhysics:
    """One environment of Gymnasium's registry.

    An episode is what `env.reset(seed=...)` and the actions make it. A discrete action is a whole number from 0, of
    whatever the space begins with; others are rounded. Only the process that steps an environment can draw it: the
    scene is the picture itself, resized to [size, size, 3] and drawn only where a camera was asked for. There is no
    proprioception.
    """

    def __init__(self, spec: TaskSpec) -> None:
        opened = open_environment(spec)
        self._env, self.info = opened.env, opened.info
        self._low = np.array(self.info.action_low, np.float32)
        self._high = np.array(self.info.action_high, np.float32)
        self._under_way = False

    def reset(self, episode: EpisodeSpec) -> PhysicsResult:
        observation, _ = self._env.reset(seed=episode.seed)
        self._under_way = True
        return self._result(observation, [], [], (False, False))

    def step(self, actions: Float32) -> PhysicsResult:
        if not self._under_way:
            raise EpisodeOver(f"the episode of {self.info.spec.name} is over or never began: call reset")
        rewards: list[float] = []
        solved: list[bool] = []
        observation, ends = None, (False, False)
        for action in np.clip(actions, self._low, self._high):
            observation, reward, terminated, truncated, info = self._env.step(self._to_environment(action))
            rewards.append(float(reward))
            solved.append(is_solved(info))
            terminated = bool(terminated) and not self.info.spec.ignore_terminations
            ends = terminated, bool(truncated) and not terminated
            if any(ends):
                self._under_way = False
                break
        return self._result(observation, rewards, solved, ends)

    def close(self) -> None:
        self._env.close()
        self._under_way = False

    def _to_environment(self, action: Float32) -> Any:
        space = self._env.action_space
        if isinstance(space, spaces.Discrete):
            return space.start + int(np.rint(action[0]))
        return action.reshape(space.shape).astype(space.dtype)

    def _result(
        self, observation: Any, rewards: list[float], solved: list[bool], ends: tuple[bool, bool]
    ) -> PhysicsResult:
        flags = np.zeros((2, len(rewards)), np.bool_)
        if rewards:
            flags[:, -1] = ends
        return PhysicsResult(
            reward=np.array(rewards, np.float32),
            success=np.array(solved, np.bool_),
            terminated=flags[0],
            truncated=flags[1],
            proprio=np.zeros(0, np.float32),
            state=flat_state(self._env, observation),
            scene=self._scene(),
            instruction=id_of(self.info.spec),
        )

    def _scene(self) -> UInt8:
        if not self.info.cameras:
            return np.zeros(0, np.uint8)
        size = self.info.spec.image_size
        drawn = Image.fromarray(picture(self._env, self.info.spec.name))
        return np.array(drawn.resize((size, size), Image.Resampling.BILINEAR)).reshape(-1)
