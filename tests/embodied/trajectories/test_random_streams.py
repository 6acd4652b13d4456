"""Randomness is an input: what is drawn is a function of where it is used, and of nothing else."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import kstest

from embodied.trajectories.random_streams import (
    BLOCK,
    EVALUATION,
    PERMUTATION,
    SAMPLING,
    SamplingNoise,
    generator,
    permutation,
)

PINNED_NOISE = [-0.5323004722595215, -0.046820610761642456]
PINNED_PERMUTATION = [7, 3, 0, 2, 5, 1, 4, 6]


def draw(noise: SamplingNoise, *places: tuple[int, int, int]) -> np.ndarray:
    """Noise for (env, episode, step) each."""
    envs, episodes, steps = np.array(places, np.int64).T
    return noise.draw(envs, episodes, steps)


def test_noise_is_keyed_by_env_episode_and_step() -> None:
    places = [(env, episode, step) for env in range(3) for episode in range(2) for step in (0, 1, BLOCK, 5 * BLOCK)]
    together = draw(SamplingNoise(7, 5), *places)
    alone = np.concatenate([draw(SamplingNoise(7, 5), place) for place in places])
    assert np.array_equal(together, alone)
    assert len(np.unique(together[:, 0])) == len(places), "two places share their noise"


def test_noise_does_not_depend_on_the_order_or_history_of_draws() -> None:
    places = [(env, episode, step) for env in (1, 0) for episode in (0, 3) for step in range(2 * BLOCK + 3)]
    orders = (places, places[::-1], sorted(places, key=lambda place: place[2]))
    found = []
    for order in orders:
        noise = SamplingNoise(7, 2)
        numbers = {place: draw(noise, place)[0].tolist() for place in order}
        found.append([numbers[place] for place in places])
    assert found[0] == found[1] == found[2]


@pytest.mark.parametrize("step", [BLOCK - 1, BLOCK])
def test_a_chunk_that_skips_steps_finds_the_same_noise(step: int) -> None:
    noise = SamplingNoise(7, 2)
    every = [draw(noise, (0, 0, t)) for t in range(step + 1)]
    assert np.array_equal(every[step], draw(SamplingNoise(7, 2), (0, 0, step)))


def test_seeds_and_purposes_have_streams_of_their_own() -> None:
    place = (0, 0, 0)
    purposes = (SAMPLING, PERMUTATION, EVALUATION)
    drawn = [draw(SamplingNoise(seed, 4, purpose), place) for seed in (0, 1) for purpose in purposes]
    assert len({tuple(numbers[0].tolist()) for numbers in drawn}) == len(drawn)


def test_noise_is_standard_normal() -> None:
    noise = SamplingNoise(11, 3)
    numbers = draw(noise, *((env, 0, step) for env in range(20) for step in range(100)))
    assert numbers.dtype == np.float32 and numbers.shape == (2000, 3)
    assert kstest(numbers.ravel(), "norm").pvalue > 0.01
    correlation = np.corrcoef(np.concatenate([numbers[:-1], numbers[1:]], axis=1).T) - np.eye(6)
    assert np.abs(correlation).max() < 0.1, "neighbouring numbers are correlated"


def test_numbers_are_pinned() -> None:
    """Another NumPy, or another key, would silently make every run another run."""
    assert draw(SamplingNoise(1, 2), (3, 5, 17))[0].tolist() == PINNED_NOISE
    assert permutation(1, 2, 3, 8).tolist() == PINNED_PERMUTATION


def test_permutations_differ_by_iteration_epoch_and_seed() -> None:
    seen = {
        tuple(permutation(seed, iteration, epoch, 50).tolist())
        for seed in (0, 1)
        for iteration in range(3)
        for epoch in range(3)
    }
    assert len(seen) == 18
    assert all(sorted(order) == list(range(50)) for order in seen)
    assert permutation(0, 1, 2, 50).tolist() == permutation(0, 1, 2, 50).tolist()


def test_generators_do_not_overlap() -> None:
    """The counter's lowest word is the generator's own: a long draw must not run into its neighbour's numbers."""
    first = generator(SAMPLING, 0, 0, 0, 0).integers(0, 2**63, 4096)
    others = [generator(SAMPLING, 0, 0, 0, 1), generator(SAMPLING, 0, 0, 1, 0), generator(SAMPLING, 0, 1, 0, 0)]
    for other in others:
        assert not np.isin(first, other.integers(0, 2**63, 4096)).any()
