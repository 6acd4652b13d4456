"""Whether a plan can run: one clear message for what is wrong, before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from schedulers.cluster import Cluster
from schedulers.errors import PlanError, nearest
from schedulers.graph import Graph, graph_of
from schedulers.layout import range_text
from schedulers.memory import devices_of
from schedulers.plan import MODES, DeviceRange, Phase, Placement, Plan, one_by_one
from schedulers.profile import Profile
from schedulers.shaping import shape_of
from schedulers.times import Problem, resident_bytes, working_bytes
from schedulers.workflow import Workflow

MOST_NODES, MOST_DEVICES = 10_000, 1_000_000
"""Of a cluster, and of one pool of it: planning looks at each, and takes seconds at this size."""


def validate(plan: Plan, workflow: Workflow, cluster: Cluster, profile: Profile | None = None) -> None:
    """Raises `PlanError` unless the plan can run: it is the workflow's, its mode is what it says, every component
    is placed exactly once and in an order that respects the edges, devices exist and are not taken twice at a time,
    batches divide, and, with a profile, every component has its pool, none has devices that it cannot use, and all
    fits in memory."""
    graph = graph_of(workflow)
    profile = profile.placed(plan.pools) if profile is not None else None
    check_cluster(cluster)
    if plan.workflow != workflow.name:
        raise PlanError(f"the plan is for workflow {plan.workflow!r}, not for {workflow.name!r}")
    if plan.mode not in MODES:
        raise PlanError(f"no mode {plan.mode!r}{nearest(str(plan.mode), MODES)}")
    check_places(plan, graph, profile)
    _check_order(plan, graph)
    _check_devices(plan, cluster)
    _check_home(plan, workflow, cluster)
    _check_batches(plan, workflow, graph)
    _check_mode(plan, graph)
    _check_waiting(plan, workflow, graph, profile)
    if profile is not None:
        _check_spread(plan, profile)
        _check_memory(plan, workflow, cluster, profile)


def check_cluster(cluster: Cluster) -> None:
    """Raises `PlanError` for a cluster without nodes, without devices, with two nodes of one name, or with links
    that cannot be."""
    if not 0 < len(cluster.nodes) <= MOST_NODES:
        if not cluster.nodes:
            raise PlanError("the cluster has no nodes; give at least one, with its cores")
        raise PlanError(f"the cluster has {len(cluster.nodes)} nodes; at most {MOST_NODES} can be planned for")
    for pool, size in (
        ("cores", sum(node.cores for node in cluster.nodes)),
        ("accelerators", sum(node.accelerators for node in cluster.nodes)),
    ):
        if size > MOST_DEVICES:
            raise PlanError(f"the cluster has {size} {pool}; at most {MOST_DEVICES} can be planned for")
    names = set[str]()
    for node in cluster.nodes:
        if node.name in names:
            raise PlanError(f"the cluster has two nodes named {node.name!r}")
        names.add(node.name)
        if node.cores < 0 or node.accelerators < 0 or node.cores + node.accelerators < 1:
            raise PlanError(
                f"node {node.name!r} has {node.cores} cores and {node.accelerators} accelerators; it needs at least one"
            )
    if not cluster.link_bytes_per_s > 0:
        raise PlanError(f"the cluster's link_bytes_per_s is {cluster.link_bytes_per_s}; it is more than 0")
    if not cluster.device_link_bytes_per_s > 0:
        raise PlanError(
            f"the cluster's device_link_bytes_per_s is {cluster.device_link_bytes_per_s}; it is more than 0"
        )
    if not 0 <= cluster.link_s < math.inf:
        raise PlanError(f"the cluster's link_s is {cluster.link_s}; it is at least 0, and finite")
    if cluster.home is not None and cluster.home not in names:
        raise PlanError(f"the cluster's home {cluster.home!r} is none of its nodes{nearest(cluster.home, names)}")


def check_places(plan: Plan, graph: Graph, profile: Profile | None = None) -> None:
    """Every component in exactly one placement, every placement with devices of one pool: that of its components."""
    if not plan.phases:
        raise PlanError("the plan has no phases")
    placed: list[str] = []
    for phase in plan.phases:
        if not phase.placements:
            raise PlanError("a phase of the plan has no placements")
        for placement in phase.placements:
            who = ", ".join(placement.components)
            if not placement.components:
                raise PlanError("a placement of the plan has no components")
            if not placement.devices or any(part.count < 1 or part.first < 0 for part in placement.devices):
                raise PlanError(f"the placement of {who} has no devices")
            if len({part.pool for part in placement.devices}) > 1:
                raise PlanError(f"the placement of {who} mixes cores and accelerators; it has devices of one pool")
            _check_pool(placement, profile)
            placed += placement.components
    for name in placed:
        if name not in graph.names:
            raise PlanError(f"the plan places {name!r}, which the workflow does not have{nearest(name, graph.names)}")
        if placed.count(name) > 1:
            raise PlanError(f"the plan places component {name!r} {placed.count(name)} times; once is allowed")
    missing = [name for name in graph.names if name not in placed]
    if missing:
        raise PlanError(f"the plan leaves out {', '.join(missing)}; every component of the workflow is placed once")


def _check_pool(placement: Placement, profile: Profile | None) -> None:
    for name in placement.components if profile else ():
        assert profile is not None
        component = profile.components.get(name)
        if component is not None and component.pool != placement.pool:
            raise PlanError(f"component {name!r} occupies {component.pool}, but is placed on {placement.pool}")


def _check_order(plan: Plan, graph: Graph) -> None:
    number = {name: i for i, phase in enumerate(plan.phases) for name in phase.components}
    homes = {number[name] for name in graph.loop}
    if len(homes) > 1:
        where = ", ".join(f"{name} in phase {number[name]}" for name in graph.loop)
        raise PlanError(f"the loop's components work in one phase, but the plan has {where}")
    for edge in graph.edges:
        if number[edge.source] > number[edge.target]:
            raise PlanError(
                f"{edge.target!r} needs {edge.carries} of {edge.source!r}, which the plan puts into a later phase"
            )


def _check_devices(plan: Plan, cluster: Cluster) -> None:
    nodes = {node.name: node for node in cluster.nodes}
    for number, phase in enumerate(plan.phases):
        taken: dict[tuple[str, str, int], str] = {}
        for placement in phase.placements:
            who = ", ".join(placement.components)
            for part in placement.devices:
                if part.node not in nodes:
                    raise PlanError(
                        f"the placement of {who} names node {part.node!r}, which the cluster does not have"
                        f"{nearest(part.node, nodes)}"
                    )
                size = devices_of(nodes[part.node], part.pool)
                if part.first + part.count > size:
                    have = range_text(DeviceRange(part.node, part.pool, 0, size)) if size else f"no {part.pool}"
                    raise PlanError(
                        f"the placement of {who} takes {range_text(part)}, but node {part.node!r} has {have}"
                    )
                for device in range(part.first, part.first + part.count):
                    key = (part.node, part.pool, device)
                    if key in taken:
                        raise PlanError(
                            f"phase {number} gives {part.node}:{part.pool}:{device} to {taken[key]} and to {who}; "
                            "placements of one phase have devices of their own"
                        )
                    taken[key] = who


def _check_home(plan: Plan, workflow: Workflow, cluster: Cluster) -> None:
    travelling = ", ".join(name for name in workflow.names if name in workflow.travelling) or "no component"
    for placement in (placement for phase in plan.phases for placement in phase.placements):
        bound = [name for name in placement.components if name not in workflow.travelling]
        away = [range_text(part) for part in placement.devices if part.node != cluster.home]
        if cluster.home is not None and bound and away:
            raise PlanError(
                f"the plan puts {', '.join(bound)} on {', '.join(away)}, but only {travelling} may leave node "
                f"{cluster.home!r}: give the placement of {', '.join(placement.components)} devices of "
                f"{cluster.home!r}"
                + (", or what may leave it a placement of its own" if len(bound) < len(placement.components) else "")
            )


def _check_batches(plan: Plan, workflow: Workflow, graph: Graph) -> None:
    if len(plan.groups) != max(1, len(graph.loops)):
        raise PlanError(
            f"the plan has numbers of groups for {len(plan.groups)} loops, but workflow {workflow.name!r} has "
            f"{len(graph.loops)}: give one for each"
        )
    for number, loop in enumerate(graph.loops):
        _check_groups(plan, workflow, number, loop[0])
    for phase in plan.phases:
        _check_micro_batch(phase, workflow, graph)
    if plan.ahead not in (0, 1):
        raise PlanError(f"ahead is 0 or 1, not {plan.ahead}")


def _check_groups(plan: Plan, workflow: Workflow, number: int, first: str) -> None:
    """A loop's groups divide its environments, and the devices of its first component those of a group."""
    items, groups = workflow.environments(number), plan.groups_of(number)
    of = f" of {workflow.task(number)}" if workflow.task(number) else ""
    if groups < 1 or items % groups:
        allowed = [str(n) for n in _divisors(items)]
        raise PlanError(
            f"{groups} groups do not divide the {items} items of the loop{of}; nearest: {_closest(groups, allowed)}"
        )
    for placement in (placement for phase in plan.phases for placement in phase.placements):
        if first in placement.components and (items // groups) % placement.count:
            allowed = [str(n) for n in _divisors(items // groups)]
            raise PlanError(
                f"the {items // groups} items of each group{of} do not divide among the {placement.count} devices "
                f"of {first!r}; nearest: {_closest(placement.count, allowed)}"
            )


def _check_micro_batch(phase: Phase, workflow: Workflow, graph: Graph) -> None:
    inside = set(phase.components)
    edges = [edge for edge in graph.edges if edge.flow == "micro_batch" and {edge.source, edge.target} & inside]
    unit = math.lcm(*(edge.unit for edge in edges))
    allowed = [str(m) for m in _divisors(workflow.items) if m % unit == 0]
    if phase.micro_batch < 1 or workflow.items % phase.micro_batch:
        raise PlanError(
            f"micro-batches of {phase.micro_batch} do not divide the {workflow.items} items of an iteration"
            f"; nearest: {_closest(phase.micro_batch, allowed)}"
        )
    for edge in edges:
        if phase.micro_batch % edge.unit:
            raise PlanError(
                f"micro-batches of {phase.micro_batch} split the units of {edge.unit} items that "
                f"{edge.source}>{edge.target} carries whole; nearest: {_closest(phase.micro_batch, allowed)}"
            )


def _divisors(number: int) -> list[int]:
    """All of them, in order."""
    small = [n for n in range(1, math.isqrt(number) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def _closest(given: int, allowed: list[str]) -> str:
    return ", ".join(sorted(sorted(allowed, key=lambda text: abs(int(text) - given))[:3], key=int))


def _check_mode(plan: Plan, graph: Graph) -> None:
    if plan.mode != plan.classified:
        raise PlanError(
            f"the plan says it is {plan.mode}, but its phases are {plan.classified} (collocated: no pool is split; "
            "disaggregated: one phase with a pool split; hybrid: several phases, one of them with a pool split)"
        )
    if plan.ahead and plan.mode != "disaggregated":
        raise PlanError(f"one step ahead needs mode 'disaggregated', not {plan.mode!r}")
    if plan.ahead and not graph.loop:
        raise PlanError("one step ahead needs a workflow with a loop")


def _check_waiting(plan: Plan, workflow: Workflow, graph: Graph, profile: Profile | None) -> None:
    known = profile or Profile(workflow.name, {}, {})
    for phase in plan.phases:
        names = [graph.ordered(placement.components) for placement in phase.placements]
        groups = tuple(plan.groups_of(i) for i in range(len(graph.loops)))
        if shape_of(graph, workflow, known, names, groups, phase.micro_batch, ahead=plan.ahead > 0) is None:
            if plan.ahead:
                raise PlanError("one step ahead, loop and learner side need placements of their own")
            who = "; ".join(", ".join(placement) for placement in names)
            raise PlanError(
                f"the placements of one phase ({who}) wait for each other; put what the loop needs into an earlier "
                "phase, and what lies between two components of a placement into that placement"
            )


def _check_spread(plan: Plan, profile: Profile) -> None:
    for placement in (placement for phase in plan.phases for placement in phase.placements):
        for name in placement.components:
            component = profile.components.get(name)
            if component is not None and component.points and placement.count > component.most_devices:
                most = component.most_devices
                raise PlanError(
                    f"the plan gives {name} {placement.count} {placement.pool}, but it does not spread over more than "
                    f"the {most} it was measured on: give the placement of {', '.join(placement.components)} {most}"
                    + (f", or {name} a placement of its own" if len(placement.components) > 1 else "")
                )


def _check_memory(plan: Plan, workflow: Workflow, cluster: Cluster, profile: Profile) -> None:
    """Per accelerator, and per node for cores. Without `unload` the components of all phases are there at once."""
    problem = Problem(workflow, profile, cluster)
    nodes = {node.name: node for node in cluster.nodes}
    held: list[dict[tuple[str, str, int], tuple[float, float]]] = []
    both = problem.shared.devices(plan) if problem.shared and not plan.unload else frozenset()
    for phase in plan.phases:
        names = [problem.graph.ordered(placement.components) for placement in phase.placements]
        groups = tuple(plan.groups_of(i) for i in range(len(problem.graph.loops)))
        shape = shape_of(problem.graph, workflow, profile, names, groups, phase.micro_batch, ahead=plan.ahead > 0)
        assert shape is not None
        now: dict[tuple[str, str, int], tuple[float, float]] = {}
        for placement, members in zip(phase.placements, names, strict=True):
            resident, lent = resident_bytes(problem, members), resident_bytes(problem, members, lent=True)
            working = float(working_bytes(problem, shape, members, np.array([placement.count]))[0])
            for device in one_by_one(placement.devices):
                now[device] = (lent if device in both else resident, working)
        held.append(now)
    for number in range(len(held)):
        total: dict[tuple[str, str, int], float] = {}
        for i, other in enumerate(held):
            if i == number or not plan.unload:
                for key, (resident, working) in other.items():
                    total[key] = total.get(key, 0.0) + resident + (working if i == number else 0.0)
        _compare(
            plan, number, total, {name: (node.memory_bytes, node.accelerator_bytes) for name, node in nodes.items()}
        )


def _compare(
    plan: Plan,
    number: int,
    total: Mapping[tuple[str, str, int], float],
    limits: Mapping[str, tuple[float, float]],
) -> None:
    summed: dict[str, float] = {}
    for (node, pool, device), size in total.items():
        where, limit = f"{node}:{pool}:{device}", limits[node][1]
        if pool == "cores":
            where, limit = f"node {node}", limits[node][0]
            size = summed[node] = summed.get(node, 0.0) + size
        if size > limit * (1 + 1e-9):
            advice = "use more devices, smaller micro-batches or other phases"
            if len(plan.phases) > 1 and not plan.unload:
                advice = "set unload, or " + advice
            raise PlanError(
                f"phase {number} needs {size / 1e9:.1f} GB on {where}, which has {limit / 1e9:.1f} GB; {advice}"
            )
