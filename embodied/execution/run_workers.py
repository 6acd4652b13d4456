"""The workers of a run, started as an assignment places them.

`embodied.execution.iteration` has the steps that they do together. The last component of the loop infers the actions,
the last after the rollout is the learner, and trajectories pass through the scorers between them. If there are
several policy replicas, or one on another machine than the farm, a rollout worker steps the environments for them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from embodied.errors import UserError
from embodied.execution.assignment import Assignment, farm_specs, frame_rows, memory_rounds
from embodied.execution.delivery import TrajectoryDelivery, start_delivery
from embodied.execution.learner_ranks import start_ranks
from embodied.execution.policy_workers import start_policy_workers, uses_replicas
from embodied.execution.roles import LearnerRole, PolicyRole, RolloutRole, ScorerRole
from embodied.execution.session import Session
from embodied.learning.weight_sync import WeightSync
from embodied.reporting.live import tell
from embodied.run.trace import SpanRecorder
from embodied.runtime.handles import WorkerGroup
from embodied.trajectories.memory import TrajectoryMemory
from embodied.workflows.context import WorkerContext, policy_spec
from embodied.workflows.recipes import WorkflowComponent
from embodied.workflows.run_spec import RunSpec
from embodied.workflows.sizes import check_instances
from sim_farm.client.farm import Farm
from sim_farm.contract import TaskInfo


@dataclass(kw_only=True)
class RunWorkers:
    """The workers of a run. `embodied.execution.iteration` has the steps that they do together."""

    spec: RunSpec
    run_dir: Path
    assignment: Assignment
    farm: Farm
    acting: WorkerGroup[Any]
    """The policy workers: one, which is the rollout worker too, or the replicas."""
    rollout_worker: WorkerGroup[RolloutRole]
    scorers: Mapping[str, WorkerGroup[ScorerRole]]
    """By name, in the order in which trajectories pass through them."""
    learner: WorkerGroup[LearnerRole]
    memory: TrajectoryMemory
    weight_sync: WeightSync
    delivery: TrajectoryDelivery
    farm_deadline_s: float
    """Deadline of the rollout worker for its farm. It is shorter than the deadline of the call, whose message could not
    name the farm's worker that is late."""
    spans: SpanRecorder

    @property
    def has_success(self) -> bool:
        """False if the run's tasks know no success: their measure is the return."""
        return all(info.has_success for info in self.farm.infos)


Run = TypeVar("Run", bound=RunWorkers)


@contextmanager
def start_workers(
    order: type[Run], spec: RunSpec, run_dir: Path, session: Session, assignment: Assignment
) -> Iterator[Run]:
    """Start the run's workers as the assignment places them; they end with the block. `order` is the class of the run.

    Raises `UserError` for assignments of a plan that contradict themselves, or have more instances than there is work
    for.
    """
    recipe = spec.recipe
    if assignment.ahead and assignment.unload:
        raise UserError(
            "a plan that runs ahead has nothing to unload: rollout and learner work at the same time; set ahead 0 "
            "or unload false"
        )
    farms = farm_specs(spec, assignment)
    if assignment.mode != "configured":  # the settings are checked with the command's
        ranks, replicas = (len(assignment.components[one.name]) for one in (recipe.learner, recipe.policy))
        check_instances(spec.config, ranks, replicas, sum(farm.groups for farm in farms))

    def rows(infos: tuple[TaskInfo, ...]) -> int:
        return frame_rows(spec, assignment.ahead, infos)

    with session.farm(farms, assignment.farms, rows, processes_here(spec, assignment)) as farm:
        base = _context(spec, run_dir, farm, assignment)
        learner = start_ranks(session, recipe.learner, base, assignment)
        # Ranks that hold shards have no policy to share with workers in their processes.
        whole = learner.size == 1 or all(learner.call_all(LearnerRole.shares_policy))
        assignment = assignment if whole else replace(assignment, hosts=())
        acting = start_policy_workers(recipe.policy, base, session, assignment, farm, learner)
        scorers = _start_scorers(session, base, assignment, learner, whole)
        farm_deadline_s = session.runtime.deadline.inner().seconds
        layout = acting.workers.call_one(0, PolicyRole.layout)
        run = order(
            spec=spec,
            run_dir=run_dir,
            assignment=assignment,
            farm=farm,
            acting=acting.workers,
            rollout_worker=acting.rollout_worker,
            scorers=scorers,
            learner=learner,
            memory=TrajectoryMemory.create(layout, farm.frames, not farm.in_process),
            weight_sync=_weight_sync(spec, assignment, learner, acting.workers, farm_deadline_s),
            delivery=start_delivery(session, assignment, acting.rollout_worker, learner, farm),
            farm_deadline_s=farm_deadline_s,
            spans=SpanRecorder(),
        )
        try:
            run.delivery.use(run.memory)
            acting.use(run.memory)
            yield run
            learner.call_all(LearnerRole.leave)
            groups = learner, acting.workers, *scorers.values(), *acting.helpers, *run.delivery.helpers
            for group in groups:
                group.end()
        finally:
            run.memory.close()
        for left in run_dir.glob("unloaded-*.safetensors"):
            left.unlink()


def _weight_sync(
    spec: RunSpec, assignment: Assignment, learner: WorkerGroup[Any], policies: WorkerGroup[Any], timeout_s: float
) -> WeightSync:
    """Weight sync from the learner to the policy workers, connected."""
    places = assignment.components[policies.name]
    return WeightSync.connect(
        learner,
        policies,
        learner_node=assignment.first_of(learner.name).node,
        sharing=assignment.guests,
        nodes={rank: places[rank].node for rank in assignment.apart(len(places))},
        timeout_s=timeout_s,
    )


def _context(spec: RunSpec, run_dir: Path, farm: Farm, assignment: Assignment) -> WorkerContext:
    """The data that the run's workers are made from."""
    for task, info in zip(spec.tasks, farm.infos, strict=True):
        if info.inexact:
            tell(
                f"the seeds of {task.env.task} do not determine its episodes: {info.inexact}. A resumed run begins "
                "others, nothing is filmed, and no evaluation can be repeated"
            )
    return WorkerContext(
        spec,
        policy_spec(spec.config, farm.infos[0]),
        run_dir,
        assignment.first_of(spec.recipe.learner.name),
        rounds=memory_rounds(spec, assignment.ahead, farm.infos),
    )


def _start_scorers(
    session: Session, base: WorkerContext, assignment: Assignment, learner: WorkerGroup[LearnerRole], whole: bool
) -> dict[str, WorkerGroup[ScorerRole]]:
    """The workers that trajectories pass through, in this order. `whole`: each rank has the whole policy."""
    found: dict[str, WorkerGroup[ScorerRole]] = {}
    for scorer in base.run.recipe.scorers:
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


def processes_here(spec: RunSpec, assignment: Assignment) -> int:
    """Number of processes on this machine for the learner's ranks, policy workers and rollout worker."""
    acting = assignment.components[spec.recipe.policy.name]
    own = [acting[replica] for replica in assignment.apart(len(acting))]
    ranks = assignment.components[spec.recipe.learner.name]
    return sum(not place.node for place in (*ranks, *own)) + uses_replicas(acting)
