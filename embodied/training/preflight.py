"""Checks before a run: what can be refused without a worker. They take seconds.

What only a simulator knows (control modes, the names of its cameras) is left to the workers.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.evaluation.protocol import PRESETS, protocol_of
from embodied.execution.assignment import (
    HERE,
    FarmAssignment,
    configured,
    configured_farm,
    farm_spec,
    farm_specs,
    observation_rows,
)
from embodied.execution.policy_workers import check_replicas
from embodied.execution.run_workers import check_workflow
from embodied.planning.run_plans import check_plan_files
from embodied.reporting.trackers import check_packages
from embodied.run import checkpoint
from embodied.run.folder import interim_root, lasting_root
from embodied.run.saved_settings import recorded_settings
from embodied.training.first_checks import nothing_to_learn
from embodied.training.fitting import check_fits
from embodied.training.selection import selection_protocol
from embodied.workflows.conventions import check_alike, check_checkpoint, notes_on
from embodied.workflows.run_spec import RunSpec, task_spec, tasks_of
from policies import registry
from policies.errors import PolicyError
from sim_farm.catalogue import check_task, problem_file
from sim_farm.client.task_farm import check_spec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.registry import backend, check_terminations
from sim_farm.shared_memory import memory
from sim_farm.shared_memory.frame_memory import nbytes_of

_log = logging.getLogger(__name__)


def check_run(run: RunSpec) -> None:
    """Check workflow, policy and tasks of a command that collects rollouts: that they exist, with their files.

    Raises `UserError`, `PolicyError` or `FarmError`.
    """
    config = run.config
    check_workflow(run.recipe)
    check_components(run)
    check_policy(config)
    for task in run.tasks:
        check_task(task.env.task)
        _check_problems(task.config, task.env.task)
        task_spec(task.config)
        run.episodes(task)  # whether environments fill episode groups
    check_fits(config, config.policy.init)


def check_training(run: RunSpec) -> None:
    """Check a training run: its trackers, `check_run`, its plan and profile, its evaluations, and, if nothing is
    planned, that environments divide among workers and groups among policy replicas."""
    config = run.config
    if not registry.policy_kind(config.policy.kind).trainable:
        raise UserError(nothing_to_learn(config.policy.kind))
    check_packages(config.track)
    check_run(run)
    check_own_evaluation(config)
    if config.eval.every:
        selection_protocol(config)
    check_plan_files(run)
    _check_frames(run)
    if config.plan.mode == "configured":
        assignment = configured(run, tuple(sorted(os.sched_getaffinity(0))), unknown_nodes(config))
        specs = farm_specs(run, assignment)
        for spec in specs:
            check_spec(spec)
        check_replicas(len(assignment.components[run.recipe.policy.name]), sum(spec.groups for spec in specs))


def check_components(run: RunSpec) -> None:
    """Raise `UserError` for settings that one of the workflow's components cannot work with."""
    for component in run.recipe.components:
        check = getattr(component.worker_class(), "check", None)
        if check is not None:
            check(run.config)


def check_begun(config: Config, run_dir: Path | None = None) -> None:
    """Compare the conventions under which the policy that the run begins with was trained with the run's: those that
    the run `run_dir` recorded where it goes on, else those of `policy.init`. Raises `UserError` where it is wrong by
    construction: no reward teaches it others."""
    init = config.policy.init
    if run_dir is not None and goes_on(run_dir):
        check_alike(str(run_dir), recorded_settings(run_dir), config, "begin another run under another --name")
    elif init is not None:
        sft = f"teach it these by demonstrations first (embodied sft CONFIG --policy.init {init})"
        check_checkpoint(init, config, sft)
        say_conventions(config, init)


def goes_on(run_dir: Path) -> bool:
    """True if the run has a checkpoint to continue from."""
    return any(checkpoint.latest(root(run_dir)) for root in (lasting_root, interim_root))


def say_conventions(config: Config, folder: Path) -> None:
    """Log the conventions in which the policy of the checkpoint `folder` acts differently from its training."""
    for note in notes_on(folder, config):
        _say(note)


def check_own_evaluation(config: Config) -> None:
    """Check the evaluation that a training ends with, also that it is under conventions like the training's. Raises as
    `check_run` does."""
    protocol = protocol_of(config)
    applied = protocol.applied(config, protocol.tasks[0])
    check_alike("the policy of this run", config, applied, protocol=published(config))
    check_evaluation(applied, protocol.tasks)


def check_subject(config: Config, tasks: Iterable[str], folder: Path | None, protocol: str | None = None) -> None:
    """`check_evaluation`, and that the policy of the checkpoint `folder` (None: of `policy.init`) is not wrong by
    construction in the configuration's environments, which a published `protocol` may have determined."""
    begun = config.policy.init if folder is None else folder
    if begun is not None:
        check_checkpoint(begun, config, protocol=protocol)
    check_evaluation(config, tasks, begun)


def published(config: Config) -> str | None:
    """The published protocol of the configuration's evaluations."""
    return config.eval.protocol if config.eval.protocol in PRESETS else None


def check_evaluation(config: Config, tasks: Iterable[str], begun: Path | None = None) -> None:
    """Check policy, tasks and environments of an evaluation, where it has one of the checkpoint `begun`. Raises as
    `check_run` does."""
    check_policy(config)
    for task in tasks:
        check_task(task)
        _check_problems(config, task)
        if config.eval.ignore_terminations:
            check_terminations(task, backend(task.partition("/")[0]))
    task_spec(config)
    check_fits(config, begun)
    num_envs = config.eval.num_envs or config.env.num_envs
    check_spec(farm_spec(config, EndlessEpisodes(config.seed), _configured_farm(config), num_envs))


def check_policy(config: Config) -> None:
    """Check the policy's kind, its options, that the files they name are there, and that the environments have the
    conventions that it converts from. Assumptions about what its files leave open are logged."""
    kind, architecture = config.policy.kind, config.policy.architecture
    _check_options(kind, architecture)
    form = registry.policy_kind(kind).format
    tasks = [task.env.task for task in tasks_of(config)]
    for sentence in (*form.assumed(architecture), *form.chunk_notes(architecture, config.policy.chunk, tasks)):
        _say(sentence)
    for setting, (option, wanted) in form.converts(architecture).items():
        for task in tasks_of(config):
            found = getattr(task.env, setting)
            if found != wanted:
                raise UserError(
                    f"policy.options.{option}, which converts from env.{setting} {wanted}, and {task.env.task} has "
                    f"{found}: set env.{setting} to {wanted}, or leave the policy's entry away and let the environment "
                    "convert"
                )


def _check_problems(config: Config, task: str) -> None:
    """Check that the policy can take each problem of a task that a file of them defines."""
    files, policy, limit = problem_file(task), config.policy, config.env.max_episode_steps
    if files is None:
        return
    # A policy that reads the state goes on with its answer, chunk after chunk.
    chunks = -(-limit // policy.chunk) if limit is not None and "state" in policy.reads else 1
    form = registry.policy_kind(policy.kind).format
    form.check_instructions(policy.architecture, files.instructions, chunks * policy.chunk, files.source)


def _check_options(kind: str, architecture: Mapping[str, Any]) -> None:
    """`registry.check`; its errors also say how to leave out an option that the configuration names."""
    try:
        registry.check(kind, architecture)
    except PolicyError as error:
        known = registry.arguments_of(registry.policy_kind(kind))
        unknown = next((name for name in architecture if name not in known), None)
        if unknown is None or repr(unknown) not in str(error):
            raise
        raise PolicyError(f"{error} (--policy.options.{unknown}= removes it)") from error


@cache
def _say(sentence: str) -> None:
    """Log a sentence once per process: a command may check the policy more than once."""
    _log.warning("%s", sentence)


def _check_frames(run: RunSpec) -> None:
    """Raise `FarmError` if shared memory has no room for the frames of one rollout. Rollouts of whole episodes are left
    to the farm: only a simulator knows their length."""
    config, cameras = run.config, run.tasks[0].spec.cameras
    count = cameras if isinstance(cameras, int) else len(cameras)
    if run.inline or run.by_episodes or not count:
        return
    rows, size = observation_rows(run, config.rollout.decisions), config.env.image_size
    name = f"the frame memory (at least {rows:,} rows of {count} x {size} x {size} pixels)"
    memory.require({name: nbytes_of(rows, count, size)})


def unknown_nodes(config: Config) -> dict[str, str]:
    """The nodes that the configuration names, taken for this machine: the cluster says later which there are."""
    return dict.fromkeys(config.farm.nodes, HERE)


def _configured_farm(config: Config) -> FarmAssignment:
    return configured_farm(config, tuple(sorted(os.sched_getaffinity(0))), unknown_nodes(config))
