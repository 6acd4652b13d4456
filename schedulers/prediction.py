"""What a plan costs, whoever wrote it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from schedulers.cluster import Cluster, Node
from schedulers.collectives import publishing_seconds
from schedulers.errors import PlanError
from schedulers.graph import Graph, graph_of
from schedulers.links import rest_seconds, with_ways
from schedulers.network import completions
from schedulers.plan import Phase, Plan, Prediction
from schedulers.profile import Profile
from schedulers.shape import Shape
from schedulers.shaping import shape_of
from schedulers.times import (
    Problem,
    communication_seconds,
    component_seconds,
    part_items,
    segment_seconds,
    switch_seconds,
    visit_seconds,
)
from schedulers.validation import check_places
from schedulers.workflow import Workflow


@dataclass(frozen=True)
class Costs:
    """One phase of a plan in numbers: seconds of each visit of a group and of each part of a segment."""

    shape: Shape
    counts: tuple[int, ...]
    """Devices of each placement."""
    visits: tuple[float, ...]
    segments: tuple[float, ...]
    busy_s: dict[str, float]
    """Of each component, per iteration, on each of its devices."""
    transfer_s: float
    """Of the longest way of one part through the other components, between nodes, and of the weights to those that
    decide."""
    exchange_s: float
    """Of `busy_s`: what instances exchange."""

    @property
    def seconds(self) -> float:
        return self.shape.exact_seconds(self.visits, self.segments) + self.transfer_s


def phase_costs(plan: Plan, phase: Phase, problem: Problem) -> Costs:
    """Costs of one phase; raises `PlanError` where its placements wait for each other in a circle."""
    names = [problem.graph.ordered(placement.components) for placement in phase.placements]
    shape = shape_of(
        problem.graph,
        problem.workflow,
        problem.profile,
        names,
        groups_of(plan, problem.graph),
        phase.micro_batch,
        ahead=plan.ahead > 0,
    )
    if shape is None:
        who = "; ".join(", ".join(placement) for placement in names)
        raise PlanError(
            f"the placements of one phase ({who}) wait for each other: "
            + (
                "one step ahead, loop and learner side need placements of their own"
                if plan.ahead
                else "put what the loop needs into an earlier phase, and components between others with one of them"
            )
        )
    shape = replace(shape, nodes=tuple(len(placement.nodes) for placement in phase.placements))
    counts = [np.array([placement.count]) for placement in phase.placements]
    visits = [
        float(visit_seconds(problem, shape, i, counts[visit.placement])[0]) for i, visit in enumerate(shape.visits)
    ]
    segments = [
        float(segment_seconds(problem, shape, i, counts[segment.placement])[0])
        for i, segment in enumerate(shape.segments)
    ]
    busy = {
        name: seconds
        for placement, count in zip(names, counts, strict=True)
        for name, seconds in _busy(problem, shape, placement, count).items()
    }
    for visit, seconds in zip(shape.visits, visits, strict=True):
        # Measured together, the components of a visit share its time as they would in turn.
        loop = shape.loops[visit.loop]
        calls, batch = loop.rounds * loop.groups, problem.environments[visit.loop] / loop.groups
        own = {
            name: calls * float(component_seconds(problem, shape, name, batch, counts[visit.placement])[0])
            for name in visit.components
        }
        alone = sum(own.values())
        for name in visit.components:
            busy[name] += own[name] * (calls * seconds / alone if alone else 1.0)
    return Costs(
        with_ways(problem, shape, [placement.nodes for placement in phase.placements]),
        tuple(placement.count for placement in phase.placements),
        tuple(visits),
        tuple(segments),
        busy,
        rest_seconds(problem, phase) + _publishing_seconds(problem, plan, phase),
        sum(
            communication_seconds(problem, shape, name, placement.count)
            for placement in phase.placements
            for name in placement.components
        ),
    )


def _publishing_seconds(problem: Problem, plan: Plan, phase: Phase) -> float:
    """Weights from the phase's components that hand them out to what decides in the loops."""
    found = 0.0
    deciders = {loop[-1] for loop in problem.graph.loops}
    targets = [p for other in plan.phases for p in other.placements if deciders & set(p.components)]
    for source in phase.placements:
        size = sum(problem.profile.components[name].published_bytes for name in source.components)
        found += sum(publishing_seconds(problem.cluster, size, source, target) for target in targets)
    return found


def _busy(problem: Problem, shape: Shape, names: tuple[str, ...], count: np.ndarray) -> dict[str, float]:
    """Of a placement's components, those of loops not counted yet."""
    result = {}
    for name in names:
        if name in problem.graph.loop:
            result[name] = 0.0
            continue
        batch = part_items(problem, shape, name)
        calls = problem.workflow.items // int(batch)
        result[name] = calls * float(component_seconds(problem, shape, name, batch, count)[0])
    return result


def predict(plan: Plan, workflow: Workflow, profile: Profile, cluster: Cluster | None = None) -> Prediction:
    """Seconds per iteration of any valid plan, and where they go: by the closed cost laws, and of several loops by
    playing their network.

    The lower bound of the result is the plan's own if it has a prediction, else 0: nothing is known about others.
    Raises `PlanError` for a plan that cannot run; `validate` says more about why.
    """
    problem = problem_of(plan, workflow, profile, cluster)
    costs = [phase_costs(plan, phase, problem) for phase in plan.phases]
    phases = tuple(cost.seconds for cost in costs)
    switch = switches(plan, costs, problem)
    known = plan.prediction.lower_bound_s if plan.prediction else 0.0
    total = sum(phases) + switch
    return Prediction(
        iteration_s=total,
        phases_s=phases,
        components_s={name: cost.busy_s[name] for cost in costs for name in cost.busy_s},
        switch_s=switch,
        lower_bound_s=min(known, total),
        communication_s=sum(cost.exchange_s + cost.transfer_s for cost in costs) or None,
    )


def predict_sequential(plan: Plan, workflow: Workflow, profile: Profile, cluster: Cluster | None = None) -> Prediction:
    """What the same plan would take if the tasks were rolled out one after the other, each with its own placements and
    groups, and nobody else at work beside it: for comparison with `predict`, which has them at the same time.

    Each task takes what it takes alone; what follows the loops is the same. Of one task it is `predict`'s time. Busy
    times are `predict`'s, and the lower bound is 0: it is one of overlapping plans.
    """
    problem = problem_of(plan, workflow, profile, cluster)
    together = predict(plan, workflow, profile, cluster)
    costs = [phase_costs(plan, phase, problem) for phase in plan.phases]
    phases = tuple(_one_after_the_other(problem, cost) if cost.shape.several else cost.seconds for cost in costs)
    return replace(together, iteration_s=sum(phases) + together.switch_s, phases_s=phases, lower_bound_s=0.0)


def _one_after_the_other(problem: Problem, cost: Costs) -> float:
    shape, now = cost.shape, 0.0
    done: list[list[list[float]]] = []
    for number, loop in enumerate(shape.loops):
        rounds = completions([loop.circuit], [alone_calls(problem, cost, number)])[0]
        done.append([[now + end for end in ends] for ends in rounds])
        now += max(rounds[-1])
    return float(shape.ending(now, shape.delivered(now, done), cost.segments)) + cost.transfer_s


def alone_calls(problem: Problem, cost: Costs, number: int) -> list[float]:
    """Seconds of each server of one loop's circuit while the other loops do not run."""
    loop = cost.shape.loops[number]
    where = {name: visit.placement for visit in loop.visits for name in visit.components}
    beside = where if loop.groups > 1 and len(set(where.values())) > 1 else ()
    shape = replace(cost.shape, beside=frozenset(beside))
    times = [
        float(visit_seconds(problem, shape, i, np.array([cost.counts[visit.placement]]))[0])
        for i, visit in enumerate(shape.visits)
        if visit.loop == number
    ]
    return loop.calls(times)


def groups_of(plan: Plan, graph: Graph) -> tuple[int, ...]:
    """Of each loop."""
    return tuple(plan.groups_of(i) for i in range(len(graph.loops)))


def switches(plan: Plan, costs: Sequence[Costs], problem: Problem) -> float:
    """Seconds per iteration of unloading and loading; zero where everything stays loaded."""
    return sum(switches_of(plan, costs, problem))


def switches_of(plan: Plan, costs: Sequence[Costs], problem: Problem) -> list[float]:
    """The same of each phase."""
    if not plan.unload or len(plan.phases) < 2:
        return [0.0] * len(costs)
    light = problem.shared.light_in(plan) if problem.shared else None
    return [switch_seconds(problem, cost.shape.placements, light) for cost in costs]


def problem_of(plan: Plan, workflow: Workflow, profile: Profile, cluster: Cluster | None = None) -> Problem:
    """The plan's problem; without a cluster, on one that has just the devices that the plan names."""
    profile = profile.placed(plan.pools)
    check_places(plan, graph_of(workflow), profile)
    return Problem(workflow, profile, cluster or _named(plan))


def _named(plan: Plan) -> Cluster:
    sizes: dict[str, dict[str, int]] = {}
    for phase in plan.phases:
        for placement in phase.placements:
            for part in placement.devices:
                node = sizes.setdefault(part.node, {"cores": 0, "accelerators": 0})
                node[part.pool] = max(node[part.pool], part.first + part.count)
    return Cluster(tuple(Node(name, size["cores"], size["accelerators"]) for name, size in sizes.items()))
