"""Who acts in a run: one policy worker, or several replicas beside a worker that goes round with the farm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from embodied.config import Config
from embodied.errors import UserError
from embodied.execution.assignment import Assignment
from embodied.execution.session import Session
from embodied.runtime.groups import WorkerGroup
from embodied.workers.affinity import Affinity
from embodied.workers.context import WorkerContext
from embodied.workers.makers import make_component, make_loop, make_replica
from embodied.workers.roles import Acting, Decider, Trainer
from embodied.workers.shared_loop import TRACK
from embodied.workflows.recipes import WorkflowComponent, recipe_of
from sim_farm.farm import Farm


def replicas_of(config: Config, assignment: Assignment) -> int:
    """Policy workers of a run: as the assignment says, and one where everything is in one process."""
    inline = config.runtime.mode == "inline"
    return 1 if inline else len(assignment.components[recipe_of(config).loop[-1]])


def check_replicas(config: Config, assignment: Assignment, groups: int) -> None:
    """Raise `UserError` where some of the policy workers would never have a group to decide for, or are on another
    machine than the frames."""
    replicas = replicas_of(config, assignment)
    away = [place.node for place in assignment.components[recipe_of(config).loop[-1]][:replicas] if place.node]
    if away:
        raise UserError(
            f"{len(away)} of {replicas} policy workers would be on other nodes ({away[0]} and so on), and they read "
            "frames out of the memory of the node where the command is typed: give the policy devices of this node in "
            "the plan; the learner's ranks may be on any"
        )
    if replicas > groups:
        raise UserError(
            f"{replicas} policy replicas would share {groups} groups of environments, and {replicas - groups} of them "
            f"would never act: set policy.replicas to {groups} or less, or farm.groups to more (better twice as many "
            "groups as replicas: one is simulated while another is inferred)"
        )


def place_acting(
    component: WorkflowComponent,
    base: WorkerContext,
    session: Session,
    assignment: Assignment,
    farm: Farm,
    trained: WorkerGroup[Trainer],
) -> tuple[WorkerGroup[Any], WorkerGroup[Decider] | None]:
    """Who acts; and the decider, where that is somebody else. Where they share the trainer's
    policy they are beside its first ranks. Raises `UserError` where these are fewer."""
    name, place, shares = component.name, session.runtime.place_group, assignment.one_process
    count = replicas_of(base.config, assignment)
    if shares and count > trained.size:
        raise UserError(
            f"the plan has {name} and {trained.name} share processes, and there are {count} of the one and "
            f"{trained.size} of the other: give both the same number (policy.replicas, optim.ranks), or each processes "
            "of its own"
        )
    owners = trained.first(min(count, trained.size)) if shares else None
    context = replace(base, farm=session.reach(farm), ranks=count, shares=shares)

    def arguments(rank: int) -> tuple[WorkflowComponent, WorkerContext]:
        return component, replace(context, affinity=assignment.components[name][rank], rank=rank)

    make = make_component if count == 1 else make_replica
    group: WorkerGroup[Any] = place(name, make, count, arguments, beside=owners)
    if owners is not None:
        group.get(group.pipe(Acting.share, owners, Trainer.own_policy))
    if count == 1:
        return group, None
    names = [handle.name for handle in group.handles]
    loop: WorkerGroup[Decider] = place(TRACK, make_loop, 1, (component, replace(context, affinity=Affinity()), names))
    return group, loop
