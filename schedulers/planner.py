"""The front door: the best plan for a workflow, from its profile, on a cluster."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace

from schedulers import pool_choice
from schedulers.chain import Chain, Chains
from schedulers.cluster import Cluster
from schedulers.collectives import priced
from schedulers.errors import PlanError, nearest
from schedulers.explain import explained
from schedulers.layout import lay_out
from schedulers.memory import devices_of, thinned, uneven
from schedulers.phases import Phases, Solved
from schedulers.plan import MODES, DeviceRange, Mode, Phase, Placement, Plan
from schedulers.prediction import predict
from schedulers.profile import ComponentProfile, Pool, Profile
from schedulers.simulation import expected_seconds
from schedulers.times import POOLS, Problem, alone, held_bytes, pool_size
from schedulers.validation import check_cluster, validate
from schedulers.workflow import Workflow

MOST_UNITS = 128
"""A pool with more devices is handed out in larger units, whole nodes if they are equal."""
MOST_UNITS_AWAY = 1024
"""The same where there is a home: what stays there has few devices, and sharing them well takes small units."""
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
    partition that can work as a pipeline; devices are handed out in any numbers (on pools of more than 128 devices,
    1,024 where there is a home, in units, see `units_of`), each with an even share of its node's memory; `groups` and
    `parts` (micro-batches an iteration) are tried as given, as far as they divide. `prediction.lower_bound_s` is what
    no plan of this space undercuts: equal to `iteration_s` unless the deadline (seconds) came first, transfers
    between nodes add to the plan's time, which the bound leaves out (not those in the loop of a cluster with a home),
    or nodes differ in memory and the bound counts on a plan that does not fit. Of communication the bound has what
    instances exchange on as few nodes as hold them, not the weights' way to the policy. `ahead`: disaggregated plans
    are one step ahead.

    Of several tasks (`workflow.loops`) the phase that rolls them out is played, not calculated. With two tasks all
    partitions and numbers of groups are looked at, and what promises less than 0.5% is left out; with more the best
    partitions found step by step are kept. `prediction.lower_bound_s` says what is certain then.

    On a cluster with a home, placements of what does not travel get devices of that node alone. The best plan there
    and the best one on all nodes are compared with the time of their messages. Where these take time and several
    components of a task travel, the bound leaves them out.

    Raises `PlanError` where there is no plan: no such mode, components without times, a pool without devices,
    nothing that fits in memory.
    """
    reached = _reached(workflow, profile, cluster, ahead, groups, parts, deadline_s, _modes(mode))
    found = _best_of(reached)
    if not found:
        raise PlanError(_why_none(workflow, profile, cluster, mode))
    best = _choose(found, workflow, profile, cluster)
    bound = min(reached.bounds.values())
    assert best.prediction is not None
    best = replace(best, prediction=replace(best.prediction, lower_bound_s=min(bound, best.prediction.iteration_s)))
    if not explain:
        return best
    if mode is not None:
        found = alternatives(workflow, profile, cluster, ahead, groups, parts, deadline_s)

    # Of several tasks the deadline counts: what one more device would gain is not worth waiting as long for.
    brief_s = deadline_s / 4 if len(workflow.loops) > 1 else deadline_s

    def again(larger: Cluster) -> Plan:
        return plan(workflow, profile, larger, mode, ahead, groups, parts, brief_s, explain=False)

    others = [candidate for plans in reached.plans for candidate in plans.values()]
    return replace(best, why=explained(best, found, others, workflow, profile, cluster, units_of(cluster), again))


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
    return _best_of(_reached(workflow, profile, cluster, ahead, groups, parts, deadline_s, modes))


@dataclass
class _Reached:
    """What several searches found."""

    plans: list[dict[Mode, Plan]] = field(default_factory=list)
    bounds: dict[Mode, float] = field(default_factory=dict)
    """Of each mode, the least that some search left open."""

    def certain(self, mode: Mode) -> bool:
        return any(_seconds(plans[mode]) <= self.bounds[mode] * (1 + 1e-9) for plans in self.plans if mode in plans)


def _reached(
    workflow: Workflow,
    profile: Profile,
    cluster: Cluster,
    ahead: bool,
    groups: Sequence[int],
    parts: Sequence[int],
    deadline_s: float,
    modes: Sequence[Mode],
) -> _Reached:
    """The best plans, whichever pools those components are on that were measured on both."""
    check_cluster(cluster)
    sets = (tuple(sorted(set(groups))), tuple(sorted(set(parts))))
    options = pool_choice.free(profile, workflow.names, [pool for pool in POOLS if pool_size(cluster, pool)])
    reached, errors, begin, most = _Reached(), list[PlanError](), time.monotonic(), pool_choice.count(options)
    asked = 0

    def seconds(pools: Mapping[str, Pool]) -> float:
        """Of the best plan with components on these pools; all choices have the same time to be searched."""
        nonlocal asked
        asked, before = asked + 1, len(reached.plans)
        try:
            _search(
                reached, workflow, profile.placed(pools), cluster, ahead, sets, begin + deadline_s * asked / most, modes
            )
        except PlanError as error:  # a pool that the home lacks, where another may do
            errors.append(error)
        return min((_seconds(plan) for plans in reached.plans[before:] for plan in plans.values()), default=math.inf)

    if not pool_choice.explore(options, seconds):
        reached.bounds = dict.fromkeys(reached.bounds, 0.0)
    if len(errors) == asked:
        raise errors[0]
    return reached


def _search(
    reached: _Reached,
    workflow: Workflow,
    profile: Profile,
    cluster: Cluster,
    ahead: bool,
    sets: tuple[tuple[int, ...], tuple[int, ...]],
    deadline: float,
    modes: Sequence[Mode],
) -> None:
    """Add the best plans on all nodes; where the cluster has a home, before them those on that alone.

    Two searches, because messages between nodes cost nothing in the first and, in the second, what they cost where
    what can travel does. More, where nodes differ in memory: first as if placements with enough devices of enough
    memory always found them. Where plans of that do not fit, others in which every device has to hold what any may,
    on all nodes and without the poorer ones.
    """

    def search(where: Cluster, modes: Sequence[Mode], generous: bool = False) -> list[Mode]:
        """Those whose best plan does not fit."""
        problem = Problem(workflow, profile, where, units_of(where), *sets, ahead, generous)
        chains = _best_chains(problem, modes, deadline)
        for mode, chain in chains.items():
            reached.bounds[mode] = min(chain.bound, reached.bounds.get(mode, math.inf))
        plans = {mode: _fitting(problem, mode, chain) for mode, chain in chains.items()}
        reached.plans.append({mode: plan for mode, plan in plans.items() if plan})
        return [mode for mode, plan in plans.items() if plan is None]

    if cluster.home is not None and len(cluster.nodes) > 1:
        with suppress(PlanError):  # it lacks a pool that other nodes have
            search(alone(cluster), modes)
    left = list(modes)
    for where in thinned(cluster):
        misfits = search(where, left, generous=uneven(where))
        if misfits:
            search(where, misfits)
        # What fits on all nodes is not better on fewer.
        left = [mode for mode in (misfits if where == cluster else left) if not reached.certain(mode)]
        if not left:
            break


def _best_chains(problem: Problem, modes: Sequence[Mode], deadline: float) -> dict[Mode, Chain]:
    chains = Chains(problem, Phases(problem, deadline))
    found = {mode: chains.best(mode) for mode in modes}
    return {mode: chain for mode, chain in found.items() if chain.phases}


def _fitting(problem: Problem, mode: Mode, chain: Chain) -> Plan | None:
    if not problem.generous:
        return _plan_of(problem, mode, chain)
    try:
        found = _plan_of(problem, mode, chain)
        validate(found, problem.workflow, problem.cluster, problem.profile)
    except PlanError:
        return None
    return found


def _best_of(reached: _Reached) -> dict[Mode, Plan]:
    """The faster plan of each mode, the first among equals; its bound is one of all."""
    result: dict[Mode, Plan] = {}
    for mode in MODES:
        plans = [plans[mode] for plans in reached.plans if mode in plans]
        if plans:
            best = min(plans, key=_seconds)
            assert best.prediction is not None
            bound = min(reached.bounds[mode], best.prediction.iteration_s)
            result[mode] = replace(best, prediction=replace(best.prediction, lower_bound_s=bound))
    return result


def units_of(cluster: Cluster) -> dict[Pool, int]:
    """Devices of each pool that are handed out together: one, or on large pools the smallest whole share of a
    node (several nodes where there are very many, but no more than home has) that leaves at most 128 units, or 1,024
    on a cluster with a home."""
    result: dict[Pool, int] = {}
    most = MOST_UNITS if len(cluster.nodes) == 1 or cluster.home is None else MOST_UNITS_AWAY
    for pool in POOLS:
        sizes = [devices_of(node, pool) for node in cluster.nodes]
        node = math.gcd(*sizes)
        total, unit = pool_size(cluster, pool), 1
        steps = [d for d in range(1, node + 1) if node % d == 0] + [node * d for d in range(2, len(sizes) + 1)]
        home = sum(devices_of(node, pool) for node in cluster.nodes if cluster.home in (None, node.name))
        steps = [step for step in steps if step <= home]
        while total / unit > most and steps:
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
    """The chain on devices. Where what instances exchange takes time and nodes are several, on whole nodes rather than
    on the same share of each, if that is faster."""
    exchanges = any(problem.profile.components[name].exchanges for name in problem.graph.names)
    several = len(problem.cluster.nodes) > 1 and exchanges and priced(problem.cluster)
    plans = [_laid_out(problem, mode, chain, together) for together in ((False, True) if several else (False,))]
    return min(plans, key=_seconds)


def _laid_out(problem: Problem, mode: Mode, chain: Chain, together: bool) -> Plan:
    groups = [tuple(loop.groups for loop in solved.shape.loops) for solved in chain.phases if solved.shape]
    result = Plan(
        workflow=problem.workflow.name,
        mode=mode,
        phases=tuple(_phase_of(problem, solved, together) for solved in chain.phases),
        groups=max(groups, default=()) or (1,),
        ahead=int(problem.ahead and mode == "disaggregated"),
        unload=chain.unload,
    )
    prediction = predict(result, problem.workflow, problem.profile, problem.cluster)
    return replace(result, prediction=replace(prediction, lower_bound_s=min(chain.bound, prediction.iteration_s)))


def _phase_of(problem: Problem, solved: Solved, together: bool) -> Phase:
    """`together`: what exchanges most is on as few nodes as can be."""
    assert solved.shape is not None
    placements, devices = solved.shape.placements, dict[int, tuple[DeviceRange, ...]]()
    for pool in POOLS:
        members = [i for i, names in enumerate(placements) if problem.pools[names[0]] == pool]
        if problem.shared is not None:  # in every phase on the first devices: there they meet
            sharing = problem.shared.names
            members.sort(key=lambda i: sharing.isdisjoint(placements[i]))
        counts = [solved.counts[i] for i in members]
        bound = [problem.bound(placements[i]) for i in members]
        needs = [0.0] * len(members)
        if problem.generous:
            needs = [held_bytes(problem, solved.shape, placements[i], solved.counts[i]) for i in members]
        talks = [_talk(problem, placements[i]) for i in members] if together else []
        devices.update(zip(members, lay_out(problem.cluster, pool, counts, bound, needs, talks), strict=True))
    return Phase(tuple(Placement(names, devices[i]) for i, names in enumerate(placements)), solved.shape.micro_batch)


def _talk(problem: Problem, names: tuple[str, ...]) -> float:
    """Bytes that the instances of a placement exchange in an iteration."""
    exchanges = (exchange for name in names for exchange in problem.profile.components[name].exchanges)
    return sum(exchange.bytes * exchange.times for exchange in exchanges)


def _seconds(candidate: Plan) -> float:
    assert candidate.prediction is not None
    return candidate.prediction.iteration_s


def _choose(found: Mapping[Mode, Plan], workflow: Workflow, profile: Profile, cluster: Cluster) -> Plan:
    """The fastest as simulated with the measured variation; the simplest mode among equals."""
    order = [mode for mode in MODES if mode in found]
    seconds = {mode: expected_seconds(found[mode], workflow, profile, cluster) for mode in order}
    return found[min(order, key=lambda mode: (round(seconds[mode], 12), MODES.index(mode)))]


def _why_none(workflow: Workflow, profile: Profile, cluster: Cluster, mode: Mode | None) -> str:
    try:
        fits = alternatives(workflow, _boundless(profile), cluster, modes=_modes(mode), deadline_s=1.0)
    except PlanError as error:
        return str(error)
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
            name: replace(_weightless(component), elsewhere=component.elsewhere and _weightless(component.elsewhere))
            for name, component in profile.components.items()
        },
    )


def _weightless(component: ComponentProfile) -> ComponentProfile:
    return replace(component, resident_bytes=0.0, bytes_per_item=0.0)
