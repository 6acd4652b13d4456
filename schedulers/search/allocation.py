"""Resource allocation: the number of devices of each placement of a phase with at most one loop.

Branch and bound, exact. Placements get devices one after the other, the busiest first. The makespan of a phase rises
with the sum and the maximum of the loop's times and of those of each pipeline (`PhaseModel.seconds_from_sums`), so a
partial allocation is bounded from below by the makespan with the least that the open placements can reach: the least
sums that they reach together with the devices that are left, and the least maxima that each reaches with all of these.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from schedulers.cluster import POOLS, Pool
from schedulers.cost.phase import PhaseModel
from schedulers.cost.problem import Problem
from schedulers.cost.times import resident_bytes, stage_seconds, usable_devices, visit_seconds, working_bytes

BLOCK = 128
"""Partial allocations that are extended at once: enough for NumPy, few enough to find a good one early."""
SLACK = 1e-12
"""Relative improvement that a branch must promise, so that rounding keeps none alive."""


@dataclass(frozen=True)
class MemoryLimits:
    """Bytes of each device that a phase may use, by pool: resident, and with the working sets."""

    resident: Mapping[Pool, float]
    peak: Mapping[Pool, float]
    weights_elsewhere: bool = False
    """See `resident_bytes`."""


@dataclass(frozen=True)
class Allocation:
    """The best numbers of devices found, in the order of the model's placements, and a lower bound of all others."""

    seconds: float = math.inf
    counts: tuple[int, ...] = ()
    bound: float = math.inf


@dataclass(frozen=True)
class SolvedPhase:
    """The best phase found of some components and one kind."""

    seconds: float
    """Makespan with the context switch; infinite where there is no such phase."""
    bound: float
    """Lower bound of every such phase."""
    model: PhaseModel | None = None
    counts: tuple[int, ...] = ()
    """Devices of each placement."""


class Options:
    """Numbers of devices that one placement may have, without those that are no better than fewer.

    Columns of `sums` and `tops` are the loop, then each pipeline of the phase.
    """

    def __init__(
        self,
        problem: Problem,
        model: PhaseModel,
        index: int,
        visits: list[int],
        stages: list[int],
        limits: MemoryLimits,
    ) -> None:
        names = model.placements[index]
        self.pool = problem.pools[names[0]]
        self.pinned = problem.pinned(names)
        self.pool_units = len(problem.counts[self.pool])
        pool = POOLS.index(self.pool)
        self.takes = [pool, pool + len(POOLS)] if self.pinned else [pool]
        """Columns of free units (see `free_units`) from which its units come."""
        counts = usable_devices(problem, model, names, problem.counts[self.pool])
        times = np.array(
            [visit_seconds(problem, model, i, counts) for i in visits]
            + [stage_seconds(problem, model, i, counts) for i in stages]
        )
        keep = np.flatnonzero(self._fits(problem, model, names, counts, limits))
        keep = keep[_undominated(times[:, keep])]
        times = times[:, keep]
        self.counts, self.units = counts[keep], keep + 1
        self.visits, self.stages = times[: len(visits)], times[len(visits) :]
        self.sums = np.zeros((len(self.counts), len(model.pipelines) + 1))
        self.tops = np.zeros_like(self.sums)
        self.sums[:, 0] = self.tops[:, 0] = self.visits.sum(axis=0)
        self.busy = sum(loop.steps * loop.groups for loop in model.loops) * self.sums[:, 0]
        for i, row in zip(stages, self.stages, strict=True):
            self.busy = self.busy + model.stages[i].parts * row
            for column, pipeline in enumerate(model.pipelines, start=1):
                if i in pipeline:
                    self.sums[:, column] += row
                    self.tops[:, column] = np.maximum(self.tops[:, column], row)
        self.never_slower = bool((np.diff(times, axis=1) <= 0).all())
        """True if more devices are never slower."""

    def _fits(
        self, problem: Problem, model: PhaseModel, names: tuple[str, ...], counts: np.ndarray, limits: MemoryLimits
    ) -> np.ndarray:
        fits = np.ones(len(counts), dtype=bool)
        if self.pinned:
            fits[problem.head_units(self.pool) :] = False
        resident = resident_bytes(problem, names, weights_elsewhere=limits.weights_elsewhere)
        if resident > limits.resident[self.pool] * (1 + SLACK):
            fits = np.zeros_like(fits)
        if problem.optimistic_memory or math.isfinite(limits.peak[self.pool]):
            peak = resident + working_bytes(problem, model, names, counts)
            fits = fits & (peak <= limits.peak[self.pool] * (1 + SLACK))
            if problem.optimistic_memory:
                fits = fits & (counts <= problem.devices_with(names, peak))
        return fits

    @cached_property
    def least(self) -> tuple[np.ndarray, np.ndarray]:
        """Least `sums` and `tops` with at most 0, 1, ... units."""
        last = self.units.searchsorted(np.arange(self.pool_units + 1), side="right") - 1
        found = []
        for table in (self.sums, self.tops):
            least = np.minimum.accumulate(table, axis=0)[np.maximum(last, 0)]
            least[last < 0] = math.inf
            found.append(least)
        return found[0], found[1]


def options_of(problem: Problem, model: PhaseModel, index: int, limits: MemoryLimits) -> Options:
    """Options of a placement, remembered because the same placement comes back in many phases with the same work."""
    names = model.placements[index]
    visits = [i for i, visit in enumerate(model.visits) if visit.placement == index]
    stages = [i for i, stage in enumerate(model.stages) if stage.placement == index]
    pool = problem.pools[names[0]]
    key = (
        names,
        tuple(model.visits[i].components for i in visits),
        tuple((model.stages[i].components, model.stages[i].parts) for i in stages),
        tuple(tuple(i in pipeline for pipeline in model.pipelines) for i in stages),
        model.contended & set(names),
        tuple(loop.groups for loop in model.loops),
        model.micro_batch,
        model.simple,
        len(model.pipelines),
        limits.resident[pool],
        limits.peak[pool],
        limits.weights_elsewhere,
    )
    if key not in problem.options:
        problem.options[key] = Options(problem, model, index, visits, stages, limits)
    return problem.options[key]


def free_units(problem: Problem) -> np.ndarray:
    """Units of each pool, then of each pool on the head node."""
    return np.array([*(len(problem.counts[pool]) for pool in POOLS), *(problem.head_units(pool) for pool in POOLS)])


class AllocationSearch:
    """The search for one phase."""

    def __init__(self, problem: Problem, model: PhaseModel, limits: MemoryLimits) -> None:
        self.problem, self.model = problem, model
        self.options = [options_of(problem, model, p, limits) for p in range(len(model.placements))]
        self.feasible = all(len(options.counts) for options in self.options)

    def bound(self) -> float:
        """A lower bound in microseconds of work: all devices for every placement."""
        if not self.feasible:
            return math.inf
        sums = np.sum([options.least[0][-1:] for options in self.options], axis=0)
        tops = np.max([options.least[1][-1:] for options in self.options], axis=0)
        return float(self._makespan(sums, tops)[0])

    @property
    def bottleneck(self) -> float:
        """Busy time of the busiest placement, with all devices for every placement."""
        return max(float(options.busy.min(initial=math.inf)) for options in self.options)

    def solve(self, cutoff: float, deadline: float) -> Allocation:
        """The best allocation faster than `cutoff`; past the deadline (`time.monotonic`) the best so far."""
        self.best = Allocation(seconds=cutoff)
        self.deadline, self.open_bound = deadline, math.inf
        if self.feasible:
            self.order = sorted(range(len(self.options)), key=lambda p: -float(self.options[p].busy.min()))
            self.least = self._least_of_open()
            columns = self.options[0].sums.shape[1]
            nothing = np.zeros((1, columns))
            self._expand(0, free_units(self.problem)[None, :], nothing, nothing, np.zeros((1, 0), dtype=int))
        if not self.best.counts:
            return Allocation(bound=self.open_bound)
        return Allocation(self.best.seconds, self.best.counts, min(self.best.seconds, self.open_bound))

    def _makespan(self, sums: np.ndarray, tops: np.ndarray) -> np.ndarray:
        """The phase's makespan for each row of sums and maxima."""
        pipelines = range(1, 1 + len(self.model.pipelines))
        makespan = self.model.seconds_from_sums(
            sums[:, 0], tops[:, 0], [sums[:, i] for i in pipelines], [tops[:, i] for i in pipelines]
        )
        return np.broadcast_to(np.asarray(makespan, dtype=float), (len(sums),))

    def _least_of_open(self) -> list[dict[Pool, tuple[np.ndarray, np.ndarray]]]:
        """For each number of decided placements and each pool, the least sums and maxima of the open ones with at most
        0, 1, ... units."""
        open_options: dict[Pool, tuple[Options, ...]] = {pool: () for pool in POOLS}
        columns = self.options[0].sums.shape[1]
        least = {pool: (np.zeros((len(self.problem.counts[pool]) + 1, columns)),) * 2 for pool in POOLS}
        result = [least]
        for p in reversed(self.order):
            options = self.options[p]
            pool = options.pool
            open_options[pool] = (*open_options[pool], options)
            key = open_options[pool]  # Many phases end with the same placements.
            if key not in self.problem.options:
                sums, tops = least[pool]
                together = least_sums(sums, options) if len(key) > 1 else options.least[0]
                self.problem.options[key] = (together, np.maximum(tops, options.least[1]))
            least = {**least, pool: self.problem.options[key]}
            result.insert(0, least)
        return result

    def _bounds(self, layer: int, free: np.ndarray, sums: np.ndarray, tops: np.ndarray) -> np.ndarray:
        for i, pool in enumerate(POOLS):
            least_sums, least_tops = self.least[layer][pool]
            sums = sums + least_sums[free[:, i]]
            tops = np.maximum(tops, least_tops[free[:, i]])
        with np.errstate(invalid="ignore"):
            bounds = self._makespan(sums, tops)
        return np.where(np.isnan(bounds), math.inf, bounds)

    def _expand(self, layer: int, free: np.ndarray, sums: np.ndarray, tops: np.ndarray, chosen: np.ndarray) -> None:
        """Decide the next placement of each row: free units, sums and maxima, and options chosen so far."""
        options = self.options[self.order[layer]]
        rows, columns = self._children(layer, free[:, options.takes].min(axis=1))
        if not len(rows):
            return
        free = free[rows]
        free[:, options.takes] -= options.units[columns, None]
        sums = sums[rows] + options.sums[columns]
        tops = np.maximum(tops[rows], options.tops[columns])
        chosen = np.column_stack([chosen[rows], columns])
        last = layer + 1 == len(self.order)
        bounds = self._makespan(sums, tops) if last else self._bounds(layer + 1, free, sums, tops)
        good = np.flatnonzero(bounds < self.best.seconds * (1 - SLACK))
        good = good[np.argsort(bounds[good], kind="stable")]
        if last:
            self._finish(chosen[good], bounds[good])
            return
        for begin in range(0, len(good), BLOCK):
            block = good[begin : begin + BLOCK]
            block = block[bounds[block] < self.best.seconds * (1 - SLACK)]
            if not len(block):
                return
            if self.best.seconds < math.inf and time.monotonic() > self.deadline:
                self.open_bound = min(self.open_bound, float(bounds[block[0]]))
                return
            self._expand(layer + 1, free[block], sums[block], tops[block], chosen[block])

    def _children(self, layer: int, free: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Pairs of a row and an option that fits into the row's free units."""
        options = self.options[self.order[layer]]
        fitting = options.units.searchsorted(free, side="right")
        if options.never_slower and all(self.options[p].pool != options.pool for p in self.order[layer + 1 :]):
            rows = np.flatnonzero(fitting)  # The last placement of its pool takes the rest.
            return rows, fitting[rows] - 1
        return each_option(fitting)

    def _finish(self, chosen: np.ndarray, bounds: np.ndarray) -> None:
        """Compare complete allocations, in the order of their bounds."""
        for row, bound in zip(chosen, bounds, strict=True):
            if bound >= self.best.seconds * (1 - SLACK):
                return
            picks = [0] * len(self.options)
            for p, pick in zip(self.order, row, strict=True):
                picks[p] = int(pick)
            seconds = float(bound) if self.model.simple else exact_seconds(self.model, self.options, picks)
            if seconds < self.best.seconds * (1 - SLACK):
                self.best = Allocation(seconds, counts_of(self.options, picks))


def exact_seconds(model: PhaseModel, options: Sequence[Options], picks: Sequence[int]) -> float:
    """Makespan where each placement has the option of this number."""
    return model.seconds(
        [float(options[p].visits[row, picks[p]]) for p, row in model.visit_rows],
        [float(options[p].stages[row, picks[p]]) for p, row in model.stage_rows],
    )


def counts_of(options: Sequence[Options], picks: Sequence[int]) -> tuple[int, ...]:
    return tuple(int(its.counts[pick]) for its, pick in zip(options, picks, strict=True))


def each_option(fitting: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Each row with each of its first `fitting` options: numbers of the rows, numbers of the options."""
    rows = np.repeat(np.arange(len(fitting)), fitting)
    return rows, np.arange(len(rows)) - np.repeat(np.cumsum(fitting) - fitting, fitting)


def least_sums(rest: np.ndarray, options: Options) -> np.ndarray:
    """Least sums of one placement and others together, with at most 0, 1, ... units; `rest`: those of the others."""
    most, columns = int(options.units[-1]), rest.shape[1]
    mine = np.full((columns, most), math.inf)
    mine[:, most - options.units] = options.sums.T
    others = np.concatenate([np.full((columns, most), math.inf), rest[:-1].T], axis=1)
    # Windows of `others` begin at each number of units: from `most` fewer units to one fewer, as in `mine`.
    windows = np.lib.stride_tricks.sliding_window_view(others, most, axis=1)
    return np.asarray((windows + mine[:, None, :]).min(axis=2).T)


def _undominated(times: np.ndarray) -> np.ndarray:
    """True for columns (more and more devices) that no earlier one equals or beats in every row."""
    count = times.shape[1]
    if len(times) == 1:
        before = np.concatenate([[math.inf], np.minimum.accumulate(times[0])[:-1]])[:count]
        return np.asarray(times[0] < before)
    beaten = np.ones((count, count), dtype=bool)
    for row in times:
        beaten &= row[:, None] <= row[None, :]
    return np.asarray(~np.triu(beaten, 1).any(axis=0))
