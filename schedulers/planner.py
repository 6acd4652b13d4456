"""The front door: the best plan for a workflow, from its profile, on a cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from schedulers.chain import Chain, Chains
from schedulers.cluster import Cluster
from schedulers.errors import PlanError, nearest
from schedulers.explain import explained
from schedulers.layout import lay_out
from schedulers.phases import Phases, Solved
from schedulers.plan import MODES, Mode, Phase, Placement, Plan, Span
from schedulers.prediction import predict
from schedulers.profile import Pool, Profile
from schedulers.simulation import expected_seconds
from schedulers.times import POOLS, Problem, pool_size
from schedulers.validation import check_cluster
from schedulers.workflow import Workflow

MOST_UNITS = 128
"""A pool with more devices is handed out in larger units, whole nodes if they are equal."""
GROUPS = (1, 2, 4)
PARTS = (1, 2, 4, 8, 16)
DEADLINE_S = 20.0


def plan(
    workflow: Workflow,
    profile: Profile,
    cluster: Cluster,
    mode: Mode | None = None,
    ahead: bool = False,
    groups: Sequence[int] = GROUPS,
    parts: Sequence[int] = PARTS,
    deadline_s: float = DEADLINE_S,
    explain: bool = True,
) -> Plan:
    """The fastest plan, of one mode or of all of them, with its prediction and the reasons in `why`.

    Exact in this space: phases are any chain of down-sets of the workflow; within one, placements are any convex
    partition that can work as a pipeline; devices are handed out in any numbers (on pools of more than 128 devices
    in units, see `units_of`); `groups` and `parts` (micro-batches an iteration) are tried as given, as far as they
    divide. `prediction.lower_bound_s` is what no plan of this space undercuts: equal to `iteration_s` unless
    the deadline (seconds) came first, or transfers between nodes add to the plan's time, which the bound leaves out.
    `ahead`: disaggregated plans are one step ahead.

    Raises `PlanError` where there is no plan: no such mode, components without times, a pool without devices,
    nothing that fits in memory.
    """
    found = alternatives(workflow, profile, cluster, ahead, groups, parts, deadline_s, modes=_modes(mode))
    if not found:
        raise PlanError(_why_none(workflow, profile, cluster, mode))
    best = _choose(found, workflow, profile, cluster)
    bound = min(_bound(candidate) for candidate in found.values())
    assert best.prediction is not None
    best = replace(best, prediction=replace(best.prediction, lower_bound_s=min(bound, best.prediction.iteration_s)))
    if not explain:
        return best
    if mode is not None:
        found = alternatives(workflow, profile, cluster, ahead, groups, parts, deadline_s)

    def again(larger: Cluster) -> Plan:
        return plan(workflow, profile, larger, mode, ahead, groups, parts, deadline_s, explain=False)

    return replace(best, why=explained(best, found, workflow, profile, cluster, units_of(cluster), again))


def alternatives(
    workflow: Workflow,
    profile: Profile,
    cluster: Cluster,
    ahead: bool = False,
    groups: Sequence[int] = GROUPS,
    parts: Sequence[int] = PARTS,
    deadline_s: float = DEADLINE_S,
    modes: Sequence[Mode] = MODES,
) -> dict[Mode, Plan]:
    """The best plan of each mode that has one, with predictions and lower bounds of their own."""
    check_cluster(cluster)
    problem = Problem(
        workflow, profile, cluster, units_of(cluster), tuple(sorted(set(groups))), tuple(sorted(set(parts))), ahead
    )
    phases = Phases(problem, time.monotonic() + deadline_s)
    chains = Chains(problem, phases)
    result: dict[Mode, Plan] = {}
    for mode in modes:
        chain = chains.best(mode)
        if chain.phases:
            result[mode] = _plan_of(problem, mode, chain)
    return result


def plan_tasks(
    tasks: Mapping[str, tuple[Workflow, Profile]], cluster: Cluster, mode: Mode | None = None
) -> dict[str, Plan]:
    """A plan for each task of a run that mixes tasks: their iterations follow one another, each by its own plan."""
    return {task: plan(workflow, profile, cluster, mode) for task, (workflow, profile) in tasks.items()}


def units_of(cluster: Cluster) -> dict[Pool, int]:
    """Devices of each pool that are handed out together: one, or on large pools the smallest whole share of a
    node (several nodes where there are very many) that leaves at most 128 units."""
    result: dict[Pool, int] = {}
    for pool in POOLS:
        sizes = [node.cores if pool == "cores" else node.accelerators for node in cluster.nodes]
        node = math.gcd(*sizes)
        total, unit = pool_size(cluster, pool), 1
        steps = [d for d in range(1, node + 1) if node % d == 0] + [node * d for d in range(2, len(sizes) + 1)]
        while total / unit > MOST_UNITS and steps:
            unit = steps.pop(0)
        result[pool] = unit
    return result


def _modes(mode: Mode | None) -> Sequence[Mode]:
    if mode is None:
        return MODES
    if mode not in MODES:
        raise PlanError(f"no mode {mode!r}{nearest(str(mode), MODES)}")
    return (mode,)


def _plan_of(problem: Problem, mode: Mode, chain: Chain) -> Plan:
    groups = max((solved.shape.groups for solved in chain.phases if solved.shape and solved.shape.visits), default=1)
    result = Plan(
        workflow=problem.workflow.name,
        mode=mode,
        phases=tuple(_phase_of(problem, solved) for solved in chain.phases),
        groups=groups,
        ahead=int(problem.ahead and mode == "disaggregated"),
        unload=chain.unload,
    )
    prediction = predict(result, problem.workflow, problem.profile, problem.cluster)
    return replace(result, prediction=replace(prediction, lower_bound_s=min(chain.bound, prediction.iteration_s)))


def _phase_of(problem: Problem, solved: Solved) -> Phase:
    assert solved.shape is not None
    spans: dict[int, tuple[Span, ...]] = {}
    for pool in POOLS:
        members = [i for i, names in enumerate(solved.shape.placements) if problem.pools[names[0]] == pool]
        spans.update(zip(members, lay_out(problem.cluster, pool, [solved.counts[i] for i in members]), strict=True))
    return Phase(
        tuple(Placement(names, spans[i]) for i, names in enumerate(solved.shape.placements)), solved.shape.micro_batch
    )


def _bound(candidate: Plan) -> float:
    assert candidate.prediction is not None
    return candidate.prediction.lower_bound_s


def _choose(found: Mapping[Mode, Plan], workflow: Workflow, profile: Profile, cluster: Cluster) -> Plan:
    """The fastest as simulated with the measured variation; the simplest mode among equals."""
    order = [mode for mode in MODES if mode in found]
    seconds = {mode: expected_seconds(found[mode], workflow, profile, cluster) for mode in order}
    return found[min(order, key=lambda mode: (round(seconds[mode], 12), MODES.index(mode)))]


def _why_none(workflow: Workflow, profile: Profile, cluster: Cluster, mode: Mode | None) -> str:
    try:
        alternatives(workflow, _boundless(profile), cluster, modes=_modes(mode), deadline_s=1.0)
    except PlanError as error:
        return str(error)
    fits = alternatives(workflow, _boundless(profile), cluster, modes=_modes(mode), deadline_s=1.0)
    kind = f"{mode} " if mode else ""
    if fits:
        return f"no {kind}plan of workflow {workflow.name!r} fits in the cluster's memory, even with unloading"
    others = alternatives(workflow, profile, cluster, deadline_s=1.0)
    instead = f"; possible: {', '.join(others)}" if others else ""
    return f"no {kind}plan of workflow {workflow.name!r} on this cluster: too few devices{instead}"


def _boundless(profile: Profile) -> Profile:
    return replace(
        profile,
        components={
            name: replace(component, resident_bytes=0.0, bytes_per_item=0.0)
            for name, component in profile.components.items()
        },
    )
