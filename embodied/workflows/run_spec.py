"""The specification of a run: what its configuration comes to, computed once and passed to everything that follows."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from embodied.config.files import parse_config
from embodied.config.schema import Config, EnvConfig
from embodied.errors import UserError
from embodied.workflows.recipes import Recipe, recipe_of
from sim_farm.contract import TaskInfo, TaskSpec
from sim_farm.episodes import EndlessEpisodes, Episodes, GroupedEpisodes, Starts
from sim_farm.graded_axes import graded
from sim_farm.perturbations import Perturbation

TASK_SEEDS = 1_000_003
"""Between the seeds of a run's tasks, so that environments of the same index do not draw the same noise."""
FINALS = {"never": "never", "truncated": "truncated", "always": "ended"}
"""Final frames that are drawn, by which of them are valued."""


@dataclass(frozen=True)
class RunTask:
    """One task of a run."""

    config: Config
    """The run's configuration with this task's `env`, its own seed and no other task."""

    @property
    def env(self) -> EnvConfig:
        return self.config.env

    @property
    def seed(self) -> int:
        return self.config.seed

    @cached_property
    def spec(self) -> TaskSpec:
        """The task that the farm simulates. Raises as `task_spec` does."""
        return task_spec(self.config)


@dataclass(frozen=True)
class RunSpec:
    """See the module's docstring."""

    config: Config
    recipe: Recipe
    tasks: tuple[RunTask, ...]
    """The main task first."""

    @classmethod
    def of(cls, config: Config) -> RunSpec:
        """The configuration's run. Raises `UserError` for a workflow that does not exist, and for keys of `extra_tasks`
        that `env` does not have."""
        return cls(config, recipe_of(config), tuple(RunTask(task) for task in tasks_of(config)))

    def __reduce__(self) -> tuple[Any, ...]:
        # Another process makes it again: a workflow of your own may hold functions that cannot be pickled.
        return RunSpec.of, (self.config,)

    def of_task(self, task: RunTask) -> RunSpec:
        """A run of that task alone."""
        return RunSpec(task.config, self.recipe, (task,))

    # --- sizes

    @property
    def seeds(self) -> tuple[int, ...]:
        """Seed of each task."""
        return tuple(task.seed for task in self.tasks)

    @property
    def environments(self) -> int:
        """Environments of all tasks."""
        return sum(task.env.num_envs for task in self.tasks)

    @property
    def inline(self) -> bool:
        """True if all workers are in one process."""
        return self.config.runtime.mode == "inline"

    @property
    def images(self) -> bool:
        """True if frames are drawn: the policy reads them."""
        return "images" in self.config.policy.reads

    # --- rollouts

    @property
    def by_episodes(self) -> bool:
        """True if a rollout is whole episodes, which come in episode groups; else it is a number of decisions."""
        return self.recipe.rollout == "episodes"

    def rounds(self, infos: Sequence[TaskInfo]) -> int:
        """The most decisions that an environment takes in one iteration; `infos` of the tasks."""
        rollout, chunk = self.config.rollout, self.config.policy.chunk
        if not self.by_episodes:
            return rollout.decisions
        episodes = rollout.max_episodes_per_env or rollout.episodes_per_env
        # The end of a turn cuts a chunk short.
        return max(math.ceil(info.max_episode_steps / chunk) + info.turns - 1 for info in infos) * episodes

    def episodes(self, task: RunTask) -> Episodes:
        """The training episodes of one of the tasks. Raises as `check_episode_groups` and `randomisation` do."""
        env = task.env
        starts = Starts(env.recorded_starts, env.start_seeds, len(randomisation(task.config)))
        if not self.by_episodes:
            return EndlessEpisodes(task.seed, starts)
        self.check_episode_groups()
        return GroupedEpisodes(task.seed, self.config.rollout.episode_group, starts)

    def check_episode_groups(self) -> None:
        """Raise `UserError` where environments and episode groups do not match."""
        size = self.config.rollout.episode_group
        for task in self.tasks if self.by_episodes else ():
            envs = task.env.num_envs
            if envs % size:
                near = max(size, round(envs / size) * size)
                raise UserError(
                    f"{envs} environments of {task.env.task} do not make episode groups of {size}; set env.num_envs to "
                    f"{near}, for example"
                )

    # --- what is valued, and in which parts the learner works

    @property
    def bootstrap(self) -> str:
        """Kind of ended episodes whose last observations are valued: none if no critic is trained."""
        return self.config.advantage.bootstrap if self.recipe.critic else "never"

    @property
    def finals(self) -> str:
        """Final frames that are drawn (`FarmSpec.final_frames`)."""
        return FINALS[self.bootstrap] if self.images else "never"

    @property
    def groups_suffice(self) -> bool:
        """True if the estimator needs no more than complete episode groups: no edge after the rollout is a barrier.
        Else it is given all of an iteration's episodes at once."""
        after = {component.name for component in self.recipe.after_rollout}
        flows = [edge.flow for edge in self.recipe.edges if edge.target in after]
        return "barrier" not in flows and self.config.advantage.scale != "batch"

    @property
    def streams(self) -> bool:
        """True if the learner may work on a part of an iteration's rows while others are still rolled out.

        Only where the update is one optimiser step over all rows: then it is a sum over parts, in their order.
        """
        optim = self.config.optim
        one_step = not self.recipe.critic and optim.epochs == 1 and optim.minibatch == 0
        return self.by_episodes and one_step and self.groups_suffice


def tasks_of(config: Config) -> tuple[Config, ...]:
    """The configuration of each task of a run, the main one first. Their seeds differ.

    Raises `UserError` for keys of `extra_tasks` that `env` does not have.
    """
    found = [config.model_copy(update={"extra_tasks": ()})]
    whole: dict[str, Any] = json.loads(config.model_dump_json()) if config.extra_tasks else {"extra_tasks": ()}
    for number, differs in enumerate(whole["extra_tasks"], start=1):
        seed = (whole["seed"] + number * TASK_SEEDS) % 2**31
        data = {**whole, "env": {**whole["env"], **differs}, "seed": seed, "extra_tasks": ()}
        found.append(parse_config(data, f"extra_tasks[{number - 1}]"))
    return tuple(found)


def task_spec(config: Config) -> TaskSpec:
    """The task of `env` that a farm simulates. Frames are drawn only if the policy reads them. Raises `UserError` where
    it reads them and there is no camera, and as `randomisation` does."""
    env = config.env
    reads_images = "images" in config.policy.reads
    if reads_images and not env.cameras:
        raise UserError("the policy reads images and env.cameras is 0; set env.cameras to 1 or more")
    return TaskSpec(
        env.task,
        env.control_mode,
        env.reward,
        env.max_episode_steps,
        env.cameras if reads_images else 0,
        env.image_size,
        env.settle_steps,
        env.orientation,
        env.gripper,
        options=env.simulator_options,
        perturbations=randomisation(config),
    )


def randomisation(config: Config) -> tuple[Perturbation, ...]:
    """The perturbations that training episodes draw from. Raises `FarmError` for an axis that the simulator lacks or
    the policy cannot notice, and for a level out of range."""
    env = config.env
    pairs = [(axis, level) for axis, levels in env.perturbed.items() for level in levels]
    return tuple(graded(env.task, axis, level, config.policy.reads) for axis, level in pairs)
