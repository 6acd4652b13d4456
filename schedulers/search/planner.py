"""The planner: the best plan for a workflow, from its profile, on a cluster.

The search is made for every choice of pools of the components that were measured on both, on the head node alone and
on all nodes, and where nodes differ in memory with and without those of less. Each gives the best sequence of phases
of every mode (`phases`), whose placements are then laid out on the nodes' devices and predicted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import accumulate, product

from schedulers.cluster import (
    POOLS,
    ROUNDING,
    Cluster,
    Node,
    Pool,
    by_memory,
    bytes_per_device,
    check_cluster,
    devices_of,
    memory_differs,
    only_head,
    pool_size,
)
from schedulers.cost.communication import takes_time
from schedulers.cost.prediction import predict
from schedulers.cost.problem import Problem
from schedulers.cost.simulation import expected_seconds
from schedulers.cost.times import peak_bytes
from schedulers.errors import PlanError, nearest
from schedulers.explain import explain_plan
from schedulers.plan import MODES, DeviceRange, Mode, Phase, Placement, Plan
from schedulers.profile import ComponentProfile, Profile
from schedulers.search.allocation import SolvedPhase
from schedulers.search.phases import PhaseSequence, SequenceSearch
from schedulers.validation import validate
from schedulers.workflow import Workflow

MAX_UNITS = 128
"""Largest pool whose devices are allocated one by one; larger ones in larger units, whole nodes if they are equal."""
MAX_UNITS_WITH_HEAD = 1024
"""The same on a cluster with a head node, whose few devices are shared well only in small units."""
MAX_POOL_CHOICES = 16
"""Choices of pools that are all searched; of more, some that are found one by one."""


@dataclass(frozen=True)
class SearchOptions:
    """Choices that the planner tries, and its deadline."""

    groups: Sequence[int] = (1, 2, 4)
    """Numbers of groups of environments in a loop, as far as they divide."""
    micro_batches: Sequence[int] = (1, 2, 4, 8, 16)
    """Numbers of micro-batches in an iteration, as far as they divide."""
    deadline_s: float = 20.0
    """Seconds after which the best plan so far is returned."""


DEFAULT = SearchOptions()


def plan(
    workflow: Workflow,
    profile: Profile,
    cluster: Cluster,
    mode: Mode | None = None,
    *,
    ahead: bool = False,
    search: SearchOptions = DEFAULT,
    explain: bool = True,
) -> Plan:
    """The fastest plan, of one mode or of all, with its prediction and the explanation in `why`.

    `ahead`: disaggregated plans run one step ahead. Devices may be allocated in any numbers, on large pools in units
    (`units_of`). No plan of this kind is faster than `prediction.lower_bound_s`; where that is `iteration_s`, the plan
    is certified optimal. It is, unless the deadline came first, the workflow has several tasks (whose search is not
    exhaustive), or the bound leaves out communication that depends on the layout (docs/planning.md).

    Raises `PlanError` where there is no plan: no such mode, components without times, a pool without devices, nothing
    that fits in memory.
    """
    found = _search(workflow, profile, cluster, _modes(mode), ahead, search)
    best_of = found.best_of_each_mode()
    if not best_of:
        raise PlanError(_why_none(workflow, profile, cluster, mode))
    best = _fastest(best_of, workflow, profile, cluster)
    assert best.prediction is not None
    bound = min(*found.bounds.values(), best.prediction.iteration_s)
    best = replace(best, prediction=replace(best.prediction, lower_bound_s=bound))
    if not explain:
        return best
    if mode is not None:
        best_of = alternatives(workflow, profile, cluster, ahead=ahead, search=search)

    # With several tasks the search may last until the deadline, which the gain of one more device is not worth.
    brief = replace(search, deadline_s=search.deadline_s / 4) if len(workflow.loops) > 1 else search

    def plan_for(larger: Cluster) -> Plan:
        return plan(workflow, profile, larger, mode, ahead=ahead, search=brief, explain=False)

    considered = [candidate for plans in found.plans for candidate in plans.values()]
    why = explain_plan(best, best_of, considered, workflow, profile, cluster, units_of(cluster), plan_for)
    return replace(best, why=why)


def alternatives(
    workflow: Workflow,
    profile: Profile,
    cluster: Cluster,
    *,
    modes: Sequence[Mode] = MODES,
    ahead: bool = False,
    search: SearchOptions = DEFAULT,
) -> dict[Mode, Plan]:
    """The best plan of each mode that has one, with its prediction and its own lower bound. Arguments as for `plan`."""
    return _search(workflow, profile, cluster, modes, ahead, search).best_of_each_mode()


def units_of(cluster: Cluster) -> dict[Pool, int]:
    """Devices of each pool that are allocated together: one, or on large pools the smallest whole share of a node
    (several nodes where there are very many, but no more than the head node has) that makes at most `MAX_UNITS`, or
    `MAX_UNITS_WITH_HEAD`."""
    result: dict[Pool, int] = {}
    most = MAX_UNITS if len(cluster.nodes) == 1 or cluster.head_node is None else MAX_UNITS_WITH_HEAD
    for pool in POOLS:
        sizes = [devices_of(node, pool) for node in cluster.nodes]
        node = math.gcd(*sizes)
        total, unit = pool_size(cluster, pool), 1
        steps = [d for d in range(1, node + 1) if node % d == 0] + [node * d for d in range(2, len(sizes) + 1)]
        head = sum(devices_of(node, pool) for node in cluster.nodes if cluster.head_node in (None, node.name))
        steps = [step for step in steps if step <= head]
        while total / unit > most and steps:
            unit = steps.pop(0)
        result[pool] = unit
    return result


# --- searches


@dataclass
class _Found:
    """Results of all searches."""

    plans: list[dict[Mode, Plan]] = field(default_factory=list)
    bounds: dict[Mode, float] = field(default_factory=dict)
    """Lower bound of each mode: the least of all searches."""

    def certain(self, mode: Mode) -> bool:
        return any(_seconds(plans[mode]) <= self.bounds[mode] * (1 + 1e-9) for plans in self.plans if mode in plans)

    def best_of_each_mode(self) -> dict[Mode, Plan]:
        """The fastest plan of each mode, the first among equals; its bound is that of all searches."""
        result: dict[Mode, Plan] = {}
        for mode in MODES:
            plans = [plans[mode] for plans in self.plans if mode in plans]
            if plans:
                best = min(plans, key=_seconds)
                assert best.prediction is not None
                bound = min(self.bounds[mode], best.prediction.iteration_s)
                result[mode] = replace(best, prediction=replace(best.prediction, lower_bound_s=bound))
        return result


def _search(
    workflow: Workflow, profile: Profile, cluster: Cluster, modes: Sequence[Mode], ahead: bool, options: SearchOptions
) -> _Found:
    """The best plans, whichever pools those components are on that were measured on both."""
    check_cluster(cluster)
    pools = _pool_options(profile, workflow.names, [pool for pool in POOLS if pool_size(cluster, pool)])
    found, errors, begin = _Found(), list[PlanError](), time.monotonic()
    tried = 0

    def seconds(choice: Mapping[str, Pool]) -> float:
        """Makespan of the best plan with components on these pools; each choice has an equal share of the deadline."""
        nonlocal tried
        tried, before = tried + 1, len(found.plans)

        def problem(where: Cluster, optimistic_memory: bool) -> Problem:
            return Problem(
                workflow,
                profile.on_pools(choice),
                where,
                units=units_of(where),
                groups=tuple(sorted(set(options.groups))),
                micro_batches=tuple(sorted(set(options.micro_batches))),
                ahead=ahead,
                optimistic_memory=optimistic_memory,
            )

        try:
            _search_nodes(found, cluster, problem, modes, begin + options.deadline_s * tried / pool_choices(pools))
        except PlanError as error:  # a pool that the head node lacks, where the other may do
            errors.append(error)
        return min((_seconds(plan) for plans in found.plans[before:] for plan in plans.values()), default=math.inf)

    if not explore_pools(pools, seconds):
        found.bounds = dict.fromkeys(found.bounds, 0.0)
    if len(errors) == tried:
        raise errors[0]
    return found


def _pool_options(profile: Profile, names: Iterable[str], there: Sequence[Pool]) -> dict[str, tuple[Pool, ...]]:
    """Pools of each component that was measured on both, as far as the cluster has them: its own first."""
    found = {}
    for name in names:
        component = profile.components.get(name)
        if component is not None and component.other_pool is not None:
            pools = tuple(pool for pool in (component.pool, component.other_pool.pool) if pool in there)
            found[name] = pools or (component.pool,)
    return found


def pool_choices(options: Mapping[str, tuple[Pool, ...]]) -> int:
    """Number of choices of pools that are searched at most."""
    every = math.prod(map(len, options.values()))
    return every if every <= MAX_POOL_CHOICES else 2 + len(options)


def explore_pools(options: Mapping[str, tuple[Pool, ...]], seconds: Callable[[Mapping[str, Pool]], float]) -> bool:
    """Call `seconds` for every choice of pools; True if these were all.

    If these are more than `MAX_POOL_CHOICES`, two are: every component on its own pool, and every one on the other; and
    the better is improved: each component in turn changes its pool, and stays there where that is faster.
    """
    every = [dict(zip(options, pools, strict=True)) for pools in product(*options.values())]
    if len(every) <= MAX_POOL_CHOICES:
        for choice in every:
            seconds(choice)
        return True
    ends = [every[0], every[-1]]
    times = [seconds(choice) for choice in ends]
    best, least = min(zip(ends, times, strict=True), key=lambda pair: pair[1])
    for name, pools in options.items():
        if len(pools) > 1:
            changed = {**best, name: pools[1 - pools.index(best[name])]}
            time_s = seconds(changed)
            if time_s < least:
                best, least = changed, time_s
    return False


def _search_nodes(
    found: _Found,
    cluster: Cluster,
    problem_on: Callable[[Cluster, bool], Problem],
    modes: Sequence[Mode],
    deadline: float,
) -> None:
    """Add the best plans on all nodes; where the cluster has a head node, before them those on that alone.

    Two searches, because messages between nodes cost nothing in the first and, in the second, the price of leaving the
    head node. More, where nodes differ in memory: first with optimistic memory. Where plans of that do not fit, others
    in which every device has to hold the same as all, on all nodes and without those of less memory.
    """

    def search(where: Cluster, modes: Sequence[Mode], optimistic_memory: bool = False) -> list[Mode]:
        """Modes whose best plan does not fit."""
        problem = problem_on(where, optimistic_memory)
        sequences = SequenceSearch(problem, deadline)
        best = {mode: sequences.best(mode) for mode in modes}
        best = {mode: sequence for mode, sequence in best.items() if sequence.phases}
        for mode, sequence in best.items():
            found.bounds[mode] = min(sequence.bound, found.bounds.get(mode, math.inf))
        plans = {mode: _fitting(problem, mode, sequence) for mode, sequence in best.items()}
        found.plans.append({mode: plan for mode, plan in plans.items() if plan})
        return [mode for mode, plan in plans.items() if plan is None]

    if cluster.head_node is not None and len(cluster.nodes) > 1:
        with suppress(PlanError):  # it lacks a pool that other nodes have
            search(only_head(cluster), modes)
    left = list(modes)
    for where in by_memory(cluster):
        misfits = search(where, left, optimistic_memory=memory_differs(where))
        if misfits:
            search(where, misfits)
        # A plan that fits on all nodes is not better on fewer.
        left = [mode for mode in (misfits if where == cluster else left) if not found.certain(mode)]
        if not left:
            break


def _fastest(best_of: Mapping[Mode, Plan], workflow: Workflow, profile: Profile, cluster: Cluster) -> Plan:
    """The fastest as simulated with the measured variation; the simplest mode among equals."""
    seconds = {mode: expected_seconds(found, workflow, profile, cluster) for mode, found in best_of.items()}
    return best_of[min(best_of, key=lambda mode: (round(seconds[mode], 12), MODES.index(mode)))]


def _seconds(candidate: Plan) -> float:
    assert candidate.prediction is not None
    return candidate.prediction.iteration_s


# --- plans on devices


def _fitting(problem: Problem, mode: Mode, sequence: PhaseSequence) -> Plan | None:
    """The plan, or None where it was found with optimistic memory and does not fit."""
    if not problem.optimistic_memory:
        return _plan_of(problem, mode, sequence)
    try:
        found = _plan_of(problem, mode, sequence)
        validate(found, problem.workflow, problem.cluster, problem.profile)
    except PlanError:
        return None
    return found


def _plan_of(problem: Problem, mode: Mode, sequence: PhaseSequence) -> Plan:
    """The plan of a sequence of phases. Where communication among instances takes time and there are several nodes,
    placements are on whole nodes rather than on the same share of each, if that is faster."""
    exchanges = any(problem.profile.components[name].exchanges for name in problem.graph.names)
    several = len(problem.cluster.nodes) > 1 and exchanges and takes_time(problem.cluster)
    plans = [_laid_out(problem, mode, sequence, whole) for whole in ((False, True) if several else (False,))]
    return min(plans, key=_seconds)


def _laid_out(problem: Problem, mode: Mode, sequence: PhaseSequence, whole_nodes: bool) -> Plan:
    groups = [tuple(loop.groups for loop in phase.model.loops) for phase in sequence.phases if phase.model]
    result = Plan(
        workflow=problem.workflow.name,
        mode=mode,
        phases=tuple(_phase_of(problem, phase, whole_nodes) for phase in sequence.phases),
        groups=max(groups, default=()) or (1,),
        ahead=int(problem.ahead and mode == "disaggregated"),
        unload=sequence.unload,
    )
    prediction = predict(result, problem.workflow, problem.profile, problem.cluster)
    bound = min(sequence.bound, prediction.iteration_s)
    return replace(result, prediction=replace(prediction, lower_bound_s=bound))


def _phase_of(problem: Problem, phase: SolvedPhase, whole_nodes: bool) -> Phase:
    assert phase.model is not None
    placements, devices = phase.model.placements, dict[int, tuple[DeviceRange, ...]]()
    for pool in POOLS:
        members = [i for i, names in enumerate(placements) if problem.pools[names[0]] == pool]
        if problem.shared_weights is not None:  # in every phase on the first devices, where the two meet
            sharing = problem.shared_weights.names
            members.sort(key=lambda i: sharing.isdisjoint(placements[i]))
        requests = []
        for i in members:
            names, count = placements[i], phase.counts[i]
            need = peak_bytes(problem, phase.model, names, count) if problem.optimistic_memory else 0.0
            requests.append(_Request(count, problem.pinned(names), need, _exchanged_bytes(problem, names)))
        devices.update(zip(members, _lay_out(problem.cluster, pool, requests, whole_nodes), strict=True))
    return Phase(tuple(Placement(names, devices[i]) for i, names in enumerate(placements)), phase.model.micro_batch)


def _exchanged_bytes(problem: Problem, names: tuple[str, ...]) -> float:
    """Bytes that the instances of a placement exchange in an iteration."""
    exchanges = (exchange for name in names for exchange in problem.profile.components[name].exchanges)
    return sum(exchange.bytes * exchange.times for exchange in exchanges)


@dataclass(frozen=True)
class _Request:
    """Devices that a placement needs."""

    count: int
    pinned: bool
    bytes: float
    """Memory needed on each."""
    exchanged_bytes: float


def _lay_out(
    cluster: Cluster, pool: Pool, requests: Sequence[_Request], whole_nodes: bool
) -> list[tuple[DeviceRange, ...]]:
    """Devices for each of several placements that work at the same time.

    On a cluster with a head node, its devices come first: for pinned placements, then for the others. Without one,
    where all nodes are equal and every count divides by their number, each node is divided in the same way, so that
    components that communicate are on one node; else the placements follow one another through the nodes, those that
    need most memory first. `whole_nodes`: they always do, and then those that exchange most first, so that each is on
    as few nodes as can be.

    Raises `PlanError` where too few devices have the memory.
    """
    nodes = [node for node in cluster.nodes if devices_of(node, pool)]
    nodes.sort(key=lambda node: cluster.head_node not in (None, node.name))
    even = cluster.head_node is None and all(request.count % len(nodes) == 0 for request in requests)
    equal = len({devices_of(node, pool) for node in nodes}) == 1
    if even and equal and not whole_nodes and all(_has(node, pool, r.bytes) for node in nodes for r in requests):
        shares = [request.count // len(nodes) for request in requests]
        firsts = accumulate(shares, initial=0)
        return [
            tuple(DeviceRange(node.name, pool, first, share) for node in nodes)
            for first, share in zip(firsts, shares, strict=False)
        ]
    taken = {node.name: 0 for node in nodes}
    devices = {}
    order = [(not r.pinned, -r.bytes, -r.exchanged_bytes if whole_nodes else 0.0, i) for i, r in enumerate(requests)]
    for *_, i in sorted(order):
        there = [node for node in nodes if _has(node, pool, requests[i].bytes)]
        devices[i] = _take(there, pool, requests[i].count, taken)
    return [devices[i] for i in range(len(requests))]


def _has(node: Node, pool: Pool, size: float) -> bool:
    return size <= bytes_per_device(node, pool) * (1 + ROUNDING)


def _take(nodes: Sequence[Node], pool: Pool, count: int, taken: dict[str, int]) -> tuple[DeviceRange, ...]:
    """The next `count` devices of these nodes that are not `taken`, which is updated."""
    devices = []
    for node in nodes:
        mine = min(devices_of(node, pool) - taken[node.name], count)
        if mine > 0:
            devices.append(DeviceRange(node.name, pool, taken[node.name], mine))
            taken[node.name] += mine
            count -= mine
    if count:
        raise PlanError(f"too few {pool} have enough memory")
    return tuple(devices)


# --- messages


def _modes(mode: Mode | None) -> Sequence[Mode]:
    if mode is None:
        return MODES
    if mode not in MODES:
        raise PlanError(f"no mode {mode!r}{nearest(str(mode), MODES)}")
    return (mode,)


def _why_none(workflow: Workflow, profile: Profile, cluster: Cluster, mode: Mode | None) -> str:
    brief = SearchOptions(deadline_s=1.0)
    try:
        fits = alternatives(workflow, _without_memory(profile), cluster, modes=_modes(mode), search=brief)
    except PlanError as error:
        return str(error)
    kind = f"{mode} " if mode else ""
    if fits:
        return f"no {kind}plan of workflow {workflow.name!r} fits in the cluster's memory, even with unloading"
    others = alternatives(workflow, profile, cluster, search=brief)
    instead = f"; possible: {', '.join(others)}" if others else ""
    return f"no {kind}plan of workflow {workflow.name!r} on this cluster: too few devices{instead}"


def _without_memory(profile: Profile) -> Profile:
    def light(component: ComponentProfile) -> ComponentProfile:
        other = component.other_pool and light(component.other_pool)
        return replace(component, resident_bytes=0.0, bytes_per_item=0.0, other_pool=other)

    return replace(profile, components={name: light(component) for name, component in profile.components.items()})
