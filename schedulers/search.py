"""How many devices for each placement of a phase: branch and bound over tables, exact for a given shape."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from schedulers.profile import Pool
from schedulers.shape import Shape
from schedulers.times import POOLS, Problem, resident_bytes, segment_seconds, usable, visit_seconds, working_bytes

PRICES = np.concatenate([[0.0], np.geomspace(0.1, 10.0, 24)])
"""Of a unit, relative to what it costs on average, at which a relaxation is evaluated."""
BLOCK = 128
"""Partial allocations that are extended at once: enough for NumPy, few enough to find a good one early."""
SLACK = 1e-12
"""Relative; a branch must promise more than this, so that rounding keeps no branch alive."""


@dataclass(frozen=True)
class Caps:
    """Bytes of each device that a phase may fill: by what is resident, and with the working sets."""

    resident: Mapping[Pool, float]
    peak: Mapping[Pool, float]
    lent: bool = False
    """See `resident_bytes`."""


@dataclass
class Outcome:
    """Best allocation found (devices of each placement, in the shape's order) and what no other can undercut."""

    seconds: float = math.inf
    counts: tuple[int, ...] = ()
    bound: float = math.inf


class Allocation:
    """The search for one shape. Placements are decided one after the other, the busiest first.

    A partial allocation is bounded from below by the phase's own cost law, whose every argument (sums and maxima
    over servers) is replaced by what is decided plus the least that the undecided placements can reach with the
    devices that are left; by the same for whole paths, so that placements on one path do not each count on all
    devices; and by the smallest busy time of the busiest placement.
    """

    def __init__(self, problem: Problem, shape: Shape, caps: Caps) -> None:
        self.problem, self.shape = problem, shape
        self.options = [options_of(problem, shape, p, caps) for p in range(len(shape.placements))]
        self.feasible = all(len(options.counts) for options in self.options)
        if self.feasible:
            self.units = {pool: len(problem.counts[pool]) for pool in POOLS}
            self.room = np.array([*self.units.values(), *(problem.home_units(pool) for pool in POOLS)])
            """Units of each pool, and of each pool at home."""
            self.combos = _combinations(shape)
            self.order = sorted(
                range(len(self.options)),
                key=lambda p: (-float(self.options[p].least_tops[-1]), p),
            )

    def quick_bound(self) -> float:
        """A lower bound in microseconds of work: the best balance of busy times, and all devices for everyone."""
        if not self.feasible:
            return math.inf
        least = max(self._balance(pool, -1) for pool in POOLS)
        sums = sum(options.least_sums for options in self.options)
        tops = np.max([options.least_tops for options in self.options], axis=0)
        return max(least, float(self._law(np.atleast_2d(sums), np.atleast_2d(tops))[0]))

    def shared_bound(self) -> float:
        """A better one for ten times the work: whole paths, whose placements share the devices.

        Least weighted sums come from a price on devices (a Lagrangian relaxation, valid at any price); maxima
        from the best balance of each.
        """
        weights = np.array([weights for weights, _ in self.combos]).T
        columns = range(self.options[0].sums.shape[1])
        tops = np.array([max(self._balance(pool, column) for pool in POOLS) for column in columns])
        whole = sum(self._priced(pool, weights) for pool in POOLS)
        return float(np.max(whole + np.array([extra for _, extra in self.combos]) @ tops))

    def _priced(self, pool: Pool, weights: np.ndarray) -> np.ndarray:
        mine = [(options.sums @ weights, options.units) for options in self.options if options.pool == pool]
        if not mine:
            return np.zeros(weights.shape[1])
        scale = sum(costs.min(axis=0) for costs, _ in mine) / self.units[pool]
        prices = scale[:, None] * PRICES
        total = -prices * self.units[pool]
        for costs, units in mine:
            total += (costs[:, :, None] + prices * units[:, None, None]).min(axis=0)
        return np.asarray(total.max(axis=1))

    def _balance(self, pool: Pool, column: int) -> float:
        """The least that the largest of a column's times can be, when the pool's placements share its devices."""
        mine = [options for options in self.options if options.pool == pool and options.least_tops[column] > 0]
        if len(mine) < 2:
            return float(mine[0].least_tops[column]) if mine else 0.0
        levels = np.sort(np.concatenate([options.falling[column] for options in mine]))[::-1]
        low, high = 0, len(levels)
        while low < high:
            middle = (low + high) // 2
            need = 0
            for options in mine:
                first = options.falling[column].searchsorted(levels[middle])
                need += int(options.units[first]) if first < len(options.units) else 1 << 40
            low, high = (low, middle) if need <= self.units[pool] else (middle + 1, high)
        return -float(levels[low]) if low < len(levels) else math.inf

    def _law(self, sums: np.ndarray, tops: np.ndarray) -> np.ndarray:
        """The phase's cost from column 0 (loop) and one column a run."""
        runs = range(1, 1 + len(self.shape.runs))
        law = self.shape.combine(sums[:, 0], tops[:, 0], [sums[:, i] for i in runs], [tops[:, i] for i in runs])
        return np.broadcast_to(np.asarray(law, dtype=float), (len(sums),))

    def solve(self, cutoff: float, deadline: float) -> Outcome:
        """The best allocation faster than `cutoff`; past the deadline (`time.monotonic`) the best so far."""
        self.best = Outcome(seconds=cutoff)
        self.deadline = deadline
        self.open = math.inf
        if self.feasible:
            self._prepare()
            columns = self.options[0].sums.shape[1]
            root = self.room[None, :]
            self._expand(0, root, np.zeros((1, columns)), np.zeros((1, columns)), np.zeros((1, 0), dtype=int))
        found = self.best.seconds if self.best.counts else math.inf
        return Outcome(found, self.best.counts, min(found, self.open) if self.best.counts else self.open)

    def _prepare(self) -> None:
        """Least sums and maxima of the placements still open, by layer, pool and units left."""
        combos = self.combos
        self.weights = np.array([weights for weights, _ in combos]).T
        self.extras = [extra for _, extra in combos]
        columns = self.options[0].sums.shape[1]
        zero = {pool: _Least.nothing(self.units[pool], columns, len(combos)) for pool in POOLS}
        self.least = [zero]
        for p in reversed(self.order):
            options, table = self.options[p], dict(self.least[0])
            table[options.pool] = table[options.pool].with_placement(options, self.weights)
            self.least.insert(0, table)

    def _bound(self, layer: int, room: np.ndarray, sums: np.ndarray, tops: np.ndarray) -> np.ndarray:
        least = self.least[layer]
        left = [least[pool].at(room[:, i]) for i, pool in enumerate(POOLS)]
        best_sums = sums + left[0][0] + left[1][0]
        best_tops = np.maximum(tops, np.maximum(left[0][1], left[1][1]))
        with np.errstate(invalid="ignore"):
            bound = np.maximum(self._law(best_sums, best_tops), best_tops[:, -1])
            whole = sums @ self.weights + left[0][2] + left[1][2]
            for i, extra in enumerate(self.extras):
                bound = np.maximum(bound, whole[:, i] + best_tops @ extra)
        return np.where(np.isnan(bound), math.inf, bound)

    def _expand(self, layer: int, room: np.ndarray, sums: np.ndarray, tops: np.ndarray, chosen: np.ndarray) -> None:
        """Decide the next placement; `room` is what is left of `self.room` in each row."""
        options = self.options[self.order[layer]]
        rows, columns = self._children(layer, room[:, options.takes].min(axis=1))
        if not len(rows):
            return
        room = room[rows]
        room[:, options.takes] -= options.units[columns, None]
        sums = sums[rows] + options.sums[columns]
        tops = np.maximum(tops[rows], options.tops[columns])
        chosen = np.column_stack([chosen[rows], columns])
        last = layer + 1 == len(self.order)
        bounds = self._law(sums, tops) if last else self._bound(layer + 1, room, sums, tops)
        good = np.flatnonzero(bounds < self.best.seconds * (1 - SLACK))
        good = good[np.argsort(bounds[good], kind="stable")]
        if last:
            self._finish(chosen, bounds, good)
            return
        for begin in range(0, len(good), BLOCK):
            block = good[begin : begin + BLOCK]
            block = block[bounds[block] < self.best.seconds * (1 - SLACK)]
            if not len(block):
                return
            if self.best.seconds < math.inf and time.monotonic() > self.deadline:
                self.open = min(self.open, float(bounds[block[0]]))
                return
            self._expand(layer + 1, room[block], sums[block], tops[block], chosen[block])

    def _children(self, layer: int, left: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of a row and an option that fits into what the row leaves."""
        options = self.options[self.order[layer]]
        fitting = options.units.searchsorted(left, side="right")
        if options.falls and all(self.options[p].pool != options.pool for p in self.order[layer + 1 :]):
            rows = np.flatnonzero(fitting)  # Nobody else wants the rest, and more is better.
            return rows, fitting[rows] - 1
        rows = np.repeat(np.arange(len(left)), fitting)
        first = np.repeat(np.cumsum(fitting) - fitting, fitting)
        return rows, np.arange(len(rows)) - first

    def _finish(self, chosen: np.ndarray, bounds: np.ndarray, good: np.ndarray) -> None:
        for row in good:
            if bounds[row] >= self.best.seconds * (1 - SLACK):
                return
            picks = {p: int(chosen[row, layer]) for layer, p in enumerate(self.order)}
            seconds = float(bounds[row])
            if not self.shape.simple:
                seconds = self._exact(picks)
            if seconds < self.best.seconds * (1 - SLACK):
                counts = tuple(int(self.options[p].counts[picks[p]]) for p in range(len(picks)))
                self.best = Outcome(seconds, counts)

    def _exact(self, picks: Mapping[int, int]) -> float:
        def times(placement: int, rows: np.ndarray) -> Iterator[float]:
            return iter(rows[:, picks[placement]])

        placements = range(len(self.options))
        own = {p: times(p, self.options[p].visits) for p in placements}
        parts = {p: times(p, self.options[p].segments) for p in placements}
        return self.shape.exact_seconds(
            [float(next(own[visit.placement])) for visit in self.shape.visits],
            [float(next(parts[segment.placement])) for segment in self.shape.segments],
        )


class _Options:
    """What one placement takes, for each number of devices that is possible and better than fewer.

    Columns of `sums` and `tops`: the loop, then each run of the phase; `tops` ends with the busy time.
    """

    def __init__(
        self, problem: Problem, shape: Shape, visits: list[int], segments: list[int], index: int, caps: Caps
    ) -> None:
        names = shape.placements[index]
        self.pool = problem.pools[names[0]]
        self.bound = problem.bound(names)
        side = POOLS.index(self.pool)
        self.takes = [side, side + len(POOLS)] if self.bound else [side]
        """Columns of `Allocation.room` that its units come from."""
        self.counts, self.units, times = self._times(problem, shape, names, visits, segments, caps)
        self.visits, self.segments = times[: len(visits)], times[len(visits) :]
        self.sums = np.zeros((len(self.counts), len(shape.runs) + 2))
        self.tops = np.zeros_like(self.sums)
        self.sums[:, 0] = self.tops[:, 0] = self.visits.sum(axis=0)
        self.tops[:, -1] = sum(loop.rounds * loop.groups for loop in shape.loops) * self.sums[:, 0]
        for i, row in zip(segments, self.segments, strict=True):
            self.tops[:, -1] += shape.segments[i].parts * row
            for column, run in enumerate(shape.runs, start=1):
                if i in run:
                    self.sums[:, column] += row
                    self.tops[:, column] = np.maximum(self.tops[:, column], row)
        self.falls = bool((np.diff(times, axis=1) <= 0).all())
        self.least_sums = self.sums.min(axis=0, initial=math.inf)
        self.least_tops = self.tops.min(axis=0, initial=math.inf)
        self.falling = -np.minimum.accumulate(self.tops, axis=0).T.copy()
        """Of each column of `tops`, the least so far, negated: sorted, for look-ups."""

    def _times(
        self, problem: Problem, shape: Shape, names: tuple[str, ...], visits: list[int], segments: list[int], caps: Caps
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Numbers of devices, the same in units, and seconds of each visit, then each segment."""
        counts = usable(problem, shape, names, problem.counts[self.pool])
        resident = resident_bytes(problem, names, caps.lent)
        fits = np.ones(len(counts), dtype=bool)
        if self.bound:
            fits[problem.home_units(self.pool) :] = False
        if resident > caps.resident[self.pool] * (1 + SLACK):
            fits = np.zeros_like(fits)
        if problem.generous or math.isfinite(caps.peak[self.pool]):
            peak = resident + working_bytes(problem, shape, names, counts)
            fits = fits & (peak <= caps.peak[self.pool] * (1 + SLACK))
            if problem.generous:
                fits = fits & (counts <= problem.roomy(names, peak))
        times = np.array(
            [visit_seconds(problem, shape, i, counts) for i in visits]
            + [segment_seconds(problem, shape, i, counts) for i in segments]
        )
        keep = np.flatnonzero(fits)
        keep = keep[_undominated(times[:, keep])]
        return counts[keep], keep + 1, times[:, keep]


def options_of(problem: Problem, shape: Shape, index: int, caps: Caps) -> _Options:
    """The same placement comes back in many partitions with the same work: it is worked out once."""
    names = shape.placements[index]
    visits = [i for i, visit in enumerate(shape.visits) if visit.placement == index]
    segments = [i for i, segment in enumerate(shape.segments) if segment.placement == index]
    pool = problem.pools[names[0]]
    key = (
        names,
        tuple(shape.visits[i].components for i in visits),
        tuple((shape.segments[i].components, shape.segments[i].parts) for i in segments),
        tuple(tuple(i in run for run in shape.runs) for i in segments),
        shape.beside & set(names),
        tuple(loop.groups for loop in shape.loops),
        shape.micro_batch,
        shape.simple,
        len(shape.runs),
        caps.resident[pool],
        caps.peak[pool],
        caps.lent,
    )
    if key not in problem.remembered:
        problem.remembered[key] = _Options(problem, shape, visits, segments, index, caps)
    return problem.remembered[key]


def _undominated(times: np.ndarray) -> np.ndarray:
    """Columns (more and more devices) that no earlier one equals or beats in every row."""
    count = times.shape[1]
    if len(times) == 1:
        before = np.concatenate([[math.inf], np.minimum.accumulate(times[0])[:-1]])[:count]
        return np.asarray(times[0] < before)
    beaten = np.ones((count, count), dtype=bool)
    for row in times:
        beaten &= row[:, None] <= row[None, :]
    return np.asarray(~np.triu(beaten, 1).any(axis=0))


@dataclass(frozen=True)
class _Least:
    """Least sums, maxima and weighted sums that the open placements of a pool reach with so many units."""

    sums: np.ndarray
    tops: np.ndarray
    whole: np.ndarray

    @staticmethod
    def nothing(units: int, columns: int, combos: int) -> _Least:
        return _Least(np.zeros((units + 1, columns)), np.zeros((units + 1, columns)), np.zeros((units + 1, combos)))

    def at(self, left: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        return self.sums[left], self.tops[left], self.whole[left]

    def with_placement(self, options: _Options, weights: np.ndarray) -> _Least:
        units = len(self.sums)
        left = np.arange(units)[:, None] - options.units[None, :]
        out = left < 0
        left = np.maximum(left, 0)

        def least(table: np.ndarray, own: np.ndarray, join: np.ufunc) -> np.ndarray:
            result = np.empty_like(table)
            for column in range(table.shape[1]):
                found = join(table[left, column], own[None, :, column])
                found[out] = math.inf
                result[:, column] = found.min(axis=1)
            return result

        return _Least(
            least(self.sums, options.sums, np.add),
            least(self.tops, options.tops, np.maximum),
            least(self.whole, options.sums @ weights, np.add),
        )


def _combinations(shape: Shape) -> list[tuple[np.ndarray, np.ndarray]]:
    """Lower bounds of the cost that are a weighted sum over servers (first) plus weighted maxima (second).

    For each path: the loop's rounds times its sum, or the slowest server's rounds; plus the runs after it.
    """
    index = {run: i for i, run in enumerate(shape.runs, start=1)}
    columns = len(index) + 2
    result = []
    for path in shape.paths:
        for tail in shape.tail or (None,):
            sums, tops = np.zeros(columns), np.zeros(columns)
            runs = list(path.runs)
            if path.start == "stream":
                if shape.arrivals and shape.arrivals[-1] < 1:
                    continue
                sums[index[runs.pop(0)]] += 1
            for run in [*runs, *(tail.runs if tail else ())]:
                sums[index[run]] += 1
                tops[index[run]] += shape.segments[run[0]].parts - 1
            if path.start == "begin" or not shape.visits:
                result.append((sums, tops))
                continue
            loop = shape.loops[0]
            first, slowest, slow_tops = sums.copy(), sums.copy(), tops.copy()
            first[0] = loop.rounds
            first_tops = tops.copy()
            if shape.simple:
                first_tops[0] = loop.groups - 1
                slowest[0] = 1
                slow_tops[0] = loop.groups - 1 + (loop.rounds - 1) * loop.groups
            else:
                slow_tops[0] = loop.rounds * loop.groups
            result += [(first, first_tops), (slowest, slow_tops)]
    return result
