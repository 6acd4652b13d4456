"""First checks of a command's settings: names, folders, and numbers that divide, before torch is imported.

`preflight` checks the same again with all the rest, by the same functions: this module answers the common mistakes
sooner. Raises `UserError`, `PolicyError` or `FarmError`.
"""

from __future__ import annotations

import os

from embodied import hub
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.reporting.trackers import check_packages
from embodied.runtime import check_interpreter
from embodied.workflows.run_spec import RunSpec, tasks_of
from embodied.workflows.sizes import physics_workers_of
from embodied.workflows.unread import check_unread
from policies.kinds import WITHOUT_WEIGHTS, check_folders, check_kind
from sim_farm.catalogue import check_task
from sim_farm.client.task_farm import check_division


def check_policy(config: Config, resumed: bool = False) -> None:
    """Check that the policy's kind and the files it is built from exist. A run that is `resumed` has recorded the
    revision of a Hugging Face name, which is not looked up again."""
    policy = config.policy
    if ":" in policy.kind:  # code, which has to be imported, and says itself what it is built from
        return
    check_kind(policy.kind)
    if policy.hub_name is None:
        check_folders(policy.architecture)
    elif not resumed:
        hub.check_checkpoint(policy.hub_name)


def check_rollouts(config: Config) -> None:
    """Check that the tasks exist, and that environments fill episode groups where the workflow has them."""
    for task in tasks_of(config):
        check_task(task.env.task)
    if ":" not in config.workflow:
        RunSpec.of(config).check_episode_groups()


def check_settings(config: Config) -> None:
    """Check that the policy has something to learn, and that the workflow reads what is set. Your own workflow is
    code, which has to be imported first."""
    if config.policy.kind in WITHOUT_WEIGHTS:
        raise UserError(nothing_to_learn(config.policy.kind))
    if ":" not in config.workflow:
        check_unread(RunSpec.of(config))


def nothing_to_learn(kind: str) -> str:
    """Message about a policy that cannot be trained."""
    return (
        f"the policy {kind} has nothing to learn: `embodied eval` evaluates it and `embodied record` records its "
        "episodes; to train, take another policy.kind (gaussian_mlp, for example)"
    )


def check_farms(config: Config) -> None:
    """Check that each task's environments divide among workers and groups, where no plan says how many."""
    if config.plan.mode == "configured":
        for task in tasks_of(config):
            _check_division(config, task.env.num_envs)


def check_runtime(config: Config) -> None:
    """Check that Ray, if the run uses it, can start its processes from this Python."""
    if config.runtime.mode == "ray":
        check_interpreter()


def check_trackers(config: Config) -> None:
    """Check that the libraries that are to follow the run are installed."""
    check_packages(config.track)


def check_trials(config: Config) -> None:
    """Check that the task of an evaluation exists, unless it names others, and that environments divide among workers
    and groups."""
    if not config.eval.tasks:
        check_task(config.env.task)
    _check_division(config, config.eval.num_envs or config.env.num_envs)


def _check_division(config: Config, num_envs: int) -> None:
    check_division(num_envs, physics_workers_of(config, len(os.sched_getaffinity(0))), config.farm.groups)
