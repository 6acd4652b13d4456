"""One phase as servers, visits and paths: everything about its cost except how many devices each placement has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import numpy as np

from schedulers.graph import Graph
from schedulers.laws import Times, arrival, largest, run_seconds, shared_loop
from schedulers.profile import Profile
from schedulers.workflow import Workflow

Start = Literal["begin", "loop", "stream"]
"""Of a path: with the phase; when the loop has ended; part by part as the loop delivers."""


@dataclass(frozen=True)
class Visit:
    """A group's stay on one placement in one round of the loop."""

    placement: int
    components: tuple[str, ...]


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
    - In the loop a group visits placements in the loop's order; a placement serves groups in turn.
    - A placement that holds loop components begins others only when the loop has ended.
    - A placement works on components level by level, a level being what lies between two barriers; within a
      level part by part, all its components on one part before the next, and a part goes on when all are done.
    - One step ahead, loop and learner side run at the same time, and what closes the iteration after both.
    """

    placements: tuple[tuple[str, ...], ...]
    groups: int
    micro_batch: int
    visits: tuple[Visit, ...]
    segments: tuple[Segment, ...]
    links: tuple[tuple[int, int, bool], ...]
    """Between segments: source, target, and whether the target waits for all of the source's parts."""
    starts: tuple[frozenset[Start], ...]
    """Of each segment."""
    paths: tuple[Path, ...]
    tail: tuple[Path, ...]
    """What comes after everything else, one step ahead only."""
    steps: int
    waves: int
    deliveries: tuple[tuple[int, int, int], ...]
    """Part k (from 1) is complete when group `s` has gone `h` times round: k, h, s."""
    arrivals: tuple[float, ...]
    """In place of `deliveries`: share of the loop's time at which part k is complete."""
    beside: frozenset[str]
    """Components that work while another placement of the phase is busy."""
    ways: tuple[float, ...] = ()
    """Seconds of a group's messages on their way into each visit; none: nothing crosses between nodes. A way is a
    server like a placement: it carries the groups' messages one after the other."""

    @property
    def rounds(self) -> int:
        return self.steps * self.waves

    @cached_property
    def simple(self) -> bool:
        """Each placement is visited once a round, so that the loop has a closed form."""
        return len({visit.placement for visit in self.visits}) == len(self.visits)

    def loop_end(self, total: Times, bottleneck: Times) -> Times:
        """Seconds of the loop from sum and maximum of the placements' times; a lower bound if not `simple`."""
        if not self.visits:
            return 0.0
        if not self.simple:
            return self.rounds * np.maximum(total, self.groups * bottleneck)
        return arrival(total, bottleneck, self.groups, self.rounds, self.groups - 1)

    def stream_end(self, total: Times, bottleneck: Times, run_total: Times, run_bottleneck: Times) -> Times:
        """End of a run that the loop feeds part by part."""
        end = self.loop_end(total, bottleneck)
        parts = len(self.deliveries)
        if self.arrivals:
            whens = [(k, end * share) for k, share in enumerate(self.arrivals, start=1)]
        elif not self.simple:
            whens = [(parts, end)]
        else:
            first: dict[tuple[int, int], int] = {}
            for k, rounds, group in self.deliveries:
                first.setdefault((rounds, group), k)
            whens = [(k, arrival(total, bottleneck, self.groups, h, s)) for (h, s), k in first.items()]
        return largest([when + run_total + (parts - k) * run_bottleneck for k, when in whens])

    def seconds(self, visits: Sequence[Times], segments: Sequence[Times]) -> Times:
        """Of the phase, given seconds per group of each visit and per part of each segment.

        Exact if `simple`, else a lower bound; see `exact_seconds`.
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
        if self.ways:
            total, bottleneck = total + sum(self.ways), np.maximum(bottleneck, max(self.ways))

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
        """Of the phase, also where a placement is visited more than once a round."""
        if self.simple or not self.visits:
            return float(self.seconds(visits, segments))
        servers = [visit.placement for visit in self.visits]
        if self.ways:
            visits = [seconds for way in zip(self.ways, visits, strict=True) for seconds in way]
            servers = [server for i, placement in enumerate(servers) for server in (~i, placement)]
        done = shared_loop(visits, servers, self.groups, self.rounds)
        end = done[-1][-1]
        if self.arrivals:
            whens = [end * share for share in self.arrivals]
        else:
            whens = [done[h - 1][s] for _, h, s in self.deliveries]

        def length(path: Path) -> float:
            time = {"begin": 0.0, "loop": end, "stream": 0.0}[path.start]
            for number, run in enumerate(path.runs):
                times, parts = [segments[i] for i in run], self.segments[run[0]].parts
                if path.start == "stream" and number == 0:
                    time = max(when + sum(times) + (parts - k) * max(times) for k, when in enumerate(whens, start=1))
                else:
                    time += sum(times) + (parts - 1) * max(times)
            return time

        result = max(length(path) for path in self.paths)
        return result + max(length(path) for path in self.tail) if self.tail else result


def shape_of(
    graph: Graph,
    workflow: Workflow,
    profile: Profile,
    placements: Sequence[tuple[str, ...]],
    groups: int,
    micro_batch: int,
    ahead: bool = False,
) -> Shape | None:
    """The shape of a phase; None where its placements would wait for each other in a circle."""
    placements = tuple(tuple(names) for names in placements)
    where = {name: i for i, names in enumerate(placements) for name in names}
    loop = tuple(name for name in graph.loop if name in where)
    visits = _visits(loop, where)
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
    steps, waves = (workflow.loop.steps, workflow.waves) if workflow.loop else (1, 1)
    deliveries, arrivals = _deliveries(workflow, profile, groups, micro_batch, parts, steps)
    streams = any(path.start == "stream" for path in paths)
    return Shape(
        placements=placements,
        groups=groups,
        micro_batch=micro_batch,
        visits=visits,
        segments=tuple(segments),
        links=tuple(links),
        starts=tuple(frozenset(start) for start in starts),
        paths=tuple(dict.fromkeys(paths)),
        tail=tuple(_paths(sorted(tail), links, [set() for _ in segments])),
        steps=steps,
        waves=waves,
        deliveries=deliveries if streams else (),
        arrivals=arrivals if streams else (),
        beside=_beside(graph, where, groups, parts, looped, ahead, early=groups * waves > 1 or bool(profile.arrivals)),
    )


def _visits(loop: tuple[str, ...], where: dict[str, int]) -> tuple[Visit, ...]:
    visits: list[Visit] = []
    for name in loop:
        if visits and visits[-1].placement == where[name]:
            visits[-1] = Visit(where[name], (*visits[-1].components, name))
        else:
            visits.append(Visit(where[name], (name,)))
    return tuple(visits)


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
    workflow: Workflow, profile: Profile, groups: int, micro_batch: int, parts: int, steps: int
) -> tuple[tuple[tuple[int, int, int], ...], tuple[float, ...]]:
    if profile.arrivals:
        known = np.arange(1, len(profile.arrivals) + 1) / len(profile.arrivals)
        shares = np.interp(np.arange(1, parts + 1) / parts, known, profile.arrivals)
        return tuple((k, steps, 0) for k in range(1, parts + 1)), tuple(float(share) for share in shares)
    group = workflow.items / workflow.waves / groups
    result = []
    for k in range(1, parts + 1):
        last = -(-min(k * micro_batch, workflow.items) // group) - 1
        wave, number = divmod(int(last), groups)
        result.append((k, (wave + 1) * steps, number))
    return tuple(result), ()


def _beside(
    graph: Graph, where: dict[str, int], groups: int, parts: int, looped: set[int], ahead: bool, early: bool
) -> frozenset[str]:
    """Components during whose work another placement can be busy: others of the loop where several groups go
    round, components that do not wait for each other, and neighbours that stream."""

    def together(a: str, b: str) -> bool:
        inside = (a in graph.loop) + (b in graph.loop)
        if inside == 2:
            return groups > 1
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
