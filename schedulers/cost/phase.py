"""Performance model of one phase: everything about its makespan except how many devices each placement has.

The rules, for plans of any kind:

- In a rollout loop a group of environments visits placements in the loop's order, once per step. With one loop a
  placement serves the groups in turn; with several loops it serves the group that is ready first.
- Outside the loops, components process the items in micro-batches. Components of one placement between the same
  barriers are a *stage*: it processes one micro-batch after the other, with all its components on one before the next,
  and passes each on when all are done with it. Stages that stream to each other are a *pipeline*; after a barrier a new
  pipeline begins.
- A placement with components of loops begins its stages when all loops have ended.
- One step ahead, the loop and the learner side work at the same time, and the closing components after both.

The makespan is the longest path through these: begin or loop, then pipelines.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from schedulers.cost.laws import (
    Route,
    Times,
    completions,
    largest,
    least_makespan,
    loop_completion,
    pipeline_seconds,
    revisiting_loop,
    stream_seconds,
)
from schedulers.profile import Profile
from schedulers.workflow import Graph, Workflow, acyclic

Start = Literal["begin", "loop", "stream"]
"""Beginning of a path: with the phase; when the loops have ended; micro-batch by micro-batch as the loops deliver."""

LINKS_PER_LOOP = 1000
"""Server numbers reserved for the links between nodes of each loop."""


@dataclass(frozen=True)
class Visit:
    """Part of a loop's step that a group spends on one placement."""

    placement: int
    components: tuple[str, ...]
    loop: int = 0


@dataclass(frozen=True)
class LoopModel:
    """One loop of the phase: the placements that its groups visit in a step."""

    groups: int
    steps: int
    """Chunk steps of an iteration: those of an episode times the episodes per environment."""
    visits: tuple[Visit, ...]
    transfers_s: tuple[float, ...] = ()
    """Seconds of a group's messages between nodes before each visit; empty: nothing crosses between nodes. A link is a
    server like a placement: it carries the groups' messages one after the other."""

    @cached_property
    def simple(self) -> bool:
        """True if each placement is visited once a step, so that the loop alone has a closed formula."""
        return len({visit.placement for visit in self.visits}) == len(self.visits)

    @cached_property
    def route(self) -> Route:
        """Servers of a step. Links between nodes are servers with numbers below 0, of this loop alone."""
        servers = [visit.placement for visit in self.visits]
        if self.transfers_s:
            first = -1 - LINKS_PER_LOOP * self.visits[0].loop
            servers = [server for i, placement in enumerate(servers) for server in (first - i, placement)]
        return Route(tuple(servers), self.groups, self.steps)

    def server_seconds(self, visits: Sequence[Times]) -> list[Times]:
        """Seconds of each server of `route`, given those of each visit."""
        if not self.transfers_s:
            return list(visits)
        return [seconds for pair in zip(self.transfers_s, visits, strict=True) for seconds in pair]


@dataclass(frozen=True)
class Stage:
    """Components of one placement that take turns on each micro-batch, and pass it on when all are done with it."""

    placement: int
    components: tuple[str, ...]
    parts: int
    """Number of micro-batches: items / micro_batch, or one for components that are not micro-batched."""


@dataclass(frozen=True)
class Path:
    """One path from the phase's beginning to its end: pipelines of stages, given by number. Between two pipelines all
    micro-batches are waited for, so that the pipelines' times add."""

    start: Start
    pipelines: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class PhaseModel:
    """A phase with these placements, groups and micro-batches. See the module for the rules."""

    placements: tuple[tuple[str, ...], ...]
    micro_batch: int
    loops: tuple[LoopModel, ...]
    """All of the workflow's loops, or none."""
    stages: tuple[Stage, ...]
    dependencies: tuple[tuple[int, int, bool], ...]
    """Source stage, target stage, and True if the target waits for all of the source's micro-batches."""
    starts: tuple[frozenset[Start], ...]
    """Conditions under which each stage begins."""
    paths: tuple[Path, ...]
    closing_paths: tuple[Path, ...]
    """Paths after all others, one step ahead only."""
    deliveries: tuple[tuple[int, int, int, int], ...]
    """(k, h, s, i): micro-batch k (from 1) is complete when group `s` of loop `i` has made `h` steps, and the
    micro-batches before it are complete. With several loops there may be more than one entry for k."""
    arrivals: tuple[float, ...]
    """In place of `deliveries`: share of the loop's time at which micro-batch k is complete."""
    contended: frozenset[str]
    """Components that work while another placement of the phase is busy."""
    node_counts: tuple[int, ...] = ()
    """Nodes of each placement, where that is decided; else empty."""

    @cached_property
    def visits(self) -> tuple[Visit, ...]:
        """Visits of all loops, one loop after the other."""
        return tuple(visit for loop in self.loops for visit in loop.visits)

    @cached_property
    def visit_rows(self) -> list[tuple[int, int]]:
        """Placement of each visit, and the visit's number among those of the placement."""
        return _numbered([visit.placement for visit in self.visits])

    @cached_property
    def stage_rows(self) -> list[tuple[int, int]]:
        """Placement of each stage, and the stage's number among those of the placement."""
        return _numbered([stage.placement for stage in self.stages])

    @property
    def several_loops(self) -> bool:
        """True if several loops share the phase: they have no formula and are played."""
        return len(self.loops) > 1

    @property
    def simple(self) -> bool:
        """True if the closed formulas are exact."""
        return not self.loops or (not self.several_loops and self.loops[0].simple)

    @cached_property
    def pipelines(self) -> tuple[tuple[int, ...], ...]:
        """All pipelines of all paths, each once."""
        return tuple(dict.fromkeys(run for path in (*self.paths, *self.closing_paths) for run in path.pipelines))

    def by_loop(self, visits: Sequence[Times]) -> list[list[Times]]:
        """Seconds of each loop's servers, given those of each visit of all loops."""
        result, rest = [], list(visits)
        for loop in self.loops:
            result.append(loop.server_seconds(rest[: len(loop.visits)]))
            rest = rest[len(loop.visits) :]
        return result

    def seconds(self, visits: Sequence[float], stages: Sequence[float]) -> float:
        """Makespan, given seconds per group of each visit and per micro-batch of each stage."""
        totals, tops = self._sums(stages)
        if self.simple:
            loads: dict[int, float] = {}
            for visit, time in zip(self.visits, visits, strict=True):
                loads[visit.placement] = loads.get(visit.placement, 0.0) + time
            bottleneck = largest(list(loads.values())) if loads else 0.0
            return float(self.seconds_from_sums(sum(loads.values()) if loads else 0.0, bottleneck, totals, tops))
        times = self.by_loop(visits)
        if self.several_loops:
            done = completions([loop.route for loop in self.loops], times)
        else:
            route = self.loops[0].route
            done = [revisiting_loop(times[0], route.servers, route.groups, route.steps)]
        end = max(max(steps[-1]) for steps in done)
        return float(self.seconds_after_loops(end, self.delivered(end, done), stages))

    def seconds_from_sums(
        self, total: Times, bottleneck: Times, totals: Sequence[Times], tops: Sequence[Times]
    ) -> Times:
        """Makespan of a phase with one loop or none, from the sum and the maximum of the loop's times and of those of
        each of `pipelines`. Rises with every argument. Exact if `simple`, else a lower bound."""
        if not self.loops:
            return self._longest(0.0, (), totals, tops)
        loop = self.loops[0]
        if loop.transfers_s:
            total = total + sum(loop.transfers_s)
            bottleneck = np.maximum(bottleneck, max(loop.transfers_s))
        if loop.simple:
            end = loop_completion(total, bottleneck, loop.groups, loop.steps, loop.groups - 1)
        else:
            end = loop.steps * np.maximum(total, loop.groups * bottleneck)
        if self.arrivals:
            delivered = [(k, end * share) for k, share in enumerate(self.arrivals, start=1)]
        elif self.deliveries and not loop.simple:
            delivered = [(self.deliveries[-1][0], end)]
        else:
            first: dict[tuple[int, int], int] = {}
            for k, steps, group, _ in self.deliveries:
                first.setdefault((steps, group), k)
            delivered = [
                (k, loop_completion(total, bottleneck, loop.groups, steps, group))
                for (steps, group), k in first.items()
            ]
        return self._longest(end, delivered, totals, tops)

    def least_seconds(self, visits: Sequence[Times], stages: Sequence[Times]) -> Times:
        """Lower bound of the makespan where several loops share the phase, without messages between nodes."""
        near = self._without_transfers
        end = least_makespan([loop.route for loop in near.loops], near.by_loop(visits))
        return self.seconds_after_loops(end, [(self.deliveries[-1][0], end)] if self.deliveries else [], stages)

    @cached_property
    def _without_transfers(self) -> PhaseModel:
        return replace(self, loops=tuple(replace(loop, transfers_s=()) for loop in self.loops))

    def delivered(self, end: float, done: Sequence[Sequence[Sequence[float]]]) -> list[tuple[int, float]]:
        """Micro-batches (from 1) and the times at which they are complete, given the loops' end and completions by
        loop, step and group."""
        if self.arrivals:
            return [(k, end * share) for k, share in enumerate(self.arrivals, start=1)]
        return [(k, done[i][h - 1][s]) for k, h, s, i in self.deliveries]

    def seconds_after_loops(self, end: Times, delivered: Sequence[tuple[int, Times]], stages: Sequence[Times]) -> Times:
        """Makespan of the phase whose loops end and deliver micro-batches at these times."""
        return self._longest(end, delivered, *self._sums(stages))

    def _sums(self, stages: Sequence[Times]) -> tuple[list[Times], list[Times]]:
        """Sum and maximum of the stages' times of each pipeline."""
        totals = [sum(stages[i] for i in run) for run in self.pipelines]
        return totals, [largest([stages[i] for i in run]) for run in self.pipelines]

    def _longest(
        self, end: Times, delivered: Sequence[tuple[int, Times]], totals: Sequence[Times], tops: Sequence[Times]
    ) -> Times:
        number = {run: i for i, run in enumerate(self.pipelines)}

        def length(path: Path) -> Times:
            time: Times = end if path.start == "loop" else 0.0
            for run in path.pipelines:
                i, parts = number[run], self.stages[run[0]].parts
                if path.start == "stream" and run is path.pipelines[0]:
                    time = stream_seconds(delivered, totals[i], tops[i], parts)
                else:
                    time = time + pipeline_seconds(totals[i], tops[i], parts)
            return time

        result = largest([length(path) for path in self.paths])
        return result + largest([length(path) for path in self.closing_paths]) if self.closing_paths else result


def _numbered(placements: Sequence[int]) -> list[tuple[int, int]]:
    return [(placement, placements[:i].count(placement)) for i, placement in enumerate(placements)]


def phase_model(
    graph: Graph,
    workflow: Workflow,
    profile: Profile,
    placements: Sequence[tuple[str, ...]],
    groups: Sequence[int],
    micro_batch: int,
    ahead: bool = False,
) -> PhaseModel | None:
    """Model of a phase with these placements and groups of each loop; None where placements would wait for each other
    in a circle."""
    placements = tuple(tuple(names) for names in placements)
    where = {name: i for i, names in enumerate(placements) for name in names}
    in_loop = [name for name in graph.loop if name in where]
    loops = _loops(graph, workflow, where, groups) if in_loop else ()
    parts = -(-workflow.items // micro_batch)
    last = frozenset(graph.closing) if ahead else frozenset[str]()
    rest = [name for name in graph.names if name in where and name not in graph.loop]
    if any(graph.later[name] & set(in_loop) for name in rest):
        return None  # Components that the loop needs are in an earlier phase.
    looped = {where[name] for name in in_loop}
    if ahead and any(where[name] in looped for name in rest if name not in last):
        return None
    stages, dependencies, starts = _stages(graph, where, rest, parts, looped, last, ahead=ahead)
    if not acyclic({i: [target for source, target, _ in dependencies if source == i] for i in range(len(stages))}):
        return None
    closing = {i for i, stage in enumerate(stages) if set(stage.components) <= last}
    paths = _paths([i for i in range(len(stages)) if i not in closing], dependencies, starts)
    if in_loop:
        paths.append(Path("loop", ()))
    elif not paths:
        paths.append(Path("begin", ()))
    streams = any(path.start == "stream" for path in paths)
    deliveries, arrivals = _deliveries(workflow, profile, groups, micro_batch, parts) if streams else ((), ())
    early = any(loop.groups > 1 for loop in loops) or workflow.episodes_per_env > 1 or bool(profile.arrivals)
    return PhaseModel(
        placements=placements,
        micro_batch=micro_batch,
        loops=loops,
        stages=tuple(stages),
        dependencies=tuple(dependencies),
        starts=tuple(frozenset(start) for start in starts),
        paths=tuple(dict.fromkeys(paths)),
        closing_paths=tuple(_paths(sorted(closing), dependencies, [set() for _ in stages])),
        deliveries=deliveries,
        arrivals=arrivals,
        contended=_contended(graph, where, loops, parts, looped, ahead=ahead, early=early or graph.several_loops),
    )


def _loops(graph: Graph, workflow: Workflow, where: dict[str, int], groups: Sequence[int]) -> tuple[LoopModel, ...]:
    result = []
    for i, (names, loop) in enumerate(zip(graph.loops, workflow.loops, strict=True)):
        visits: list[Visit] = []
        for name in names:
            if visits and visits[-1].placement == where[name]:
                visits[-1] = Visit(where[name], (*visits[-1].components, name), i)
            else:
                visits.append(Visit(where[name], (name,), i))
        result.append(LoopModel(groups[i], loop.steps * workflow.episodes_per_env, tuple(visits)))
    return tuple(result)


def _stages(
    graph: Graph,
    where: dict[str, int],
    rest: list[str],
    parts: int,
    looped: set[int],
    last: frozenset[str],
    *,
    ahead: bool,
) -> tuple[list[Stage], list[tuple[int, int, bool]], list[set[Start]]]:
    """Stages, the dependencies between them and how each begins. A level counts the barriers before a component."""
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
        keys.setdefault((where[name], level[name], name in last, name not in graph.micro_batched), []).append(name)
    order = sorted(keys, key=lambda key: (key[2], key[1], key[3], key[0]))
    mine = {name: i for i, key in enumerate(order) for name in keys[key]}
    stages = [Stage(key[0], tuple(keys[key]), 1 if key[3] else parts) for key in order]
    starts: list[set[Start]] = [set() for _ in stages]
    dependencies: dict[tuple[int, int], bool] = {}
    for edge in inner:
        if edge.target not in mine:
            continue
        target, barrier = mine[edge.target], edge.flow == "barrier" or parts == 1
        if edge.source in mine:
            if mine[edge.source] != target:
                pair = (mine[edge.source], target)
                dependencies[pair] = dependencies.get(pair, False) or barrier
        elif not ahead:
            starts[target].add("loop" if barrier else "stream")
    for i, key in enumerate(order):
        for j in range(i):
            if order[j][0] == key[0]:
                dependencies[(j, i)] = True
        if key[0] in looped and not ahead:
            starts[i].add("loop")
        if "loop" in starts[i]:
            starts[i].discard("stream")  # Waiting for the whole loop includes its parts.
    return stages, [(i, j, barrier) for (i, j), barrier in dependencies.items()], starts


def _paths(members: list[int], dependencies: list[tuple[int, int, bool]], starts: Sequence[set[Start]]) -> list[Path]:
    """All paths from a stage where work can begin to one that nothing follows."""
    inside = set(members)
    following: dict[int, list[tuple[int, bool]]] = {i: [] for i in members}
    fed = set()
    for source, target, barrier in dependencies:
        if source in inside and target in inside:
            following[source].append((target, barrier))
            fed.add(target)
    found: list[Path] = []

    def walk(start: Start, pipelines: tuple[tuple[int, ...], ...], here: int) -> None:
        if not following[here]:
            found.append(Path(start, pipelines))
        for target, barrier in following[here]:
            grown = (*pipelines, (target,)) if barrier else (*pipelines[:-1], (*pipelines[-1], target))
            walk(start, grown, target)

    for i in members:
        for start in sorted(starts[i]):
            walk(start, ((i,),), i)
        if not starts[i] and i not in fed:
            walk("begin", ((i,),), i)
    # A path whose work is part of another's with the same beginning can never be the longest.
    flat = [(path, [i for run in path.pipelines for i in run]) for path in dict.fromkeys(found)]
    return [
        path
        for path, work in flat
        if not any(
            other is not path and other.start == path.start and len(theirs) > len(work) and _within(path, other)
            for other, theirs in flat
        )
    ]


def _within(path: Path, other: Path) -> bool:
    """True if each pipeline of `path` is, in order, part of another pipeline of `other`."""
    if path.start == "stream" and not set(path.pipelines[0]) <= set(other.pipelines[0]):
        return False
    rest = iter(other.pipelines)
    return all(any(set(run) <= set(candidate) for candidate in rest) for run in path.pipelines)


def _deliveries(
    workflow: Workflow, profile: Profile, groups: Sequence[int], micro_batch: int, parts: int
) -> tuple[tuple[tuple[int, int, int, int], ...], tuple[float, ...]]:
    if profile.arrivals:
        known = np.arange(1, len(profile.arrivals) + 1) / len(profile.arrivals)
        shares = np.interp(np.arange(1, parts + 1) / parts, known, profile.arrivals)
        steps = workflow.loops[0].steps
        return tuple((k, steps, 0, 0) for k in range(1, parts + 1)), tuple(float(share) for share in shares)
    # Items are in the order of episodes, then of loops, then of groups. A micro-batch waits for the last of each loop.
    result: dict[tuple[int, int], tuple[int, int, int, int]] = {}
    first = 0.0  # number of the next group's first item
    for episode in range(workflow.episodes_per_env):
        for i, loop in enumerate(workflow.loops):
            size = workflow.environments(i) / groups[i]
            for group in range(groups[i]):
                steps = (episode + 1) * loop.steps
                for k in range(int(first // micro_batch) + 1, -int(-(first + size) // micro_batch) + 1):
                    result[k, i] = (k, steps, group, i)
                first += size
    return tuple(sorted(result.values())), ()


def _contended(
    graph: Graph,
    where: dict[str, int],
    loops: Sequence[LoopModel],
    parts: int,
    looped: set[int],
    *,
    ahead: bool,
    early: bool,
) -> frozenset[str]:
    """Components during whose work another placement can be busy: others of a loop with several groups, those of other
    loops, components that do not wait for each other, and neighbours that stream.

    `early`: the loop delivers micro-batches before it ends."""

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
