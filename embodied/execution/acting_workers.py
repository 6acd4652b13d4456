"""Who acts in a run: one policy worker, or replicas beside a worker that goes round with the farm.

There are replicas where there are several policy workers, or where the one is on another machine than the farm.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.errors import UserError
from embodied.execution.assignment import Assignment
from embodied.execution.makers import make_component, make_loop, make_replica
from embodied.execution.roles import LearnerRole, PolicyRole, Replica, RolloutRole
from embodied.execution.session import Session
from embodied.rollout.acting import RolloutSettings
from embodied.rollout.desk_relay import DeskRelay, FarDesk
from embodied.rollout.desks import Desks
from embodied.rollout.replica_desk import Desk, OwnDesk
from embodied.rollout.shared_loop import TRACK
from embodied.runtime.groups import WorkerGroup
from embodied.trajectories.memory import MemoryLayout, TrajectoryMemory
from embodied.workflows.context import WorkerContext
from embodied.workflows.recipes import WorkflowComponent, recipe_of
from sim_farm.client.farm import Farm


def replicas_of(config: Config, assignment: Assignment) -> int:
    """Policy workers of a run: as the assignment says, and one where everything is in one process."""
    inline = config.runtime.mode == "inline"
    return 1 if inline else len(assignment.components[recipe_of(config).loop[-1]])


def hosts_of(config: Config, assignment: Assignment) -> tuple[int | None, ...]:
    """`Assignment.hosts` of each policy worker of a run; where everything is in one process there is one rank."""
    if config.runtime.mode == "inline":
        return (0 if assignment.guests else None,)
    return assignment.hosts or (None,) * replicas_of(config, assignment)


def acts_at_desks(places: Sequence[Affinity]) -> bool:
    """Whether policy workers at these places are replicas, and somebody else goes round with the farm."""
    return len(places) > 1 or bool(places[0].node)


def check_replicas(config: Config, assignment: Assignment, groups: int) -> None:
    """Raise `UserError` where some of the policy workers would never have a group to decide for."""
    replicas = replicas_of(config, assignment)
    if replicas > groups:
        raise UserError(
            f"{replicas} policy replicas would share {groups} groups of environments, and {replicas - groups} of them "
            f"would never act: set policy.replicas to {groups} or less, or farm.groups to more (better twice as many "
            "groups as replicas: one is simulated while another is inferred)"
        )


@dataclass(frozen=True)
class ActingWorkers:
    """Who acts."""

    workers: WorkerGroup[Any]
    """The policy worker, which is the rollout_worker too; or the replicas."""
    settings: RolloutSettings
    places: tuple[Affinity, ...]
    loop: WorkerGroup[RolloutRole] | None = None
    """The rollout_worker of replicas."""
    relay: WorkerGroup[DeskRelay] | None = None
    """Sits at the desks of replicas on other machines."""

    @property
    def helpers(self) -> tuple[WorkerGroup[Any], ...]:
        """The workers beside those of the component."""
        return tuple(group for group in (self.loop, self.relay) if group is not None)

    @contextmanager
    def at_desks(self, farm: Farm, memory: TrajectoryMemory, layout: MemoryLayout, valued: bool) -> Iterator[None]:
        """Within, the rollout_worker writes into the memory and reaches the replicas at desks; `valued`: they are asked for
        values too."""
        if self.loop is None:
            rollout_worker: WorkerGroup[RolloutRole] = self.workers
            rollout_worker.call(RolloutRole.use, memory, None)
            yield
            return
        desks = Desks.create(self.workers.size, farm, layout, valued)
        try:
            own = [OwnDesk(farm, self.settings, rank, memory, desks) for rank in range(desks.replicas)]
            at: list[Desk] = list(own)
            if self.relay is not None:
                away = [rank for rank, place in enumerate(self.places) if place.node]
                self.relay.call(DeskRelay.use, {rank: own[rank] for rank in away})
                for rank in away:
                    at[rank] = FarDesk(rank, self.relay.handles[0].caller())
            self.workers.scatter(Replica.use, [(desk,) for desk in at])
            self.loop.call(RolloutRole.use, memory, desks)
            yield
        finally:
            desks.close()


def place_acting(
    component: WorkflowComponent,
    base: WorkerContext,
    session: Session,
    assignment: Assignment,
    farm: Farm,
    trained: WorkerGroup[LearnerRole],
) -> ActingWorkers:
    """Who acts. Guests of the learner's ranks act with their policies."""
    name, place, hosts = component.name, session.runtime.place_group, assignment.hosts
    count = replicas_of(base.config, assignment)
    context = replace(base, farm=session.reach(farm), ranks=count)
    places = assignment.components[name][:count]

    def arguments(rank: int) -> tuple[WorkflowComponent, WorkerContext]:
        return component, replace(context, affinity=places[rank], rank=rank, shares=hosts[rank] is not None)

    alone = not acts_at_desks(places)
    make, nodes = make_component if alone else make_replica, [each.node for each in places]
    beside = [None if host is None else trained.handles[host] for host in hosts]
    group: WorkerGroup[Any] = place(name, make, count, arguments, beside=beside, nodes=nodes)
    if assignment.guests:
        guests, owners = group.some(assignment.guests), trained.some(host for host in hosts if host is not None)
        guests.get(guests.pipe(PolicyRole.share, owners, LearnerRole.own_policy))
    settings = RolloutSettings.of(context)
    if alone:
        return ActingWorkers(group, settings, places)
    names = [handle.name for handle in group.handles]
    loop: WorkerGroup[RolloutRole] = place(TRACK, make_loop, 1, (component, replace(context, affinity=Affinity()), names))
    away = sum(bool(node) for node in nodes)
    relay = session.runtime.place_called(f"relay of {name}", DeskRelay, away) if away else None
    return ActingWorkers(group, settings, places, loop, relay)
