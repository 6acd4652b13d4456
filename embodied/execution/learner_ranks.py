"""The ranks of a learner: started and connected."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from embodied.execution.assignment import HERE, Assignment
from embodied.execution.roles import LearnerRole
from embodied.execution.session import Session
from embodied.runtime.handles import WorkerGroup
from embodied.runtime.ranks import LOOPBACK
from embodied.workflows.context import WorkerContext
from embodied.workflows.recipes import WorkflowComponent


def start_ranks(
    session: Session, learner: WorkflowComponent, base: WorkerContext, assignment: Assignment
) -> WorkerGroup[LearnerRole]:
    """Start the learner's ranks as the assignment places them, and connect them. If one fails, all end."""
    places = assignment.components[learner.name]
    ranks = len(places)
    contexts = [replace(base, affinity=place, rank=rank, ranks=ranks) for rank, place in enumerate(places)]
    nodes = tuple(place.node for place in places)
    group: WorkerGroup[LearnerRole] = session.runtime.start_group(
        learner.name, WorkflowComponent.make, ranks, lambda rank: (learner, contexts[rank]), nodes=nodes
    )
    connect_ranks(session, group, nodes)
    return group


def connect_ranks(session: Session, group: WorkerGroup[Any], nodes: Sequence[str]) -> None:
    """Connect the ranks of a group on these nodes with each other. If one fails, all end."""
    if group.size == 1:
        return
    try:
        address = group.call_one(0, LearnerRole.listen, _rendezvous_host(session, nodes))
        group.call_all(LearnerRole.join, address, session.runtime.deadline.inner().seconds)
    except BaseException:
        group.abandon()  # the other ranks wait for one that failed
        raise


def _rendezvous_host(session: Session, nodes: Sequence[str]) -> str:
    """The address of rank 0's machine; the loopback interface where all ranks are on one."""
    if len(set(nodes)) == 1:
        return LOOPBACK
    addresses = {HERE if node.is_here else node.id: node.address for node in session.runtime.nodes()}
    return addresses[nodes[0]]
