"""The phase in which several tasks are rolled out: which components share devices, in how many groups, on how many.

Several loops that share servers have no closed formula, so candidates are played (`laws.serve`), and a lower bound
(`laws.least_makespan`) says which need not be.

- Allocation of devices (`SharedLoopsAllocation`): allocations are bounded, and the most promising ones played.
- Candidates (`SeveralTasksSearch`): a partition into placements, a number of groups for each loop, and a micro-batch.
  Where they are few (two tasks) all are tried. Where they are many, tasks are divided into sets that share cores, and
  the best of these candidates are improved step by step; `relaxed_bound` says how far they can be from the best.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product

import numpy as np

from schedulers.cluster import POOLS
from schedulers.cost.communication import with_movable_away
from schedulers.cost.laws import Times, alone_seconds, server_loads
from schedulers.cost.phase import PhaseModel, phase_model
from schedulers.cost.problem import Problem
from schedulers.cost.times import switch_seconds
from schedulers.search.allocation import (
    Allocation,
    MemoryLimits,
    SolvedPhase,
    counts_of,
    each_option,
    exact_seconds,
    free_units,
    options_of,
)
from schedulers.workflow import partitions, time_shared

TOLERANCE = 0.005
"""Relative improvement over the best found below which a candidate is not played; bounds include it."""

Partition = tuple[tuple[str, ...], ...]
"""Components of each placement."""

# --- allocation of devices

MAX_ROWS = 20_000
"""Allocations whose bounds are computed; of more, those with the least."""
MAX_PLAYED = 60
"""Allocations of one candidate that are played."""
MAX_SHIFTS = 20
"""Allocations that are played to improve one."""
SHARPNESS = 16
"""Exponent with which servers and loops count in the greedy order: the slowest counts most."""


class SharedLoopsAllocation:
    """The search for the devices of each placement of one candidate.

    Unlike `AllocationSearch` it is not always exact: `Allocation.bound` says how far from it.
    """

    def __init__(self, problem: Problem, model: PhaseModel, limits: MemoryLimits) -> None:
        self.model, self.free = model, free_units(problem)
        self.options = [options_of(problem, model, p, limits) for p in range(len(model.placements))]
        self.feasible = all(len(options.counts) for options in self.options)

    def bound(self) -> float:
        """A lower bound: all devices for every placement."""
        return float(self._least_seconds(np.zeros((1, 0), dtype=int))[0]) if self.feasible else math.inf

    def solve(self, cutoff: float, deadline: float) -> Allocation:
        """The best allocation faster than `cutoff` that was found, and a lower bound of all. Past the deadline
        (`time.monotonic`) the greedy one."""
        given = self.greedy() if self.feasible else None
        if given is None:
            return Allocation()
        best = Allocation(seconds=cutoff)
        seconds = self.play(given)
        if seconds < cutoff:
            best = Allocation(seconds, counts_of(self.options, given))
        if time.monotonic() > deadline:
            return Allocation(best.seconds if best.counts else math.inf, best.counts, self.bound())
        rows, bounds, open_bound = self._promising(best.seconds)
        for number, row in enumerate(np.argsort(bounds, kind="stable")):
            late = number >= MAX_PLAYED or time.monotonic() > deadline
            if late or bounds[row] >= best.seconds * (1 - TOLERANCE):
                open_bound = min(open_bound, float(bounds[row]))
                break
            seconds = self.play(rows[row])
            if seconds < best.seconds:
                best = Allocation(seconds, counts_of(self.options, rows[row]))
        found = best.seconds if best.counts else math.inf
        return Allocation(found, best.counts, min(found, open_bound))

    def play(self, picks: Sequence[int]) -> float:
        """Makespan of the phase where each placement has the option of this number."""
        return exact_seconds(self.model, self.options, picks)

    def greedy(self) -> list[int] | None:
        """Options that balance servers and loops, by giving devices one after the other to the placement that gains
        most. None where there are too few devices."""
        picks = [0] * len(self.options)
        free = self.free.copy()
        for options in self.options:
            free[options.takes] -= options.units[0]
        if (free < 0).any():
            return None
        present = self._strain(picks)
        while True:
            best: tuple[float, int, float] | None = None
            for p, options in enumerate(self.options):
                if picks[p] + 1 == len(options.units):
                    continue
                more = int(options.units[picks[p] + 1] - options.units[picks[p]])
                if (free[options.takes] < more).any():
                    continue
                picks[p] += 1
                strain = self._strain(picks)
                picks[p] -= 1
                gain = (present - strain) / more
                if gain > 0 and (best is None or gain > best[0]):
                    best = (gain, p, strain)
            if best is None:
                return picks
            _, p, present = best
            free[self.options[p].takes] -= self.options[p].units[picks[p] + 1] - self.options[p].units[picks[p]]
            picks[p] += 1

    def shifted(self, picks: Sequence[int]) -> list[int]:
        """The options after giving one placement more devices at the cost of another, as long as that is faster and not
        too often tried."""
        best, seconds, played = list(picks), self.play(picks), 0
        improved = True
        while improved:
            improved = False
            for to in range(len(best)):
                if best[to] + 1 == len(self.options[to].units):
                    continue
                for source in range(len(best)):
                    changed = list(best)
                    changed[to] += 1
                    changed[source] -= source != to
                    while source != to and changed[source] >= 0 and not self._fits(changed):
                        changed[source] -= 1
                    if changed[source] < 0 or not self._fits(changed) or self._least_of(changed) >= seconds:
                        continue
                    played += 1
                    if played > MAX_SHIFTS:
                        return best
                    found = self.play(changed)
                    if found < seconds * (1 - 1e-9):
                        best, seconds, improved = changed, found, True
                        break
        return best

    def _fits(self, picks: Sequence[int]) -> bool:
        free = self.free.copy()
        for options, pick in zip(self.options, picks, strict=True):
            free[options.takes] -= options.units[pick]
        return bool((free >= 0).all())

    def _strain(self, picks: Sequence[int]) -> float:
        """Measure of the time of all loops and shared components; the slowest counts most."""
        routes = [loop.route for loop in self.model.loops]
        visits = [float(self.options[p].visits[row, picks[p]]) for p, row in self.model.visit_rows]
        times = self.model.by_loop(visits)
        terms = [alone_seconds(route, own) for route, own in zip(routes, times, strict=True)]
        terms += server_loads(routes, times).values()
        rest = [float(options.stages[:, pick].sum()) for options, pick in zip(self.options, picks, strict=True)]
        most = max(terms)
        if not most:
            return sum(rest)
        return float(most * sum((term / most) ** SHARPNESS for term in terms) ** (1 / SHARPNESS)) + 1e-3 * sum(rest)

    def _least_of(self, picks: Sequence[int]) -> float:
        return float(
            self.model.least_seconds(
                [self.options[p].visits[row, picks[p]] for p, row in self.model.visit_rows],
                [self.options[p].stages[row, picks[p]] for p, row in self.model.stage_rows],
            )
        )

    def _least_seconds(self, picks: np.ndarray) -> np.ndarray:
        """Lower bounds of partial allocations, one a row, that have options for the first placements: the open ones
        take their least."""

        def times(p: int, table: np.ndarray, row: int) -> Times:
            return table[row, picks[:, p]] if p < picks.shape[1] else table[row].min()

        found = self.model.least_seconds(
            [times(p, self.options[p].visits, row) for p, row in self.model.visit_rows],
            [times(p, self.options[p].stages, row) for p, row in self.model.stage_rows],
        )
        return np.broadcast_to(np.asarray(found, dtype=float), (len(picks),))

    def _promising(self, cutoff: float) -> tuple[np.ndarray, np.ndarray, float]:
        """Allocations that promise to be faster than `cutoff`, their bounds, and the least bound of the others."""
        picks, free = np.zeros((1, 0), dtype=int), self.free[None, :]
        bounds, open_bound = np.zeros(1), math.inf
        for options in self.options:
            rows, columns = each_option(options.units.searchsorted(free[:, options.takes].min(axis=1), side="right"))
            picks = np.column_stack([picks[rows], columns])
            free = free[rows]
            free[:, options.takes] -= options.units[columns, None]
            bounds = self._least_seconds(picks)
            good = np.flatnonzero(bounds < cutoff * (1 - TOLERANCE))
            if len(good) < len(bounds):
                open_bound = min(open_bound, float(np.delete(bounds, good).min()))
            if len(good) > MAX_ROWS:
                order = np.argsort(bounds[good], kind="stable")
                open_bound = min(open_bound, float(bounds[good][order[MAX_ROWS]]))
                good = good[order[:MAX_ROWS]]
            picks, free, bounds = picks[good], free[good], bounds[good]
        return picks, bounds, open_bound


# --- candidates

MAX_CANDIDATES = 3000
"""Partitions times groups times micro-batches that are tried one by one."""
MAX_REST = 8
"""Partitions of the components that no single task owns, with which the step-by-step search begins."""
MAX_DESCENTS = 2
"""Candidates of the first ones that are improved."""
MAX_STEPS = 100
"""Candidates that are looked at to improve one, so that ten tasks are planned in seconds."""
FEW_ALLOCATIONS = 500
"""Number of a candidate's allocations up to which all are considered."""
NEAR = 1.05
"""Candidates so much slower than the best may become better when they are improved."""
WORTH_SHIFTING = 1.01
"""Candidates so much slower than the best may beat it with another allocation."""
WEIGHTS = np.linspace(0.0, 1.0, 21)
"""Weights of the shared server's load against that of a pool, in the relaxation."""


@dataclass(frozen=True)
class Candidate:
    """Placements, groups and micro-batch of the phase, without the allocation of devices."""

    partition: Partition
    groups: tuple[int, ...]
    """Groups of each loop."""
    micro_batch: int


class SeveralTasksSearch:
    """The search for the best phase of these components, with the context switch if `switching`; `deadline` is on
    `time.monotonic`'s clock."""

    def __init__(
        self,
        problem: Problem,
        components: frozenset[str],
        kind: str,
        switching: bool,
        limits: MemoryLimits,
        deadline: float,
    ) -> None:
        self.problem, self.graph = problem, problem.graph
        self.components, self.kind, self.switching = components, kind, switching
        self.limits, self.deadline = limits, deadline
        self.micro_batches = problem.micro_batch_sizes(components)
        self.alike = equal_tasks(problem)
        self.ahead = problem.ahead and kind == "split" and len(components) == len(self.graph.names)

    def solve(self) -> SolvedPhase:
        found = self._all() if self._few() else self._step_by_step()
        if found.model is None:
            return SolvedPhase(math.inf, math.inf)  # Nothing fits.
        bound = max(found.bound, self.relaxed_bound() + self._least_switch_s())
        return SolvedPhase(found.seconds, min(bound, found.seconds), found.model, found.counts)

    def _switch_s(self, partition: Partition) -> float:
        return switch_seconds(self.problem, partition) if self.switching else 0.0

    def _least_switch_s(self) -> float:
        """Context switch of components in separate placements, which are loaded at the same time: no partition
        takes less."""
        shared = self.problem.shared_weights
        each = tuple((name,) for name in self.components)
        return switch_seconds(self.problem, each, shared.names if shared else None) if self.switching else 0.0

    def _few(self) -> bool:
        candidates = len(self.micro_batches)
        candidates *= math.prod(len(self.problem.group_options(i, ())) for i in range(len(self.graph.loops)))
        if self.kind == "split":
            candidates *= _partitions_by_pool(self.problem, self.components)
        return candidates <= MAX_CANDIDATES

    def _model(self, candidate: Candidate) -> PhaseModel | None:
        model = phase_model(
            self.graph,
            self.problem.workflow,
            self.problem.profile,
            candidate.partition,
            candidate.groups,
            candidate.micro_batch,
            ahead=self.ahead,
        )
        return model and with_movable_away(self.problem, model)

    # --- all candidates

    def _all(self) -> SolvedPhase:
        searches = []
        for partition in candidate_partitions(self.problem, self.components, self.kind):
            several = [self.problem.group_options(i, partition) for i in range(len(self.graph.loops))]
            for groups, micro_batch in product(product(*several), self.micro_batches):
                model = self._model(Candidate(partition, groups, micro_batch))
                if model is not None:
                    search = SharedLoopsAllocation(self.problem, model, self.limits)
                    searches.append((search, self._switch_s(partition)))
        bounds = [search.bound() + switch for search, switch in searches]
        best, open_bound = SolvedPhase(math.inf, math.inf), math.inf
        # Among candidates of about the same bound the tidiest stays: partitions come in that order.
        for i in sorted(range(len(searches)), key=lambda i: _bucket(bounds[i])):
            late = time.monotonic() > self.deadline and best.model is not None
            if late or not bounds[i] < best.seconds * (1 - TOLERANCE):
                open_bound = min(open_bound, bounds[i])
                continue
            search, switch = searches[i]
            found = search.solve(best.seconds - switch, self.deadline)
            open_bound = min(open_bound, found.bound + switch)
            if found.counts:
                best = SolvedPhase(found.seconds + switch, 0.0, search.model, found.counts)
        return SolvedPhase(best.seconds, min(best.seconds, open_bound), best.model, best.counts)

    # --- step by step

    def _step_by_step(self) -> SolvedPhase:
        found: list[tuple[SolvedPhase, Candidate]] = []
        least = self.relaxed_bound()
        for start in self._starts():
            if time.monotonic() > self.deadline and found:
                break
            # Those that come close are worth improving too.
            cutoff = min((one.seconds for one, _ in found), default=math.inf) * NEAR
            one = self._play(start, cutoff)
            if one.model is not None:
                found.append((one, start))
        found.sort(key=lambda pair: pair[0].seconds)
        best = found[0][0] if found else SolvedPhase(math.inf, 0.0)
        for one, candidate in found[:MAX_DESCENTS]:
            if best.seconds > least * (1 + TOLERANCE):
                one = self._improved(one, candidate)
                best = one if one.seconds < best.seconds * (1 - 1e-9) else best
        return best

    def _improved(self, best: SolvedPhase, candidate: Candidate) -> SolvedPhase:
        """The result of going to the first better neighbour, again and again."""
        improved, seen = True, {self._pattern(candidate)}
        while improved:
            improved = False
            for other in self._neighbours(candidate):
                pattern = self._pattern(other)
                if pattern in seen:
                    continue
                if len(seen) > MAX_STEPS or time.monotonic() > self.deadline:
                    return best
                seen.add(pattern)
                found = self._play(other, best.seconds * (1 - 1e-6))
                if found.model is not None:
                    best, candidate, improved = found, other, True
                    break
        return best

    def _pattern(self, candidate: Candidate) -> object:
        """Equal for candidates that differ only in which of several equal tasks has which place."""
        of = {name: i for i, loop in enumerate(self.graph.loops) for name in loop if name not in self.graph.shared}
        kind = {i: (number, candidate.groups[i]) for number, alike in enumerate(self.alike) for i in alike}
        labels = {name: (kind[i], self.graph.loops[i].index(name)) for name, i in of.items()}
        where = {name: number for number, block in enumerate(candidate.partition) for name in block}
        blocks = [tuple(sorted(map(str, (labels.get(name, name) for name in block)))) for block in candidate.partition]
        tasks = []
        for i, loop in enumerate(self.graph.loops):
            mine = [where[name] for name in loop]
            tasks.append((kind[i], tuple(blocks[number] for number in mine), tuple(map(mine.index, mine))))
        return tuple(sorted(blocks)), tuple(sorted(tasks)), candidate.micro_batch

    def _play(self, candidate: Candidate, cutoff: float) -> SolvedPhase:
        """The candidate with devices given greedily and then shifted; infinite where that does not beat `cutoff`."""
        none = SolvedPhase(math.inf, 0.0)
        model = self._model(candidate)
        if model is None:
            return none
        search, switch = SharedLoopsAllocation(self.problem, model, self.limits), self._switch_s(candidate.partition)
        if not search.bound() + switch < cutoff:
            return none
        if math.prod(len(options.counts) for options in search.options) <= FEW_ALLOCATIONS:
            found = search.solve(cutoff - switch, self.deadline)
            return SolvedPhase(found.seconds + switch, 0.0, model, found.counts) if found.counts else none
        picks = search.greedy()
        if picks is None:
            return none
        seconds = search.play(picks) + switch
        if seconds < cutoff * WORTH_SHIFTING:
            picks = search.shifted(picks)
            seconds = search.play(picks) + switch
        return SolvedPhase(seconds, 0.0, model, counts_of(search.options, picks)) if seconds < cutoff else none

    def _starts(self) -> Iterator[Candidate]:
        numbers = sorted({number for i in range(len(self.graph.loops)) for number in self.problem.group_options(i, ())})
        for partition in candidate_partitions(self.problem, self.components, self.kind):
            for number in reversed(numbers):
                options = [self.problem.group_options(i, partition) for i in range(len(self.graph.loops))]
                groups = tuple(max((n for n in own if n <= number), default=own[0]) for own in options)
                for micro_batch in self.micro_batches:
                    yield Candidate(partition, groups, micro_batch)

    def _neighbours(self, candidate: Candidate) -> Iterator[Candidate]:
        """Another number of groups for one task or for all equal ones; another micro-batch; one component, all of a
        task's, or all that no single task owns, into another placement or one of their own; two placements in one."""
        partition = candidate.partition
        for members in dict.fromkeys([*self.alike, *((i,) for mine in self.alike for i in mine)]):
            for number in self.problem.group_options(members[0], partition):
                groups = tuple(number if i in members else n for i, n in enumerate(candidate.groups))
                yield Candidate(partition, groups, candidate.micro_batch)
        for micro_batch in self.micro_batches:
            yield Candidate(partition, candidate.groups, micro_batch)
        if self.kind == "shared":
            return
        own = [frozenset(loop) - self.graph.shared for loop in self.graph.loops]
        parts: list[tuple[str, ...]] = [(name,) for name in self.graph.ordered(self.components)]
        own.append(self.components - {name for mine in own for name in mine})
        parts += [names for mine in own for names in _by_pool(self.problem, self.graph.ordered(mine)) if len(names) > 1]
        for moved in parts:
            rest = [tuple(name for name in block if name not in moved) for block in partition]
            kept = tuple(block for block in rest if block)
            for target in (None, *kept):
                blocks = (
                    (*kept, moved)
                    if target is None
                    else tuple(self.graph.ordered((*block, *moved)) if block == target else block for block in kept)
                )
                yield from self._with_partition(candidate, blocks)
        for i, one in enumerate(partition):
            for other in partition[i + 1 :]:
                joined = self.graph.ordered((*one, *other))
                yield from self._with_partition(candidate, (*(b for b in partition if b not in (one, other)), joined))

    def _with_partition(self, candidate: Candidate, partition: Partition) -> Iterator[Candidate]:
        partition = _in_order(self.problem, partition)
        if _possible(self.problem, self.components, partition):
            options = [self.problem.group_options(i, partition) for i in range(len(self.graph.loops))]
            groups = tuple(n if n in own else own[0] for n, own in zip(candidate.groups, options, strict=True))
            yield Candidate(partition, groups, candidate.micro_batch)

    # --- a lower bound of all candidates

    def relaxed_bound(self) -> float:
        """Lower bound if each task could choose its groups by itself and had all devices to itself, but devices have
        only so much time, and the component that all share serves one group at a time.

        A Lagrangian relaxation, valid at any weight w: T >= sum over tasks of the least of w * load of the shared
        component + (1 - w) * device seconds / devices.
        """
        tasks = [self._loads(i) for i in range(len(self.graph.loops))]
        least: float = max(min(option[0] for option in options) for options in tasks)
        for pool in range(len(POOLS)):
            for weight in WEIGHTS:
                least = max(
                    least,
                    sum(min(weight * o[1] + (1 - weight) * o[2 + pool] for o in options) for options in tasks),
                )
        return float(least) + self._after_loops()

    def _after_loops(self) -> float:
        """Least time after the loops, of the components that cannot begin before these have ended."""
        if self.ahead:
            return 0.0
        barred = set[str]().union(*(self.graph.barred[name] for name in self.graph.loop))
        ends: dict[str, float] = {}
        for name in self.graph.ordered(self.components & barred):
            before = [ends[edge.source] for edge in self.graph.edges if edge.target == name and edge.source in ends]
            items = self.problem.workflow.items
            component = self.problem.profile.components[name]
            sizes = self.micro_batches if name in self.graph.micro_batched else (items,)
            own = min((items // size * float(self.problem.times(name, size).min()) for size in sizes), default=0.0)
            # Micro-batches of two components may overlap: only one counts where they stream.
            ends[name] = own * min(1.0, component.contention)
            whole = [edge for edge in self.graph.edges if edge.target == name and edge.flow == "barrier"]
            ends[name] += max((ends[edge.source] for edge in whole if edge.source in ends), default=0.0)
            ends[name] = max([ends[name], *before])
        return max(ends.values(), default=0.0)

    def _loads(self, number: int) -> list[tuple[float, ...]]:
        """For each number of groups of a task: its makespan alone, the load that it puts on a component that all tasks
        share, and by pool device seconds over devices (seconds, where components take turns)."""
        problem, loop = self.problem, self.graph.loops[number]
        steps = problem.workflow.loops[number].steps * problem.workflow.episodes_per_env
        shared = [name for name in loop if all(name in other for other in self.graph.loops)]
        # Measured together, components may take less than one after the other.
        unknown = any(set(entry.components) & set(loop) for entry in problem.profile.together)
        result: list[tuple[float, ...]] = []
        for groups in self.problem.group_options(number, ()):
            once: dict[str, float] = {}
            area = dict.fromkeys(POOLS, 0.0)
            for name in loop:
                component, pool = problem.profile.components[name], problem.pools[name]
                times = problem.times(name, problem.environments[number] / groups) * min(1.0, component.contention)
                once[name] = 0.0 if unknown else float(times.min())
                used = np.minimum(problem.counts[pool], component.max_devices)
                # Components that take turns have all devices, and wait for all others.
                share = times if self.kind == "shared" else times * used / problem.sizes[pool]
                area[pool] += 0.0 if unknown else float(share.min()) * groups * steps
            alone = steps * max(sum(once.values()), groups * max(once.values()))
            serial = max((groups * steps * once[name] for name in shared), default=0.0)
            result.append((alone, serial, *(area[pool] for pool in POOLS)))
        return result


def candidate_partitions(problem: Problem, components: frozenset[str], kind: str) -> list[Partition]:
    """Partitions of a phase with several loops that are tried: all where these are few, else those in which sets of
    tasks share devices. Partitions that mix tasks least come first, then those of few placements."""
    graph, pools = problem.graph, problem.pools
    one = time_shared(graph, components, pools)
    if kind == "shared":
        return [one]
    if _partitions_by_pool(problem, components) <= MAX_CANDIDATES:
        found = list(partitions(graph, components, pools))
    else:
        found = list(_of_sets(problem, components))
    owner = {name: i for i, loop in enumerate(graph.loops) for name in loop if name not in graph.shared}

    def mixed(partition: Partition) -> int:
        """Components of single tasks that share devices with those of other tasks."""
        own = [[name for name in block if name in owner] for block in partition]
        return sum(len(names) for names in own if len({owner[name] for name in names}) > 1)

    good = [blocks for blocks in dict.fromkeys(found) if len(blocks) > len(one) and _enough(problem, blocks)]
    return sorted(good, key=lambda blocks: (mixed(blocks), len(blocks)))


def _of_sets(problem: Problem, components: frozenset[str]) -> Iterator[Partition]:
    """Partitions: the tasks in one set, two, and so on to one set per task, of about equal work; in each set, physics
    and rendering fused or split; with every partition of the other components, if these are few."""
    graph, pools = problem.graph, problem.pools
    own = [graph.ordered(set(loop) - graph.shared) for loop in graph.loops]
    rest = frozenset(components) - {name for names in own for name in names}
    others = [tuple(blocks) for blocks in partitions(graph, rest, pools)] if len(rest) <= 6 else []
    others = (others or [time_shared(graph, rest, pools)])[:MAX_REST]
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
            together = _in_order(problem, (*blocks, *more))
            if _possible(problem, components, together):
                yield together


def _balanced(problem: Problem, own: Sequence[tuple[str, ...]], count: int) -> list[set[str]]:
    """The tasks' own components in `count` sets: the task with most work first, into the set with least work."""
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


def equal_tasks(problem: Problem) -> list[tuple[int, ...]]:
    """Sets of tasks with the same number of steps and environments, and the same times."""
    profile, found = problem.profile, dict[object, list[int]]()
    for i, (loop, names) in enumerate(zip(problem.workflow.loops, problem.graph.loops, strict=True)):
        key = (loop.steps, problem.environments[i], tuple(profile.components[name] for name in names))
        found.setdefault(key, []).append(i)
    return [tuple(members) for members in found.values()]


def _by_pool(problem: Problem, names: Sequence[str]) -> list[tuple[str, ...]]:
    found = [tuple(name for name in names if problem.pools[name] == pool) for pool in POOLS]
    return [block for block in found if block]


def _in_order(problem: Problem, partition: Partition) -> Partition:
    return tuple(sorted(partition, key=lambda block: problem.graph.position(block[0])))


def _enough(problem: Problem, partition: Partition) -> bool:
    """True if each placement can have a device."""
    pools = [problem.pools[block[0]] for block in partition]
    return all(pools.count(pool) <= len(problem.counts[pool]) for pool in POOLS)


def _possible(problem: Problem, components: frozenset[str], partition: Partition) -> bool:
    """True if these are placements of one pool each that can work as a pipeline, more than one of some pool."""
    graph, pools = problem.graph, problem.pools
    if any(len({pools[name] for name in block}) > 1 for block in partition) or not _enough(problem, partition):
        return False
    if len(partition) <= len(time_shared(graph, components, pools)):
        return False
    for block in partition:
        inside = set(block)
        for name in components - inside:
            if any(name in graph.later[a] for a in block) and graph.later[name] & inside:
                return False
    return True


def _partitions_by_pool(problem: Problem, components: frozenset[str]) -> int:
    """Number of partitions of the components into placements of one pool each."""
    return math.prod(_bell(sum(problem.pools[name] == pool for name in components)) for pool in POOLS)


@cache
def _bell(count: int) -> int:
    """Number of partitions of so many components."""
    return 1 if count == 0 else sum(math.comb(count - 1, k) * _bell(k) for k in range(count))


def _bucket(bound: float) -> int:
    """Equal for bounds that differ by less than the tolerance, and rising."""
    return math.floor(math.log(max(bound, 1e-300)) / TOLERANCE) if bound < math.inf else 10**9
