"""Clusters to plan for: this machine, the Ray cluster that a run has joined, or one that a file describes."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path

import schedulers
from embodied.devices import accelerators, memory_bytes
from embodied.errors import UserError, nearest
from embodied.execution.assignment import HOME
from embodied.execution.session import Session
from embodied.files import read_yaml
from schedulers import Cluster, DeviceRange, Node, Plan, PlanError, Profile, Workflow


def local_cluster(cores: int, device: str = "cpu") -> Cluster:
    """This machine's cores, the GPUs that a `policy.device` leaves to choose from, and their memory."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    gpus = accelerators(device)
    return Cluster((Node(HOME, cores, len(gpus), float(memory), memory_bytes(gpus)),))


def run_cluster(session: Session) -> Cluster:
    """This machine, the home of what does not travel, and the other machines of the run's Ray cluster.

    Their GPUs are taken to be like those here, and count where `policy.device` leaves all of these. Where there are
    others, the links to them are measured, which takes a second or two.
    """
    device = session.config.policy.device
    here = local_cluster(len(session.cores), device)
    nodes = () if session.config.runtime.address == "local" else session.runtime.nodes()
    others = [node for node in nodes if not node.is_here and node.cores]
    if not others:
        return here
    link, home = session.runtime.link(), here.nodes[0]
    counts = home.accelerators and device in ("auto", "cuda")
    away = (
        Node(n.name, n.cores, n.accelerators if counts else 0, float(n.memory_bytes), home.accelerator_bytes)
        for n in others
    )
    return replace(
        here,
        nodes=(home, *away),
        link_bytes_per_s=link.bytes_per_s,
        link_s=link.message_s,
        head_node=HOME,
    )


def with_stand_ins(cluster: Cluster, plan: Plan, device: str) -> Cluster:
    """The cluster with the accelerators that a plan names, where `policy.device` is `cpu`: processes on the CPU stand
    in for them, so that a plan for machines with accelerators is tried out on some without."""
    if device != "cpu":
        return cluster
    parts = [part for phase in plan.phases for placement in phase.placements for part in placement.devices]
    named = {node.name: [p.first + p.count for p in parts if _accelerates(p, node)] for node in cluster.nodes}
    return replace(cluster, nodes=tuple(replace(n, accelerators=max(named[n.name], default=0)) for n in cluster.nodes))


def _accelerates(part: DeviceRange, node: Node) -> bool:
    return part.pool == "accelerators" and part.node == node.name


def read_cluster(reference: str, device: str) -> Cluster:
    """`local` (see `local_cluster`), or a cluster from a YAML or JSON file.

    Raises `UserError` or `PlanError` for what is none.
    """
    if reference == "local":
        return local_cluster(len(os.sched_getaffinity(0)), device)
    path = Path(reference)
    if not path.is_file():
        raise UserError(f"there is no cluster file {reference!r}{nearest(reference, ['local'])}")
    data = read_yaml(path)
    try:
        return schedulers.from_data(Cluster, data)
    except PlanError as error:
        raise UserError(f"{path}: {str(error)[:2000]}") from error


# --- Which of a workflow's components simulate, decide, pass on and train: all that planning knows about them.


@dataclass(frozen=True)
class ComponentRoles:
    """A workflow's components by their role."""

    simulators: tuple[tuple[str, ...], ...]
    """For each task the components of its farm: physics, and render if frames are drawn."""
    policy: str
    """The last component of every loop, which all tasks share."""
    scorers: tuple[str, ...]
    """Components that trajectories pass through on their way to the learner, in the workflow's order."""
    learner: str
    """The component without outgoing edges after the rollout."""

    @property
    def farm(self) -> tuple[str, ...]:
        """The simulators of all tasks."""
        return tuple(name for names in self.simulators for name in names)


def roles_of(workflow: Workflow) -> ComponentRoles:
    """The roles in a workflow whose loops have one rollout worker, and that has one learner."""
    in_loops = {name for loop in workflow.loops for name in loop.components}
    sources = {edge.source for edge in workflow.edges}
    after = [name for name in workflow.names if name not in in_loops]
    (learner,) = (name for name in after if name not in sources)
    return ComponentRoles(
        tuple(loop.components[:-1] for loop in workflow.loops),
        workflow.loops[0].components[-1],
        tuple(name for name in after if name != learner),
        learner,
    )


def leaving_home(workflow: Workflow) -> Workflow:
    """The workflow whose rollout worker and learner may run on other nodes: they receive what they read of the memory
    of the node where the command is typed."""
    roles = roles_of(workflow)
    leave = (roles.policy, roles.learner)
    components = tuple(replace(c, movable=c.movable or c.name in leave) for c in workflow.components)
    return replace(workflow, components=components)


def planned_for(workflow: Workflow, profile: Profile, cluster: Cluster) -> Workflow:
    """The workflow as the planner places it: rollout worker and learner may use other nodes' accelerators."""
    compute = profile.components[roles_of(workflow).policy].pool == "accelerators"
    away = any(node.accelerators for node in cluster.nodes if node.name != cluster.head_node)
    return leaving_home(workflow) if compute and away and cluster.head_node is not None else workflow
