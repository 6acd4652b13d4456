"""How many devices for each placement of a phase in which several loops share servers."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence

import numpy as np

from schedulers.laws import Times
from schedulers.network import alone, loads
from schedulers.search import Caps, Outcome, options_of
from schedulers.shape import Shape
from schedulers.times import POOLS, Problem

TOLERANCE = 0.005
"""Relative. What promises less than this more than the best found is not played; bounds count it."""
MOST_ROWS = 20_000
"""Allocations that are bounded; beyond, those that promise most."""
MOST_PLAYED = 60
"""Allocations of one shape that are played."""
MOST_SHIFTED = 20
"""Allocations that are played to improve one."""
SHARPNESS = 16
"""Exponent with which servers and loops count in the order of giving devices: the slowest counts most."""


class NetworkAllocation:
    """The search for one shape: allocations are bounded by what no order of serving undercuts, and the best are played.

    Unlike the search for one loop it is not always exact: `Outcome.bound` says how far from it.
    """

    def __init__(self, problem: Problem, shape: Shape, caps: Caps) -> None:
        self.problem, self.shape = problem, shape
        self.options = [options_of(problem, shape, p, caps) for p in range(len(shape.placements))]
        self.feasible = all(len(options.counts) for options in self.options)
        if not self.feasible:
            return
        sizes = [len(problem.counts[pool]) for pool in POOLS]
        self.room = np.array([*sizes, *(problem.home_units(pool) for pool in POOLS)])
        self.visits = [visit.placement for visit in shape.visits]
        self.segments = [segment.placement for segment in shape.segments]

    def quick_bound(self) -> float:
        """A lower bound: every placement has all devices."""
        if not self.feasible:
            return math.inf
        return float(self._least([options.visits.min(axis=1) for options in self.options], last=-1))

    def solve(self, cutoff: float, deadline: float) -> Outcome:
        """The best allocation faster than `cutoff` that was found, and what none undercuts. Past the deadline
        (`time.monotonic`) the first one that promises to be good."""
        if not self.feasible:
            return Outcome()
        best = Outcome(seconds=cutoff)
        given = self.greedy()
        if given is None:
            return Outcome()
        seconds = self.played(given)
        if seconds < cutoff:
            best = Outcome(seconds, self._counts(given))
        if time.monotonic() > deadline:
            return Outcome(best.seconds if best.counts else math.inf, best.counts, self.quick_bound())
        rows, bounds, open_bound = self._rows(best.seconds)
        for number in np.argsort(bounds, kind="stable"):
            late = number >= MOST_PLAYED or time.monotonic() > deadline
            if late or bounds[number] >= best.seconds * (1 - TOLERANCE):
                open_bound = min(open_bound, float(bounds[number]))
                break
            seconds = self.played(rows[number])
            if seconds < best.seconds:
                best = Outcome(seconds, self._counts(rows[number]))
        found = best.seconds if best.counts else math.inf
        return Outcome(found, best.counts, min(found, open_bound))

    def played(self, picks: Sequence[int]) -> float:
        """Seconds of the phase where each placement has the option of this number."""
        own = {p: iter(self.options[p].visits[:, picks[p]]) for p in range(len(picks))}
        parts = {p: iter(self.options[p].segments[:, picks[p]]) for p in range(len(picks))}
        return self.shape.exact_seconds(
            [float(next(own[p])) for p in self.visits], [float(next(parts[p])) for p in self.segments]
        )

    def greedy(self) -> list[int] | None:
        """Options that balance servers and loops, found by giving devices one by one to whom they help most. None where
        there are too few devices."""
        picks = [0] * len(self.options)
        room = self.room.copy()
        for options in self.options:
            room[options.takes] -= options.units[0]
        if (room < 0).any():
            return None
        present = self._strain(picks)
        while True:
            best: tuple[float, int, float] | None = None
            for p, options in enumerate(self.options):
                if picks[p] + 1 == len(options.units):
                    continue
                more = int(options.units[picks[p] + 1] - options.units[picks[p]])
                if (room[options.takes] < more).any():
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
            room[self.options[p].takes] -= self.options[p].units[picks[p] + 1] - self.options[p].units[picks[p]]
            picks[p] += 1

    def shifted(self, picks: Sequence[int]) -> list[int]:
        """The best of `picks` and what comes of giving one placement more at the cost of another, again and again, as
        long as that is not too often."""
        best, seconds, played = list(picks), self.played(picks), 0
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
                    if changed[source] < 0 or not self._fits(changed) or self._bound(changed) >= seconds:
                        continue
                    played += 1
                    if played > MOST_SHIFTED:
                        return best
                    found = self.played(changed)
                    if found < seconds * (1 - 1e-9):
                        best, seconds, improved = changed, found, True
                        break
        return best

    def _fits(self, picks: Sequence[int]) -> bool:
        room = self.room.copy()
        for options, pick in zip(self.options, picks, strict=True):
            room[options.takes] -= options.units[pick]
        return bool((room >= 0).all())

    def _counts(self, picks: Sequence[int]) -> tuple[int, ...]:
        return tuple(int(options.counts[pick]) for options, pick in zip(self.options, picks, strict=True))

    counts_of = _counts

    def _times(self, picks: Sequence[int]) -> list[float]:
        own = {p: iter(self.options[p].visits[:, picks[p]]) for p in range(len(picks))}
        return [float(next(own[p])) for p in self.visits]

    def _strain(self, picks: Sequence[int]) -> float:
        """How slow all loops and servers are, the slowest counting most."""
        circuits = [loop.circuit for loop in self.shape.loops]
        times = self.shape.by_loop(self._times(picks))
        terms = [alone(circuit, own) for circuit, own in zip(circuits, times, strict=True)]
        terms += loads(circuits, times).values()
        rest = [float(options.segments[:, pick].sum()) for options, pick in zip(self.options, picks, strict=True)]
        most = max(terms)
        if not most:
            return sum(rest)
        return float(most * sum((term / most) ** SHARPNESS for term in terms) ** (1 / SHARPNESS)) + 1e-3 * sum(rest)

    def _bound(self, picks: Sequence[int]) -> float:
        columns = [options.visits[:, pick] for options, pick in zip(self.options, picks, strict=True)]
        return float(self._least(columns, last=0, picks=picks))

    def _least(self, columns: Sequence[Times], last: int, picks: Sequence[int] | None = None) -> Times:
        """`Shape.least_seconds` from each placement's times of visits; segments at their least without `picks`."""
        own = {p: iter(column) for p, column in enumerate(columns)}
        parts = {
            p: iter(options.segments.min(axis=1) if picks is None else options.segments[:, picks[p]])
            for p, options in enumerate(self.options)
        }
        return self.shape.least_seconds([next(own[p]) for p in self.visits], [next(parts[p]) for p in self.segments])

    def _rows(self, cutoff: float) -> tuple[np.ndarray, np.ndarray, float]:
        """Allocations that promise to be faster than `cutoff`, their bounds, and the least bound of those left out."""
        picks = np.zeros((1, 0), dtype=int)
        room = self.room[None, :]
        least = [options.visits.min(axis=1) for options in self.options]
        pieces = [options.segments.min(axis=1) for options in self.options]
        bounds, open_bound = np.zeros(1), math.inf
        for options in self.options:
            fitting = options.units.searchsorted(room[:, options.takes].min(axis=1), side="right")
            rows = np.repeat(np.arange(len(room)), fitting)
            columns = np.arange(len(rows)) - np.repeat(np.cumsum(fitting) - fitting, fitting)
            picks = np.column_stack([picks[rows], columns])
            room = room[rows]
            room[:, options.takes] -= options.units[columns, None]
            bounds = self._bounds(picks, least, pieces)
            good = np.flatnonzero(bounds < cutoff * (1 - TOLERANCE))
            if len(good) < len(bounds):
                open_bound = min(open_bound, float(np.delete(bounds, good).min()))
            if len(good) > MOST_ROWS:
                order = np.argsort(bounds[good], kind="stable")
                open_bound = min(open_bound, float(bounds[good][order[MOST_ROWS]]))
                good = good[order[:MOST_ROWS]]
            picks, room, bounds = picks[good], room[good], bounds[good]
        return picks, bounds, open_bound

    def _bounds(self, picks: np.ndarray, least: Sequence[np.ndarray], pieces: Sequence[np.ndarray]) -> np.ndarray:
        """Of partial allocations: the placements that are not decided yet take their least."""
        decided = picks.shape[1]
        own = {
            p: iter(options.visits[:, picks[:, p]] if p < decided else least[p])
            for p, options in enumerate(self.options)
        }
        parts = {
            p: iter(options.segments[:, picks[:, p]] if p < decided else pieces[p])
            for p, options in enumerate(self.options)
        }
        found = self.shape.least_seconds([next(own[p]) for p in self.visits], [next(parts[p]) for p in self.segments])
        return np.broadcast_to(np.asarray(found, dtype=float), (len(picks),))
