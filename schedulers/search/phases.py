"""Phases: the best sequence of phases, and the best placements of each.

A phase is the difference of two prefixes of the workflow graph. Its makespan depends on the other phases only through
memory, so each phase is solved once, and the best sequence is found by a dynamic programme over prefixes:
f(P) = min over prefixes Q within P of f(Q) + makespan of (P - Q) + context switch. To solve a phase, every partition
into placements, number of groups and micro-batch is tried, with the best allocation of devices to each.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Literal

import numpy as np

from schedulers.cluster import POOLS, Pool
from schedulers.cost.communication import with_movable_away
from schedulers.cost.phase import PhaseModel, phase_model
from schedulers.cost.problem import Problem
from schedulers.cost.times import resident_bytes, switch_seconds, working_bytes
from schedulers.plan import Mode
from schedulers.search.allocation import SLACK, AllocationSearch, MemoryLimits, SolvedPhase
from schedulers.search.several_tasks import SeveralTasksSearch, candidate_partitions
from schedulers.workflow import partitions, prefixes, time_shared

Kind = Literal["shared", "split"]
"""`shared`: one placement per pool, whose components take turns; `split`: some pool is split between placements."""

KINDS: dict[Mode, tuple[Kind, ...]] = {
    "collocated": ("shared",),
    "disaggregated": ("split",),
    "hybrid": ("shared", "split"),
}


@dataclass(frozen=True)
class PhaseSequence:
    """Phases one after the other."""

    seconds: float
    bound: float
    """Lower bound of every sequence of the same mode."""
    phases: tuple[SolvedPhase, ...] = ()
    unload: bool = False
    clumsiness: float = 0.0
    """Number of phases, and more for those that are hard to read. Among equally fast sequences the least is best."""


NONE = PhaseSequence(math.inf, math.inf)


class PhaseSolver:
    """Solves phases, each once; `deadline` is on `time.monotonic`'s clock."""

    def __init__(self, problem: Problem, deadline: float) -> None:
        self.problem, self.deadline = problem, deadline
        self.solved: dict[tuple[object, ...], SolvedPhase] = {}

    def solve(
        self, components: frozenset[str], kind: Kind, *, switching: bool = False, limits: MemoryLimits | None = None
    ) -> SolvedPhase:
        """The best phase of exactly these components; `seconds` is infinite where there is none.

        `switching`: with the context switch, which depends on which components share devices.
        """
        everything = self.problem.memory_limits
        limits = limits or MemoryLimits(everything, everything)
        limits = replace(limits, weights_elsewhere=not switching and self.weights_elsewhere(components))
        key = (components, kind, switching, tuple(limits.resident.items()), tuple(limits.peak.items()))
        if key not in self.solved:
            if self.problem.graph.several_loops and self.problem.graph.loop[0] in components:
                several = SeveralTasksSearch(self.problem, components, kind, switching, limits, self.deadline)
                self.solved[key] = several.solve()
            else:
                self.solved[key] = self._solve(components, kind, switching, limits)
        return self.solved[key]

    def weights_elsewhere(self, components: frozenset[str]) -> bool:
        """True if the policy of such a phase may share weights with the learner of another, when both stay loaded."""
        return self.problem.shared_weights is not None and self.problem.shared_weights.learner not in components

    def resident_sizes(self, components: frozenset[str], kind: Kind) -> list[dict[Pool, float]]:
        """The different amounts of memory, by pool, that the fullest device can have resident in such a phase."""
        found: dict[tuple[float, ...], dict[Pool, float]] = {}
        elsewhere = self.weights_elsewhere(components)
        for placements in self._partitions(components, kind):
            resident = {pool: 0.0 for pool in POOLS}
            for names in placements:
                pool = self.problem.pools[names[0]]
                size = resident_bytes(self.problem, names, weights_elsewhere=elsewhere)
                resident[pool] = max(resident[pool], size)
            found[tuple(resident.values())] = resident
        return list(found.values())

    def _solve(self, components: frozenset[str], kind: Kind, switching: bool, limits: MemoryLimits) -> SolvedPhase:
        searches = [AllocationSearch(self.problem, model, limits) for model in self.models(components, kind)]
        switch_s = [switch_seconds(self.problem, search.model.placements) if switching else 0.0 for search in searches]
        bounds = [search.bound() + switch for search, switch in zip(searches, switch_s, strict=True)]
        best, open_bound = SolvedPhase(math.inf, math.inf), math.inf
        # Among equally good phases the best balanced one stays, then the one with fewer placements.
        for i in sorted(range(len(searches)), key=lambda i: (bounds[i], searches[i].bottleneck)):
            late = time.monotonic() > self.deadline and best.model is not None
            if late or bounds[i] >= best.seconds * (1 - SLACK):
                open_bound = min(open_bound, bounds[i])
                break
            found = searches[i].solve(best.seconds - switch_s[i], self.deadline)
            open_bound = min(open_bound, found.bound + switch_s[i])
            if found.counts:
                best = SolvedPhase(found.seconds + switch_s[i], 0.0, searches[i].model, found.counts)
        return replace(best, bound=min(best.seconds, open_bound))

    def models(self, components: frozenset[str], kind: Kind) -> Iterator[PhaseModel]:
        """Every phase of these components: partition into placements, number of groups and micro-batch."""
        problem, graph = self.problem, self.problem.graph
        ahead = problem.ahead and kind == "split" and len(components) == len(graph.names)
        in_loop = bool(graph.loops) and graph.loop[0] in components
        for placements in self._partitions(components, kind):
            # Where the loops are in another phase their groups do not matter.
            several = [(n,) for n in problem.group_options(0, placements)] if in_loop else [(1,) * len(graph.loops)]
            for groups, micro_batch in product(several, problem.micro_batch_sizes(components)):
                model = phase_model(
                    graph, problem.workflow, problem.profile, placements, groups, micro_batch, ahead=ahead
                )
                if model is not None:
                    yield with_movable_away(problem, model)

    def _partitions(self, components: frozenset[str], kind: Kind) -> list[tuple[tuple[str, ...], ...]]:
        graph, pools = self.problem.graph, self.problem.pools
        if graph.several_loops and graph.loop[0] in components:
            return candidate_partitions(self.problem, components, kind)
        one = time_shared(graph, components, pools)
        if kind == "shared":
            return [one]
        # No pool has more placements than units of devices.
        units = {pool: len(counts) for pool, counts in self.problem.counts.items()}
        found = [
            placements
            for placements in partitions(graph, components, pools)
            if len(placements) > len(one)
            and all(sum(pools[names[0]] == pool for names in placements) <= units[pool] for pool in POOLS)
        ]
        return sorted(found, key=len)


class SequenceSearch:
    """The search for the best sequence of phases of each mode."""

    def __init__(self, problem: Problem, deadline: float) -> None:
        self.problem, self.phases = problem, PhaseSolver(problem, deadline)
        self.prefixes = prefixes(problem.graph)
        self.all = frozenset(problem.graph.names)

    def best(self, mode: Mode) -> PhaseSequence:
        """The best sequence of a mode.

        First without context switches, as if everything fitted in memory together: where it does, no sequence is
        faster. Where it does not, the best of those with switches and of those in which everything stays loaded.
        """
        free = self._best(mode, switching=False)
        if not free.phases or self._fits_together(free.phases):
            return free
        switched = self._best(mode, switching=True)
        loaded = self._best_loaded(mode, switched.seconds)
        bound = max(free.bound, min(switched.bound, loaded.bound))
        best = min(switched, loaded, key=lambda sequence: sequence.seconds)
        return replace(best, bound=min(bound, best.seconds))

    def _best(self, mode: Mode, switching: bool) -> PhaseSequence:
        """The best sequence with or without context switches, by a dynamic programme over prefixes.

        The best sequence of a prefix is the best of a shorter prefix and one more phase. Sequences are kept apart by
        what makes them one of the mode (see `_ends`).
        """
        best = {(frozenset[str](), False, False): PhaseSequence(0.0, 0.0)}
        for prefix in self.prefixes[1:]:
            for (done, split, several), before in list(best.items()):
                if not done < prefix or (mode == "disaggregated" and (done or prefix != self.all)):
                    continue
                for kind in KINDS[mode]:
                    alone = not done and prefix == self.all
                    phase = self.phases.solve(prefix - done, kind, switching=switching and not alone)
                    if math.isinf(phase.bound):
                        continue
                    key = (prefix, split or self._splits(prefix - done, kind), several or bool(done))
                    other = best.get(key, NONE)
                    found = PhaseSequence(
                        seconds=before.seconds + phase.seconds,
                        bound=min(before.bound + phase.bound, other.bound),
                        phases=(*before.phases, phase),
                        unload=switching and bool(done),
                        clumsiness=before.clumsiness + 1 + 1.5 * self._mixes(phase),
                    )
                    best[key] = found if _better(found, other) else replace(other, bound=found.bound)
        complete = [best.get((self.all, *end), NONE) for end in self._ends(mode)]
        result = complete[0]
        for other in complete[1:]:
            result = other if _better(other, result) else result
        return replace(result, bound=min(sequence.bound for sequence in complete))

    @staticmethod
    def _ends(mode: Mode) -> list[tuple[bool, bool]]:
        """Does the phase with the loops split a pool, is there more than one phase: what makes a sequence one of the
        mode."""
        if mode == "collocated":
            return [(False, False), (False, True)]
        return [(True, mode == "hybrid")]

    def _splits(self, components: frozenset[str], kind: Kind) -> bool:
        """True if a phase splits a pool under the loop, or under anything in a workflow without one."""
        return kind == "split" and set(self.problem.graph.loop) <= components

    def _mixes(self, phase: SolvedPhase) -> bool:
        """True if loop and learner side share a placement: the same time as two phases, but harder to read."""
        if phase.model is None:
            return False
        loop = set(self.problem.graph.loop)
        return any(loop & set(names) and set(names) - loop for names in phase.model.placements)

    def _memory(self, phase: SolvedPhase) -> tuple[dict[Pool, float], dict[Pool, float]]:
        """Most bytes resident on a device of each pool, and most with the working sets."""
        resident: dict[Pool, float] = dict.fromkeys(POOLS, 0.0)
        peak: dict[Pool, float] = dict.fromkeys(POOLS, 0.0)
        assert phase.model is not None
        elsewhere = self.phases.weights_elsewhere(frozenset(name for p in phase.model.placements for name in p))
        for names, count in zip(phase.model.placements, phase.counts, strict=True):
            pool = self.problem.pools[names[0]]
            size = resident_bytes(self.problem, names, weights_elsewhere=elsewhere)
            working = float(working_bytes(self.problem, phase.model, names, np.array([count]))[0])
            resident[pool] = max(resident[pool], size)
            peak[pool] = max(peak[pool], size + working)
        return resident, peak

    def _fits_together(self, phases: tuple[SolvedPhase, ...]) -> bool:
        """True if all phases' components fit on a device that has the most of each, with any one phase at work."""
        memory = [self._memory(phase) for phase in phases]
        return all(
            peak[pool] + sum(other[pool] for j, (other, _) in enumerate(memory) if j != i)
            <= self.problem.memory_limits[pool] * (1 + SLACK)
            for i, (_, peak) in enumerate(memory)
            for pool in POOLS
        )

    def _best_loaded(self, mode: Mode, cutoff: float) -> PhaseSequence:
        """The best sequence faster than `cutoff` whose components all stay loaded: all sequences are tried, and all
        divisions of the memory among their phases."""
        best, open_bound, limits = NONE, math.inf, self.problem.memory_limits
        for sequence in self._sequences(mode):
            least = sum(self.phases.solve(*phase).bound for phase in sequence)
            if least >= min(best.seconds, cutoff) * (1 - SLACK):
                continue
            for sizes in product(*(self.phases.resident_sizes(*phase) for phase in sequence)):
                total = {pool: sum(size[pool] for size in sizes) for pool in POOLS}
                if any(total[pool] > limits[pool] * (1 + SLACK) for pool in POOLS):
                    continue
                solved = []
                for phase, size in zip(sequence, sizes, strict=True):
                    peak = {pool: limits[pool] - total[pool] + size[pool] for pool in POOLS}
                    solved.append(self.phases.solve(*phase, limits=MemoryLimits(size, peak)))
                seconds = sum(phase.seconds for phase in solved)
                open_bound = min(open_bound, sum(phase.bound for phase in solved))
                if seconds < best.seconds:
                    best = PhaseSequence(seconds, seconds, tuple(solved))
        return replace(best, bound=min(best.seconds, open_bound))

    def _sequences(self, mode: Mode) -> Iterator[tuple[tuple[frozenset[str], Kind], ...]]:
        """All sequences of phases of the mode: components and kind of each."""
        ends = self._ends(mode)

        def extend(
            done: frozenset[str], sequence: tuple[tuple[frozenset[str], Kind], ...]
        ) -> Iterator[tuple[tuple[frozenset[str], Kind], ...]]:
            if done == self.all:
                if (any(self._splits(*phase) for phase in sequence), len(sequence) > 1) in ends:
                    yield sequence
                return
            for prefix in self.prefixes:
                if done < prefix and (mode != "disaggregated" or prefix == self.all):
                    for kind in KINDS[mode]:
                        yield from extend(prefix, (*sequence, (prefix - done, kind)))

        return extend(frozenset(), ())


def _better(one: PhaseSequence, other: PhaseSequence) -> bool:
    if math.isclose(one.seconds, other.seconds, rel_tol=1e-9):
        return one.clumsiness < other.clumsiness
    return one.seconds < other.seconds
