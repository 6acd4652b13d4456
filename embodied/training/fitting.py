"""The check that a policy fits its tasks, before a worker starts: with the sizes that are known at once."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path

import policies
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.workflows.context import check_same_sizes, policy_spec
from embodied.workflows.run_spec import task_spec, tasks_of
from policies.checkpoint import check_into
from policies.contract import PolicySpec
from policies.errors import PolicyError
from policies.registry import check_actions, policy_kind
from sim_farm.catalogue import is_quick, is_shipped
from sim_farm.contract import TaskInfo, TaskSpec
from sim_farm.workers.hosts import InProcess


def check_fits(config: Config, begun: Path | None = None) -> None:
    """Check the policy's actions and observations against the run's tasks, and build it where that reads no weights;
    `begun`: the checkpoint that it is filled with must be of these sizes. A task whose simulator takes seconds counts
    with what is known of it: its actions are real numbers, and it has what the policy reads. About a simulator from
    outside this project, nothing is known before its workers start.

    Raises `UserError` or `PolicyError`.
    """
    tasks = [task for task in tasks_of(config) if is_quick(task.env.task) or is_shipped(task.env.task)]
    if not tasks:
        return
    infos = [_described(task_spec(task)) if is_quick(task.env.task) else None for task in tasks]
    specs = [
        _stand_in(task) if info is None else policy_spec(task, info) for task, info in zip(tasks, infos, strict=True)
    ]
    for task, info, spec in zip(tasks, infos, specs, strict=True):
        if info is not None and infos[0] is not None:
            check_same_sizes(specs[0], spec, task.env.task)
    kind = policy_kind(config.policy.kind)
    if kind.pretrained or not kind.trainable:
        return
    try:
        policy = policies.build(config.policy.kind, specs[0], config.seed, **config.policy.architecture)
    except PolicyError as error:
        raise UserError(_does_not_fit(config, infos[0], str(error))) from error
    if begun is not None and infos[0] is not None:
        check_into(policy, begun)


@lru_cache(maxsize=64)
def _described(task: TaskSpec) -> TaskInfo:
    """A command checks its training and its evaluation."""
    return InProcess().describe(task)


def _stand_in(config: Config) -> PolicySpec:
    """A spec with what the policy reads, each of one number or as many cameras as are asked for."""
    reads, cameras = config.policy.reads, task_spec(config).cameras
    names = cameras if isinstance(cameras, tuple) else tuple(f"camera {i}" for i in range(cameras))
    spec = PolicySpec(
        action_dim=1,
        chunk=config.policy.chunk,
        horizon=config.policy.horizon,
        state_dim=int("state" in reads),
        proprio_dim=int("proprio" in reads),
        cameras=names,
        image_size=config.env.image_size if names else PolicySpec.image_size,
    )
    check_actions(config.policy.kind, spec)
    return spec


def _does_not_fit(config: Config, info: TaskInfo | None, wrong: str) -> str:
    """The message of a policy that cannot be built, with what the task has for it to read."""
    has = "" if info is None else f"; the task has {_observations(info)}"
    return (
        f"the policy {config.policy.kind} with policy.reads [{', '.join(config.policy.reads)}] cannot act in "
        f"{config.env.task}: {wrong}{has}. Set policy.reads to what the kind reads, or policy.kind or policy.options "
        "to what reads that (docs/adding-a-policy.md lists the kinds)"
    )


def _observations(info: TaskInfo) -> str:
    sizes = {"state": info.state_dim, "proprio": info.proprio_dim}
    parts = [f"{name} of {size} numbers" for name, size in sizes.items() if size]
    return ", ".join([*parts, "images with env.cameras of 1 or more"])
