"""The specification of a run's farm under an assignment, and the number of rows of its trajectory memory."""

from __future__ import annotations

from collections.abc import Sequence

from embodied.config.schema import Config
from embodied.execution.assignment import Assignment, FarmAssignment
from embodied.rollout.rollout_loop import rows_for_finals
from embodied.workflows.context import FINALS, bootstrap_of, task_spec
from embodied.workflows.sizes import episodes_of, rounds_of, tasks_of
from sim_farm.contract import TaskInfo
from sim_farm.episodes import Episodes
from sim_farm.shared_memory.layout import FarmSpec


def farm_spec(config: Config, episodes: Episodes, farm: FarmAssignment, num_envs: int | None = None) -> FarmSpec:
    """The farm of one task whose workers are assigned so."""
    return FarmSpec(
        task=task_spec(config),
        episodes=episodes,
        num_envs=num_envs or config.env.num_envs,
        chunk=config.policy.chunk,
        groups=farm.groups,
        physics_workers=len(farm.physics),
        render_workers=len(farm.render),
        devices=farm.devices,
        final_frames=FINALS[bootstrap_of(config)] if "images" in config.policy.reads else "never",
    )


def run_specs(config: Config, assignment: Assignment) -> tuple[FarmSpec, ...]:
    """The farms of a run's tasks."""
    pairs = zip(tasks_of(config), assignment.farms, strict=True)
    return tuple(farm_spec(task, episodes_of(task, task.seed), farm) for task, farm in pairs)


def memory_rounds(config: Config, ahead: int, infos: Sequence[TaskInfo]) -> int:
    """Decisions of each environment that the trajectory memory holds: an iteration's, and the next's where a rollout
    runs ahead."""
    return (1 + ahead) * rounds_of(config, [info.max_episode_steps for info in infos])


def observation_rows(config: Config, rounds: int) -> int:
    """Rows of the frame memory for so many rounds of decisions: their observations, and those after them."""
    return (rounds + 1) * _columns(config)


def frame_rows(config: Config, ahead: int, infos: Sequence[TaskInfo]) -> int:
    """Rows of the frame memory: of the trajectories, the observations after them, and final observations."""
    rounds = memory_rounds(config, ahead, infos)
    finals = 0
    if bootstrap_of(config) != "never":
        shortest = min(info.max_episode_steps for info in infos)
        finals = rows_for_finals(_columns(config), rounds, config.policy.chunk, shortest)
    return observation_rows(config, rounds) + finals


def _columns(config: Config) -> int:
    """Environments of all tasks."""
    return sum(task.env.num_envs for task in tasks_of(config))
