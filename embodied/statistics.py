"""95% intervals of a success rate, of the difference of two, and of a measured time; percentiles of latencies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np

# SciPy is imported where an interval is computed: it takes a third of a worker's start, and most compute none.

Z2 = NormalDist().inv_cdf(0.975) ** 2


def wilson(solved: int, episodes: int) -> tuple[float, float]:
    """The 95% Wilson score interval of solved / episodes. Without episodes everything is possible: 0 to 1."""
    from scipy.stats import binomtest

    if episodes == 0:
        return 0.0, 1.0
    interval = binomtest(solved, episodes).proportion_ci(method="wilson")
    return float(interval.low), float(interval.high)


def pass_at(k: int, attempts: int, solved: Sequence[int]) -> tuple[float, float, float]:
    """pass@k of N problems, and its 95% interval: the mean of 1 - C(n - c, k) / C(n, k) over problems, where c of the
    n = `attempts` attempts succeeded (`solved` [N]). It is unbiased (Chen et al. 2021, "Evaluating large language
    models trained on code", equation 1).

    The interval is Wilson's for N problems: a mean of shares varies no more than one of zeros and ones.
    """
    shares = [1.0 - math.comb(attempts - count, k) / math.comb(attempts, k) for count in solved]
    mean = float(np.mean(shares))
    return mean, *wilson_of(mean, len(shares))


def wilson_of(share: float, count: int) -> tuple[float, float]:
    """The 95% Wilson score interval of a mean of `count` numbers from 0 to 1."""
    middle = (share + Z2 / (2 * count)) / (1 + Z2 / count)
    half = math.sqrt(Z2 * (share * (1 - share) / count + Z2 / (4 * count * count))) / (1 + Z2 / count)
    return max(0.0, middle - half), min(1.0, middle + half)


def typical(values: Sequence[float]) -> tuple[float, float, float]:
    """Median of what cannot be negative, and half the width of the mean's 95% interval to both sides of it, down to 0.

    The median, since now and then a machine does something else for a second. One value has no width.
    """
    middle, spread = float(np.median(values)), _half_width(values)
    return middle, max(0.0, middle - spread), middle + spread


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Mean, and the 95% interval of Student's t around it. One value has no width, and neither have equal ones: for
    success rates there is `seeds_interval`."""
    mean, half = float(np.mean(values)), _half_width(values)
    return mean, mean - half, mean + half


def seeds_interval(rates: Sequence[float], episodes: Sequence[int]) -> tuple[float, float, float]:
    """Mean of the success rates of runs that differ in their seeds, each over its number of `episodes`, and its 95%
    interval within 0 and 1: Student's t over the rates, and never narrower than Wilson's interval of all episodes
    together. Three seeds that happen to end alike, at 100% for example, vary as little as their episodes show, and no
    less. For one seed it is Wilson's alone, and without episodes 0 to 1. Raises `ValueError` if a rate lacks its
    number.
    """
    if not rates or len(rates) != len(episodes) or min(episodes) < 0:
        raise ValueError(f"{len(rates)} success rates need as many numbers of episodes, got {list(episodes)}")
    mean, low, high = mean_interval(rates)
    count = sum(episodes)
    least, most = wilson_of(float(np.average(rates, weights=episodes)), count) if count else (0.0, 1.0)
    return mean, max(0.0, min(low, least)), min(1.0, max(high, most))


def _half_width(values: Sequence[float]) -> float:
    """Half width of the mean's 95% interval; 0 for one value."""
    from scipy.stats import sem
    from scipy.stats import t as student

    return float(student.ppf(0.975, len(values) - 1) * sem(values)) if len(values) > 1 else 0.0


@dataclass(frozen=True)
class PairedDifference:
    """Difference of two evaluations of the same episodes."""

    episodes: int
    both: int
    """Episodes that both solved."""
    first_only: int
    second_only: int
    neither: int
    difference: float
    """Success rate of the first less that of the second."""
    low: float
    high: float
    """The 95% interval of the difference."""
    p_value: float
    """p-value of McNemar's exact test: the probability of a split at least this unequal of the episodes that one alone
    solved, if neither is better."""


def paired_difference(first: Sequence[bool], second: Sequence[bool]) -> PairedDifference:
    """Compare outcomes of the same episodes, in the same order; raises `ValueError` unless the lengths are equal.

    The interval is the score interval of T. Tango, "Equivalence test and confidence interval for the difference in
    proportions for the paired-sample design", Statistics in Medicine 17 (1998), 891-908. It depends on the episodes
    that one alone solved and on how many there are, lies within [-1, 1], and has a width where all outcomes agree.
    """
    from scipy.stats import binomtest

    one, two = np.asarray(first, np.bool_), np.asarray(second, np.bool_)
    if len(one) != len(two) or not len(one):
        raise ValueError(f"a paired comparison needs the same episodes twice, got {len(one)} and {len(two)} outcomes")
    n = len(one)
    both, first_only = int((one & two).sum()), int((one & ~two).sum())
    second_only, neither = int((~one & two).sum()), int((~one & ~two).sum())
    alone = first_only + second_only
    return PairedDifference(
        n,
        both,
        first_only,
        second_only,
        neither,
        (first_only - second_only) / n,
        _limit(first_only, second_only, n, -1.0),
        _limit(first_only, second_only, n, 1.0),
        float(binomtest(first_only, alone).pvalue) if alone else 1.0,
    )


def _limit(b: int, c: int, n: int, end: float) -> float:
    """The difference between (b - c) / n and `end` at which the score statistic is as large as 95% allows."""

    from scipy.optimize import brentq

    def excess(delta: float) -> float:
        """Squared score less its bound; `q` is the most likely rate of c under this difference."""
        linear = -b - c + (2 * n - b + c) * delta
        spread = delta * (1 - delta)
        q = (math.sqrt(max(0.0, linear * linear + 8 * n * c * spread)) - linear) / (4 * n)
        return (b - c - n * delta) ** 2 - Z2 * n * (2 * q + spread)

    if excess(end) <= 0:  # the difference is at the end already
        return end
    # Not from the difference itself, where score and bound are both 0 if all outcomes agree.
    return float(brentq(excess, (b - c) / n + end * 1e-9, end, xtol=1e-12))


def latency_percentiles(latencies_s: Sequence[float]) -> dict[str, float]:
    """Number of the decisions with these latencies in seconds, their 50th, 95th and 99th percentile, and the longest;
    the number alone where there are none."""
    if not latencies_s:
        return {"decisions": 0}
    p50, p95, p99, longest = np.percentile(latencies_s, [50, 95, 99, 100]).tolist()
    return {
        "decisions": len(latencies_s),
        "latency_p50_s": p50,
        "latency_p95_s": p95,
        "latency_p99_s": p99,
        "latency_max_s": longest,
    }
