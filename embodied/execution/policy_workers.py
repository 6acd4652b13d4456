"""The policy workers of a run: one, which also steps the environments, or replicas and a rollout worker.

There are replicas where there are several policy workers, or where the one is on another machine than the farm.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from embodied.devices import Affinity
from embodied.execution.assignment import Assignment
from embodied.execution.roles import LearnerRole, PolicyRole, ReplicaRole, RolloutRole
from embodied.execution.session import Session
from embodied.rollout.policy_worker import TRACK
from embodied.rollout.replicas import ReplicaAddress
from embodied.runtime.handles import WorkerGroup
from embodied.trajectories.memory import TrajectoryMemory
from embodied.workflows.context import WorkerContext
from embodied.workflows.recipes import WorkflowComponent
from sim_farm.client.farm import Farm


def uses_replicas(places: Sequence[Affinity]) -> bool:
    """True if policy workers at these places are replicas, and a rollout worker steps the environments."""
    return len(places) > 1 or bool(places[0].node)


@dataclass(frozen=True)
class PolicyWorkers:
    """The policy workers of a run, and the rollout worker of replicas."""

    workers: WorkerGroup[Any]
    """The policy worker, which is the rollout worker too; or the replicas."""
    near: tuple[int, ...] = ()
    """Ranks of the replicas on the machine of the trajectory memory."""
    of_replicas: WorkerGroup[RolloutRole] | None = None
    """The rollout worker of replicas."""

    @property
    def rollout_worker(self) -> WorkerGroup[RolloutRole]:
        return self.of_replicas or self.workers

    @property
    def helpers(self) -> tuple[WorkerGroup[Any], ...]:
        """Workers beside those of the policy component."""
        return () if self.of_replicas is None else (self.of_replicas,)

    def use(self, memory: TrajectoryMemory) -> None:
        """Write trajectories into the memory, and read frames there, from now on."""
        if self.near:
            self.workers.some(self.near).call_all(ReplicaRole.map_frames, memory)
        self.rollout_worker.call(RolloutRole.use, memory)


def start_policy_workers(
    component: WorkflowComponent,
    base: WorkerContext,
    session: Session,
    assignment: Assignment,
    farm: Farm,
    trained: WorkerGroup[LearnerRole],
) -> PolicyWorkers:
    """Start the policy workers, and the rollout worker of replicas. Guests share policies of the learner's ranks."""
    name, start, places = component.name, session.runtime.start_group, assignment.components[component.name]
    context = replace(base, farm=session.reach(farm), ranks=len(places))
    hosts = [assignment.host(replica) for replica in range(len(places))]

    def arguments(rank: int) -> tuple[WorkflowComponent, WorkerContext]:
        return component, replace(context, affinity=places[rank], rank=rank, shares=hosts[rank] is not None)

    alone = not uses_replicas(places)
    make: Any = WorkflowComponent.make if alone else make_replica
    nodes = [each.node for each in places]
    beside = [None if host is None else trained.handles[host] for host in hosts]
    group: WorkerGroup[Any] = start(name, make, len(places), arguments, beside=beside, nodes=nodes)
    if assignment.guests:
        guests, owners = group.some(assignment.guests), trained.some(host for host in hosts if host is not None)
        guests.get(guests.pipe(PolicyRole.share, owners, LearnerRole.own_policy))
    if alone:
        return PolicyWorkers(group)
    near = tuple(rank for rank, node in enumerate(nodes) if not node)
    addresses = [ReplicaAddress(handle.caller(), rank in near) for rank, handle in enumerate(group.handles)]
    at = component, replace(context, affinity=Affinity()), addresses
    rollout_worker: WorkerGroup[RolloutRole] = start(TRACK, make_rollout_worker, 1, at)
    return PolicyWorkers(group, near, rollout_worker)


def make_replica(component: WorkflowComponent, context: WorkerContext) -> Any:
    """One of several policy workers."""
    return component.worker_class().make_replica(context)


def make_rollout_worker(
    component: WorkflowComponent, context: WorkerContext, replicas: Sequence[ReplicaAddress]
) -> Any:
    """The rollout worker of these replicas."""
    return component.worker_class().make_rollout_worker(context, replicas)
