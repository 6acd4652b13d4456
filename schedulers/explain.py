"""Explanation of a plan in sentences: why this mode, what limits it, what the alternatives cost, what would help."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

from schedulers.cluster import POOLS, Cluster, Node, Pool, bytes_per_device, devices_of
from schedulers.cost.laws import completions, makespan, server_loads
from schedulers.cost.prediction import (
    PhaseCosts,
    phase_costs,
    predict,
    predict_sequential,
    problem_of,
    server_seconds_alone,
)
from schedulers.cost.problem import Problem
from schedulers.cost.simulation import expected_seconds
from schedulers.cost.times import peak_bytes
from schedulers.errors import PlanError
from schedulers.plan import MODES, Mode, Phase, Placement, Plan, first_of, node_text, ranges_text
from schedulers.profile import Profile
from schedulers.unused import Unused, unused_devices
from schedulers.workflow import Workflow

WORTH_A_SENTENCE = 0.01
"""Relative gain below which more hardware is not worth mentioning."""
BUSY_MACHINE = 0.05
"""Share of the cores' time that other programs used, from which on a profile is said to be of a busy machine."""
BUSY = 0.9
"""Share of its time above which a placement is the bottleneck of a task."""


def explain_plan(
    plan: Plan,
    best_of: Mapping[Mode, Plan],
    considered: Sequence[Plan],
    workflow: Workflow,
    profile: Profile,
    cluster: Cluster,
    units: Mapping[Pool, int],
    plan_for: Callable[[Cluster], Plan],
) -> tuple[str, ...]:
    """Sentences for `Plan.why`.

    `best_of`: the best plan of each mode. `considered`: all plans that were found. `units`: devices that were allocated
    together. `plan_for`: the best plan for another cluster.
    """
    problem = problem_of(plan, workflow, profile, cluster)

    def compared(other: Plan) -> str:
        return _compared(other, plan, lambda one: expected_seconds(one, workflow, profile, cluster))

    return (
        _seconds(plan),
        *_phases(plan),
        *explain_tasks(plan, problem),
        *_estimates(problem),
        *_busy(profile),
        *_uneven(plan, problem),
        *_modes(plan, best_of, compared),
        *_pools(plan, considered, profile, compared),
        *_nodes(plan, considered, workflow, cluster, compared),
        *_memory(plan, problem),
        *_weights(plan, problem),
        _bottleneck(plan, problem),
        *_unused(plan, considered, problem),
        _switches(plan),
        *_communication(plan),
        *_gap(plan, units),
        _more_devices(plan, cluster, problem, plan_for),
    )


def _seconds(plan: Plan) -> str:
    assert plan.prediction is not None
    groups = ""
    if len(plan.groups) == 1 and plan.groups[0] > 1:
        groups = f", {plan.groups[0]} groups of environments in the loop"
    ahead = ", one step ahead" if plan.ahead else ""
    return f"{plan.mode.capitalize()}: {in_words(plan.prediction.iteration_s)} per iteration{groups}{ahead}."


def _phases(plan: Plan) -> list[str]:
    assert plan.prediction is not None
    result = []
    for number, (phase, seconds) in enumerate(zip(plan.phases, plan.prediction.phases_s, strict=True), start=1):
        places = "; ".join(f"{', '.join(p.components)} on {ranges_text(p.devices)}" for p in phase.placements)
        result.append(f"Phase {number} ({in_words(seconds)}): {places}.")
    return result


def _estimates(problem: Problem) -> list[str]:
    """Components whose times were not measured."""
    found: dict[str, list[str]] = {}
    for name in problem.graph.names:
        source = problem.profile.components[name].estimated
        if source:
            found.setdefault(source, []).append(name)
    return [f"Times of {', '.join(names)} are estimated: {source}." for source, names in found.items()]


def _busy(profile: Profile) -> list[str]:
    """Sentence that the machine had other work while it was measured, so that its times are longer than alone."""
    share = profile.other_programs
    if share is None or share < BUSY_MACHINE:
        return []
    return [f"Other programs used {share:.0%} of the cores' time when this was profiled: alone it is shorter."]


def _uneven(plan: Plan, problem: Problem) -> list[str]:
    """Components whose items take different numbers of turns, and what their stragglers cost."""
    result = []
    for name in problem.graph.names:
        turns = problem.profile.components[name].turns
        if turns is None:
            continue
        (placement,) = (p for phase in plan.phases for p in phase.placements if name in p.components)
        number = next((i for i, names in enumerate(problem.graph.loops) if name in names), None)
        items = problem.workflow.items if number is None else problem.environments[number] / plan.groups_of(number)
        each, low, high = items / len(placement.instances), turns.quantiles[0], turns.quantiles[-1]
        mean = f"{turns.mean:,.0f}" if turns.mean >= 100 else f"{turns.mean:.3g}"
        result.append(
            f"An item of {name} takes {low:,.0f} to {high:,.0f} turns, {mean} on average: in a call of {each:.3g} on "
            f"each instance {turns.waiting(each):.0%} of the slots are empty while the longest go on."
        )
    return result


def _modes(plan: Plan, found: Mapping[Mode, Plan], compared: Callable[[Plan], str]) -> list[str]:
    assert plan.prediction is not None
    result = []
    for mode in MODES:
        other = found.get(mode)
        if mode == plan.mode:
            continue
        if other is None or other.prediction is None:
            result.append(f"There is no {mode} plan on these devices.")
            continue
        result.append(f"The best {mode} plan would take {compared(other)}.")
    return result


def _pools(plan: Plan, considered: Sequence[Plan], profile: Profile, compared: Callable[[Plan], str]) -> list[str]:
    """Cost of the other pool, for components that were measured on both."""
    result = []
    for name, pool in plan.pools.items():
        component = profile.components[name].on(pool)
        if component.other_pool is None:
            continue
        other = component.other_pool.pool
        best = _best(each for each in considered if each.pools.get(name) == other)
        if best is None:
            result.append(f"No plan was found with {name} on {other}.")
        else:
            result.append(f"With {name} on {other} the best plan found would take {compared(best)}.")
    return result


def _nodes(
    plan: Plan, considered: Sequence[Plan], workflow: Workflow, cluster: Cluster, compared: Callable[[Plan], str]
) -> list[str]:
    """Use of the other nodes than the head node, or why they are not used."""
    away = [node.name for node in cluster.nodes if node.name != cluster.head_node]
    if cluster.head_node is None or not away:
        return []
    names, head = _listed(away), node_text(cluster.head_node)
    if _leaves(plan, cluster):
        stay = _best(other for other in considered if not _leaves(other, cluster))
        if stay is None:
            return [f"On {head} alone there is no such plan."]
        return [f"On {head} alone an iteration would take {compared(stay)}."]
    movable = ", ".join(name for name in workflow.names if name in workflow.movable)
    if not movable:
        return [f"Nothing is on {names}: no component may leave {head}."]
    only = f"Nothing is on {names}. Only {movable} may leave {head}, and "
    leave = _best(other for other in considered if _leaves(other, cluster))
    if leave is None:
        messages = f": a message to another node takes {in_words(cluster.link_s)}" if cluster.link_s else ""
        return [only + f"no plan is faster for it{messages}."]
    return [only + f"the best plan in which it does would take {compared(leave)}."]


def _memory(plan: Plan, problem: Problem) -> list[str]:
    """Nodes that are idle for want of memory."""
    used = {part.node for phase in plan.phases for placement in phase.placements for part in placement.devices}
    result = []
    for phase in plan.phases:
        cost = phase_costs(plan, phase, problem)
        for names, count in zip(cost.model.placements, cost.counts, strict=True):
            pool = problem.pools[names[0]]
            idle = [node for node in problem.cluster.nodes if node.name not in used and devices_of(node, pool)]
            need = peak_bytes(problem, cost.model, names, count)
            poor = [node for node in idle if bytes_per_device(node, pool) < need]
            if poor and not problem.pinned(names):
                most = max(bytes_per_device(node, pool) for node in poor)
                result.append(
                    f"For want of memory {', '.join(names)} cannot be on {_listed([node.name for node in poor])}: "
                    f"{need / 1e9:.3g} GB for each of its {pool}, where there are {most / 1e9:.3g} GB."
                )
    return result


def _weights(plan: Plan, problem: Problem) -> list[str]:
    """Number of accelerators on which policy and learner share one copy of the weights."""
    shared = problem.shared_weights
    hosts = shared.hosts(plan) if shared else ()
    guests = len(hosts) - hosts.count(None)
    if shared is None or not guests:
        return []
    return [
        f"On {guests} of {len(hosts)} accelerators of {shared.policy} it takes turns with {shared.learner} in one "
        "process, with one copy of the weights."
    ]


def _listed(names: Sequence[str]) -> str:
    return f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}"


def _leaves(plan: Plan, cluster: Cluster) -> bool:
    return any(placement.nodes != {cluster.head_node} for phase in plan.phases for placement in phase.placements)


def _predicted(plan: Plan) -> float:
    assert plan.prediction is not None
    return plan.prediction.iteration_s


def _best(plans: Iterable[Plan]) -> Plan | None:
    """The plan with the least predicted time; None without any."""
    return min(plans, key=_predicted, default=None)


def _compared(other: Plan, plan: Plan, expected: Callable[[Plan], float]) -> str:
    """The ratio of the other plan's seconds for one iteration to the plan's: with constant times, and, where the other
    plan is then the faster one, with the times of single calls varying as measured. `expected` gives the seconds of a
    plan with varying times, by which the plan was chosen."""
    seconds = _predicted(other)
    ratio = seconds / _predicted(plan) if _predicted(plan) else math.inf
    text = f"{_times(ratio)} ({in_words(seconds)})"
    if ratio >= 0.995:
        return text
    theirs, own = expected(other), expected(plan)
    varying = f"{_times(theirs / own if own else math.inf)} ({in_words(theirs)} against {in_words(own)})"
    return f"{text} if every call took its mean time, and {varying} as calls vary"


def _times(ratio: float) -> str:
    return f"{ratio:.2f} times as long" if abs(ratio - 1) >= 0.005 else "as long"


def _bottleneck(plan: Plan, problem: Problem) -> str:
    """The component with the longest busy time, and the bottleneck of the rollout loop."""
    assert plan.prediction is not None
    busy = plan.prediction.components_s
    name = max(busy, key=lambda name: busy[name])
    share = busy[name] / plan.prediction.iteration_s if plan.prediction.iteration_s else 0.0
    text = f"The busiest component is {name}: its devices work on it {share:.0%} of the iteration"
    return "; ".join([text, *_loop_waits(plan, problem)]) + "."


def _loop_waits(plan: Plan, problem: Problem) -> list[str]:
    """Sentences on what the rollout loop of one task waits for; empty if its components are in one placement, or there
    are several tasks."""
    result = []
    for phase in plan.phases:
        cost = phase_costs(plan, phase, problem)
        if len(cost.model.loops) != 1:
            continue
        loads: dict[int, float] = {}
        for visit, seconds in zip(cost.model.visits, cost.visits, strict=True):
            loads[visit.placement] = loads.get(visit.placement, 0.0) + seconds
        if len(loads) < 2:
            continue
        groups, transfers = plan.groups_of(0), cost.model.loops[0].transfers_s
        total = sum(loads.values()) + sum(transfers)
        slowest = max(loads, key=lambda i: loads[i])
        if max(transfers, default=0.0) > loads[slowest] and max(transfers) * groups >= total:
            result.append("the loop waits for the link between nodes")
        elif loads[slowest] * groups >= total:
            result.append(f"the loop waits for {', '.join(cost.model.placements[slowest])}")
        else:
            between = f", {sum(transfers) / total:.0%} of it between nodes" if transfers else ""
            result.append(f"the loop is as long as the steps of one group{between}")
    return result


def _unused(plan: Plan, considered: Sequence[Plan], problem: Problem) -> list[str]:
    """Sentences on unused devices, and on the time of the best plan found that uses more of them."""
    return [_gap_in_words(plan, gap, problem) for gap in unused_devices(plan, considered, problem)]


def _gap_in_words(plan: Plan, gap: Unused, problem: Problem) -> str:
    others = sum(any(p.pool == gap.pool for p in phase.placements) for phase in plan.phases) > len(gap.phases)
    numbers = " and ".join(str(number + 1) for number in gap.phases)
    when = f" in phase{'s' if len(gap.phases) > 1 else ''} {numbers}" if others and numbers else ""
    pool = gap.pool if gap.total > 1 else gap.pool.removesuffix("s")
    which = f"{gap.count} of {gap.total} {pool} {'is' if gap.count == 1 else 'are'} unused{when}"
    text = f"{which} ({ranges_text(gap.devices)}): "
    if gap.better is None:
        return text + _no_use(plan, gap, problem)
    compared = _longer(_predicted(gap.better), plan)
    if not gap.components:
        return f"{text}the best plan found that uses more of them is {gap.better.mode} and would take {compared}."
    reason = _why_not(plan, gap, problem)
    grown = f"{gap.more} more for {', '.join(gap.components)}{' and one group of environments' * gap.regrouped}"
    return f"{text}with {grown} an iteration would take {compared}{reason}."


def _longer(seconds: float, plan: Plan) -> str:
    change = seconds / _predicted(plan) - 1 if _predicted(plan) else 0.0
    if abs(change) < 0.0005:
        return f"as long ({in_words(seconds)})"
    return f"{abs(change):.1%} {'longer' if change > 0 else 'less'} ({in_words(seconds)})"


def _no_use(plan: Plan, gap: Unused, problem: Problem) -> str:
    """Reason why no plan was found that uses more of these devices."""
    mine = [
        name
        for number in gap.phases
        for placement in plan.phases[number].placements
        if placement.pool == gap.pool
        for name in placement.components
    ]
    if not mine:
        return f"nothing of the plan computes on {gap.pool}."
    names, head = ", ".join(mine), problem.cluster.head_node
    if all(problem.pinned((name,)) for name in mine) and all(part.node != head for part in gap.devices):
        return f"{names} may not leave {head}."
    first = [name for name in mine if any(name == loop[0] for loop in problem.graph.loops)]
    divides = f" (workers of {', '.join(first)} divide the environments of a group)" if first else ""
    return f"no larger number fits {names}{divides}."


def _why_not(plan: Plan, gap: Unused, problem: Problem) -> str:
    """Reason why more devices do not help, as far as the two predictions tell."""
    assert plan.prediction is not None and gap.better is not None and gap.better.prediction is not None
    before, after = plan.prediction, gap.better.prediction
    sent = (after.communication_s or 0.0) - (before.communication_s or 0.0)
    busy = max(before.components_s[name] for name in gap.components)
    saved = busy - max(after.components_s[name] for name in gap.components)
    if sent > 0 and sent >= saved / 2:
        return f", communication {in_words(sent)} more"
    if gap.regrouped:
        return ": the components of one group wait for each other"
    if saved <= busy * 0.0005:
        return f": {', '.join(gap.components)} would be no faster"
    waits = [text for text in _loop_waits(plan, problem) if not text.endswith(", ".join(gap.components))]
    in_loop = set(gap.components) & set(problem.graph.loop)
    return f": {waits[0]}" if waits and in_loop else ""


def _switches(plan: Plan) -> str:
    assert plan.prediction is not None
    if plan.prediction.switch_s > 0:
        return f"Components do not fit together: context switches cost {in_words(plan.prediction.switch_s)}."
    if plan.unload:
        return "Components do not fit together and are unloaded between phases; no time was measured for that."
    return "Everything stays loaded: context switches cost nothing."


def _communication(plan: Plan) -> list[str]:
    assert plan.prediction is not None
    seconds = plan.prediction.communication_s or 0.0
    share = seconds / plan.prediction.iteration_s if plan.prediction.iteration_s else 0.0
    return [f"Communication takes {in_words(seconds)} ({share:.1%})."] if seconds else []


def _gap(plan: Plan, units: Mapping[Pool, int]) -> list[str]:
    assert plan.prediction is not None
    pools = {placement.pool for phase in plan.phases for placement in phase.placements}
    coarse = " and ".join(f"{units[pool]} {pool}" for pool in POOLS if pool in pools and units[pool] > 1)
    whole = f" with devices in units of {coarse}" if coarse else ""
    gap = 1 - plan.prediction.lower_bound_s / plan.prediction.iteration_s if plan.prediction.iteration_s else 0.0
    if gap < 1e-9:
        return [f"No plan{whole} is faster (certified)."]
    most = f"at most {gap:.1%}" if gap >= 0.0005 else "less than 0.1%"
    return [f"A faster plan{whole} could exist, by {most}."]


def _more_devices(plan: Plan, cluster: Cluster, problem: Problem, plan_for: Callable[[Cluster], Plan]) -> str:
    """Gain of one more device of each pool, found by planning with it."""
    assert plan.prediction is not None
    gains: dict[str, float] = {}
    for what, larger in _larger(cluster, set(problem.pools.values())).items():
        try:
            better = plan_for(larger).prediction
        except PlanError:
            continue
        assert better is not None
        gains[what] = 1 - better.iteration_s / plan.prediction.iteration_s
    if not gains or max(gains.values()) < WORTH_A_SENTENCE:
        tried = " or ".join(gains) or "more devices"
        return f"{tried[:1].upper()}{tried[1:]} would gain less than {WORTH_A_SENTENCE:.0%}."
    best = max(gains, key=lambda what: gains[what])
    others = "".join(f", {what} {max(gain, 0.0):.0%}" for what, gain in gains.items() if what != best)
    return f"{best[:1].upper()}{best[1:]} would help most: an iteration would take {gains[best]:.0%} less{others}."


def _larger(cluster: Cluster, pools: set[Pool]) -> dict[str, Cluster]:
    """The cluster with one more device of each pool used; with several nodes, with one more node."""
    if len(cluster.nodes) > 1:
        extra = replace(cluster.nodes[-1], name=f"{cluster.nodes[-1].name}+1")
        return {"one more node": replace(cluster, nodes=(*cluster.nodes, extra))}
    node: Node = cluster.nodes[0]
    names = {"cores": "one more core", "accelerators": "one more accelerator"}
    result = {}
    for pool in POOLS:
        if pool in pools and devices_of(node, pool):
            grown = replace(node, **{pool: devices_of(node, pool) + 1})  # type: ignore[arg-type]
            result[names[pool]] = replace(cluster, nodes=(grown,))
    return result


# --- several tasks


def explain_tasks(plan: Plan, problem: Problem) -> list[str]:
    """A sentence on the gain of overlapping, and a few for each task. Empty for plans of one task."""
    if not problem.graph.several_loops:
        return []
    number = next(i for i, phase in enumerate(plan.phases) if problem.graph.loop[0] in phase.components)
    cost = phase_costs(plan, plan.phases[number], problem)
    routes = [loop.route for loop in cost.model.loops]
    times = cost.model.by_loop(cost.visits)
    ends = [max(steps[-1]) for steps in completions(routes, times)]
    result = [_overlap(plan, problem)]
    for loop in range(len(routes)):
        text = _where(plan, plan.phases[number], problem, loop)
        alone = makespan([routes[loop]], [server_seconds_alone(problem, cost, loop)])
        text += f". Its rollout ends after {in_words(ends[loop])}; alone it would take {in_words(alone)}"
        text += f"; {_waits(problem, plan.phases[number], cost, times, ends, loop)}"
        result.append(f"{text}.{_fused_or_split(plan, number, problem, loop)}")
    return result


def _overlap(plan: Plan, problem: Problem) -> str:
    known = (plan, problem.workflow, problem.profile, problem.cluster)
    together, after = predict(*known).iteration_s, predict_sequential(*known).iteration_s
    gain = 1 - together / after if after else 0.0
    effect = f"saves {gain:.0%}" if gain >= 0 else f"costs {-gain:.0%}"
    return (
        f"The {len(problem.graph.loops)} tasks are rolled out at the same time: one after the other, with the same "
        f"placements, an iteration would take {in_words(after)}, so overlapping {effect}."
    )


def _where(plan: Plan, phase: Phase, problem: Problem, loop: int) -> str:
    groups, items = plan.groups_of(loop), problem.environments[loop]
    own = [name for name in problem.graph.loops[loop] if name not in problem.graph.shared]
    places = []
    for placement in phase.placements:
        mine = [name for name in own if name in placement.components]
        if not mine:
            continue
        text = f"{', '.join(mine)}{' fused' if len(mine) > 1 else ''} on {ranges_text(placement.devices)}"
        others = _others(placement.components, problem, loop)
        places.append(text + (f", taking turns with {others}" if others else ""))
    number = f"{groups} groups" if groups > 1 else "one group"
    name = problem.workflow.task(loop)
    return f"{name[:1].upper()}{name[1:]}, {number} of {items // groups} environments: {'; '.join(places)}"


def _others(names: Sequence[str], problem: Problem, loop: int) -> str:
    """Other members of a placement: tasks by their numbers, components that no single task owns by name."""
    graph = problem.graph
    owners = {name: i for i, members in enumerate(graph.loops) for name in members if name not in graph.shared}
    tasks = sorted({owners[name] for name in names if name in owners} - {loop})
    words = [f"task{'s' if len(tasks) > 1 else ''} {', '.join(map(str, tasks))}"] if tasks else []
    return " and ".join([*words, *(name for name in names if name not in owners)])


def _waits(
    problem: Problem,
    phase: Phase,
    cost: PhaseCosts,
    times: Sequence[Sequence[float]],
    ends: Sequence[float],
    loop: int,
) -> str:
    """The bottleneck of a task: the busiest of the placements that it visits, or the steps of one group."""
    routes = [its.route for its in cost.model.loops]
    loads = server_loads(routes, times)
    route, end = routes[loop], max(ends)
    server = max(route.servers, key=lambda server: loads[server])
    share = loads[server] / end if end else 0.0

    def words(server: int) -> str:
        if server < 0:
            return "the link between nodes"
        names = cost.model.placements[server]
        where = ranges_text(phase.placements[server].devices)
        common = ", ".join(name for name in names if name in problem.graph.shared)
        return f"{common} on {where}" if common else where

    step_s = sum(times[loop])
    if share < BUSY and route.steps * step_s > BUSY * ends[loop]:
        longest, server = max(zip(times[loop], route.servers, strict=True))
        part = longest / step_s if step_s else 0.0
        return f"it is as long as the steps of one group ({in_words(step_s)} each, {part:.0%} of it {words(server)})"
    return f"its bottleneck is {words(server)}, busy {share:.0%} of the rollout"


def _fused_or_split(plan: Plan, number: int, problem: Problem, loop: int) -> str:
    """Makespan with physics and rendering split instead of fused, or fused instead of split, on the same devices with
    the best number of groups."""
    own = [name for name in problem.graph.loops[loop] if name not in problem.graph.shared]
    places = [placement for placement in plan.phases[number].placements if set(placement.components) & set(own)]
    pools = {problem.pools[name] for name in own}
    if len(own) < 2 or len(pools) > 1 or any(not set(placement.components) <= set(own) for placement in places):
        return ""
    fused = len(places) == 1
    best = math.inf
    for other in _fused(places) if not fused else _split(places[0], problem.graph.ordered(own)):
        kept = tuple(placement for placement in plan.phases[number].placements if placement not in places)
        phases = list(plan.phases)
        phases[number] = replace(phases[number], placements=(*kept, *other))
        for groups in problem.group_options(loop, [placement.components for placement in (*kept, *other)]):
            several = tuple(groups if i == loop else n for i, n in enumerate(plan.groups))
            changed = replace(plan, phases=tuple(phases), groups=several)
            best = min(best, _seconds_with(changed, problem, loop, groups, own[0]))
    if math.isinf(best):
        return ""
    seconds = _seconds_with(plan, problem, loop, plan.groups_of(loop), own[0])
    words = ("Fused", "split") if fused else ("Split", "fused")
    ratio = best / seconds if seconds else 1.0
    than = "as long" if abs(ratio - 1) < 0.005 else f"{ratio:.2f} times as long"
    return f" {words[0]}: {words[1]}, on the same devices, an iteration would take {than}."


def _seconds_with(plan: Plan, problem: Problem, loop: int, groups: int, first: str) -> float:
    for placement in (placement for phase in plan.phases for placement in phase.placements):
        if first in placement.components and (problem.environments[loop] // groups) % placement.count:
            return math.inf
    try:
        return predict(plan, problem.workflow, problem.profile, problem.cluster).iteration_s
    except PlanError:
        return math.inf


def _fused(places: Sequence[Placement]) -> Iterator[tuple[Placement, ...]]:
    """One placement on all devices, on one less, and so on."""
    names = tuple(name for placement in places for name in placement.components)
    devices = tuple(device for placement in places for device in placement.devices)
    for count in range(sum(placement.count for placement in places), 0, -1):
        yield (Placement(names, first_of(devices, count)),)


def _split(place: Placement, names: Sequence[str]) -> Iterator[tuple[Placement, ...]]:
    for count in range(1, place.count):
        rest = tuple(reversed(first_of(tuple(reversed(place.devices)), place.count - count, last=True)))
        yield Placement((names[0],), first_of(place.devices, count)), Placement(tuple(names[1:]), rest)


def in_words(seconds: float) -> str:
    """A duration as text for people."""
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
