"""The best way to run the phase in which several tasks are rolled out: who shares devices, in how many groups.

Where there are few ways (two tasks) all are tried. Where there are many, tasks are shared out to sets that share
cores, and what is found is improved step by step; `relaxed_bound` says how far it can be from the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product

import numpy as np

from schedulers import task_family
from schedulers.links import travelled
from schedulers.search import Caps
from schedulers.shape import Shape
from schedulers.shaping import shape_of
from schedulers.task_allocation import TOLERANCE, NetworkAllocation
from schedulers.task_family import Blocks, bell, by_pool, classes, family, possible
from schedulers.times import POOLS, Problem

MOST_DESCENTS = 2
"""Of the ways that it begins with, so many are improved."""
MOST_STEPS = 100
"""Ways that improving one of these looks at, so that ten tasks are planned in seconds."""
FEW_ALLOCATIONS = 500
"""Of a way; all are looked at."""
NEAR = 1.05
"""Ways so much slower than the best may become better when they are improved."""
WORTH_SHIFTING = 1.01
"""Ways so much slower than the best may beat it when devices are given differently."""
WEIGHTS = np.linspace(0.0, 1.0, 21)
"""Of the shared server's load against that of a pool, in a relaxation."""


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
        least_extra: float,
        deadline: float,
    ) -> None:
        """`group_options`: of a loop under a partition; `extra`: seconds that loading a partition costs, `least_extra`
        what it costs at least."""
        self.problem, self.graph = problem, problem.graph
        self.components, self.kind, self.micro_batches = components, kind, micro_batches
        self.group_options, self.caps, self.deadline = group_options, caps, deadline
        self.extra, self.least_extra = extra, least_extra
        self.alike = classes(problem)
        self.ahead = problem.ahead and kind == "apart" and len(components) == len(self.graph.names)

    def solve(self) -> Found:
        found = self._exhaustive() if self._few() else self._step_by_step()
        if found.shape is None:
            return Found(math.inf, math.inf)  # Nothing fits.
        bound = max(found.bound, self.relaxed_bound() + self.least_extra)
        return Found(found.seconds, min(bound, found.seconds), found.shape, found.counts)

    def _few(self) -> bool:
        groups = math.prod(len(self.group_options(i, ())) for i in range(len(self.graph.loops)))
        ways = groups * len(self.micro_batches)
        if self.kind == "apart":
            for pool in POOLS:
                ways *= bell(sum(self.problem.pools[name] == pool for name in self.components))
        return ways <= task_family.MOST_WAYS

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
        # Of those that promise about the same, the tidiest stays: partitions come in that order.
        for i in sorted(range(len(candidates)), key=lambda i: _bucket(bounds[i])):
            late = time.monotonic() > self.deadline and best.shape is not None
            if late or not bounds[i] < best.seconds * (1 - TOLERANCE):
                open_bound = min(open_bound, bounds[i])
                continue
            candidate, cost = candidates[i]
            outcome = candidate.solve(best.seconds - cost, self.deadline)
            open_bound = min(open_bound, outcome.bound + cost)
            if outcome.counts:
                best = Found(outcome.seconds + cost, 0.0, candidate.shape, outcome.counts)
        return Found(best.seconds, min(best.seconds, open_bound), best.shape, best.counts)

    # --- step by step

    def _step_by_step(self) -> Found:
        found: list[tuple[Found, Way]] = []
        least = self.relaxed_bound()
        for start in self._starts():
            if time.monotonic() > self.deadline and found:
                break
            # Those that come close are worth improving too.
            cutoff = min((one.seconds for one, _ in found), default=math.inf) * NEAR
            one = self._played(start, cutoff)
            if one.shape is not None:
                found.append((one, start))
        found.sort(key=lambda pair: pair[0].seconds)
        best = found[0][0] if found else Found(math.inf, 0.0)
        for one, way in found[:MOST_DESCENTS]:
            if best.seconds > least * (1 + TOLERANCE):
                one = self._improved(one, way)
                best = one if one.seconds < best.seconds * (1 - 1e-9) else best
        return best

    def _improved(self, best: Found, way: Way) -> Found:
        """What the first better neighbour leads to, again and again."""
        improved, seen = True, {self._pattern(way)}
        while improved:
            improved = False
            for other in self._neighbours(way):
                pattern = self._pattern(other)
                if pattern in seen:
                    continue
                if len(seen) > MOST_STEPS or time.monotonic() > self.deadline:
                    return best
                seen.add(pattern)
                found = self._played(other, best.seconds * (1 - 1e-6))
                if found.shape is not None:
                    best, way, improved = found, other, True
                    break
        return best

    def _pattern(self, way: Way) -> object:
        """Equal for ways that differ only in which of several tasks that are alike has which place."""
        of = {name: i for i, loop in enumerate(self.graph.loops) for name in loop if name not in self.graph.common}
        kind = {i: (number, way.groups[i]) for number, alike in enumerate(self.alike) for i in alike}
        labels = {name: (kind[i], self.graph.loops[i].index(name)) for name, i in of.items()}
        where = {name: number for number, block in enumerate(way.blocks) for name in block}
        blocks = [tuple(sorted(map(str, (labels.get(name, name) for name in block)))) for block in way.blocks]
        tasks = []
        for i, loop in enumerate(self.graph.loops):
            mine = [where[name] for name in loop]
            tasks.append((kind[i], tuple(blocks[number] for number in mine), tuple(map(mine.index, mine))))
        return tuple(sorted(blocks)), tuple(sorted(tasks)), way.micro_batch

    def _played(self, way: Way, cutoff: float) -> Found:
        """The way with devices given greedily and then shifted; infinite where that does not beat `cutoff`."""
        none = Found(math.inf, 0.0)
        shape = self.shape(way)
        if shape is None:
            return none
        allocation, cost = NetworkAllocation(self.problem, shape, self.caps), self.extra(way.blocks)
        if not allocation.quick_bound() + cost < cutoff:
            return none
        if math.prod(len(options.counts) for options in allocation.options) <= FEW_ALLOCATIONS:
            outcome = allocation.solve(cutoff - cost, self.deadline)
            return Found(outcome.seconds + cost, 0.0, shape, outcome.counts) if outcome.counts else none
        picks = allocation.greedy()
        if picks is None:
            return none
        seconds = allocation.played(picks) + cost
        if seconds < cutoff * WORTH_SHIFTING:
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
        """Another number of groups for one task or for all that are alike; one component, all of a task's, or all that
        are no single task's, into another placement or one of their own; two placements in one."""
        for members in dict.fromkeys([*self.alike, *((i,) for mine in self.alike for i in mine)]):
            for number in self.group_options(members[0], way.blocks):
                groups = tuple(number if i in members else n for i, n in enumerate(way.groups))
                yield Way(way.blocks, groups, way.micro_batch)
        for micro_batch in self.micro_batches:
            yield Way(way.blocks, way.groups, micro_batch)
        if self.kind == "turns":
            return
        own = [frozenset(loop) - self.graph.common for loop in self.graph.loops]
        parts: list[tuple[str, ...]] = [(name,) for name in self.graph.ordered(self.components)]
        own.append(self.components - {name for mine in own for name in mine})  # What is no single task's, together.
        parts += [names for mine in own for names in by_pool(self.problem, self.graph.ordered(mine)) if len(names) > 1]
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
        if possible(self.problem, self.components, blocks):
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
        least: float = max(min(option[0] for option in options) for options in tasks)
        for pool in range(len(POOLS)):
            for weight in WEIGHTS:
                least = max(
                    least,
                    sum(min(weight * o[1] + (1 - weight) * o[2 + pool] for o in options) for options in tasks),
                )
        return float(least) + self._after()

    def _after(self) -> float:
        """What follows the loops at least, where nothing of it can begin before they have ended."""
        if self.ahead:
            return 0.0
        barred = set[str]().union(*(self.graph.barred[name] for name in self.graph.loop))
        ends: dict[str, float] = {}
        for name in self.graph.ordered(self.components & barred):
            before = [ends[edge.source] for edge in self.graph.edges if edge.target == name and edge.source in ends]
            items = self.problem.workflow.items
            component = self.problem.profile.components[name]
            parts = self.micro_batches if name in self.graph.divisible else (items,)
            own = min((items // part * float(self.problem.times(name, part).min()) for part in parts), default=0.0)
            # Parts of two components may overlap: only one counts where they stream.
            ends[name] = own * min(1.0, component.beside)
            whole = [edge for edge in self.graph.edges if edge.target == name and edge.flow == "barrier"]
            ends[name] += max((ends[edge.source] for edge in whole if edge.source in ends), default=0.0)
            ends[name] = max([ends[name], *before])
        return max(ends.values(), default=0.0)

    def _loads(self, number: int) -> list[tuple[float, ...]]:
        """Of a task, for each number of groups: its own way alone, the load that it puts on a component that all tasks
        share, and device seconds over devices (of what takes turns: seconds), by pool."""
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
                # Who takes turns has all devices, and waits for all others.
                share = times if self.kind == "turns" else times * used / problem.sizes[pool]
                area[pool] += 0.0 if free else float(share.min()) * groups * rounds
            alone = rounds * max(sum(once.values()), groups * max(once.values()))
            serial = max((groups * rounds * once[name] for name in shared), default=0.0)
            result.append((alone, serial, *(area[pool] for pool in POOLS)))
        return result


def _bucket(bound: float) -> int:
    """Equal for bounds that differ by less than the tolerance, and rising."""
    return math.floor(math.log(max(bound, 1e-300)) / TOLERANCE) if bound < math.inf else 10**9
