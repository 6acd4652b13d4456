"""One phase as servers, visits and paths: everything about its cost except how many devices each placement has."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import numpy as np

from schedulers.laws import Times, arrival, largest, run_seconds, shared_loop
from schedulers.network import Circuit, bound, completions

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
    nodes: tuple[int, ...] = ()
    """How many each placement is on, where that is decided; else none."""

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
