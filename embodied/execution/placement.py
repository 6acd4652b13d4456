"""The workers of a run: those of all components that are no simulators, placed by an assignment."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.execution.acting_workers import ActingWorkers, hosts_of, replicas_of, start_policy_workers, uses_replicas
from embodied.execution.assignment import Assignment
from embodied.execution.farm_specs import memory_rounds
from embodied.execution.learner_ranks import place_ranks, ranks_of
from embodied.execution.makers import make_component
from embodied.execution.roles import LearnerRole, ScorerRole
from embodied.execution.session import Session
from embodied.runtime.groups import WorkerGroup
from embodied.workflows.context import WorkerContext, check_same_sizes, policy_spec
from embodied.workflows.recipes import Recipe, WorkflowComponent, recipe_of
from embodied.workflows.sizes import check_recorded_starts, tasks_of
from sim_farm.client.farm import Farm


@dataclass(frozen=True)
class PlacedWorkers:
    """A run's workers."""

    workers: dict[str, WorkerGroup[Any]]
    """Of each component that is no simulator, by its name."""
    acting: ActingWorkers
    """Of these, those who act, and who helps them."""
    assignment: Assignment
    """As it could be done, with hosts for all who act: ranks that hold shards have no policy to share, so that who acts
    has processes of its own."""


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
                f"the workflow {recipe.name} has {edge.source} hand {edge.carries!r} to {edge.target}, and nobody "
                f"serves that edge: {edge.source} makes {', '.join(sorted(made)) or 'nothing'}, {edge.target} takes "
                f"{', '.join(sorted(taken)) or 'nothing'}"
            )


def processes_here(config: Config, assignment: Assignment) -> int:
    """How many processes of this machine the learner's ranks and those who act will be in."""
    recipe = recipe_of(config)
    acting = assignment.components[recipe.loop[-1]][: replicas_of(config, assignment)]
    ranks = assignment.components[recipe.after_rollout[-1].name][: ranks_of(config, assignment)]
    own = [place for place, host in zip(acting, hosts_of(config, assignment), strict=True) if host is None]
    return sum(not place.node for place in (*ranks, *own)) + uses_replicas(acting)


def place_workers(config: Config, run_dir: Path, session: Session, assignment: Assignment, farm: Farm) -> PlacedWorkers:
    """Place the learner's ranks, then who acts, then the scorers.

    Raises `UserError` for tasks that one policy cannot act in, or that lack a start.
    """
    recipe, tasks = recipe_of(config), tasks_of(config)
    sizes = policy_spec(config, farm.infos[0])
    for task, info in zip(tasks, farm.infos, strict=True):
        check_same_sizes(sizes, policy_spec(task, info), task.env.task)
        check_recorded_starts(task, info)
    *scorers, learner = recipe.after_rollout
    base = WorkerContext(
        config,
        sizes,
        run_dir,
        assignment.first_of(learner.name),
        seeds=tuple(task.seed for task in tasks),
        rounds=memory_rounds(config, assignment.ahead, farm.infos),
    )
    trained = place_ranks(session, learner, base, assignment)
    whole = trained.size == 1 or all(trained.call_all(LearnerRole.shares_policy))
    assignment = replace(assignment, hosts=hosts_of(config, assignment if whole else replace(assignment, hosts=())))
    acting = start_policy_workers(recipe.component(recipe.loop[-1]), base, session, assignment, farm, trained)
    workers: dict[str, WorkerGroup[Any]] = {learner.name: trained, recipe.loop[-1]: acting.workers}
    for scorer in scorers:
        # Beside the learner a scorer uses its weights, which must not be away while trajectories pass.
        leaves = assignment.unload and 0 not in assignment.hosts
        beside = assignment.first_of(scorer.name) == base.affinity and whole and not leaves
        workers[scorer.name] = _place_scorer(session, scorer, base, assignment, trained.first() if beside else None)
    return PlacedWorkers(workers, acting, assignment)


def _place_scorer(
    session: Session,
    scorer: WorkflowComponent,
    base: WorkerContext,
    assignment: Assignment,
    beside: WorkerGroup[LearnerRole] | None,
) -> WorkerGroup[ScorerRole]:
    context = replace(base, affinity=assignment.first_of(scorer.name), shares=beside is not None)
    group: WorkerGroup[ScorerRole] = session.runtime.place_group(
        scorer.name, make_component, 1, (scorer, context), beside=() if beside is None else beside.handles
    )
    if beside is not None:
        group.get(group.pipe(ScorerRole.share, beside, LearnerRole.own_policy))
    return group
