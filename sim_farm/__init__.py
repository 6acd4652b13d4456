"""Simulators as workers: physics and rendering apart, frames in shared memory, episodes named by seeds.

physics, renderer = sim_farm.make("tabletop/reach", cameras=1, size=128)
farm = sim_farm.Farm.create(sim_farm.FarmSpec(...), sim_farm.InProcess())  # or a list of specs, one for each task
envs = sim_farm.vector_env("tabletop/reach", 16, workers=2)  # a gymnasium.vector.VectorEnv
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from sim_farm.client.farm import Farm
from sim_farm.client.observations import Observations
from sim_farm.contract import EpisodeSpec, FarmError, Physics, PhysicsResult, Renderer, TaskInfo, TaskSpec
from sim_farm.episodes import EndlessEpisodes, ListedEpisodes, evaluation_episodes
from sim_farm.registry import make_physics, make_renderer
from sim_farm.shared_memory.frame_memory import FrameMemory
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess

if TYPE_CHECKING:
    from sim_farm.client.stable_baselines3 import sb3_vec_env
    from sim_farm.client.vector_env import vector_env

_LATER = {"sb3_vec_env": "sim_farm.client.stable_baselines3", "vector_env": "sim_farm.client.vector_env"}
"""Names whose modules import libraries that the farm itself does not need."""


def make(task: str, cameras: int | tuple[str, ...] = 0, size: int = 128) -> tuple[Physics, Renderer]:
    """The physics and the renderer of a task, with `cameras` of `size` x `size` pixels."""
    spec = TaskSpec(task, cameras=cameras, image_size=size)
    return make_physics(spec), make_renderer(spec)


def __getattr__(name: str) -> Any:
    if name not in _LATER:
        raise AttributeError(f"module 'sim_farm' has no attribute {name!r}")
    return getattr(importlib.import_module(_LATER[name]), name)


__all__ = [
    "EndlessEpisodes",
    "EpisodeSpec",
    "Farm",
    "FarmError",
    "FarmSpec",
    "FrameMemory",
    "InProcess",
    "ListedEpisodes",
    "Observations",
    "Physics",
    "PhysicsResult",
    "Renderer",
    "TaskInfo",
    "TaskSpec",
    "evaluation_episodes",
    "make",
    "make_physics",
    "make_renderer",
    "sb3_vec_env",
    "vector_env",
]
