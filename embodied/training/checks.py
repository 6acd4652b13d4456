"""Checks before a command starts its workers: one table, in the order of the checks.

An entry says what it needs, which commands it is for, and the function that raises `UserError`, `PolicyError` or
`FarmError`. What needs nothing is answered before torch is imported (`check_settings`, by the command line and the
functions of `embodied`); then come packages, files and checkpoints, and what simulators that are quickly made say of
their tasks (`check_start`); other simulators are asked in the session, before the farm is started and while Ray is
(`check_tasks`). An assignment is checked where it is made: only a cluster knows the machines of a plan.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from embodied import hub
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.evaluation.protocol import PRESETS, Protocol, protocol_of, require_states
from embodied.reporting.trackers import check_packages
from embodied.runtime import check_interpreter
from embodied.workflows.run_spec import RunSpec, task_spec, tasks_of
from embodied.workflows.sizes import check_instances, physics_workers_of
from embodied.workflows.unread import check_unread
from policies.errors import PolicyError
from policies.kinds import KINDS, WITHOUT_WEIGHTS, check_folders, check_kind
from sim_farm.catalogue import check_task, exact_replay, is_quick, is_shipped, problem_file
from sim_farm.client.task_farm import check_spec
from sim_farm.contract import TaskInfo, TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.registry import backend, check_terminations
from sim_farm.shared_memory import memory
from sim_farm.shared_memory.frame_memory import nbytes_of
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess

if TYPE_CHECKING:  # torch is imported for what needs it
    from embodied.execution.session import Session
    from policies.contract import PolicySpec

_log = logging.getLogger(__name__)
_HERE = InProcess()
"""Quick simulators. What it has answered stays: a training and its evaluation may be of one task."""

AT_END = "evaluation at the end"
"""In place of a command: the evaluation that `train` and `sft` end with."""
ROLLOUTS = frozenset({"train", "profile", "compare", "plan"})
"""Commands about training runs."""
STARTS = ROLLOUTS - {"plan"}
"""Those of them that start workers."""
TRIALS = frozenset({"eval", AT_END})
"""By a protocol of evaluations."""
ACTS = frozenset({"eval", "record", "serve"})
"""Commands in which a trained policy acts."""
LEARNS = frozenset({"train", "sft"})
COMMANDS = ROLLOUTS | ACTS | LEARNS
SIMULATES = (COMMANDS | {AT_END}) - {"plan", "serve"}
"""A plan may be for another machine, and a server needs a simulator only for a policy without a checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Subject of the checks: a command with its settings, or the evaluation that a training ends with."""

    command: str
    config: Config
    checkpoint: Path | None = None
    """Folder of the policy's weights; None: those of `policy.init`, if it is set, or of the policy itself."""
    run_dir: Path | None = None
    """Folder of the run that is resumed."""
    by: Protocol | None = None
    """Protocol of the evaluation; None: that of the settings."""
    infos: tuple[TaskInfo, ...] = ()
    """Descriptions of the tasks by their simulators; empty before these are asked."""

    @cached_property
    def run(self) -> RunSpec:
        return RunSpec.of(self.config)

    @cached_property
    def protocol(self) -> Protocol:
        return self.by or protocol_of(self.config)

    @cached_property
    def tasks(self) -> tuple[Config, ...]:
        """The configuration of each task that the policy acts in."""
        if self.command in TRIALS:
            return tuple(self.protocol.applied(self.config, task) for task in self.protocol.tasks)
        return tasks_of(self.config)[: None if self.command in ROLLOUTS else 1]

    @property
    def is_resumed(self) -> bool:
        """True if the run has a checkpoint to continue from."""
        from embodied.run.folder import has_checkpoint

        return self.run_dir is not None and has_checkpoint(self.run_dir)

    @property
    def begun(self) -> Path | None:
        """The checkpoint that the policy is filled with; None also for one that is written in the run itself."""
        own = self.command == AT_END or self.is_resumed
        return None if own else self.checkpoint or self.config.policy.init

    @cached_property
    def specs(self) -> tuple[TaskSpec, ...]:
        """The tasks as simulators are asked for them."""
        specs = tuple(map(task_spec, self.tasks))
        if self.command in ROLLOUTS | {"sft"}:
            return specs
        tables = self.protocol.perturbations if self.command in TRIALS else {}
        ignored = self.config.eval.ignore_terminations
        return tuple(
            replace(spec, ignore_terminations=ignored, perturbations=tables.get(spec.name, ())) for spec in specs
        )

    @property
    def is_quick(self) -> bool:
        """True if environments of all tasks are made in a fraction of a second, in any process."""
        return self.command in SIMULATES and all(is_quick(task.env.task) for task in self.tasks)

    def at_end(self) -> Checked:
        """The evaluation that it ends with."""
        return Checked(command=AT_END, config=self.config)


# --- needs nothing


def _interpreter(checked: Checked) -> None:
    """Ray can start its processes from this Python."""
    if checked.config.runtime.mode == "ray":
        check_interpreter()


def _policy_exists(checked: Checked) -> None:
    """The policy's kind, and the folders that it is built from, are there. A run that is resumed has recorded the
    revision of a Hugging Face name, which is not looked up again."""
    policy = checked.config.policy
    if ":" in policy.kind:  # code, which has to be imported, and says itself what it is built from
        return
    check_kind(policy.kind)
    if policy.hub_name is None:
        check_folders(policy.architecture)
    elif checked.run_dir is None:
        hub.check_checkpoint(policy.hub_name)


def _has_weights(checked: Checked) -> None:
    """The policy has something to learn. Only a kind from outside this project has to be imported for it."""
    kind = checked.config.policy.kind
    if kind in KINDS:
        learns = kind not in WITHOUT_WEIGHTS
    else:
        from policies.registry import policy_kind

        learns = policy_kind(kind).trainable
    if not learns:
        raise UserError(
            f"the policy {kind} has nothing to learn: `embodied eval` evaluates it and `embodied record` records its "
            "episodes; to train, take another policy.kind (gaussian_mlp, for example)"
        )


def _settings_agree(checked: Checked) -> None:
    """No settings of the workflow contradict each other. Your own estimator or objective may read any of its
    section."""
    config, recipe = checked.config, checked.run.recipe
    warmup, size = config.optim.critic_warmup, config.rollout.episode_group
    if config.advantage.credit == "action" and config.loss.ratio_unit == "chunk":
        raise UserError("advantage.credit is action, and loss.ratio_unit chunk: set it to action or element")
    if warmup >= config.iterations:
        raise UserError(
            f"optim.critic_warmup is {warmup} of {config.iterations} iterations: the policy would never learn; set it "
            "to less"
        )
    if recipe.objective == "contrast" and config.loss.ratio_unit != "action":
        raise UserError(
            f"the workflow {config.workflow} has a loss for each action, and loss.ratio_unit is "
            f"{config.loss.ratio_unit}: set it to action"
        )
    judged = recipe.estimator == "reinforce" and config.advantage.baseline == "group"
    if size < 2 and recipe.rollout == "episodes" and (judged or recipe.estimator == "group_relative"):
        raise UserError(
            f"rollout.episode_group is {size}, and the workflow {config.workflow} judges episodes of a group against "
            "each other: set it to 2 or more"
        )


def _waits(checked: Checked) -> None:
    """Demonstrations are learned without a delay."""
    config = checked.config
    if config.env.most_delay:
        raise UserError(
            f"env.delay is {config.env.delay}, and demonstrations have no delay: set --env.delay 0. A policy that "
            f"executes all that it predicts learns chunks of {config.decided} actions from them (policy.chunk), to be "
            f"trained under that delay with policy.chunk {config.policy.chunk} (docs/latency.md)"
        )


def _tasks_exist(checked: Checked) -> None:
    """The tasks exist, with the files that their simulators need, a camera for a policy that reads images, and the
    perturbations of training episodes. The protocol of an evaluation can be made."""
    if not (checked.command in TRIALS and checked.config.eval.tasks):
        check_task(checked.config.env.task)  # whose message names the nearest
    for task in checked.tasks:
        check_task(task.env.task)
        task_spec(task)


def _environments_divide(checked: Checked) -> None:
    """Environments divide among workers and groups, where no plan says how many."""
    if checked.command != "train" or checked.config.plan.mode == "configured":
        for farm in _farms(checked):
            check_spec(farm)


def _instances(checked: Checked) -> None:
    """Ranks have rows, and policy replicas have groups of environments, where no plan says how many there are; what
    is quantised has no shards."""
    config = checked.config
    for key, value in (("policy.base", config.policy.base), ("optim.moments", config.optim.moments)):
        if value is not None and config.optim.sharding == "sharded":
            raise UserError(
                f"{key} is {value}, and optim.sharding sharded: what is quantised is whole on every rank. Set "
                f"optim.sharding to whole, or leave {key} out"
            )
    replicas, groups = 1, config.farm.groups * len(checked.tasks)
    if checked.command == "train" and config.plan.mode == "configured" and not checked.run.inline:
        replicas = config.policy.replicas
    check_instances(config, config.optim.ranks, replicas, groups)


def require_rows(config: Config, rows: int) -> None:
    """Raise `UserError` for more ranks than rows of a minibatch; `rows`: the most that there can be."""
    batch = min(config.sft.batch, rows)
    if config.optim.ranks > batch:
        raise UserError(
            f"optim.ranks is {config.optim.ranks}, and a minibatch has {batch} rows: each rank takes one or more; set "
            f"optim.ranks to {batch} or less, or learn from more rows at once (sft.batch, more demonstrations)"
        )


def _augmentation(checked: Checked) -> None:
    """Pictures that are changed at random are read."""
    augment, reads = checked.config.sft.augment, checked.config.policy.reads
    if augment is not None and "images" not in reads:
        raise UserError(
            f"sft.augment is {augment}, and the policy reads no pictures (policy.reads {' '.join(reads)}): "
            "leave sft.augment out, or let it read them (--policy.reads ... images, --env.cameras 1)"
        )


def _can_be_recorded(checked: Checked) -> None:
    """Nothing is set that is for evaluations alone, and the simulator replays episodes."""
    evaluation, task = checked.config.eval, checked.config.env.task
    if evaluation.instruction is not None:
        raise UserError("--eval.instruction is for evaluations: recordings use each task's own instruction")
    if evaluation.ignore_terminations:
        raise UserError("--eval.ignore-terminations is for evaluations: what is recorded ends where its task does")
    if not exact_replay(task):
        raise UserError(
            f"{task} declares exact_replay=False: recordings are replays of what the policy did, and its episodes "
            "cannot be replayed"
        )


def _terminations(checked: Checked) -> None:
    """The simulators of an evaluation can run an episode on after its end, where that is asked for."""
    if checked.config.eval.ignore_terminations:
        for task in checked.tasks:
            check_terminations(task.env.task, backend(task.env.task.partition("/")[0]))


# --- needs torch: packages, files and checkpoints


def _edges_are_served(checked: Checked) -> None:
    """Each component has a class of worker, and each edge carries what its source makes and its target takes."""
    recipe = checked.run.recipe
    classes = {component.name: component.worker_class() for component in recipe.components}
    after = {component.name for component in recipe.after_rollout}
    for edge in recipe.edges:
        if edge.target not in after:
            continue  # within the loop: the farm's own
        made: frozenset[str] = getattr(classes[edge.source], "makes", frozenset())
        taken: frozenset[str] = getattr(classes[edge.target], "takes", frozenset())
        if edge.carries not in made & taken:
            raise UserError(
                f"the workflow {recipe.name} has {edge.source} send {edge.carries!r} to {edge.target}, and no worker "
                f"serves that edge: {edge.source} makes {', '.join(sorted(made)) or 'nothing'}, {edge.target} takes "
                f"{', '.join(sorted(taken)) or 'nothing'}"
            )


def _components(checked: Checked) -> None:
    """The settings are such that each of the workflow's components can work with them."""
    for component in checked.run.recipe.components:
        check = getattr(component.worker_class(), "check", None)
        if check is not None:
            check(checked.config)


def _episodes_have_limits(checked: Checked) -> None:
    """Episodes whose length is judged have a limit."""
    from embodied.algorithms.estimators import overlong_limits

    if checked.config.advantage.overlong_margin is not None:
        overlong_limits(checked.config)


def _policy_options(checked: Checked) -> None:
    """The policy's options and the files that they name are right."""
    from policies import registry

    kind, architecture = checked.config.policy.kind, checked.config.policy.architecture
    try:
        registry.check(kind, architecture, checked.config.policy.base)
    except PolicyError as error:
        known = registry.arguments_of(registry.policy_kind(kind))
        unknown = next((name for name in architecture if name not in known), None)
        if unknown is None or repr(unknown) not in str(error):
            raise
        raise PolicyError(f"{error} (--policy.options.{unknown}= removes it)") from error


def _memory_settings(checked: Checked) -> None:
    """The policy can have what makes an update smaller."""
    from embodied.learning.recompute import check_recomputes
    from policies.quantised import library
    from policies.registry import policy_kind

    config = checked.config
    if config.optim.moments is not None:
        library()
    if config.optim.recompute:
        check_recomputes(config.policy.kind, policy_kind(config.policy.kind).policy_for(config.policy.architecture))


def _assumptions(checked: Checked) -> None:
    """Refuses nothing: logs what is assumed where the policy's files leave something open."""
    from policies.registry import policy_kind

    policy, tasks = checked.tasks[0].policy, [task.env.task for task in checked.tasks]
    form = policy_kind(policy.kind).format
    for sentence in (
        *form.assumed(policy.architecture),
        *form.chunk_notes(policy.architecture, policy.chunk, tasks),
    ):
        _say(sentence)


def _contrasts(checked: Checked) -> None:
    """The policy has what the workflow's objective compares."""
    from policies.registry import policy_kind

    config, recipe = checked.config, checked.run.recipe
    policy = config.policy
    if recipe.objective == "contrast" and not policy_kind(policy.kind).format.contrasts(policy.architecture):
        raise UserError(
            f"the workflow {config.workflow} contrasts the velocities of one drawn step, which the policy "
            f"{policy.kind} does not have with these options: take a flow policy (flow, pi0, smolvla) that scores one "
            "step of a decision, or another workflow"
        )


def _delay_has_room(checked: Checked) -> None:
    """Under a delay, a decision predicts what is executed after the next one has begun, which is not before it has
    arrived itself. The world goes on meanwhile."""
    from policies.registry import policy_kind

    config, policy, delay = checked.config, checked.config.policy, checked.config.env.delay
    for task in checked.run.tasks:
        if task.env.delay != delay:
            raise UserError(
                f"{task.env.task} in extra_tasks has the delay {task.env.delay}, and env.delay is {delay}: all tasks "
                "of a run have one, since the policy is built for it; leave it out of extra_tasks"
            )
    most, kind = config.env.most_delay, policy_kind(policy.kind)
    if not most:
        return
    if kind.chooses and "instruction" in policy.reads:
        raise UserError(
            f"env.delay is {delay}, and nothing goes on while the policy {policy.kind} writes an answer: leave "
            "env.delay out"
        )
    predicted = policy.horizon or kind.format.predicts(policy.architecture) or config.decided
    if most > policy.chunk or config.decided > predicted:
        room = min(policy.chunk, predicted - policy.chunk)
        fewer = f"Set env.delay to at most {room}" if room > 0 else "Set env.delay to 0"
        raise UserError(
            f"env.delay {delay} is beyond the chunk: policy.chunk is {policy.chunk}, and a decision of {policy.kind} "
            f"predicts {predicted} actions. As many actions as the delay has env steps are executed after the next "
            "decision has begun, so that policy.chunk plus the delay have to be predicted; and that one begins "
            f"policy.chunk env steps after the last, which has to have arrived. {fewer}, or policy.chunk to at least "
            f"{most} for a policy that predicts at least {most} actions more"
        )


def _converted_once(checked: Checked) -> None:
    """The environments have the conventions that the policy converts from."""
    from policies.registry import policy_kind

    policy = checked.config.policy
    for setting, (option, wanted) in policy_kind(policy.kind).format.converts(policy.architecture).items():
        for task in checked.tasks:
            found = getattr(task.env, setting)
            if found != wanted:
                raise UserError(
                    f"policy.options.{option}, which converts from env.{setting} {wanted}, and {task.env.task} has "
                    f"{found}: set env.{setting} to {wanted}, or leave the policy's entry away and let the environment "
                    "convert"
                )


def _begun_alike(checked: Checked) -> None:
    """The run has the conventions of the policy that it begins with: those of a resumed run's record, else those of
    `policy.init`. No reward teaches others; demonstrations may."""
    from embodied.run.saved_settings import recorded_settings
    from embodied.workflows.conventions import check_alike, check_checkpoint

    config, run_dir, init = checked.config, checked.run_dir, checked.config.policy.init
    if run_dir is not None and checked.is_resumed:
        check_alike(str(run_dir), recorded_settings(run_dir), config, "begin another run under another --name")
    elif init is not None:
        if checked.command != "sft":
            sft = f"teach it these by demonstrations first (embodied sft CONFIG --policy.init {init})"
            check_checkpoint(init, config, sft)
        _say_conventions(config, init)


def _acts_alike(checked: Checked) -> None:
    """The conventions are those that the policy was trained under. Differences that matter less are logged where the
    result does not have them."""
    from embodied.workflows.conventions import check_alike, check_checkpoint

    config, applied = checked.config, checked.tasks[0]
    published = config.eval.protocol if checked.command in TRIALS and config.eval.protocol in PRESETS else None
    if checked.command == AT_END:
        check_alike("the policy of this run", config, applied, protocol=published)
    elif checked.begun is not None:
        check_checkpoint(checked.begun, applied, protocol=published)
        if checked.command == "record" and checked.checkpoint is not None:
            _say_conventions(config, checked.checkpoint)


def _problems(checked: Checked) -> None:
    """The policy can take each problem of a task that a file of them defines."""
    from policies.registry import policy_kind

    for task in checked.tasks:
        files, policy, limit = problem_file(task.env.task), task.policy, task.env.max_episode_steps
        if files is None:
            continue
        # A policy that reads the state goes on with its answer, chunk after chunk.
        chunks = -(-limit // policy.chunk) if limit is not None and "state" in policy.reads else 1
        form = policy_kind(policy.kind).format
        form.check_instructions(policy.architecture, files.instructions, chunks * policy.chunk, files.source)


def _selection(checked: Checked) -> None:
    """The evaluations during training have a protocol."""
    from embodied.training.selection import selection_protocol

    if checked.config.eval.every:
        selection_protocol(checked.config)


def _plan_files(checked: Checked) -> None:
    """Plan and profile fit the run."""
    from embodied.planning.run_plans import check_plan_files

    check_plan_files(checked.run)


def _frames(checked: Checked) -> None:
    """Shared memory has room for the frames of one rollout. Rollouts of whole episodes are left to the farm: only a
    simulator knows their length."""
    from embodied.execution.assignment import observation_rows

    run, config, cameras = checked.run, checked.config, checked.specs[0].cameras
    count = cameras if isinstance(cameras, int) else len(cameras)
    if run.inline or run.by_episodes or not count:
        return
    rows, size = observation_rows(run, config.rollout.decisions), config.env.image_size
    name = f"the frame memory (at least {rows:,} rows of {count} x {size} x {size} pixels)"
    memory.require({name: nbytes_of(rows, count, size)})


def _acts_in_shipped(checked: Checked) -> None:
    """The policy can act in tasks whose simulators take seconds, for what is known of those of this project: actions
    are real numbers, and there is what the policy reads."""
    slow = [task for task in checked.tasks if not is_quick(task.env.task) and is_shipped(task.env.task)]
    if slow:
        _built(checked, _stand_in(slow[0]), None)


# --- needs what simulators say of the tasks


def _acts_in_tasks(checked: Checked) -> None:
    """The policy can act in every task, its checkpoint is of these sizes, and it is trained where it has to be."""
    from embodied.workflows.context import check_same_sizes, policy_spec

    built: list[PolicySpec] = []
    for task, info in zip(checked.tasks, checked.infos, strict=True):
        sizes = policy_spec(task, info)
        if checked.command in ROLLOUTS:
            check_same_sizes((built or [sizes])[0], sizes, task.env.task)
        if sizes in built or (built and checked.command in ROLLOUTS):
            continue
        try:
            _built(checked, sizes, info)
        except PolicyError as error:
            if not built:
                raise
            advice = "name tasks of the sizes it was trained on in eval.tasks"
            raise PolicyError(f"{task.env.task}: {error}; {advice}") from error
        built.append(sizes)


def _measure(checked: Checked) -> None:
    """Where a setting needs success, the tasks have one; and all of them have one, or none. Of success, `stop_at` is a
    share."""
    without, stop_at = [info.spec.name for info in checked.infos if not info.has_success], checked.config.stop_at
    if not without:
        if stop_at is not None and not 0 < stop_at <= 1:
            share = f"; {stop_at:g}% is {stop_at / 100:g}" if 1 < stop_at <= 100 else ""
            raise UserError(f"stop_at is a share of solved episodes, above 0 and at most 1 (got {stop_at:g}){share}")
        return
    known = [info.spec.name for info in checked.infos if info.has_success]
    if known:
        raise UserError(
            f"{without[0]} has no success and is measured by its return, {known[0]} has one: train them in runs of "
            "their own"
        )
    config, recipe, advantage = checked.config, checked.run.recipe, checked.config.advantage
    by_outcome = recipe.estimator in ("group_relative", "reinforce")
    for given, needs, remedy in (
        (by_outcome and advantage.outcome == "success", "advantage.outcome: success", "set it to return"),
        (advantage.keep_rates is not None, "advantage.keep_rates", "leave it away"),
        (recipe.estimator == "binary", f"the workflow {config.workflow}", "set workflow to ppo"),
    ):
        if given:
            raise UserError(f"{without[0]} has no success, which {needs} is about; it is measured by return: {remedy}")


def _recorded_starts(checked: Checked) -> None:
    """The tasks have the recorded states that training episodes begin from."""
    for task, info in zip(checked.tasks, checked.infos, strict=True):
        starts = task.env.recorded_starts
        largest = starts[-1] if isinstance(starts, range) and starts else max(starts, default=-1)
        if largest >= info.init_states:
            there = f"0 to {info.init_states - 1}" if info.init_states else "none"
            raise UserError(
                f"{task.env.task}: env.init_states is {task.env.init_states}, and the task's recorded initial states "
                f"are {there}: set env.init_states to {info.init_states} or less, or to ranges within them"
            )


def _trials(checked: Checked) -> None:
    """The simulators have the files and the recorded states of the protocol."""
    for task, info in zip(checked.tasks, checked.infos, strict=True):
        checked.protocol.check(task.env.task, info)


def _episodes_can_be_recorded(checked: Checked) -> None:
    """The task has the recorded states, and its episodes can be replayed."""
    (info,), task = checked.infos, checked.config.env.task
    require_states(task, checked.config.eval.recorded_states or (), info)
    if info.inexact:
        raise UserError(f"{task} cannot be recorded, which is to replay what the policy did: {info.inexact}")


# --- the table

Need = Literal["nothing", "torch", "simulators"]


@dataclass(frozen=True)
class Entry:
    """One check."""

    needs: Need
    check: Callable[[Checked], None]
    commands: frozenset[str]


TABLE = (
    Entry("nothing", _interpreter, (STARTS | LEARNS | ACTS) - {"serve"}),
    Entry("nothing", lambda checked: check_packages(checked.config.track), LEARNS),
    Entry("nothing", _policy_exists, COMMANDS),
    Entry("nothing", _has_weights, frozenset({"train"})),
    Entry("nothing", lambda checked: check_unread(checked.run), STARTS),
    Entry("nothing", _settings_agree, STARTS),
    Entry("nothing", _can_be_recorded, frozenset({"record"})),
    Entry("nothing", _tasks_exist, SIMULATES | {"plan"}),
    Entry("nothing", _terminations, TRIALS),
    Entry("nothing", lambda checked: checked.run.check_episode_groups(), ROLLOUTS),
    Entry("nothing", _environments_divide, TRIALS | {"train", "record"}),
    Entry("nothing", _instances, STARTS),
    Entry("nothing", lambda checked: require_rows(checked.config, checked.config.sft.batch), frozenset({"sft"})),
    Entry("nothing", _augmentation, frozenset({"sft"})),
    Entry("nothing", _waits, frozenset({"sft"})),
    Entry("torch", _edges_are_served, STARTS),
    Entry("torch", _components, STARTS),
    Entry("torch", _contrasts, STARTS),
    Entry("torch", _delay_has_room, STARTS),
    Entry("torch", _episodes_have_limits, STARTS),
    Entry("torch", _policy_options, COMMANDS - {"plan"}),
    Entry("torch", _memory_settings, LEARNS),
    Entry("torch", _assumptions, SIMULATES | {"serve"}),
    Entry("torch", _begun_alike, ROLLOUTS | LEARNS),
    Entry("torch", _acts_alike, ACTS | {AT_END}),
    Entry("torch", _converted_once, SIMULATES | {"serve"}),
    Entry("torch", _problems, SIMULATES),
    Entry("torch", _selection, frozenset({"train"})),
    Entry("torch", _acts_in_shipped, SIMULATES),
    Entry("torch", _plan_files, frozenset({"train"})),
    Entry("torch", _frames, frozenset({"train"})),
    Entry("simulators", _acts_in_tasks, SIMULATES | {"serve"}),
    Entry("simulators", _measure, STARTS),
    Entry("simulators", _recorded_starts, STARTS),
    Entry("simulators", _trials, TRIALS),
    Entry("simulators", _episodes_can_be_recorded, frozenset({"record"})),
)


def _check(needs: Need, *checked: Checked) -> None:
    for entry in TABLE:
        for each in checked:
            if entry.needs == needs and each.command in entry.commands:
                entry.check(each)


def _parts(checked: Checked) -> Iterator[Checked]:
    yield checked
    if checked.command in LEARNS:
        yield checked.at_end()


def check_settings(checked: Checked) -> None:
    """Check what needs nothing. torch is not imported."""
    _check("nothing", *_parts(checked))


def check_start(checked: Checked) -> None:
    """Check what needs torch, and the tasks if all of their simulators are quick. No worker is started."""
    _check("torch", *_parts(checked))
    for each in _parts(checked):
        if each.is_quick:
            check_described(each, [_HERE.describe(spec) for spec in each.specs])


def check_tasks(checked: Checked, session: Session) -> None:
    """Check the tasks whose simulators are not quick: they are asked in processes, which the farm then uses for
    its workers. Ray is started meanwhile, with processes for the first workers. The farm is not."""
    if not checked.is_quick:
        here = not checked.config.farm.nodes
        farms = tuple(_farms(checked, at_once=True)) if here else ()
        workers = 2 if checked.command in ROLLOUTS else 1  # the policy worker, and the learner
        check_described(checked, session.describe(checked.specs, farms, workers))


def check_described(checked: Checked, infos: Sequence[TaskInfo]) -> None:
    """Check the tasks of which the simulators say `infos`."""
    _check("simulators", replace(checked, infos=tuple(infos)))


# --- used by several


def _farms(checked: Checked, at_once: bool = False) -> Iterator[FarmSpec]:
    """The farm of each task as it is configured; `at_once`: of those that are simulated at the same time."""
    rollouts = checked.command in ROLLOUTS
    for task, spec in list(zip(checked.tasks, checked.specs, strict=True))[: 1 if at_once and not rollouts else None]:
        num_envs = task.env.num_envs if rollouts else task.eval.num_envs or task.env.num_envs
        cores, farm, devices = len(os.sched_getaffinity(0)), task.farm, task.farm.devices
        yield FarmSpec(
            task=spec,
            episodes=EndlessEpisodes(task.seed),
            num_envs=num_envs,
            chunk=task.policy.chunk,
            groups=farm.groups,
            physics_workers=physics_workers_of(task, cores),
            render_workers=farm.render_workers,
            devices=("cpu",) if devices == "cpu" else devices,
        )


def _built(checked: Checked, spec: PolicySpec, info: TaskInfo | None) -> None:
    """Build the policy of these sizes where that reads no weights, for a task of which a simulator says `info`. Raises
    `UserError` or `PolicyError` where it cannot be, or has to be trained first."""
    import policies
    from policies.checkpoint import check_into
    from policies.registry import policy_kind

    config = checked.config
    kind = policy_kind(config.policy.kind)
    if kind.pretrained or not kind.trainable:
        return
    try:
        policy = policies.build(config.policy.kind, spec, config.seed, **config.policy.architecture)
    except PolicyError as error:
        raise UserError(_does_not_fit(config, info, str(error))) from error
    if checked.command in ACTS and checked.begun is None and any(p.requires_grad for p in policy.parameters()):
        raise UserError(
            f"the policy {config.policy.kind} has to be trained before it is evaluated: name a run instead of a "
            "configuration, or its checkpoint with --checkpoint"
        )
    if checked.begun is not None and info is not None:
        check_into(policy, checked.begun)


def _stand_in(config: Config) -> PolicySpec:
    """A spec with what the policy reads, each of one number or as many cameras as are asked for."""
    from policies.contract import PolicySpec
    from policies.registry import check_actions

    reads, cameras = config.policy.reads, task_spec(config).cameras
    names = cameras if isinstance(cameras, tuple) else tuple(f"camera {i}" for i in range(cameras))
    spec = PolicySpec(
        action_dim=1,
        chunk=config.decided,
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


def _say_conventions(config: Config, folder: Path) -> None:
    """Log the conventions in which the policy of the checkpoint `folder` acts differently from its training."""
    from embodied.workflows.conventions import notes_on

    for note in notes_on(folder, config):
        _say(note)


@cache
def _say(sentence: str) -> None:
    """Log a sentence once per process: a command may be about several runs."""
    _log.warning("%s", sentence)
