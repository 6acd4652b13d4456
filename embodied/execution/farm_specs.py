"""The farm of a run, as its assignment has it."""

from __future__ import annotations

from embodied.config import Config
from embodied.execution.assignment import Assignment
from embodied.workers.makers import FINALS, bootstrap_of, task_spec
from sim_farm.episodes import Episodes
from sim_farm.layout import FarmSpec


def farm_spec(config: Config, episodes: Episodes, assignment: Assignment, num_envs: int | None = None) -> FarmSpec:
    """The farm of a run whose workers are assigned so."""
    return FarmSpec(
        task=task_spec(config),
        episodes=episodes,
        num_envs=num_envs or config.env.num_envs,
        chunk=config.policy.chunk,
        stages=assignment.groups,
        physics_workers=len(assignment.physics),
        render_workers=len(assignment.render),
        devices=config.farm.devices,
        final_frames=FINALS[bootstrap_of(config)] if "images" in config.policy.reads else "never",
    )
