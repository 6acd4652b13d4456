"""Random numbers as inputs: each is a function of the run, environment, episode and step that uses it.

Philox is a counter-based generator: key and counter determine the numbers, so that neither the number of workers nor
the order in which they finish changes them.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

SAMPLING, PERMUTATION, EVALUATION, IMITATION, CLASSIFICATION, DISTURBANCE, SERVING, AUGMENTATION, DELAY = range(9)
"""Last word of the counter: what the numbers are for."""
BLOCK = 16
"""Decisions whose noise is drawn at once; making a generator costs more than drawing from it."""


def generator(purpose: int, seed: int, key: int, major: int, minor: int) -> np.random.Generator:
    """The generator of (purpose, seed, key, major, minor); all non-negative."""
    bits = np.random.Philox(
        key=np.array([seed, key], np.uint64), counter=np.array([0, minor, major, purpose], np.uint64)
    )
    return np.random.Generator(bits)


class SamplingNoise:
    """Standard normal noise for decisions, keyed by (run, environment, episode, env step)."""

    def __init__(self, seed: int, size: int, purpose: int = SAMPLING) -> None:
        self._seed, self._size, self._purpose = seed, size, purpose
        self._blocks: dict[int, tuple[int, int, npt.NDArray[np.float32]]] = {}

    def draw(
        self, envs: npt.NDArray[np.int64], episodes: npt.NDArray[np.int64], steps: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.float32]:
        """[B, size] float32 for the decisions taken by `envs` [B] at env step `steps` [B] of `episodes` [B]."""
        noise = np.empty((len(envs), self._size), np.float32)
        for row, (env, episode, step) in enumerate(zip(envs.tolist(), episodes.tolist(), steps.tolist(), strict=True)):
            noise[row] = self._block(env, episode, step // BLOCK)[step % BLOCK]
        return noise

    def _block(self, env: int, episode: int, block: int) -> npt.NDArray[np.float32]:
        known = self._blocks.get(env)
        if known is None or known[:2] != (episode, block):
            numbers = generator(self._purpose, self._seed, env, episode, block).standard_normal(
                (BLOCK, self._size), np.float32
            )
            known = (episode, block, numbers)
            self._blocks[env] = known
        return known[2]


def permutation(seed: int, iteration: int, epoch: int, rows: int) -> npt.NDArray[np.int64]:
    """The order in which an epoch visits its rows: new for every iteration and epoch."""
    return generator(PERMUTATION, seed, 0, iteration, epoch).permutation(rows)
