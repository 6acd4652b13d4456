"""The farm as stable-baselines3's `VecEnv`, which its algorithms take.

PPO("MlpPolicy", sim_farm.sb3_vec_env("maniskill/PushCube-v1", 16, workers=2)).learn(100_000)
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

try:
    from stable_baselines3.common.vec_env import VecEnv, VecMonitor
except ModuleNotFoundError as error:
    from sim_farm.contract import FarmError

    raise FarmError(
        "sim_farm.sb3_vec_env needs the package 'stable-baselines3': pip install stable-baselines3"
    ) from error

from gymnasium.vector import AutoresetMode

from sim_farm.client.vector_env import FarmVectorEnv, vector_env


def sb3_vec_env(task: str, num_envs: int, **options: Any) -> VecMonitor:
    """Environments as `vector_env` makes them; stable-baselines3 logs their mean length, return and success.

    `options` are those of `vector_env` but for `autoreset_mode`. With cameras it takes `MultiInputPolicy`.
    """
    return VecMonitor(SB3VecEnv(vector_env(task, num_envs, autoreset_mode=AutoresetMode.SAME_STEP, **options)))


class SB3VecEnv(VecEnv):
    """A `FarmVectorEnv` that resets in the same step, by stable-baselines3's calls."""

    def __init__(self, envs: FarmVectorEnv) -> None:
        self.envs = envs
        super().__init__(envs.num_envs, envs.single_observation_space, envs.single_action_space)

    def reset(self) -> Any:
        observations, _ = self.envs.reset(seed=self._seeds)
        self._reset_seeds()
        self._reset_options()
        return observations

    def step_async(self, actions: np.ndarray) -> None:
        self.envs.step_async(actions)

    def step_wait(self) -> Any:
        observations, rewards, terminations, truncations, infos = self.envs.step_wait()
        dones = terminations | truncations
        rows: list[dict[str, Any]] = [{"TimeLimit.truncated": limit} for limit in truncations.tolist()]
        for i in np.flatnonzero(dones).tolist():
            rows[i]["terminal_observation"] = infos["final_obs"][i]
            rows[i]["is_success"] = bool(infos["final_info"]["success"][i])
        return observations, rewards.astype(np.float32), dones, rows

    def close(self) -> None:
        self.envs.close()

    # What concerns single environments: there are none here, but for what all of them share.

    def get_attr(self, attr_name: str, indices: Any = None) -> list[Any]:
        return [getattr(self.envs, attr_name)] * len(self._chosen(indices))

    def set_attr(self, attr_name: str, value: Any, indices: Any = None) -> None:
        raise AttributeError(f"the farm's environments have no attributes to set, {attr_name!r} was given")

    def env_method(self, method_name: str, *method_args: Any, indices: Any = None, **method_kwargs: Any) -> list[Any]:
        raise AttributeError(f"the farm's environments have no methods of their own, {method_name!r} was called")

    def env_is_wrapped(self, wrapper_class: Any, indices: Any = None) -> list[bool]:
        return [False] * len(self._chosen(indices))

    def _chosen(self, indices: Any) -> Sequence[int]:
        return list(self._get_indices(indices))
