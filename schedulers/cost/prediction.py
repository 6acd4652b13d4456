"""Prediction: the makespan of any plan, by the cost laws, and where the time goes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from schedulers.cluster import Cluster, Node
from schedulers.cost.communication import transfer_seconds, weight_sync_seconds, with_transfers
from schedulers.cost.laws import completions
from schedulers.cost.phase import PhaseModel
from schedulers.cost.problem import Problem
from schedulers.cost.times import (
    communication_seconds,
    component_seconds,
    items_at_once,
    stage_seconds,
    switch_seconds,
    visit_seconds,
)
from schedulers.plan import Phase, Plan, Prediction
from schedulers.profile import Profile
from schedulers.validation import check_placements, phase_model_of
from schedulers.workflow import Workflow, graph_of


@dataclass(frozen=True)
class PhaseCosts:
    """One phase of a plan in numbers."""

    model: PhaseModel
    counts: tuple[int, ...]
    """Devices of each placement."""
    visits: tuple[float, ...]
    """Seconds of each visit of a group."""
    stages: tuple[float, ...]
    """Seconds of each stage per micro-batch."""
    busy_s: dict[str, float]
    """Busy time of each component per iteration, on each of its devices."""
    transfer_s: float
    """Messages between nodes of one micro-batch through the components outside the loop, and weight sync."""
    exchange_s: float
    """Part of `busy_s`: communication among instances."""

    @property
    def seconds(self) -> float:
        return self.model.seconds(self.visits, self.stages) + self.transfer_s


def predict(plan: Plan, workflow: Workflow, profile: Profile, cluster: Cluster | None = None) -> Prediction:
    """Makespan of any valid plan, and where the time goes: by the closed cost laws, and with several loops by playing
    their queues.

    The lower bound is the plan's own if it has a prediction, else 0: nothing is known about other plans. Raises
    `PlanError` for a plan that cannot run; `validate` says more about why.
    """
    problem = problem_of(plan, workflow, profile, cluster)
    costs = [phase_costs(plan, phase, problem) for phase in plan.phases]
    phases = tuple(cost.seconds for cost in costs)
    switch = sum(switches(plan, costs, problem))
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
    """Prediction of the same plan with the tasks rolled out one after the other, for comparison with `predict`.

    Each task has its own placements and groups, no other component works beside it, and it takes what it takes alone;
    the work after the loops is the same. With one task this is `predict`. Busy times are `predict`'s, and the lower
    bound is 0, since that of the plan is one of overlapping plans.
    """
    problem = problem_of(plan, workflow, profile, cluster)
    together = predict(plan, workflow, profile, cluster)
    costs = [phase_costs(plan, phase, problem) for phase in plan.phases]
    phases = tuple(_sequential(problem, cost) if cost.model.several_loops else cost.seconds for cost in costs)
    return replace(together, iteration_s=sum(phases) + together.switch_s, phases_s=phases, lower_bound_s=0.0)


def _sequential(problem: Problem, cost: PhaseCosts) -> float:
    model, now = cost.model, 0.0
    done: list[list[list[float]]] = []
    for number, loop in enumerate(model.loops):
        steps = completions([loop.route], [server_seconds_alone(problem, cost, number)])[0]
        done.append([[now + end for end in ends] for ends in steps])
        now += max(steps[-1])
    return float(model.seconds_after_loops(now, model.delivered(now, done), cost.stages)) + cost.transfer_s


def server_seconds_alone(problem: Problem, cost: PhaseCosts, number: int) -> list[float]:
    """Seconds of each server of one loop's route while the other loops do not run."""
    loop = cost.model.loops[number]
    where = {name: visit.placement for visit in loop.visits for name in visit.components}
    contended = where if loop.groups > 1 and len(set(where.values())) > 1 else ()
    model = replace(cost.model, contended=frozenset(contended))
    times = [
        float(visit_seconds(problem, model, i, np.array([cost.counts[visit.placement]]))[0])
        for i, visit in enumerate(model.visits)
        if visit.loop == number
    ]
    return loop.server_seconds(times)


def phase_costs(plan: Plan, phase: Phase, problem: Problem) -> PhaseCosts:
    """Costs of one phase; raises `PlanError` where its placements wait for each other in a circle."""
    model = phase_model_of(plan, phase, problem.graph, problem.workflow, problem.profile)
    model = replace(model, node_counts=tuple(len(placement.nodes) for placement in phase.placements))
    counts = [np.array([placement.count]) for placement in phase.placements]
    visits = [
        float(visit_seconds(problem, model, i, counts[visit.placement])[0]) for i, visit in enumerate(model.visits)
    ]
    stages = [
        float(stage_seconds(problem, model, i, counts[stage.placement])[0]) for i, stage in enumerate(model.stages)
    ]
    return PhaseCosts(
        model=with_transfers(problem, model, [placement.nodes for placement in phase.placements]),
        counts=tuple(placement.count for placement in phase.placements),
        visits=tuple(visits),
        stages=tuple(stages),
        busy_s=_busy(problem, model, counts, visits),
        transfer_s=transfer_seconds(problem, phase) + _weight_sync_seconds(problem, plan, phase),
        exchange_s=sum(
            communication_seconds(problem, model, name, placement.count)
            for placement in phase.placements
            for name in placement.components
        ),
    )


def _busy(
    problem: Problem, model: PhaseModel, counts: Sequence[np.ndarray], visits: Sequence[float]
) -> dict[str, float]:
    """`PhaseCosts.busy_s`."""
    busy = {}
    for names, count in zip(model.placements, counts, strict=True):
        for name in names:
            busy[name] = 0.0
            if name not in problem.graph.loop:
                batch = items_at_once(problem, model, name)
                calls = problem.workflow.items // batch
                busy[name] = calls * float(component_seconds(problem, model, name, batch, count)[0])
    for visit, seconds in zip(model.visits, visits, strict=True):
        # Measured together, the components of a visit share its time in proportion to their own.
        loop = model.loops[visit.loop]
        calls, environments = loop.steps * loop.groups, problem.environments[visit.loop] / loop.groups
        own = {
            name: calls * float(component_seconds(problem, model, name, environments, counts[visit.placement])[0])
            for name in visit.components
        }
        alone = sum(own.values())
        for name in visit.components:
            busy[name] += own[name] * (calls * seconds / alone if alone else 1.0)
    return busy


def _weight_sync_seconds(problem: Problem, plan: Plan, phase: Phase) -> float:
    """Weights of the phase's components on their way to the policies in the loops."""
    found = 0.0
    policies = {loop[-1] for loop in problem.graph.loops}
    targets = [p for other in plan.phases for p in other.placements if policies & set(p.components)]
    for source in phase.placements:
        size = sum(problem.profile.components[name].published_bytes for name in source.components)
        found += sum(weight_sync_seconds(problem.cluster, size, source, target) for target in targets)
    return found


def switches(plan: Plan, costs: Sequence[PhaseCosts], problem: Problem) -> list[float]:
    """Seconds of each phase's context switch; zeros where everything stays loaded."""
    if not plan.unload or len(plan.phases) < 2:
        return [0.0] * len(costs)
    kept = problem.shared_weights.kept_in(plan) if problem.shared_weights else None
    return [switch_seconds(problem, cost.model.placements, kept) for cost in costs]


def problem_of(plan: Plan, workflow: Workflow, profile: Profile, cluster: Cluster | None = None) -> Problem:
    """The plan's problem; without a cluster, on one that has just the devices that the plan names."""
    profile = profile.on_pools(plan.pools)
    check_placements(plan, graph_of(workflow), profile)
    return Problem(workflow, profile, cluster or _named(plan))


def _named(plan: Plan) -> Cluster:
    sizes: dict[str, dict[str, int]] = {}
    for phase in plan.phases:
        for placement in phase.placements:
            for part in placement.devices:
                node = sizes.setdefault(part.node, {"cores": 0, "accelerators": 0})
                node[part.pool] = max(node[part.pool], part.first + part.count)
    return Cluster(tuple(Node(name, size["cores"], size["accelerators"]) for name, size in sizes.items()))
