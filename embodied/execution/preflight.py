"""What can be known of a run without a worker, checked before one is started: seconds, and not a minute later."""

from __future__ import annotations

import os
from collections.abc import Iterable

from embodied.config import Config
from embodied.execution.assignment import configured
from embodied.execution.farm_specs import farm_spec
from embodied.workers.makers import task_spec
from embodied.workflows.recipes import configs_of_tasks, episodes_of, recipe_of
from policies import registry
from sim_farm.catalogue import check_task
from sim_farm.episodes import EndlessEpisodes
from sim_farm.farm import check_spec


def check_workflow(config: Config) -> None:
    """Check policy, workflow and tasks of whatever rolls out: that they exist, with the files that they need.

    Raises `UserError`, `PolicyError` or `FarmError`. What only a simulator knows (control modes, the names of its
    cameras) is left to the workers.
    """
    recipe_of(config)
    check_policy(config)
    for task in configs_of_tasks(config):
        check_task(task.env.task)
        task_spec(task)
        episodes_of(task, task.seed)  # whether environments fill groups of episodes


def check_training(config: Config) -> None:
    """`check_workflow`, and whether environments divide among workers, where it is the configuration that says how."""
    check_workflow(config)
    if config.plan.mode == "configured" and config.plan.file is None:
        for task in configs_of_tasks(config):
            _check_farm(task, task.env.num_envs)


def check_evaluation(config: Config, tasks: Iterable[str]) -> None:
    """Check the policy, the tasks and the environments that it is evaluated in. Raises as `check_workflow` does."""
    check_policy(config)
    for task in tasks:
        check_task(task)
    task_spec(config)
    _check_farm(config, config.eval.num_envs or config.env.num_envs)


def check_policy(config: Config) -> None:
    """Check the policy's kind, its options, and that the files they name are there."""
    registry.check(config.policy.kind, config.policy.architecture)


def _check_farm(config: Config, num_envs: int) -> None:
    """Raise `FarmError` where environments do not divide among physics workers and groups of environments."""
    farm = config.farm.model_copy(update={"nodes": ()})  # how many there are, not whether the cluster has these nodes
    assignment = configured(config.model_copy(update={"farm": farm}), tuple(sorted(os.sched_getaffinity(0))))
    check_spec(farm_spec(config, EndlessEpisodes(config.seed), assignment, num_envs))
