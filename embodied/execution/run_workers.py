"""The workers of a run: started as an assignment places them, and the single steps that they do together.

`embodied.execution.iteration` puts the steps in the order of an iteration. The last component of the loop infers the
actions, the last after the rollout is the learner, and trajectories pass through the scorers between them. If there are
several policy replicas, or one on another machine than the farm, a rollout worker steps the environments for them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.execution.assignment import Assignment, frame_rows, memory_rounds, run_specs
from embodied.execution.learner_ranks import ranks_of, saved_by_ranks, start_ranks, update_of_ranks
from embodied.execution.policy_workers import check_replicas, hosts_of, replicas_of, start_policy_workers, uses_replicas
from embodied.execution.roles import LearnerRole, PolicyRole, RolloutRole, ScorerRole
from embodied.execution.rollouts import (
    Rollouts,
    RolloutsInParts,
    SentTrajectories,
    SpanRecorder,
    TrajectoryDelivery,
    start_delivery,
)
from embodied.execution.run_offload import RunOffload
from embodied.execution.session import Session
from embodied.learning.weight_sync import WeightSync
from embodied.metric import Metric
from embodied.reporting.live import tell
from embodied.run import checkpoint
from embodied.run.background_writer import Written
from embodied.runtime.handles import WorkerGroup
from embodied.trajectories.memory import TrajectoryMemory
from embodied.workflows.checks import check_measure, check_ranks, check_recorded_starts
from embodied.workflows.context import WorkerContext, check_same_sizes, policy_spec
from embodied.workflows.recipes import Recipe, WorkflowComponent, recipe_of
from embodied.workflows.sizes import tasks_of
from policies.registry import policy_kind
from sim_farm.client.farm import Farm

ANSWER_S = 5.0
"""Longest wait, after a loss, for a rank to answer whether it still writes a checkpoint."""


METRICS = (Metric("time/switch_s", "s", "Time in which roles changed places in a device's memory; 0 where none do."),)


@dataclass(kw_only=True)
class RunWorkers:
    """The workers of a run, and the steps of an iteration. See `embodied.execution.iteration.start_run`."""

    config: Config
    recipe: Recipe
    assignment: Assignment
    farm: Farm
    workers: Mapping[str, WorkerGroup[Any]]
    """By name, for each component that is no simulator."""
    acting: WorkerGroup[PolicyRole]
    """The policy workers: one, which is the rollout worker too, or the replicas."""
    rollout_worker: WorkerGroup[RolloutRole]
    learner: WorkerGroup[LearnerRole]
    memory: TrajectoryMemory
    rollouts: Rollouts
    weight_sync: WeightSync
    delivery: TrajectoryDelivery
    offload: RunOffload
    spans: SpanRecorder

    def begin(self, environments: dict[str, np.ndarray] | None, version: int) -> None:
        """Publish the learner's weights, which have seen `version` updates, and start the environments, or continue
        from the snapshot `environments`."""
        self.publish(version)
        self.spans.take()
        self.rollout_worker.call(RolloutRole.begin, environments, self.recipe.rollout == "episodes")

    def snapshot(self) -> dict[str, np.ndarray]:
        """The state of the environments after the rollout, for checkpoints."""
        return self.rollout_worker.call(RolloutRole.snapshot)

    def update(self, iteration: int, sent: SentTrajectories) -> dict[str, float]:
        """Update the policy from the trajectories that were sent; metrics of the update."""
        scoring = self.rollouts.await_received(sent)
        metrics = update_of_ranks(self.learner.call_all(LearnerRole.finish, iteration))
        end = time.monotonic_ns()
        update_ns = int(metrics["learner/update_s"] * 1e9)
        self.spans.mark("driver", "update", sent.begin_ns, end, trajectories=self.delivery.path)
        self.spans.mark(self.learner.name, "update", end - update_ns, end)
        return metrics | {"time/switch_s": 0.0} | scoring

    def publish(self, version: int) -> None:
        """Bring the learner's weights, which have seen `version` updates, to all policy workers."""
        begin = time.monotonic_ns()
        self.weight_sync.publish(version)
        self.spans.mark("driver", "publish weights", begin, path=self.weights_path)

    @property
    def has_success(self) -> bool:
        """False if the run's tasks know no success: their measure is the return."""
        return all(info.has_success for info in self.farm.infos)

    @property
    def weights_path(self) -> str:
        """Transport of weights from the learner to the policy workers, in words."""
        return self.weight_sync.path

    # --- checkpoints

    def load(self, folder: Path) -> None:
        """Load a verified checkpoint into the learner."""
        self.learner.call_all(LearnerRole.load, folder)

    def save(self, root: Path, state: checkpoint.RunState, environments: dict[str, np.ndarray]) -> None:
        """Begin to write a checkpoint of the current state, once the one before is complete.

        Raises `CheckpointError` if it cannot be begun, or if the one before could not be written and `saved` has not
        raised that yet.
        """
        self.learner.call_all(LearnerRole.save, root, state, environments)

    def saving(self) -> bool:
        """True while a checkpoint is being written."""
        return any(self.learner.call_all(LearnerRole.saving))

    def saves_on(self) -> bool:
        """True if, after a loss, the learner's ranks answer, so that a checkpoint that they write will be complete. A
        rank whose peer has failed waits for that one and does not answer. Raises the failure of a rank that is gone."""
        return self.learner.answers(self.learner.submit_all(LearnerRole.saving), ANSWER_S)

    def saved(self) -> Written | None:
        """Wait until the last checkpoint is complete; when it was written. Raises `CheckpointError` if it could not
        be."""
        return saved_by_ranks(self.learner)


Run = TypeVar("Run", bound=RunWorkers)


@contextmanager
def start_workers(
    order: type[Run], config: Config, run_dir: Path, session: Session, assignment: Assignment
) -> Iterator[Run]:
    """Start the run's workers as the assignment places them; they end with the block. `order` is the class of the run.

    Raises `UserError` for tasks that one policy cannot act in, for edges that no worker serves, and for assignments
    that contradict themselves or have more ranks than a minibatch rows.
    """
    recipe = recipe_of(config)
    check_workflow(recipe)
    if assignment.ahead and assignment.unload:
        raise UserError(
            "a plan that runs ahead has nothing to unload: rollout and learner work at the same time; set ahead 0 "
            "or unload false"
        )
    specs = run_specs(config, assignment)
    check_replicas(config, assignment, sum(spec.groups for spec in specs))
    check_ranks(config, ranks_of(config, assignment))
    rows = partial(frame_rows, config, assignment.ahead)
    with session.farm(specs, assignment.farms, rows, processes_here(config, assignment)) as farm:
        base = _context(config, run_dir, farm, assignment)
        learner = start_ranks(session, recipe.learner, base, assignment)
        # Ranks that hold shards have no policy to share with workers in their processes.
        whole = learner.size == 1 or all(learner.call_all(LearnerRole.shares_policy))
        assignment = replace(assignment, hosts=hosts_of(config, assignment if whole else replace(assignment, hosts=())))
        acting = start_policy_workers(recipe.policy, base, session, assignment, farm, learner)
        scorers = _start_scorers(session, base, assignment, learner, whole)
        rollout_worker = acting.rollout_worker
        farm_deadline_s = session.runtime.deadline.inner().seconds
        layout = acting.workers.call_one(0, PolicyRole.layout)
        delivery = start_delivery(session, assignment, rollout_worker, learner, farm)
        memory = TrajectoryMemory.create(layout, farm.frames, not farm.in_process)
        spans = SpanRecorder()
        rollouts = (RolloutsInParts if recipe.rollout == "episodes" else Rollouts)(
            config=config,
            assignment=assignment,
            rollout_worker=rollout_worker,
            scorers=scorers,
            learner=learner,
            delivery=delivery,
            environments=sum(spec.num_envs for spec in farm.specs),
            farm_deadline_s=farm_deadline_s,
            spans=spans,
        )
        run = order(
            config=config,
            recipe=recipe,
            assignment=assignment,
            farm=farm,
            workers={learner.name: learner, acting.workers.name: acting.workers, **scorers},
            acting=acting.workers,
            rollout_worker=rollout_worker,
            learner=learner,
            memory=memory,
            rollouts=rollouts,
            weight_sync=_weight_sync(config, assignment, learner, acting.workers, farm_deadline_s),
            delivery=delivery,
            offload=RunOffload(
                farm=farm,
                rollout_worker=rollout_worker,
                acting=acting.workers,
                assignment=assignment,
                learner=learner,
                run_dir=run_dir,
                farm_deadline_s=farm_deadline_s,
            ),
            spans=spans,
        )
        try:
            delivery.use(memory)
            acting.use(memory)
            yield run
            learner.call_all(LearnerRole.leave)
            for group in (*run.workers.values(), *acting.helpers, *delivery.helpers):
                group.end()
        finally:
            memory.close()
        for left in run_dir.glob("unloaded-*.safetensors"):
            left.unlink()


def _weight_sync(
    config: Config, assignment: Assignment, learner: WorkerGroup[Any], policies: WorkerGroup[Any], timeout_s: float
) -> WeightSync:
    """Weight sync from the learner to the policy workers, connected."""
    places = assignment.components[policies.name]
    return WeightSync.connect(
        learner,
        policies,
        learner_node=assignment.first_of(learner.name).node,
        sharing=assignment.guests,
        nodes={rank: places[rank].node for rank in assignment.apart},
        timeout_s=timeout_s,
        engine=policy_kind(config.policy.kind).policy.asks_engine(config.policy.architecture),
    )


def _context(config: Config, run_dir: Path, farm: Farm, assignment: Assignment) -> WorkerContext:
    """The data that the run's workers are made from.

    Raises `UserError` for tasks that one policy cannot act in, whose recorded initial states are not there, or that
    have no success where the configuration needs one.
    """
    tasks = tasks_of(config)
    sizes = policy_spec(config, farm.infos[0])
    for task, info in zip(tasks, farm.infos, strict=True):
        check_same_sizes(sizes, policy_spec(task, info), task.env.task)
        check_recorded_starts(task, info)
        if info.inexact:
            tell(
                f"the seeds of {task.env.task} do not determine its episodes: {info.inexact}. A resumed run begins "
                "others, nothing is filmed, and no evaluation can be repeated"
            )
    check_measure(config, farm.infos)
    return WorkerContext(
        config,
        sizes,
        run_dir,
        assignment.first_of(recipe_of(config).learner.name),
        seeds=tuple(task.seed for task in tasks),
        rounds=memory_rounds(config, assignment.ahead, farm.infos),
    )


def _start_scorers(
    session: Session, base: WorkerContext, assignment: Assignment, learner: WorkerGroup[LearnerRole], whole: bool
) -> dict[str, WorkerGroup[ScorerRole]]:
    """The workers that trajectories pass through, in this order. `whole`: each rank has the whole policy."""
    found: dict[str, WorkerGroup[ScorerRole]] = {}
    for scorer in recipe_of(base.config).scorers:
        # Beside the learner a scorer uses its weights, which must not be away while trajectories pass.
        leaves = assignment.unload and 0 not in assignment.hosts
        beside = assignment.first_of(scorer.name) == base.affinity and whole and not leaves
        found[scorer.name] = _start_scorer(session, scorer, base, assignment, learner.first() if beside else None)
    return found


def _start_scorer(
    session: Session,
    scorer: WorkflowComponent,
    base: WorkerContext,
    assignment: Assignment,
    beside: WorkerGroup[LearnerRole] | None,
) -> WorkerGroup[ScorerRole]:
    context = replace(base, affinity=assignment.first_of(scorer.name), shares=beside is not None)
    group: WorkerGroup[ScorerRole] = session.runtime.start_group(
        scorer.name, WorkflowComponent.make, 1, (scorer, context), beside=() if beside is None else beside.handles
    )
    if beside is not None:
        group.get(group.pipe(ScorerRole.share, beside, LearnerRole.own_policy))
    return group


def check_workflow(recipe: Recipe) -> None:
    """Raise `UserError` for a component without a class of worker, and for an edge that carries what its source does
    not make or its target does not take."""
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


def processes_here(config: Config, assignment: Assignment) -> int:
    """Number of processes on this machine for the learner's ranks, policy workers and rollout worker."""
    recipe = recipe_of(config)
    acting = assignment.components[recipe.policy.name][: replicas_of(config, assignment)]
    ranks = assignment.components[recipe.learner.name][: ranks_of(config, assignment)]
    own = [place for place, host in zip(acting, hosts_of(config, assignment), strict=True) if host is None]
    return sum(not place.node for place in (*ranks, *own)) + uses_replicas(acting)
