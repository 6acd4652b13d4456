"""The best way to run the phase in which several tasks are rolled out: who shares devices, in how many groups.

Where there are few ways (two tasks) all are tried. Where there are many, tasks are shared out to sets that share
cores, and what is found is improved step by step; `relaxed_bound` says how far it can be from the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from schedulers.graph import partitions, turns
from schedulers.links import travelled
from schedulers.search import Caps
from schedulers.shape import Shape, shape_of
from schedulers.task_allocation import TOLERANCE, NetworkAllocation
from schedulers.times import POOLS, Problem

MOST_WAYS = 3000
"""Partitions times groups times parts that are tried one by one."""
MOST_REST = 8
"""Partitions of what is not one task's own that the step by step search begins with."""
WEIGHTS = np.linspace(0.0, 1.0, 21)
"""Of the shared server's load against that of a pool, in a relaxation."""

Blocks = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Way:
    """Who shares devices, in how many groups each loop goes, and how large parts are."""

    blocks: Blocks
    groups: tuple[int, ...]
    micro_batch: int


@dataclass(frozen=True)
class Found:
    seconds: float
    """With what `extra` says of the placements."""
    bound: float
    shape: Shape | None = None
    counts: tuple[int, ...] = ()


class TaskSearch:
    def __init__(
        self,
        problem: Problem,
        components: frozenset[str],
        kind: str,
        micro_batches: Sequence[int],
        group_options: Callable[[int, Blocks], Sequence[int]],
        caps: Caps,
        extra: Callable[[Blocks], float],
        deadline: float,
    ) -> None:
        """`group_options`: of a loop under a partition; `extra`: seconds that loading a partition costs."""
        self.problem, self.graph = problem, problem.graph
        self.components, self.kind, self.micro_batches = components, kind, micro_batches
        self.group_options, self.caps, self.extra, self.deadline = group_options, caps, extra, deadline
        self.ahead = problem.ahead and kind == "apart" and len(components) == len(self.graph.names)

    def solve(self) -> Found:
        found = self._exhaustive() if self._few() else self._step_by_step()
        bound = max(found.bound, self.relaxed_bound())
        return Found(found.seconds, min(bound, found.seconds), found.shape, found.counts)

    def _few(self) -> bool:
        groups = math.prod(len(self.group_options(i, ())) for i in range(len(self.graph.loops)))
        ways = groups * len(self.micro_batches)
        if self.kind == "apart":
            for pool in POOLS:
                ways *= _bell(sum(self.problem.pools[name] == pool for name in self.components))
        return ways <= MOST_WAYS

    def shape(self, way: Way) -> Shape | None:
        shape = shape_of(
            self.graph,
            self.problem.workflow,
            self.problem.profile,
            way.blocks,
            way.groups,
            way.micro_batch,
            ahead=self.ahead,
        )
        return shape and travelled(self.problem, shape)

    # --- all ways

    def _exhaustive(self) -> Found:
        candidates = []
        for blocks in family(self.problem, self.components, self.kind):
            several = [self.group_options(i, blocks) for i in range(len(self.graph.loops))]
            for groups, micro_batch in product(product(*several), self.micro_batches):
                shape = self.shape(Way(blocks, groups, micro_batch))
                if shape is not None:
                    candidates.append((NetworkAllocation(self.problem, shape, self.caps), self.extra(blocks)))
        bounds = [candidate.quick_bound() + cost for candidate, cost in candidates]
        best, open_bound = Found(math.inf, math.inf), math.inf
        for i in sorted(range(len(candidates)), key=lambda i: bounds[i]):
            late = time.monotonic() > self.deadline and best.shape is not None
            if late or not bounds[i] < best.seconds * (1 - TOLERANCE):
                open_bound = min(open_bound, bounds[i])
                break
            candidate, cost = candidates[i]
            outcome = candidate.solve(best.seconds - cost, self.deadline)
            open_bound = min(open_bound, outcome.bound + cost)
            if outcome.counts:
                best = Found(outcome.seconds + cost, 0.0, candidate.shape, outcome.counts)
        return Found(best.seconds, min(best.seconds, open_bound), best.shape, best.counts)

    # --- step by step

    def _step_by_step(self) -> Found:
        best, way = Found(math.inf, 0.0), None
        seen: set[Way] = set()
        starts = list(self._starts())
        for start in starts:
            if time.monotonic() > self.deadline and best.shape is not None:
                break
            found = self._played(start, best.seconds, seen)
            if found.seconds < best.seconds:
                best, way = found, start
        improved = way is not None
        while improved and time.monotonic() < self.deadline:
            improved = False
            assert way is not None
            for other in self._neighbours(way):
                if time.monotonic() > self.deadline:
                    break
                found = self._played(other, best.seconds, seen)
                if found.seconds < best.seconds * (1 - 1e-6):
                    best, way, improved = found, other, True
                    break
        return best

    def _played(self, way: Way, cutoff: float, seen: set[Way]) -> Found:
        """The way with devices given greedily and then shifted; infinite where it cannot beat `cutoff`."""
        none = Found(math.inf, 0.0)
        if way in seen:
            return none
        seen.add(way)
        shape = self.shape(way)
        if shape is None:
            return none
        allocation, cost = NetworkAllocation(self.problem, shape, self.caps), self.extra(way.blocks)
        if not allocation.quick_bound() + cost < cutoff:
            return none
        picks = allocation.greedy()
        if picks is None:
            return none
        seconds = allocation.played(picks) + cost
        if seconds < cutoff * 1.02:
            picks = allocation.shifted(picks)
            seconds = allocation.played(picks) + cost
        return Found(seconds, 0.0, shape, allocation.counts_of(picks)) if seconds < cutoff else none

    def _starts(self) -> Iterator[Way]:
        numbers = sorted({number for i in range(len(self.graph.loops)) for number in self.group_options(i, ())})
        for blocks in family(self.problem, self.components, self.kind):
            for number in reversed(numbers):
                options = [self.group_options(i, blocks) for i in range(len(self.graph.loops))]
                groups = tuple(max((n for n in own if n <= number), default=own[0]) for own in options)
                for micro_batch in self.micro_batches:
                    yield Way(blocks, groups, micro_batch)

    def _neighbours(self, way: Way) -> Iterator[Way]:
        """Another number of groups for one task or for all that are alike; one component, or all of a task's, into
        another placement or one of their own; two placements in one."""
        alike = classes(self.problem)
        for members in dict.fromkeys([*alike, *((i,) for mine in alike for i in mine)]):
            for number in self.group_options(members[0], way.blocks):
                groups = tuple(number if i in members else n for i, n in enumerate(way.groups))
                yield Way(way.blocks, groups, way.micro_batch)
        for micro_batch in self.micro_batches:
            yield Way(way.blocks, way.groups, micro_batch)
        if self.kind == "turns":
            return
        own = [frozenset(loop) - self.graph.common for loop in self.graph.loops]
        parts: list[tuple[str, ...]] = [(name,) for name in self.graph.ordered(self.components)]
        parts += [names for mine in own for names in _by_pool(self.problem, self.graph.ordered(mine)) if len(names) > 1]
        for moved in parts:
            rest = [tuple(name for name in block if name not in moved) for block in way.blocks]
            kept = tuple(block for block in rest if block)
            for target in (None, *kept):
                blocks = (
                    (*kept, moved)
                    if target is None
                    else tuple(self.graph.ordered((*block, *moved)) if block == target else block for block in kept)
                )
                yield from self._with_blocks(way, blocks)
        for i, one in enumerate(way.blocks):
            for other in way.blocks[i + 1 :]:
                joined = self.graph.ordered((*one, *other))
                yield from self._with_blocks(way, (*(b for b in way.blocks if b not in (one, other)), joined))

    def _with_blocks(self, way: Way, blocks: Blocks) -> Iterator[Way]:
        blocks = tuple(sorted(blocks, key=lambda block: self.graph.position(block[0])))
        if _possible(self.problem, self.components, blocks):
            options = [self.group_options(i, blocks) for i in range(len(self.graph.loops))]
            groups = tuple(n if n in own else own[0] for n, own in zip(way.groups, options, strict=True))
            yield Way(blocks, groups, way.micro_batch)

    # --- what no way undercuts

    def relaxed_bound(self) -> float:
        """Each task may choose its groups by itself, pays for nobody's turn, and has all devices to itself; but devices
        have only so much time, and the component that all share serves one group at a time.

        By weights (a Lagrangian relaxation, valid at any): T >= sum over tasks of the least of
        w * load of the shared component + (1 - w) * device seconds / devices.
        """
        tasks = [self._loads(i) for i in range(len(self.graph.loops))]
        least = max(min(option[0] for option in options) for options in tasks)
        for pool in range(len(POOLS)):
            for weight in WEIGHTS:
                least = max(
                    least,
                    sum(min(weight * o[1] + (1 - weight) * o[2 + pool] for o in options) for options in tasks),
                )
        return least

    def _loads(self, number: int) -> list[tuple[float, ...]]:
        """Of a task, for each number of groups: its own way alone, the load that it puts on a component that all tasks
        share, and device seconds over devices, by pool."""
        problem, loop = self.problem, self.graph.loops[number]
        rounds = problem.workflow.loops[number].steps * problem.workflow.episodes_per_env
        shared = [name for name in loop if all(name in other for other in self.graph.loops)]
        # Measured together, components may take less than one after the other.
        free = any(set(entry.components) & set(loop) for entry in problem.profile.together)
        result = []
        for groups in self.group_options(number, ()):
            once: dict[str, float] = {}
            area = dict.fromkeys(POOLS, 0.0)
            for name in loop:
                component, pool = problem.profile.components[name], problem.pools[name]
                times = problem.times(name, problem.environments[number] / groups) * min(1.0, component.beside)
                once[name] = 0.0 if free else float(times.min())
                used = np.minimum(problem.counts[pool], component.most_devices)
                area[pool] += 0.0 if free else float((times * used).min()) * groups * rounds / problem.sizes[pool]
            alone = rounds * max(sum(once.values()), groups * max(once.values()))
            serial = max((groups * rounds * once[name] for name in shared), default=0.0)
            result.append((alone, serial, *(area[pool] for pool in POOLS)))
        return result


def family(problem: Problem, components: frozenset[str], kind: str) -> list[Blocks]:
    """The partitions of a phase with several loops that are looked at: all where these are few, else those of sets of
    tasks that share devices. Fewer placements first."""
    graph, pools = problem.graph, problem.pools
    one = turns(graph, components, pools)
    if kind == "turns":
        return [one]
    sizes = {pool: sum(pools[name] == pool for name in components) for pool in POOLS}
    if math.prod(_bell(size) for size in sizes.values()) <= MOST_WAYS:
        found = list(partitions(graph, components, pools))
    else:
        found = list(_of_sets(problem, components))
    good = [blocks for blocks in dict.fromkeys(found) if len(blocks) > len(one)]
    return sorted((blocks for blocks in good if _enough(problem, blocks)), key=len)


def _of_sets(problem: Problem, components: frozenset[str]) -> Iterator[Blocks]:
    """One to as many sets as there are tasks, of about equal work; in each physics and rendering fused or split; and
    with them every partition of the rest, as far as these are few."""
    graph, pools = problem.graph, problem.pools
    own = [graph.ordered(set(loop) - graph.common) for loop in graph.loops]
    rest = frozenset(components) - {name for names in own for name in names}
    others = [tuple(blocks) for blocks in partitions(graph, rest, pools)] if len(rest) <= 6 else []
    others = (others or [turns(graph, rest, pools)])[:MOST_REST]
    for count in range(1, len(own) + 1):
        sets = _balanced(problem, own, count)
        fused = [block for names in sets for block in _by_pool(problem, graph.ordered(names))]
        steps = [[names[depth : depth + 1] for names in own] for depth in range(max(map(len, own)))]
        split = [
            block
            for names in sets
            for step in steps
            for block in _by_pool(problem, graph.ordered(name for one in step for name in one if name in names))
        ]
        for blocks, more in product(dict.fromkeys((tuple(fused), tuple(split))), others):
            together = tuple(sorted((*blocks, *more), key=lambda block: graph.position(block[0])))
            if _possible(problem, components, together):
                yield together


def _balanced(problem: Problem, own: Sequence[tuple[str, ...]], count: int) -> list[set[str]]:
    """The tasks' own components in so many sets, the one with most work first into the set with least."""
    work = []
    for i, names in enumerate(own):
        seconds = sum(float(problem.times(name, problem.environments[i])[0]) for name in names)
        work.append(problem.workflow.loops[i].steps * seconds)
    sets: list[set[str]] = [set() for _ in range(count)]
    filled = [0.0] * count
    for i in sorted(range(len(own)), key=lambda i: -work[i]):
        least = filled.index(min(filled))
        sets[least] |= set(own[i])
        filled[least] += work[i]
    return [names for names in sets if names]


def classes(problem: Problem) -> list[tuple[int, ...]]:
    """Tasks that are alike: as many steps and environments, and the same times."""
    profile, found = problem.profile, dict[object, list[int]]()
    for i, (loop, names) in enumerate(zip(problem.workflow.loops, problem.graph.loops, strict=True)):
        key = (loop.steps, problem.environments[i], tuple(profile.components[name] for name in names))
        found.setdefault(key, []).append(i)
    return [tuple(members) for members in found.values()]


def _by_pool(problem: Problem, names: Sequence[str]) -> list[tuple[str, ...]]:
    found = [tuple(name for name in names if problem.pools[name] == pool) for pool in POOLS]
    return [block for block in found if block]


def _enough(problem: Problem, blocks: Blocks) -> bool:
    """Whether each placement can have a device."""
    return all(sum(problem.pools[block[0]] == pool for block in blocks) <= len(problem.counts[pool]) for pool in POOLS)


def _possible(problem: Problem, components: frozenset[str], blocks: Blocks) -> bool:
    """Whether these are placements of one pool each that can work as a pipeline, more than one of some pool."""
    graph, pools = problem.graph, problem.pools
    if any(len({pools[name] for name in block}) > 1 for block in blocks) or not _enough(problem, blocks):
        return False
    if len(blocks) <= len(turns(graph, components, pools)):
        return False
    for block in blocks:
        inside = set(block)
        for name in components - inside:
            if any(name in graph.later[a] for a in block) and graph.later[name] & inside:
                return False
    return True


@cache
def _bell(count: int) -> int:
    """Partitions of so many components."""
    return 1 if count == 0 else sum(math.comb(count - 1, k) * _bell(k) for k in range(count))
