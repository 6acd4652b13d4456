"""MiniGrid seen through a camera: what the agent sees as a picture, and success as the info has it.

MiniGrid's own observation is a grid of 7 x 7 cells, which is numbers. `RGBImgPartialObsWrapper` draws them.
"""

from __future__ import annotations

from typing import Any

import gymnasium
import minigrid  # noqa: F401  registers its environments
from minigrid.wrappers import RGBImgPartialObsWrapper


class Reached(gymnasium.Wrapper[Any, Any, Any, Any]):
    """Says in every info whether the goal was reached."""

    def step(self, action: Any) -> tuple[Any, Any, bool, bool, dict[str, Any]]:
        observation, reward, terminated, truncated, info = self.env.step(action)
        return observation, reward, terminated, truncated, {**info, "is_success": terminated and float(reward) > 0}


def empty(**arguments: Any) -> gymnasium.Env[Any, Any]:
    """A room of 3 x 3 cells with a goal, where the agent begins anywhere."""
    return Reached(RGBImgPartialObsWrapper(gymnasium.make("MiniGrid-Empty-Random-5x5-v0", **arguments)))


gymnasium.register("MiniGridPixels-Empty-Random-5x5-v0", empty, max_episode_steps=50)
