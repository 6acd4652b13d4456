"""Checks of a workflow's settings: those that contradict each other, or that the tasks cannot satisfy. Each raises
`UserError`, before a worker starts unless only a simulator knows."""

from __future__ import annotations

from collections.abc import Sequence

from embodied.algorithms.estimators import overlong_limits
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.workflows.context import check_same_sizes, policy_spec
from embodied.workflows.recipes import Recipe
from embodied.workflows.run_spec import RunSpec
from embodied.workflows.unread import check_unread
from policies.registry import policy_kind
from sim_farm.contract import TaskInfo


def check_algorithm(config: Config) -> None:
    """Raise `UserError` for such a setting. Your own estimator or objective may read any setting of its section."""
    run = RunSpec.of(config)
    recipe = run.recipe
    check_unread(run)
    _check_critic(config)
    if config.advantage.overlong_margin is not None:
        overlong_limits(config)  # raises where an episode has no limit
    _check_contrast(config, recipe)


# --- settings that contradict each other


def _check_critic(config: Config) -> None:
    warmup = config.optim.critic_warmup
    if warmup >= config.iterations:
        raise UserError(
            f"optim.critic_warmup is {warmup} of {config.iterations} iterations: the policy would never learn; set it "
            "to less"
        )


def _check_contrast(config: Config, recipe: Recipe) -> None:
    if recipe.objective == "contrast":
        if not policy_kind(config.policy.kind).format.contrasts(config.policy.architecture):
            raise UserError(
                f"the workflow {config.workflow} contrasts the velocities of one drawn step, which the policy "
                f"{config.policy.kind} has not as it is: take a flow policy (flow, pi0, smolvla) that scores one step "
                "of a decision, or another workflow"
            )
        if config.loss.ratio_unit != "action":
            raise UserError(
                f"the workflow {config.workflow} has a loss for each action, and loss.ratio_unit is "
                f"{config.loss.ratio_unit}: set it to action"
            )
    size = config.rollout.episode_group
    if size < 2 and recipe.rollout == "episodes" and (_compares(config, recipe)):
        raise UserError(
            f"rollout.episode_group is {size}, and the workflow {config.workflow} judges episodes of a group against "
            "each other: set it to 2 or more"
        )


def _compares(config: Config, recipe: Recipe) -> bool:
    baseline = recipe.estimator == "reinforce" and config.advantage.baseline == "group"
    return recipe.estimator == "group_relative" or baseline


# --- tasks, their measure, their starts, ranks


def check_tasks(run: RunSpec, infos: Sequence[TaskInfo]) -> None:
    """Check what only the simulators know of a run's tasks. Raises `UserError` for tasks that one policy cannot act in,
    whose recorded initial states are not there, or that have no success where a setting needs one; `PolicyError` for
    actions that the policy cannot give."""
    sizes = policy_spec(run.config, infos[0])
    for task, info in zip(run.tasks, infos, strict=True):
        check_same_sizes(sizes, policy_spec(task.config, info), task.env.task)
        check_recorded_starts(task.config, info)
    check_measure(run, infos)


def check_measure(run: RunSpec, infos: Sequence[TaskInfo]) -> None:
    """Raise `UserError` where tasks know no success and a setting needs it, or some know it and others do not; and for
    a `stop_at` that is no share of success."""
    without = [info.spec.name for info in infos if not info.has_success]
    if not without:
        _check_share(run.config.stop_at)
        return
    known = [info.spec.name for info in infos if info.has_success]
    if known:
        raise UserError(
            f"{without[0]} has no success and is measured by its return, {known[0]} has one: train them in runs of "
            "their own"
        )
    config, recipe, advantage = run.config, run.recipe, run.config.advantage
    by_outcome = recipe.estimator in ("group_relative", "reinforce")
    for given, needs, remedy in (
        (by_outcome and advantage.outcome == "success", "advantage.outcome: success", "set it to return"),
        (advantage.keep_rates is not None, "advantage.keep_rates", "leave it away"),
        (recipe.estimator == "binary", f"the workflow {config.workflow}", "set workflow to ppo"),
    ):
        if given:
            raise UserError(f"{without[0]} has no success, which {needs} is about; it is measured by return: {remedy}")


def _check_share(stop_at: float | None) -> None:
    if stop_at is None or 0 < stop_at <= 1:
        return
    share = f"; {stop_at:g}% is {stop_at / 100:g}" if 1 < stop_at <= 100 else ""
    raise UserError(f"stop_at is a share of solved episodes, above 0 and at most 1 (got {stop_at:g}){share}")


def check_recorded_starts(config: Config, info: TaskInfo) -> None:
    """Raise `UserError` where training episodes would begin from a recorded state that the task does not have."""
    starts = config.env.recorded_starts
    largest = starts[-1] if isinstance(starts, range) and starts else max(starts, default=-1)
    if largest >= info.init_states:
        there = f"0 to {info.init_states - 1}" if info.init_states else "none"
        raise UserError(
            f"{config.env.task}: env.init_states is {config.env.init_states}, and the task's recorded initial states "
            f"are {there}: set env.init_states to {info.init_states} or less, or to ranges within them"
        )


def check_ranks(config: Config, ranks: int) -> None:
    """Raise `UserError` for more ranks than rows of a minibatch."""
    if config.optim.minibatch and ranks > config.optim.minibatch:
        raise UserError(
            f"the learner has {ranks} ranks, and a minibatch {config.optim.minibatch} rows: each rank takes one "
            f"or more; set optim.ranks to {config.optim.minibatch} or less, or optim.minibatch to {ranks} or more"
        )


def check_credit(config: Config) -> None:
    """Raise `UserError` where single actions have credit and ratios are taken over more than that."""
    if config.advantage.credit == "action" and config.loss.ratio_unit == "chunk":
        raise UserError("advantage.credit is action, and loss.ratio_unit chunk: set it to action or element")
