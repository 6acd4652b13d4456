"""One phase as servers, visits and paths: everything about its cost except how many devices each placement has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from schedulers.graph import Graph
from schedulers.laws import Times, arrival, largest, run_seconds, shared_loop
from schedulers.network import Circuit, bound, completions
from schedulers.profile import Profile
from schedulers.workflow import Workflow

Start = Literal["begin", "loop", "stream"]
"""Of a path: with the phase; when the loops have ended; part by part as they deliver."""

WAYS = 1000
"""Numbers of servers that each loop has for its ways between nodes."""


@dataclass(frozen=True)
class Visit:
    """A group's stay on one placement in one round of its loop."""

    placement: int
    components: tuple[str, ...]
    loop: int = 0


@dataclass(frozen=True)
class LoopShape:
    """One loop of the phase: the placements that its groups visit, and how often."""

    groups: int
    rounds: int
    visits: tuple[Visit, ...]
    ways: tuple[float, ...] = ()
    """Seconds of a group's messages on their way into each visit; none: nothing crosses between nodes. A way is a
    server like a placement: it carries the groups' messages one after the other."""

    @cached_property
    def simple(self) -> bool:
        """Each placement is visited once a round, so that the loop by itself has a closed form."""
        return len({visit.placement for visit in self.visits}) == len(self.visits)

    @cached_property
    def circuit(self) -> Circuit:
        """With the ways between nodes, which are servers of numbers below 0, of this loop alone."""
        servers = [visit.placement for visit in self.visits]
        if self.ways:
            first = -1 - WAYS * self.visits[0].loop
            servers = [server for i, placement in enumerate(servers) for server in (first - i, placement)]
        return Circuit(tuple(servers), self.groups, self.rounds)

    def calls(self, times: Sequence[Times]) -> list[Times]:
        """Seconds of each server of `circuit`, given those of each visit."""
        if not self.ways:
            return list(times)
        return [seconds for pair in zip(self.ways, times, strict=True) for seconds in pair]


@dataclass(frozen=True)
class Segment:
    """Components of one placement that take turns on each part, and pass it on when all are done with it."""

    placement: int
    components: tuple[str, ...]
    parts: int
    """How often: items / micro_batch, or once for what cannot be divided."""


@dataclass(frozen=True)
class Path:
    """One way from the phase's beginning to its end. A run is a chain of segments that stream; between runs all
    parts are waited for, so that the runs' times add."""

    start: Start
    runs: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Shape:
    """A phase whose placements hold the given components, with so many groups and items per part.

    The rules of the game, for plans of any kind:
    - In a loop a group visits placements in the loop's order. Of one loop, a placement serves the groups in turn; of
      several, the group that is ready first.
    - A placement that holds components of loops begins others only when all loops have ended.
    - A placement works on components level by level, a level being what lies between two barriers; within a
      level part by part, all its components on one part before the next, and a part goes on when all are done.
    - One step ahead, loop and learner side run at the same time, and what closes the iteration after both.
    """

    placements: tuple[tuple[str, ...], ...]
    micro_batch: int
    loops: tuple[LoopShape, ...]
    """All of the workflow's loops, or none."""
    segments: tuple[Segment, ...]
    links: tuple[tuple[int, int, bool], ...]
    """Between segments: source, target, and whether the target waits for all of the source's parts."""
    starts: tuple[frozenset[Start], ...]
    """Of each segment."""
    paths: tuple[Path, ...]
    tail: tuple[Path, ...]
    """What comes after everything else, one step ahead only."""
    deliveries: tuple[tuple[int, int, int, int], ...]
    """Part k (from 1) is complete when group `s` of loop `i` has gone `h` times round, and the parts before it are: k,
    h, s, i. Of several loops there may be more than one such for a part."""
    arrivals: tuple[float, ...]
    """In place of `deliveries`: share of the loop's time at which part k is complete."""
    beside: frozenset[str]
    """Components that work while another placement of the phase is busy."""

    @cached_property
    def visits(self) -> tuple[Visit, ...]:
        """Of all loops, one after the other."""
        return tuple(visit for loop in self.loops for visit in loop.visits)

    @property
    def several(self) -> bool:
        """Several loops share the phase: no law is exact, the network of their groups has to be played."""
        return len(self.loops) > 1

    @property
    def simple(self) -> bool:
        """The closed laws are exact."""
        return not self.loops or (not self.several and self.loops[0].simple)

    def by_loop(self, times: Sequence[Times], loops: Sequence[LoopShape] | None = None) -> list[list[Times]]:
        """Times of `visits`, each loop's by themselves, with those of its ways between nodes."""
        result, rest = [], list(times)
        for loop in self.loops if loops is None else loops:
            mine, rest = rest[: len(loop.visits)], rest[len(loop.visits) :]
            result.append(loop.calls(mine))
        return result

    def loop_end(self, total: Times, bottleneck: Times) -> Times:
        """Seconds of the only loop from sum and maximum of the placements' times; a lower bound if not `simple`."""
        if not self.loops:
            return 0.0
        loop = self.loops[0]
        if not loop.simple:
            return loop.rounds * np.maximum(total, loop.groups * bottleneck)
        return arrival(total, bottleneck, loop.groups, loop.rounds, loop.groups - 1)

    def stream_end(self, total: Times, bottleneck: Times, run_total: Times, run_bottleneck: Times) -> Times:
        """End of a run that the loop feeds part by part."""
        end = self.loop_end(total, bottleneck)
        parts, loop = self.deliveries[-1][0], self.loops[0]
        if self.arrivals:
            whens = [(k, end * share) for k, share in enumerate(self.arrivals, start=1)]
        elif not self.simple:
            whens = [(parts, end)]
        else:
            first: dict[tuple[int, int], int] = {}
            for k, rounds, group, _ in self.deliveries:
                first.setdefault((rounds, group), k)
            whens = [(k, arrival(total, bottleneck, loop.groups, h, s)) for (h, s), k in first.items()]
        return largest([when + run_total + (parts - k) * run_bottleneck for k, when in whens])

    def seconds(self, visits: Sequence[Times], segments: Sequence[Times]) -> Times:
        """Of a phase with one loop or none, given seconds per group of each visit and per part of each segment.

        Exact if `simple`, else a lower bound; see `exact_seconds`, and `least_seconds` for several loops.
        """
        loads: dict[int, Times] = {}
        for visit, time in zip(self.visits, visits, strict=True):
            loads[visit.placement] = loads.get(visit.placement, 0.0) + time
        total = sum(loads.values()) if loads else 0.0
        bottleneck = largest(list(loads.values())) if loads else 0.0
        totals = [sum(segments[i] for i in run) for run in self.runs]
        tops = [largest([segments[i] for i in run]) for run in self.runs]
        return self.combine(total, bottleneck, totals, tops)

    @cached_property
    def runs(self) -> tuple[tuple[int, ...], ...]:
        """All runs of all paths, each once."""
        return tuple(dict.fromkeys(run for path in (*self.paths, *self.tail) for run in path.runs))

    def combine(self, total: Times, bottleneck: Times, totals: Sequence[Times], tops: Sequence[Times]) -> Times:
        """`seconds` from the loop's sum and maximum and those of each run. Rises with every argument."""
        index = {run: i for i, run in enumerate(self.runs)}
        ways = self.loops[0].ways if self.loops else ()
        if ways:
            total, bottleneck = total + sum(ways), np.maximum(bottleneck, max(ways))

        def length(path: Path) -> Times:
            runs = list(path.runs)
            end: Times = 0.0
            if path.start == "stream":
                first = index[runs.pop(0)]
                end = self.stream_end(total, bottleneck, totals[first], tops[first])
            elif path.start == "loop":
                end = self.loop_end(total, bottleneck)
            for run in runs:
                i = index[run]
                end = end + run_seconds(totals[i], tops[i], self.segments[run[0]].parts)
            return end

        result = largest([length(path) for path in self.paths])
        return result + largest([length(path) for path in self.tail]) if self.tail else result

    def exact_seconds(self, visits: Sequence[float], segments: Sequence[float]) -> float:
        """Of the phase, also where a placement is visited more than once a round, or by several loops."""
        if self.simple:
            return float(self.seconds(visits, segments))
        times = self.by_loop(visits)
        if self.several:
            done = completions([loop.circuit for loop in self.loops], times)
        else:
            circuit = self.loops[0].circuit
            done = [shared_loop(times[0], circuit.servers, circuit.groups, circuit.rounds)]
        end = max(max(rounds[-1]) for rounds in done)
        return float(self.ending(end, self.delivered(end, done), segments))

    def least_seconds(self, visits: Sequence[Times], segments: Sequence[Times]) -> Times:
        """What the phase takes at least where several loops share it, without messages between nodes."""
        near = [replace(loop, ways=()) for loop in self.loops]
        end = bound([loop.circuit for loop in near], self.by_loop(visits, near))
        return self.ending(end, [(self.deliveries[-1][0], end)] if self.deliveries else [], segments)

    def delivered(self, end: float, done: Sequence[Sequence[Sequence[float]]]) -> list[tuple[int, float]]:
        """When each part is complete: parts from 1, given the loops' end and completions by loop, round and group."""
        if self.arrivals:
            return [(k, end * share) for k, share in enumerate(self.arrivals, start=1)]
        return [(k, done[i][h - 1][s]) for k, h, s, i in self.deliveries]

    def ending(self, end: Times, whens: Sequence[tuple[int, Times]], segments: Sequence[Times]) -> Times:
        """Of the phase whose loops end then, and deliver part k at `when` for each (k, when)."""

        def length(path: Path) -> Times:
            time: Times = 0.0 if path.start != "loop" else end
            for number, run in enumerate(path.runs):
                times, parts = [segments[i] for i in run], self.segments[run[0]].parts
                if path.start == "stream" and number == 0:
                    time = largest([when + sum(times) + (parts - k) * largest(times) for k, when in whens])
                else:
                    time = time + sum(times) + (parts - 1) * largest(times)
            return time

        result = largest([length(path) for path in self.paths])
        return result + largest([length(path) for path in self.tail]) if self.tail else result


def shape_of(
    graph: Graph,
    workflow: Workflow,
    profile: Profile,
    placements: Sequence[tuple[str, ...]],
    groups: Sequence[int],
    micro_batch: int,
    ahead: bool = False,
) -> Shape | None:
    """The shape of a phase; None where its placements would wait for each other in a circle. `groups`: of each loop."""
    placements = tuple(tuple(names) for names in placements)
    where = {name: i for i, names in enumerate(placements) for name in names}
    loop = tuple(name for name in graph.loop if name in where)
    loops = _loops(graph, workflow, where, groups) if loop else ()
    parts = -(-workflow.items // micro_batch)
    last = frozenset(graph.closing) if ahead else frozenset[str]()
    rest = [name for name in graph.names if name in where and name not in graph.loop]
    if any(graph.later[name] & set(loop) for name in rest):
        return None  # What the loop needs comes in a phase of its own.
    looped = {where[name] for name in loop}
    if ahead and any(where[name] in looped for name in rest if name not in last):
        return None
    segments, links, starts = _segments(graph, where, rest, parts, looped, ahead, last)
    if not _ordered(len(segments), links):
        return None
    tail = {i for i, segment in enumerate(segments) if set(segment.components) <= last}
    body = [i for i in range(len(segments)) if i not in tail]
    paths = _paths(body, links, starts)
    if loop:
        paths.append(Path("loop", ()))
    elif not paths:
        paths.append(Path("begin", ()))
    streams = any(path.start == "stream" for path in paths)
    deliveries, arrivals = _deliveries(workflow, profile, groups, micro_batch, parts) if streams else ((), ())
    several_parts = any(loop.groups > 1 for loop in loops) or workflow.episodes_per_env > 1 or bool(profile.arrivals)
    return Shape(
        placements=placements,
        micro_batch=micro_batch,
        loops=loops,
        segments=tuple(segments),
        links=tuple(links),
        starts=tuple(frozenset(start) for start in starts),
        paths=tuple(dict.fromkeys(paths)),
        tail=tuple(_paths(sorted(tail), links, [set() for _ in segments])),
        deliveries=deliveries,
        arrivals=arrivals,
        beside=_beside(graph, where, loops, parts, looped, ahead, early=several_parts or graph.several),
    )


def _loops(graph: Graph, workflow: Workflow, where: dict[str, int], groups: Sequence[int]) -> tuple[LoopShape, ...]:
    result = []
    for i, (names, loop) in enumerate(zip(graph.loops, workflow.loops, strict=True)):
        visits: list[Visit] = []
        for name in names:
            if visits and visits[-1].placement == where[name]:
                visits[-1] = Visit(where[name], (*visits[-1].components, name), i)
            else:
                visits.append(Visit(where[name], (name,), i))
        result.append(LoopShape(groups[i], loop.steps * workflow.episodes_per_env, tuple(visits)))
    return tuple(result)


def _segments(
    graph: Graph,
    where: dict[str, int],
    rest: list[str],
    parts: int,
    looped: set[int],
    ahead: bool,
    last: frozenset[str],
) -> tuple[list[Segment], list[tuple[int, int, bool]], list[set[Start]]]:
    """Segments, the links between them and how each begins. A level counts the barriers before a component."""
    level: dict[str, int] = {}
    inner = [edge for edge in graph.edges if edge.source in where and edge.target in where]
    for name in rest:
        level[name] = 0
        for edge in inner:
            if edge.target == name and not (ahead and edge.source in graph.loop):
                barrier = edge.flow == "barrier" or parts == 1
                level[name] = max(level[name], level.get(edge.source, 0) + barrier)
    keys: dict[tuple[int, int, bool, bool], list[str]] = {}
    for name in rest:
        keys.setdefault((where[name], level[name], name in last, name not in graph.divisible), []).append(name)
    order = sorted(keys, key=lambda key: (key[2], key[1], key[3], key[0]))
    mine = {name: i for i, key in enumerate(order) for name in keys[key]}
    segments = [Segment(key[0], tuple(keys[key]), 1 if key[3] else parts) for key in order]
    starts: list[set[Start]] = [set() for _ in segments]
    links: dict[tuple[int, int], bool] = {}
    for edge in inner:
        if edge.target not in mine:
            continue
        target, barrier = mine[edge.target], edge.flow == "barrier" or parts == 1
        if edge.source in mine:
            if mine[edge.source] != target:
                pair = (mine[edge.source], target)
                links[pair] = links.get(pair, False) or barrier
        elif not ahead:
            starts[target].add("loop" if barrier else "stream")
    for i, key in enumerate(order):
        for j in range(i):
            if order[j][0] == key[0]:
                links[(j, i)] = True
        if key[0] in looped and not ahead:
            starts[i].add("loop")
        if "loop" in starts[i]:
            starts[i].discard("stream")  # What waits for the whole loop waits for its parts.
    return segments, [(i, j, barrier) for (i, j), barrier in links.items()], starts


def _ordered(count: int, links: list[tuple[int, int, bool]]) -> bool:
    left = set(range(count))
    while left:
        free = {j for j in left if not any(target == j and source in left for source, target, _ in links)}
        if not free:
            return False
        left -= free
    return True


def _paths(members: list[int], links: list[tuple[int, int, bool]], starts: Sequence[set[Start]]) -> list[Path]:
    """All ways from a segment where work can begin to one that nothing follows."""
    inside = set(members)
    following: dict[int, list[tuple[int, bool]]] = {i: [] for i in members}
    fed = set()
    for source, target, barrier in links:
        if source in inside and target in inside:
            following[source].append((target, barrier))
            fed.add(target)
    found: list[Path] = []

    def walk(start: Start, runs: tuple[tuple[int, ...], ...], here: int) -> None:
        if not following[here]:
            found.append(Path(start, runs))
        for target, barrier in following[here]:
            grown = (*runs, (target,)) if barrier else (*runs[:-1], (*runs[-1], target))
            walk(start, grown, target)

    for i in members:
        for start in sorted(starts[i]):
            walk(start, ((i,),), i)
        if not starts[i] and i not in fed:
            walk("begin", ((i,),), i)
    # A path whose work is part of another's with the same beginning can never be the longest.
    flat = [(path, [i for run in path.runs for i in run]) for path in dict.fromkeys(found)]
    return [
        path
        for path, work in flat
        if not any(
            other is not path and other.start == path.start and len(theirs) > len(work) and _within(path, other)
            for other, theirs in flat
        )
    ]


def _within(path: Path, other: Path) -> bool:
    """Each run of `path` is, in order, part of a run of its own in `other`."""
    if path.start == "stream" and not set(path.runs[0]) <= set(other.runs[0]):
        return False
    rest = iter(other.runs)
    return all(any(set(run) <= set(candidate) for candidate in rest) for run in path.runs)


def _deliveries(
    workflow: Workflow, profile: Profile, groups: Sequence[int], micro_batch: int, parts: int
) -> tuple[tuple[tuple[int, int, int, int], ...], tuple[float, ...]]:
    if profile.arrivals:
        known = np.arange(1, len(profile.arrivals) + 1) / len(profile.arrivals)
        shares = np.interp(np.arange(1, parts + 1) / parts, known, profile.arrivals)
        steps = workflow.loops[0].steps
        return tuple((k, steps, 0, 0) for k in range(1, parts + 1)), tuple(float(share) for share in shares)
    # Items are in the order of episodes, then of loops, then of groups. A part waits for the last of each loop.
    result: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    first = 0.0  # Item of the next group.
    for episode in range(workflow.episodes_per_env):
        for i, loop in enumerate(workflow.loops):
            size = workflow.environments(i) / groups[i]
            for group in range(groups[i]):
                rounds = (episode + 1) * loop.steps
                for k in range(int(first // micro_batch) + 1, -int(-(first + size) // micro_batch) + 1):
                    result[k, i] = (k, rounds, group, i)
                first += size
    return tuple(sorted(result.values())), ()


def _beside(
    graph: Graph,
    where: dict[str, int],
    loops: Sequence[LoopShape],
    parts: int,
    looped: set[int],
    ahead: bool,
    early: bool,
) -> frozenset[str]:
    """Components during whose work another placement can be busy: others of the loop where several groups go
    round, those of other loops, components that do not wait for each other, and neighbours that stream."""

    def together(a: str, b: str) -> bool:
        inside = (a in graph.loop) + (b in graph.loop)
        if inside == 2:
            mine = [i for i, names in enumerate(graph.loops) if a in names or b in names]
            return len(mine) > 1 or loops[mine[0]].groups > 1
        if ahead and (a in graph.closing or b in graph.closing):
            return inside == 0 and a not in graph.later[b] and b not in graph.later[a]
        if ahead and inside == 1:
            return True
        if a in graph.later[b]:
            a, b = b, a
        elif b not in graph.later[a]:
            return True
        if a in graph.loop and (where[b] in looped or not early):
            return False
        return parts > 1 and b not in graph.barred[a]

    return frozenset(a for a in where if any(where[b] != where[a] and together(a, b) for b in where))
