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


def hosts_of(config: Config, assignment: Assignment) -> tuple[int | None, ...]:
    """`Assignment.hosts` of each policy worker of a run; where everything is in one process there is one rank."""
    if config.runtime.mode == "inline":
        return (0 if assignment.guests else None,)
    return assignment.hosts or (None,) * replicas_of(config, assignment)


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
    """Who acts; and the decider, where that is somebody else. Guests of the trainer's ranks act with their policies."""
    name, place, hosts = component.name, session.runtime.place_group, assignment.hosts
    count = replicas_of(base.config, assignment)
    context = replace(base, farm=session.reach(farm), ranks=count)

    def arguments(rank: int) -> tuple[WorkflowComponent, WorkerContext]:
        shares, where = hosts[rank] is not None, assignment.components[name][rank]
        return component, replace(context, affinity=where, rank=rank, shares=shares)

    make = make_component if count == 1 else make_replica
    beside = [None if host is None else trained.handles[host] for host in hosts]
    group: WorkerGroup[Any] = place(name, make, count, arguments, beside=beside)
    if assignment.guests:
        guests, owners = group.some(assignment.guests), trained.some(host for host in hosts if host is not None)
        guests.get(guests.pipe(Acting.share, owners, Trainer.own_policy))
    if count == 1:
        return group, None
    names = [handle.name for handle in group.handles]
    loop: WorkerGroup[Decider] = place(TRACK, make_loop, 1, (component, replace(context, affinity=Affinity()), names))
    return group, loop
