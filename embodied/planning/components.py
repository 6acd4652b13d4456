"""Which of a workflow's components simulate, decide, pass on and train: all that planning knows about them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from schedulers import Cluster, Profile, Workflow


@dataclass(frozen=True)
class ComponentRoles:
    """A workflow's components by their role."""

    simulators: tuple[tuple[str, ...], ...]
    """Of each task, those of its farm: the one that steps, and the one that draws where frames are drawn."""
    rollout_worker: str
    """The last of every loop: all tasks share it."""
    scorers: tuple[str, ...]
    """Those that trajectories pass through on their way to the learner, in the workflow's order."""
    learner: str
    """The one that hands nothing on."""

    @property
    def farm(self) -> tuple[str, ...]:
        """The simulators of all tasks."""
        return tuple(name for names in self.simulators for name in names)


def roles_of(workflow: Workflow) -> ComponentRoles:
    """The roles in a workflow that has loops with one rollout_worker, and one learner."""
    looping = {name for loop in workflow.loops for name in loop.components}
    sources = {edge.source for edge in workflow.edges}
    after = [name for name in workflow.names if name not in looping]
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
    leave = (roles.rollout_worker, roles.learner)
    components = tuple(replace(c, movable=c.movable or c.name in leave) for c in workflow.components)
    return replace(workflow, components=components)


def planned_for(workflow: Workflow, profile: Profile, cluster: Cluster) -> Workflow:
    """The workflow as the planner places it: rollout worker and learner may leave home for other nodes' accelerators."""
    compute = profile.components[roles_of(workflow).rollout_worker].pool == "accelerators"
    away = any(node.accelerators for node in cluster.nodes if node.name != cluster.head_node)
    return leaving_home(workflow) if compute and away and cluster.head_node is not None else workflow
