"""The best way to run one phase: every partition into placements, number of groups and micro-batch."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from schedulers.graph import partitions, turns
from schedulers.links import travelled
from schedulers.memory import levels
from schedulers.profile import Pool
from schedulers.search import SLACK, Allocation, Caps
from schedulers.shape import Shape
from schedulers.shaping import shape_of
from schedulers.task_family import family
from schedulers.task_search import TaskSearch
from schedulers.times import POOLS, Problem, resident_bytes, switch_seconds

Kind = Literal["turns", "apart"]
"""`turns`: one placement a pool; `apart`: some pool is split between placements."""


@dataclass(frozen=True)
class Solved:
    """A phase, how long it takes, and what no phase of these components and this kind can undercut."""

    seconds: float
    """With `switch_s`."""
    bound: float
    shape: Shape | None = None
    counts: tuple[int, ...] = ()
    switch_s: float = 0.0
    """To load the components before and unload them after."""


def group_options(problem: Problem, number: int, placements: Sequence[tuple[str, ...]]) -> list[int]:
    """Into how many groups a loop's environments may be divided. A loop that is in one placement has one group, unless
    it was measured with more."""
    loop = problem.graph.loops[number]
    alone = any(set(loop) <= set(names) for names in placements)
    measured = {entry.groups for entry in problem.profile.together if set(entry.components) == set(loop)}
    return [
        groups
        for groups in problem.groups
        if problem.environments[number] % groups == 0 and (groups == 1 or not alone or groups in measured)
    ]


class Phases:
    """Solves phases and remembers them; `deadline` is on `time.monotonic`'s clock."""

    def __init__(self, problem: Problem, deadline: float) -> None:
        self.problem, self.deadline = problem, deadline
        self.found: dict[tuple[object, ...], Solved] = {}

    def solve(
        self, components: frozenset[str], kind: Kind, switching: bool = False, caps: Caps | None = None
    ) -> Solved:
        """The best phase of exactly these components; `seconds` is infinite where there is none.

        `switching`: with the time to load and unload them, which depends on who shares devices.
        """
        caps = caps or Caps(self.problem.limits, self.problem.limits)
        caps = replace(caps, lent=not switching and self.lent(components))
        key = (components, kind, switching, tuple(caps.resident.items()), tuple(caps.peak.items()))
        if key not in self.found:
            self.found[key] = self._solve(components, kind, switching, caps)
        return self.found[key]

    def lent(self, components: frozenset[str]) -> bool:
        """Whether what decides in a phase shares weights with what is trained in another, if both stay loaded."""
        return self.problem.shared is not None and self.problem.shared.trainer not in components

    def levels(self, components: frozenset[str], kind: Kind) -> list[dict[Pool, float]]:
        """The different amounts, by pool, that the fullest device can have resident in such a phase."""
        seen: dict[tuple[float, ...], dict[Pool, float]] = {}
        for names in self._partitions(components, kind):
            held = {pool: 0.0 for pool in POOLS}
            for placement in names:
                pool = self.problem.pools[placement[0]]
                held[pool] = max(held[pool], resident_bytes(self.problem, placement, self.lent(components)))
            seen[tuple(held.values())] = held
        return list(seen.values())

    def _solve(self, components: frozenset[str], kind: Kind, switching: bool, caps: Caps) -> Solved:
        if self.problem.graph.several and self.problem.graph.loop[0] in components:
            return self._solve_tasks(components, kind, switching, caps)
        candidates = [Allocation(self.problem, shape, caps) for shape in self.shapes(components, kind)]
        extra = [
            switch_seconds(self.problem, candidate.shape.placements) if switching else 0.0 for candidate in candidates
        ]
        bounds = [candidate.quick_bound() + cost for candidate, cost in zip(candidates, extra, strict=True)]
        best, open_bound = Solved(math.inf, math.inf), math.inf
        # Where two are equally good, the one with fewer placements stays: shapes come in that order.
        for i in sorted(range(len(candidates)), key=lambda i: bounds[i]):
            if bounds[i] >= best.seconds * (1 - SLACK):
                break
            if time.monotonic() > self.deadline and best.shape is not None:
                open_bound = min(open_bound, bounds[i])
                break
            if candidates[i].shared_bound() + extra[i] >= best.seconds * (1 - SLACK):
                continue
            outcome = candidates[i].solve(best.seconds - extra[i], self.deadline)
            open_bound = min(open_bound, outcome.bound + extra[i])
            if outcome.counts:
                best = Solved(outcome.seconds + extra[i], 0.0, candidates[i].shape, outcome.counts, extra[i])
        return replace(best, bound=min(best.seconds, open_bound))

    def _solve_tasks(self, components: frozenset[str], kind: Kind, switching: bool, caps: Caps) -> Solved:
        def extra(blocks: Sequence[tuple[str, ...]]) -> float:
            return switch_seconds(self.problem, tuple(blocks)) if switching else 0.0

        def options(number: int, blocks: Sequence[tuple[str, ...]]) -> list[int]:
            return group_options(self.problem, number, blocks)

        parts = self._micro_batches(components)
        # Components in placements of their own are loaded side by side: no partition takes less.
        each, shared = tuple((name,) for name in components), self.problem.shared
        least = switch_seconds(self.problem, each, shared.names if shared else None) if switching else 0.0
        found = TaskSearch(self.problem, components, kind, parts, options, caps, extra, least, self.deadline).solve()
        cost = extra(found.shape.placements) if found.shape else 0.0
        return Solved(found.seconds, found.bound, found.shape, found.counts, cost)

    def _partitions(self, components: frozenset[str], kind: Kind) -> list[tuple[tuple[str, ...], ...]]:
        graph, pools = self.problem.graph, self.problem.pools
        if graph.several and graph.loop[0] in components:
            return family(self.problem, components, kind)
        one = turns(graph, components, pools)
        if kind == "turns":
            return [one]
        found = [names for names in partitions(graph, components, pools) if len(names) > len(one)]
        # More placements of a pool than it has devices cannot be.
        sizes = self.problem.counts
        found = [
            names
            for names in found
            if all(sum(pools[placement[0]] == pool for placement in names) <= len(sizes[pool]) for pool in POOLS)
        ]
        return sorted(found, key=len)

    def shapes(self, components: frozenset[str], kind: Kind) -> Iterator[Shape]:
        """All shapes of the plan space for these components, without regard to memory."""
        problem, graph = self.problem, self.problem.graph
        ahead = problem.ahead and kind == "apart" and len(components) == len(graph.names)
        for names in self._partitions(components, kind):
            for groups in self._groups(components, names):
                for micro_batch in self._micro_batches(components):
                    shape = shape_of(graph, problem.workflow, problem.profile, names, groups, micro_batch, ahead=ahead)
                    if shape is not None:
                        yield travelled(problem, shape)

    def _groups(self, components: frozenset[str], names: tuple[tuple[str, ...], ...]) -> list[tuple[int, ...]]:
        """Of each loop; where the loops are not in the phase that does not matter."""
        graph = self.problem.graph
        if not graph.loops or graph.loop[0] not in components:
            return [(1,) * len(graph.loops)]
        return [(groups,) for groups in group_options(self.problem, 0, names)]

    def _micro_batches(self, components: frozenset[str]) -> list[int]:
        """Whole parts of the items that respect units, where a part can flow or has to fit in memory."""
        problem, graph, items = self.problem, self.problem.graph, self.problem.workflow.items
        flowing = [edge for edge in graph.edges if edge.flow == "micro_batch"]
        inside = any({edge.source, edge.target} <= components for edge in flowing)
        tight = any(
            problem.profile.components[name].bytes_per_item
            and math.isfinite(levels(problem.cluster, problem.pools[name])[0])
            for name in components & graph.divisible
        )
        units = [edge.unit for edge in flowing if {edge.source, edge.target} & components]
        return [
            items // parts
            for parts in (problem.parts if inside or tight else (1,))
            if items % parts == 0 and all((items // parts) % unit == 0 for unit in units)
        ]
