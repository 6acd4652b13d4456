"""Intervals: they cover what they should as often as they should, and they are consistent with each other."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from embodied.statistics import mean_interval, paired_difference, pass_at, seeds_interval, typical, wilson

OUTCOMES = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=1, max_size=60)


def test_wilson_is_the_published_formula() -> None:
    """E. B. Wilson (1927): the roots of the score equation."""
    z = 1.959963984540054
    for solved, n in [(0, 10), (3, 10), (10, 10), (47, 50), (431, 500)]:
        p = solved / n
        centre = (p + z * z / (2 * n)) / (1 + z * z / n)
        half = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
        assert wilson(solved, n) == pytest.approx((centre - half, centre + half), abs=1e-9)


def test_pass_at_k_is_the_mean_over_every_choice_of_k_attempts() -> None:
    attempts, solved = 6, [0, 1, 3, 6]
    tried = [[number < count for number in range(attempts)] for count in solved]
    for k in (1, 2, 5, 6):
        choices = [any(chosen) for problem in tried for chosen in itertools.combinations(problem, k)]
        share, low, high = pass_at(k, attempts, solved)
        assert share == pytest.approx(np.mean(choices)) and 0 <= low < share < high <= 1
    assert pass_at(1, 1, [1, 0, 0, 1, 1])[1:] == pytest.approx(wilson(3, 5))


def test_without_episodes_everything_is_possible() -> None:
    assert wilson(0, 0) == (0.0, 1.0)


@pytest.mark.parametrize(("count", "published_t"), [(2, 12.706), (3, 4.303), (10, 2.262), (31, 2.042), (121, 1.980)])
def test_a_measured_time_has_students_interval(count: int, published_t: float) -> None:
    values = 5.0 + np.random.default_rng(0).normal(0, 0.1, count)
    middle, low, high = typical(values.tolist())
    assert middle == np.median(values)
    half = published_t * np.std(values, ddof=1) / math.sqrt(count)
    assert [middle - low, high - middle] == pytest.approx([half, half], rel=3e-4)
    assert typical([1.5]) == (1.5, 1.5, 1.5) and typical([0.0, 1.0])[1] == 0.0


@settings(deadline=None)
@given(OUTCOMES)
def test_the_difference_lies_in_its_interval_and_the_interval_in_its_range(pairs: list[tuple[bool, bool]]) -> None:
    found = paired_difference([a for a, _ in pairs], [b for _, b in pairs])
    assert -1 - 1e-12 <= found.low <= found.difference <= found.high <= 1 + 1e-12
    assert found.low < found.high and 0 < found.p_value <= 1
    assert found.both + found.first_only + found.second_only + found.neither == len(pairs)


@settings(deadline=None)
@given(OUTCOMES)
def test_exchanging_the_two_negates_the_difference(pairs: list[tuple[bool, bool]]) -> None:
    first, second = [a for a, _ in pairs], [b for _, b in pairs]
    there, back = paired_difference(first, second), paired_difference(second, first)
    assert (back.difference, back.low, back.high) == pytest.approx((-there.difference, -there.high, -there.low))
    assert back.p_value == pytest.approx(there.p_value)


def test_pairing_narrows_the_interval_where_the_same_episodes_are_easy_for_both() -> None:
    easy = np.arange(100) < 60
    better = np.arange(100) < 70
    shuffled = np.roll(better, 47)
    paired, unpaired = paired_difference(list(better), list(easy)), paired_difference(list(shuffled), list(easy))
    assert paired.difference == unpaired.difference == pytest.approx(0.1)
    assert paired.low > 0 > unpaired.low


@pytest.mark.parametrize("n", [1, 5, 50, 500])
def test_where_all_outcomes_agree_the_interval_is_wilson_s_of_no_episode_that_one_alone_solved(n: int) -> None:
    found, (_, high) = paired_difference([True] * n, [True] * n), wilson(0, n)
    assert (found.low, found.difference, found.high) == pytest.approx((-high, 0.0, high), abs=1e-9)


@pytest.mark.slow
@pytest.mark.parametrize(("base", "gain", "loss"), [(0.5, 0.2, 0.1), (0.9, 0.05, 0.05), (0.2, 0.1, 0.3)])
def test_the_interval_covers_the_true_difference_about_as_often_as_it_says(
    base: float, gain: float, loss: float
) -> None:
    """50 episodes, 1500 repetitions: the standard error of the coverage is 0.6 points."""
    rng = np.random.default_rng(3)
    second = rng.random((1500, 50)) < base
    change = rng.random((1500, 50))
    first = np.where(second, change >= loss, change < gain)
    truth = (1 - base) * gain - base * loss
    found = [paired_difference(a, b) for a, b in zip(first, second, strict=True)]
    assert 0.93 <= np.mean([f.low <= truth <= f.high for f in found]) <= 0.99


def test_other_numbers_of_episodes_cannot_be_paired() -> None:
    with pytest.raises(ValueError, match="same episodes"):
        paired_difference([True], [True, False])
    with pytest.raises(ValueError, match="same episodes"):
        paired_difference([], [])


@pytest.mark.parametrize("solved", [0, 57, 100])
def test_seeds_that_end_alike_are_as_uncertain_as_their_episodes(solved: int) -> None:
    mean, low, high = seeds_interval([solved / 100] * 3, [100] * 3)
    assert mean == pytest.approx(solved / 100) and (low, high) == pytest.approx(wilson(3 * solved, 300))
    assert low < high, "equal rates are no certainty"


def test_seeds_that_differ_have_students_interval_within_the_rates_there_are() -> None:
    rates = [0.5, 0.6, 0.55]
    assert seeds_interval(rates, [100] * 3)[1:] == pytest.approx(mean_interval(rates)[1:])
    assert seeds_interval([0.9, 1.0], [100] * 2)[2] == 1.0


def test_of_one_seed_and_without_episodes() -> None:
    assert seeds_interval([0.2], [100])[1:] == pytest.approx(wilson(20, 100))
    assert seeds_interval([0.0], [0])[1:] == (0.0, 1.0)
    with pytest.raises(ValueError, match="as many numbers"):
        seeds_interval([0.5, 0.5], [100])


@given(st.lists(st.tuples(st.integers(0, 50), st.just(50)), min_size=1, max_size=6))
def test_a_mean_over_seeds_is_never_surer_than_its_episodes(found: list[tuple[int, int]]) -> None:
    solved, episodes = zip(*found, strict=True)
    mean, low, high = seeds_interval([count / 50 for count in solved], episodes)
    least, most = wilson(sum(solved), sum(episodes))
    assert 0 <= low <= min(mean, least) + 1e-9 and max(mean, most) - 1e-9 <= high <= 1
