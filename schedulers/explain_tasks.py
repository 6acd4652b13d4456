"""Of a plan of several tasks in words: where each is rolled out, what it waits for, and why fused or split."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from schedulers import network
from schedulers.errors import PlanError
from schedulers.layout import ranges_text
from schedulers.phases import group_options
from schedulers.plan import DeviceRange, Phase, Placement, Plan
from schedulers.prediction import Costs, alone_calls, phase_costs, predict, predict_sequential
from schedulers.times import Problem

BUSY = 0.9
"""Share of its time above which a placement is what a task waits for."""


def tasks_explained(plan: Plan, problem: Problem) -> list[str]:
    """A sentence on what overlapping gains, and a few for each task. None for plans of one task."""
    if not problem.graph.several:
        return []
    number = next(i for i, phase in enumerate(plan.phases) if problem.graph.loop[0] in phase.components)
    cost = phase_costs(plan, plan.phases[number], problem)
    circuits = [loop.circuit for loop in cost.shape.loops]
    times = cost.shape.by_loop(cost.visits)
    ends = [max(rounds[-1]) for rounds in network.completions(circuits, times)]
    result = [_overlap(plan, problem)]
    for loop in range(len(circuits)):
        text = _where(plan, plan.phases[number], problem, loop)
        alone = network.end([circuits[loop]], [alone_calls(problem, cost, loop)])
        text += f". Its rollout ends after {in_words(ends[loop])}; alone it would take {in_words(alone)}"
        text += f"; {_waits(problem, plan.phases[number], cost, times, ends, loop)}"
        result.append(f"{text}.{_why_so(plan, number, problem, loop)}")
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
    own = [name for name in problem.graph.loops[loop] if name not in problem.graph.common]
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
    """Who else is in a placement: other tasks by their numbers, what belongs to no single task by name."""
    graph = problem.graph
    owners = {name: i for i, members in enumerate(graph.loops) for name in members if name not in graph.common}
    tasks = sorted({owners[name] for name in names if name in owners} - {loop})
    words = [f"task{'s' if len(tasks) > 1 else ''} {', '.join(map(str, tasks))}"] if tasks else []
    return " and ".join([*words, *(name for name in names if name not in owners)])


def _waits(
    problem: Problem, phase: Phase, cost: Costs, times: Sequence[Sequence[float]], ends: Sequence[float], loop: int
) -> str:
    """What binds a task: the busiest of the placements that it visits, or its groups' own way round."""
    circuits = [shape.circuit for shape in cost.shape.loops]
    loads = network.loads(circuits, times)
    circuit, end = circuits[loop], max(ends)
    server = max(circuit.servers, key=lambda server: loads[server])
    share = loads[server] / end if end else 0.0

    def what(server: int) -> str:
        if server < 0:
            return "the link between nodes"
        names = cost.shape.placements[server]
        where = ranges_text(phase.placements[server].devices)
        common = ", ".join(name for name in names if name in problem.graph.common)
        return f"{common} on {where}" if common else where

    way = sum(times[loop])
    if share < BUSY and circuit.rounds * way > BUSY * ends[loop]:
        longest, server = max(zip(times[loop], circuit.servers, strict=True))
        part = longest / way if way else 0.0
        return f"it is as long as a group's own way round ({in_words(way)} a round, {part:.0%} of it {what(server)})"
    return f"what it waits for most is {what(server)}, busy {share:.0%} of the rollout"


def _why_so(plan: Plan, number: int, problem: Problem, loop: int) -> str:
    """What the other of fused and split would take with the same devices and the best number of groups."""
    own = [name for name in problem.graph.loops[loop] if name not in problem.graph.common]
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
        for groups in group_options(problem, loop, [placement.components for placement in (*kept, *other)]):
            several = tuple(groups if i == loop else n for i, n in enumerate(plan.groups))
            changed = replace(plan, phases=tuple(phases), groups=several)
            best = min(best, _seconds(changed, problem, loop, groups, own[0]))
    if math.isinf(best):
        return ""
    seconds = _seconds(plan, problem, loop, plan.groups_of(loop), own[0])
    words = ("Fused", "split") if fused else ("Split", "fused")
    ratio = best / seconds if seconds else 1.0
    than = "as long" if abs(ratio - 1) < 0.005 else f"{ratio:.2f} times as long"
    return f" {words[0]}: {words[1]}, on the same devices, an iteration would take {than}."


def _seconds(plan: Plan, problem: Problem, loop: int, groups: int, first: str) -> float:
    for placement in (placement for phase in plan.phases for placement in phase.placements):
        if first in placement.components and (problem.environments[loop] // groups) % placement.count:
            return math.inf
    try:
        return predict(plan, problem.workflow, problem.profile, problem.cluster).iteration_s
    except PlanError:
        return math.inf


def _fused(places: Sequence[Placement]) -> Iterator[tuple[Placement, ...]]:
    """All devices, or as many as the environments divide among."""
    names = tuple(name for placement in places for name in placement.components)
    devices = tuple(device for placement in places for device in placement.devices)
    for count in range(sum(placement.count for placement in places), 0, -1):
        yield (Placement(names, _first(devices, count)),)


def _split(place: Placement, names: Sequence[str]) -> Iterator[tuple[Placement, ...]]:
    for count in range(1, place.count):
        rest = tuple(reversed(_first(tuple(reversed(place.devices)), place.count - count, last=True)))
        yield Placement((names[0],), _first(place.devices, count)), Placement(tuple(names[1:]), rest)


def _first(devices: Sequence[DeviceRange], count: int, last: bool = False) -> tuple[DeviceRange, ...]:
    """So many of these devices, the first of each range, or the last."""
    result = []
    for part in devices:
        mine = min(part.count, count)
        if mine:
            result.append(replace(part, first=part.first + (part.count - mine if last else 0), count=mine))
            count -= mine
    return tuple(result)


def in_words(seconds: float) -> str:
    """A duration for people."""
    return f"{seconds:.1f} s" if seconds >= 10 else f"{seconds:.3g} s" if seconds >= 1 else f"{seconds * 1e3:.3g} ms"
