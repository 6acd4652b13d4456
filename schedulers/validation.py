"""Checks that a plan can run: one clear message for what is wrong, before anything starts."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

from schedulers.cluster import Cluster, check_cluster, devices_of
from schedulers.cost.phase import PhaseModel, phase_model
from schedulers.cost.problem import Problem
from schedulers.cost.times import resident_bytes, working_bytes
from schedulers.errors import PlanError, nearest
from schedulers.plan import MODES, Device, DeviceRange, Phase, Placement, Plan, one_by_one, range_text
from schedulers.profile import Profile
from schedulers.workflow import Graph, Workflow, graph_of


def validate(plan: Plan, workflow: Workflow, cluster: Cluster, profile: Profile | None = None) -> None:
    """Raises `PlanError` unless the plan can run.

    It is the workflow's, its mode is that of its phases, every component is placed exactly once and in an order that
    respects the edges, devices exist and are not used twice at a time, batches divide, and, with a profile, every
    component has its pool, none has devices that it cannot use, and all fits in memory.
    """
    graph = graph_of(workflow)
    profile = profile.on_pools(plan.pools) if profile is not None else None
    check_cluster(cluster)
    if plan.workflow != workflow.name:
        raise PlanError(f"the plan is for workflow {plan.workflow!r}, not for {workflow.name!r}")
    if plan.mode not in MODES:
        raise PlanError(f"no mode {plan.mode!r}{nearest(str(plan.mode), MODES)}")
    check_placements(plan, graph, profile)
    _check_order(plan, graph)
    _check_devices(plan, cluster)
    _check_head_node(plan, workflow, cluster)
    _check_batches(plan, workflow, graph)
    _check_mode(plan, graph)
    for phase in plan.phases:
        phase_model_of(plan, phase, graph, workflow, profile or Profile(workflow.name, {}, {}))
    if profile is not None:
        _check_max_devices(plan, profile)
        _check_memory(plan, workflow, cluster, profile)


def check_placements(plan: Plan, graph: Graph, profile: Profile | None = None) -> None:
    """Raises `PlanError` unless every component is in exactly one placement, and every placement has devices of one
    pool, that of its components."""
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
    if len({number[name] for name in graph.loop}) > 1:
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
        taken: dict[Device, str] = {}
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


def _check_head_node(plan: Plan, workflow: Workflow, cluster: Cluster) -> None:
    movable = ", ".join(name for name in workflow.names if name in workflow.movable) or "no component"
    for placement in (placement for phase in plan.phases for placement in phase.placements):
        pinned = [name for name in placement.components if name not in workflow.movable]
        away = [range_text(part) for part in placement.devices if part.node != cluster.head_node]
        if cluster.head_node is not None and pinned and away:
            raise PlanError(
                f"the plan puts {', '.join(pinned)} on {', '.join(away)}, but only {movable} may leave node "
                f"{cluster.head_node!r}: give the placement of {', '.join(placement.components)} devices of "
                f"{cluster.head_node!r}"
                + (", or what may leave it a placement of its own" if len(pinned) < len(placement.components) else "")
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
    """Raises `PlanError` unless a loop's groups divide its environments, and the devices of its first component those
    of a group."""
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
    """Divisors, ascending."""
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


def phase_model_of(plan: Plan, phase: Phase, graph: Graph, workflow: Workflow, profile: Profile) -> PhaseModel:
    """Model of one of the plan's phases; raises `PlanError` where its placements wait for each other in a circle."""
    names = [graph.ordered(placement.components) for placement in phase.placements]
    groups = tuple(plan.groups_of(i) for i in range(len(graph.loops)))
    model = phase_model(graph, workflow, profile, names, groups, phase.micro_batch, ahead=plan.ahead > 0)
    if model is not None:
        return model
    if plan.ahead:
        raise PlanError("one step ahead, loop and learner side need placements of their own")
    who = "; ".join(", ".join(placement) for placement in names)
    raise PlanError(
        f"the placements of one phase ({who}) wait for each other; put what the loop needs into an earlier phase, and "
        "what lies between two components of a placement into that placement"
    )


def _check_max_devices(plan: Plan, profile: Profile) -> None:
    for placement in (placement for phase in plan.phases for placement in phase.placements):
        for name in placement.components:
            component = profile.components.get(name)
            if component is not None and component.points and placement.count > component.max_devices:
                most = component.max_devices
                raise PlanError(
                    f"the plan gives {name} {placement.count} {placement.pool}, but it does not spread over more than "
                    f"the {most} it was measured on: give the placement of {', '.join(placement.components)} {most}"
                    + (f", or {name} a placement of its own" if len(placement.components) > 1 else "")
                )


def _check_memory(plan: Plan, workflow: Workflow, cluster: Cluster, profile: Profile) -> None:
    """Per accelerator, and per node for cores. Without `unload` the components of all phases are loaded at once."""
    problem = Problem(workflow, profile, cluster)
    nodes = {node.name: node for node in cluster.nodes}
    loaded: list[dict[Device, tuple[float, float]]] = []
    shared = problem.shared_weights
    both = shared.devices(plan) if shared and not plan.unload else frozenset()
    for phase in plan.phases:
        model = phase_model_of(plan, phase, problem.graph, workflow, profile)
        now: dict[Device, tuple[float, float]] = {}
        for placement, names in zip(phase.placements, model.placements, strict=True):
            resident = resident_bytes(problem, names)
            without = resident_bytes(problem, names, weights_elsewhere=True)
            working = float(working_bytes(problem, model, names, np.array([placement.count]))[0])
            for device in one_by_one(placement.devices):
                now[device] = (without if device in both else resident, working)
        loaded.append(now)
    limits = {name: (node.memory_bytes, node.accelerator_bytes) for name, node in nodes.items()}
    for number in range(len(loaded)):
        total: dict[Device, float] = {}
        for i, other in enumerate(loaded):
            if i == number or not plan.unload:
                for key, (resident, working) in other.items():
                    total[key] = total.get(key, 0.0) + resident + (working if i == number else 0.0)
        _compare(plan, number, total, limits)


def _compare(
    plan: Plan,
    number: int,
    total: Mapping[Device, float],
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
