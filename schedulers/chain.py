"""The order of phases: a dynamic programme over the down-sets of the workflow, exact with memory and switches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product

import numpy as np

from schedulers.graph import ideals
from schedulers.phases import Kind, Phases, Solved
from schedulers.plan import Mode
from schedulers.profile import Pool
from schedulers.search import SLACK, Caps
from schedulers.times import POOLS, Problem, resident_bytes, working_bytes

KINDS: dict[Mode, tuple[Kind, ...]] = {
    "collocated": ("turns",),
    "disaggregated": ("apart",),
    "hybrid": ("turns", "apart"),
}


@dataclass(frozen=True)
class Chain:
    """Phases one after the other, their time with switches, and what none of the same mode can undercut."""

    seconds: float
    bound: float
    phases: tuple[Solved, ...] = ()
    unload: bool = False


@dataclass(frozen=True)
class _State:
    """Best way to have done some components: time, lower bound, clumsiness, phases."""

    seconds: float
    bound: float
    penalty: float
    phases: tuple[Solved, ...]


class Chains:
    def __init__(self, problem: Problem, phases: Phases) -> None:
        self.problem, self.phases = problem, phases
        self.ideals = ideals(problem.graph)
        self.all = frozenset(problem.graph.names)

    def best(self, mode: Mode) -> Chain:
        """The best chain of a mode: f(I) = min over J within I of f(J) + phase(I - J) + switch(I - J).

        First without switches, as if everything fitted: where it does, nothing is faster. Where it does not, the
        best of those that switch and of those that are arranged so that everything stays loaded.
        """
        free = self._programme(mode, switching=False)
        if free is None or not free.phases:
            return Chain(math.inf, math.inf)
        if self._stays(free.phases):
            return Chain(free.seconds, free.bound, free.phases)
        switched = self._programme(mode, switching=True)
        best = Chain(math.inf, math.inf)
        if switched is not None:
            best = Chain(switched.seconds, switched.bound, switched.phases, unload=len(switched.phases) > 1)
        loaded = self._loaded(mode, best.seconds)
        bound = max(free.bound, min(best.bound, loaded.bound))
        best = min(best, loaded, key=lambda chain: chain.seconds)
        return Chain(best.seconds, min(bound, best.seconds), best.phases, best.unload)

    def _programme(self, mode: Mode, switching: bool) -> _State | None:
        """States are kept apart by what the mode asks of the whole chain: was the loop's phase split, is there
        more than one phase."""
        states: dict[tuple[frozenset[str], bool, bool], _State] = {
            (frozenset(), False, False): _State(0.0, 0.0, 0.0, ())
        }
        for ideal in self.ideals[1:]:
            for (done, split, several), state in list(states.items()):
                if not done < ideal or (mode == "disaggregated" and (done or ideal != self.all)):
                    continue
                rest = ideal - done
                for kind in KINDS[mode]:
                    solved = self.phases.solve(rest, kind, switching and bool(done or ideal != self.all))
                    if not solved.bound < math.inf:
                        continue
                    key = (ideal, split or self._splits(rest, kind), several or bool(done))
                    grown = _State(
                        state.seconds + solved.seconds,
                        min(state.bound + solved.bound, states[key].bound if key in states else math.inf),
                        state.penalty + 1 + 1.5 * self._mixes(solved),
                        (*state.phases, solved),
                    )
                    better = key not in states or _better(grown, states[key])
                    states[key] = grown if better else replace(states[key], bound=grown.bound)
        full = [states.get((self.all, split, several)) for split, several in self._ends(mode)]
        found = [state for state in full if state is not None]
        if not found:
            return None
        best = found[0]
        for state in found[1:]:
            best = state if _better(state, best) else best
        return replace(best, bound=min(state.bound for state in found))

    @staticmethod
    def _ends(mode: Mode) -> list[tuple[bool, bool]]:
        if mode == "collocated":
            return [(False, False), (False, True)]
        return [(True, mode == "hybrid")]

    def _splits(self, components: frozenset[str], kind: Kind) -> bool:
        """Whether a phase makes a chain hybrid: it splits a pool, under the loop if the workflow has one."""
        return kind == "apart" and set(self.problem.graph.loop) <= components

    def _mixes(self, solved: Solved) -> bool:
        """Loop and learner side in one placement of a phase: the same time as two phases, but harder to read."""
        if solved.shape is None:
            return False
        loop = set(self.problem.graph.loop)
        return any(loop & set(names) and set(names) - loop for names in solved.shape.placements)

    def _held(self, solved: Solved) -> tuple[dict[Pool, float], dict[Pool, float]]:
        """Of a phase, by pool: most bytes resident on a device, and most with the working sets."""
        resident: dict[Pool, float] = dict.fromkeys(POOLS, 0.0)
        peak: dict[Pool, float] = dict.fromkeys(POOLS, 0.0)
        assert solved.shape is not None
        lent = self.phases.lent(frozenset(name for names in solved.shape.placements for name in names))
        for names, count in zip(solved.shape.placements, solved.counts, strict=True):
            pool, held = self.problem.pools[names[0]], resident_bytes(self.problem, names, lent)
            working = float(working_bytes(self.problem, solved.shape, names, np.array([count]))[0])
            resident[pool] = max(resident[pool], held)
            peak[pool] = max(peak[pool], held + working)
        return resident, peak

    def _stays(self, phases: tuple[Solved, ...]) -> bool:
        """All phases' components fit on a device that holds the most of each, with any one phase at work."""
        held = [self._held(solved) for solved in phases]
        return all(
            peak[pool] + sum(other[pool] for j, (other, _) in enumerate(held) if j != i)
            <= self.problem.limits[pool] * (1 + SLACK)
            for i, (_, peak) in enumerate(held)
            for pool in POOLS
        )

    def _loaded(self, mode: Mode, cutoff: float) -> Chain:
        """The best chain faster than `cutoff` whose components all stay loaded, by trying all chains."""
        best = Chain(math.inf, math.inf)
        open_bound = math.inf
        for phases in self._chains(mode):
            limit = min(best.seconds, cutoff)
            if sum(self.phases.solve(*phase).bound for phase in phases) >= limit * (1 - SLACK):
                continue
            for held in product(*(self.phases.levels(*phase) for phase in phases)):
                total = {pool: sum(level[pool] for level in held) for pool in POOLS}
                if any(total[pool] > self.problem.limits[pool] * (1 + SLACK) for pool in POOLS):
                    continue
                solved = []
                for phase, level in zip(phases, held, strict=True):
                    peak = {pool: self.problem.limits[pool] - total[pool] + level[pool] for pool in POOLS}
                    solved.append(self.phases.solve(*phase, caps=Caps(level, peak)))
                seconds = sum(phase.seconds for phase in solved)
                open_bound = min(open_bound, sum(phase.bound for phase in solved))
                if seconds < best.seconds:
                    best = Chain(seconds, seconds, tuple(solved))
        return Chain(best.seconds, min(best.seconds, open_bound), best.phases)

    def _chains(self, mode: Mode) -> Iterator[tuple[tuple[frozenset[str], Kind], ...]]:
        ends = self._ends(mode)

        def walk(
            done: frozenset[str], chain: tuple[tuple[frozenset[str], Kind], ...]
        ) -> Iterator[tuple[tuple[frozenset[str], Kind], ...]]:
            if done == self.all:
                if (any(self._splits(*phase) for phase in chain), len(chain) > 1) in ends:
                    yield chain
                return
            for ideal in self.ideals:
                if done < ideal and (mode != "disaggregated" or ideal == self.all):
                    for kind in KINDS[mode]:
                        yield from walk(ideal, (*chain, (ideal - done, kind)))

        return walk(frozenset(), ())


def _better(one: _State, other: _State) -> bool:
    if abs(one.seconds - other.seconds) > 1e-9 * max(one.seconds, other.seconds):
        return one.seconds < other.seconds
    return one.penalty < other.penalty
