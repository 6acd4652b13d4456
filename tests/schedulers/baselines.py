"""Other ways to plan: every plan there is, and the simpler planners that the exact one must not lose to."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product

import numpy as np

from schedulers import (
    Cluster,
    DeviceRange,
    Mode,
    Phase,
    Placement,
    Plan,
    Pool,
    Profile,
    SearchOptions,
    Workflow,
    predict,
    validate,
)
from schedulers.cluster import POOLS
from schedulers.cost.prediction import PhaseCosts, phase_costs
from schedulers.cost.problem import Problem
from schedulers.cost.times import switch_seconds, working_bytes
from schedulers.errors import PlanError

GROUPS = (1, 2)
PARTS = (1, 2, 4)
SMALL = SearchOptions(GROUPS, PARTS)
Blocks = tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Choice:
    """One way to run one phase, with all that its cost and its memory come to."""

    names: frozenset[str]
    blocks: Blocks
    counts: tuple[int, ...]
    groups: tuple[int, ...]
    micro_batch: int
    seconds: float
    switch_s: float
    resident: tuple[float, ...]
    peak: tuple[float, ...]
    """Where all phases stay loaded: with weights that another phase has too counted there."""
    alone: tuple[float, ...]
    """The peak where nothing of other phases is loaded."""

    @property
    def split(self) -> bool:
        return len(self.counts) > 1


def set_partitions(names: Sequence[str]) -> Iterator[Blocks]:
    if not names:
        yield ()
        return
    for rest in set_partitions(names[1:]):
        yield ((names[0],), *rest)
        for i, block in enumerate(rest):
            yield (*rest[:i], (names[0], *block), *rest[i + 1 :])


class Exhaustive:
    """All plans of the plan space, one by one, for problems with a handful of components and devices."""

    def __init__(self, workflow: Workflow, profile: Profile, cluster: Cluster, ahead: int = 0) -> None:
        self.ahead = ahead
        self.problem = Problem(workflow, profile, cluster)
        self.graph = self.problem.graph
        self.loop = frozenset(self.graph.loop)
        self.choices = cache(self._choices)
        self.direct = {name: set[str]() for name in workflow.names}
        for edge in workflow.edges:
            self.direct[edge.source].add(edge.target)
        for loop in self.graph.loops:
            for a, b in zip(loop, loop[1:], strict=False):
                self.direct[a].add(b)

    def reach(self, name: str) -> set[str]:
        found: set[str] = set()
        stack = [name]
        while stack:
            for target in self.direct[stack.pop()] - found:
                found.add(target)
                stack.append(target)
        return found

    def best(self, mode: Mode) -> float:
        """Seconds of the fastest plan of the mode; infinite if there is none."""
        best = math.inf
        for chain in self._chains(mode):
            for options in product(*(self.choices(names) for names in chain)):
                if not self._is(mode, options):
                    continue
                seconds = sum(choice.seconds for choice in options)
                if not self._stays(options):
                    if not all(self._fits(choice.alone) for choice in options):
                        continue
                    seconds += sum(choice.switch_s for choice in options) if len(options) > 1 else 0.0
                best = min(best, seconds)
        return best

    def _is(self, mode: Mode, options: Sequence[Choice]) -> bool:
        split = [len(choice.blocks) > len({self._pool(block) for block in choice.blocks}) for choice in options]
        if mode == "collocated":
            return not any(split)
        if mode == "disaggregated":
            return len(options) == 1 and split[0]
        return len(options) > 1 and any(
            cut and self.loop <= choice.names for cut, choice in zip(split, options, strict=True)
        )

    def _pool(self, block: tuple[str, ...]) -> Pool:
        return self.problem.pools[block[0]]

    def _chains(self, mode: Mode) -> Iterator[tuple[frozenset[str], ...]]:
        nodes = [frozenset(node) for node in self.graph.collapsed]
        for blocks in set_partitions([str(i) for i in range(len(nodes))]):
            sets = [frozenset[str]().union(*(nodes[int(i)] for i in block)) for block in blocks]
            for order in _orders(sets):
                before: set[str] = set()
                for names in order:
                    if any(self.reach(name) & before for name in names):
                        break
                    before |= names
                else:
                    yield order

    def _choices(self, names: frozenset[str]) -> list[Choice]:
        result: list[Choice] = []
        flowing = any(edge.flow == "micro_batch" and {edge.source, edge.target} <= names for edge in self.graph.edges)
        tight = any(self.problem.profile.components[name].bytes_per_item for name in names & self.graph.micro_batched)
        for blocks in set_partitions(sorted(names, key=self.graph.position)):
            if any(len({self.problem.pools[name] for name in block}) > 1 for block in blocks):
                continue
            one = len(blocks) == len({self._pool(block) for block in blocks})
            if not one and not self._pipeline(blocks):
                continue
            several = [GROUPS if self.loop <= names else (1,)] * len(self.graph.loops)
            whole = [parts for parts in PARTS if self.problem.workflow.items % parts == 0]
            for groups, parts in product(product(*several), whole if flowing or tight else (1,)):
                result += self._allocations(names, blocks, groups, self.problem.workflow.items // parts)
        return result

    def _pipeline(self, blocks: Blocks) -> bool:
        """Convex, and without a circle between placements."""
        after = {name: self.reach(name) for block in blocks for name in block}
        for block in blocks:
            for name in after:
                if name not in block and any(name in after[a] for a in block) and after[name] & set(block):
                    return False
        index = {name: i for i, block in enumerate(blocks) for name in block}
        edges = {(index[a], index[b]) for a in index for b in after[a] if b in index and index[a] != index[b]}
        return not any(_cyclic(start, start, edges) for start in range(len(blocks)))

    def _allocations(
        self, names: frozenset[str], blocks: Blocks, groups: tuple[int, ...], micro_batch: int
    ) -> Iterator[Choice]:
        problem = self.problem
        for items, number, loop in zip(problem.environments, groups, self.graph.loops, strict=True):
            alone = any(set(loop) <= set(block) for block in blocks)
            measured = {e.groups for e in problem.profile.together if set(e.components) == set(loop)}
            if items % number or (number > 1 and alone and number not in measured):
                return
        ranges = [range(1, problem.sizes[problem.pools[block[0]]] + 1) for block in blocks]
        for counts in product(*ranges):
            used = {pool: 0 for pool in POOLS}
            for block, count in zip(blocks, counts, strict=True):
                used[problem.pools[block[0]]] += count
            if any(used[pool] > problem.sizes[pool] for pool in POOLS) or not self._at_home(blocks, counts):
                continue
            if any(count > self._useful(name) for block, count in zip(blocks, counts, strict=True) for name in block):
                continue
            if any(
                loop[0] in block and (items // number) % count
                for block, count in zip(blocks, counts, strict=True)
                for items, number, loop in zip(problem.environments, groups, self.graph.loops, strict=True)
            ):
                continue
            cost = self._cost(blocks, counts, groups, micro_batch)
            if cost is None:
                continue
            choice = self._choice(names, cost, blocks, counts, groups, micro_batch)
            if self._fits(choice.peak):
                yield choice

    def _fits(self, resident: Sequence[float]) -> bool:
        return all(resident[i] <= self.problem.memory_limits[pool] * (1 + 1e-12) for i, pool in enumerate(POOLS))

    def _useful(self, name: str) -> float:
        """Devices that a component can have."""
        component = self.problem.profile.components[name]
        return math.inf if component.data_parallel else max(point.devices for point in component.points)

    def _at_home(self, blocks: Blocks, counts: tuple[int, ...]) -> bool:
        """True if the head node has devices for all components that are not movable."""
        cluster = self.problem.cluster
        home = [node for node in cluster.nodes if node.name == cluster.head_node]
        need = {pool: 0 for pool in POOLS}
        for block, count in zip(blocks, counts, strict=True):
            if not set(block) <= self.problem.workflow.movable:
                need[self.problem.pools[block[0]]] += count
        return not home or (need["cores"] <= home[0].cores and need["accelerators"] <= home[0].accelerators)

    def _cost(
        self, blocks: Blocks, counts: Sequence[int], groups: tuple[int, ...], micro_batch: int
    ) -> PhaseCosts | None:
        phase = phase_of(self.problem, blocks, counts, micro_batch)
        try:
            return phase_costs(Plan("", "hybrid", (phase,), groups or (1,), ahead=self.ahead), phase, self.problem)
        except PlanError:
            return None

    def _choice(
        self,
        names: frozenset[str],
        cost: PhaseCosts,
        blocks: Blocks,
        counts: tuple[int, ...],
        groups: tuple[int, ...],
        m: int,
    ) -> Choice:
        resident, peak, alone = ({pool: 0.0 for pool in POOLS} for _ in range(3))
        for block, count in zip(blocks, counts, strict=True):
            pool, work = self._pool(block), working_bytes(self.problem, cost.model, block, np.array([count]))[0]
            unshared, shared = self._resident_bytes(block), self._resident_bytes(block, set(self.graph.names) - names)
            resident[pool], peak[pool] = max(resident[pool], shared), max(peak[pool], shared + float(work))
            alone[pool] = max(alone[pool], unshared + float(work))
        sizes = (tuple(found.values()) for found in (resident, peak, alone))
        return Choice(names, blocks, counts, groups, m, cost.seconds, switch_seconds(self.problem, blocks), *sizes)

    def _resident_bytes(self, block: tuple[str, ...], elsewhere: Collection[str] = ()) -> float:
        """Resident bytes of a placement, without weights that a learner in it, or one `elsewhere`, shares."""
        components = self.problem.profile.components
        found, policies = (
            sum(components[name].resident_bytes for name in block),
            {loop[-1] for loop in self.graph.loops},
        )
        for learner in (name for name in {*block, *elsewhere} - self.loop if components[name].shares_weights):
            for policy in policies & set(block):
                if components[policy].pool == components[learner].pool == "accelerators":
                    found -= min(components[policy].resident_bytes, components[learner].resident_bytes)
        return found

    def _stays(self, options: Sequence[Choice]) -> bool:
        for i, choice in enumerate(options):
            for p, pool in enumerate(POOLS):
                others = sum(other.resident[p] for j, other in enumerate(options) if j != i)
                if choice.peak[p] + others > self.problem.memory_limits[pool] * (1 + 1e-12):
                    return False
        return True


def _orders(sets: list[frozenset[str]]) -> Iterator[tuple[frozenset[str], ...]]:
    if not sets:
        yield ()
    for i, names in enumerate(sets):
        for rest in _orders(sets[:i] + sets[i + 1 :]):
            yield (names, *rest)


def _cyclic(start: int, here: int, edges: set[tuple[int, int]], seen: frozenset[int] = frozenset()) -> bool:
    for source, target in edges:
        if source == here and (
            target == start or (target not in seen and _cyclic(start, target, edges, seen | {target}))
        ):
            return True
    return False


def phase_of(problem: Problem, blocks: Blocks, counts: Sequence[int], micro_batch: int) -> Phase:
    """Devices one by one: first of home for what does not travel, then whatever is left, home's before others'.

    Where there are too few, the last node is taken to have more: `validate` refuses that.
    """
    cluster, travelling = problem.cluster, problem.workflow.movable
    nodes = sorted(cluster.nodes, key=lambda node: cluster.head_node not in (None, node.name))
    free: dict[str, list[DeviceRange]] = {}
    for pool in POOLS:
        sizes = [node.cores if pool == "cores" else node.accelerators for node in nodes]
        sizes[-1] += sum(counts)
        free[pool] = [
            DeviceRange(node.name, pool, i, 1) for node, size in zip(nodes, sizes, strict=True) for i in range(size)
        ]
    order = range(len(blocks))
    if cluster.head_node is not None:
        order = sorted(order, key=lambda i: set(blocks[i]) <= travelling)
    placements = {}
    for i in order:
        pool = problem.pools[blocks[i][0]]
        placements[i] = Placement(blocks[i], tuple(free[pool][: counts[i]]))
        free[pool] = free[pool][counts[i] :]
    return Phase(tuple(placements[i] for i in range(len(blocks))), micro_batch)


def single_phase(problem: Problem, blocks: Blocks, counts: Sequence[int], groups: int, micro_batch: int) -> Plan:
    phase = phase_of(problem, blocks, counts, micro_batch)
    plan = Plan(problem.workflow.name, "collocated", (phase,), (groups,))
    return replace(plan, mode=plan.classified)


def largest_even(problem: Problem, block: Sequence[str], most: int, groups: int = 1) -> int:
    """The most devices among which the block's items divide."""
    loop = problem.graph.loop
    if not loop or loop[0] not in block:
        return most
    return max(n for n in range(1, most + 1) if (problem.environments[0] // groups) % n == 0)


def all_collocated(problem: Problem) -> Plan:
    """Every node of the collapsed graph in a phase of its own, on all devices of its pool; one pool only."""
    phases = []
    for node in problem.graph.collapsed:
        size = largest_even(problem, node, problem.sizes[problem.pools[node[0]]])
        phases.append(phase_of(problem, (node,), (size,), problem.workflow.items))
    return Plan(problem.workflow.name, "collocated", tuple(phases))


def uniform_split(problem: Problem) -> Plan | None:
    """Every component with devices of its own, the same number for each."""
    blocks = tuple((name,) for name in problem.graph.names)
    share = problem.sizes["cores"] // len(blocks)
    if share < 1 or len(blocks) < 2:
        return None
    return single_phase(
        problem, blocks, [largest_even(problem, block, share) for block in blocks], 1, problem.workflow.items
    )


def published_recursion(problem: Problem, parts: int) -> Plan:
    """One best time for each (sub-chain, devices), as published for language models: a sub-chain is run in turn on
    all its devices, or cut in time, or cut in space with T = t1 + t2 + (parts - 1) max(t1, t2). Loopless chains only.
    """
    names, items = problem.graph.names, problem.workflow.items

    @cache
    def best(first: int, last: int, devices: int) -> tuple[float, str, int, int]:
        """Seconds, how, where it is cut, devices of the left."""
        members = [problem.profile.components[name] for name in names[first:last]]
        found = [(sum(component.seconds(items, devices) for component in members), "turns", 0, 0)]
        for cut in range(first + 1, last):
            found.append((best(first, cut, devices)[0] + best(cut, last, devices)[0], "time", cut, 0))
            for left in range(1, devices):
                t1 = best(first, cut, left)[0] / parts
                t2 = best(cut, last, devices - left)[0] / parts
                found.append((t1 + t2 + (parts - 1) * max(t1, t2), "space", cut, left))
        return min(found)

    def placements(first: int, last: int, devices: int) -> list[tuple[tuple[str, ...], int]]:
        _, how, cut, left = best(first, last, devices)
        if how == "space":
            return placements(first, cut, left) + placements(cut, last, devices - left)
        return [(names[first:last], devices)]

    def phases(first: int, last: int, devices: int) -> list[Phase]:
        _, how, cut, _ = best(first, last, devices)
        if how == "time":
            return phases(first, cut, devices) + phases(cut, last, devices)
        found = placements(first, last, devices)
        micro_batch = items // parts if how == "space" else items
        return [phase_of(problem, tuple(b for b, _ in found), [n for _, n in found], micro_batch)]

    plan = Plan(problem.workflow.name, "collocated", tuple(phases(0, len(names), problem.sizes["cores"])))
    return replace(plan, mode=plan.classified)


def hill_climbing(problem: Problem, seed: int, tries: int = 150) -> float:
    """Seconds of the best plan of one phase met on a walk that takes any random change that is no worse."""
    random = np.random.default_rng(seed)
    items, size = problem.workflow.items, problem.sizes["cores"]
    blocks: Blocks = (problem.graph.names,)
    counts, groups, parts = [largest_even(problem, problem.graph.names, size)], 1, 1
    best = math.inf

    def seconds(blocks: Blocks, counts: Sequence[int], groups: int, parts: int) -> float:
        plan = single_phase(problem, blocks, counts, groups, items // parts)
        try:
            validate(plan, problem.workflow, problem.cluster, problem.profile)
            whole = any(set(problem.graph.loop) <= set(block) for block in blocks) and groups > 1
            measured = any(entry.groups == groups for entry in problem.profile.together)
            if whole and not measured:
                return math.inf
            return predict(plan, problem.workflow, problem.profile, problem.cluster).iteration_s
        except PlanError:
            return math.inf

    for _ in range(tries):
        new_blocks, new_counts = [list(block) for block in blocks], list(counts)
        move = random.integers(0, 4)
        if move == 0:
            i = int(random.integers(0, len(counts)))
            new_counts[i] = max(1, new_counts[i] + int(random.choice([-1, 1])))
        elif move == 1:
            i, j = random.integers(0, len(blocks), size=2)
            new_blocks[j].append(new_blocks[i].pop(int(random.integers(0, len(new_blocks[i])))))
        elif move == 2:
            i = int(random.integers(0, len(blocks)))
            cut = int(random.integers(0, len(new_blocks[i])))
            new_blocks.append(new_blocks[i][cut:])
            new_blocks[i] = new_blocks[i][:cut]
            new_counts[i], extra = max(1, new_counts[i] // 2), max(1, new_counts[i] // 2)
            new_counts.append(extra)
        pairs = [(problem.graph.ordered(block), n) for block, n in zip(new_blocks, new_counts, strict=True) if block]
        changed = tuple(block for block, _ in pairs), [n for _, n in pairs]
        others = (int(random.choice(GROUPS)), int(random.choice(PARTS))) if move == 3 else (groups, parts)
        found = seconds(*changed, *others)
        if found <= best:
            best, (blocks, counts), (groups, parts) = found, changed, others
    return best
