"""Who may share devices in the phase in which several tasks are rolled out: the partitions that are looked at."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from itertools import product

from schedulers.graph import partitions, turns
from schedulers.times import POOLS, Problem

MOST_WAYS = 3000
"""Partitions times groups times parts that are tried one by one."""
MOST_REST = 8
"""Partitions of what is not one task's own that the step by step search begins with."""

Blocks = tuple[tuple[str, ...], ...]


def family(problem: Problem, components: frozenset[str], kind: str) -> list[Blocks]:
    """The partitions of a phase with several loops that are looked at: all where these are few, else those of sets of
    tasks that share devices. Those that mix tasks least come first, then those of few placements."""
    graph, pools = problem.graph, problem.pools
    one = turns(graph, components, pools)
    if kind == "turns":
        return [one]
    sizes = {pool: sum(pools[name] == pool for name in components) for pool in POOLS}
    if math.prod(bell(size) for size in sizes.values()) <= MOST_WAYS:
        found = list(partitions(graph, components, pools))
    else:
        found = list(_of_sets(problem, components))
    good = [blocks for blocks in dict.fromkeys(found) if len(blocks) > len(one)]
    return sorted((b for b in good if _enough(problem, b)), key=lambda b: (_mixed(problem, b), len(b)))


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
        fused = [block for names in sets for block in by_pool(problem, graph.ordered(names))]
        steps = [[names[depth : depth + 1] for names in own] for depth in range(max(map(len, own)))]
        split = [
            block
            for names in sets
            for step in steps
            for block in by_pool(problem, graph.ordered(name for one in step for name in one if name in names))
        ]
        for blocks, more in product(dict.fromkeys((tuple(fused), tuple(split))), others):
            together = tuple(sorted((*blocks, *more), key=lambda block: graph.position(block[0])))
            if possible(problem, components, together):
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


def by_pool(problem: Problem, names: Sequence[str]) -> list[tuple[str, ...]]:
    found = [tuple(name for name in names if problem.pools[name] == pool) for pool in POOLS]
    return [block for block in found if block]


def _enough(problem: Problem, blocks: Blocks) -> bool:
    """Whether each placement can have a device."""
    return all(sum(problem.pools[block[0]] == pool for block in blocks) <= len(problem.counts[pool]) for pool in POOLS)


def possible(problem: Problem, components: frozenset[str], blocks: Blocks) -> bool:
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


def _mixed(problem: Problem, blocks: Blocks) -> int:
    """Components of single tasks that share devices with those of other tasks."""
    owner = {name: i for i, loop in enumerate(problem.graph.loops) for name in loop if name not in problem.graph.common}
    own = [[name for name in block if name in owner] for block in blocks]
    return sum(len(names) for names in own if len({owner[name] for name in names}) > 1)


@cache
def bell(count: int) -> int:
    """Partitions of so many components."""
    return 1 if count == 0 else sum(math.comb(count - 1, k) * bell(k) for k in range(count))
