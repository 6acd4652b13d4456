"""Calls whose items end at different times: each takes a different number of turns, and one that is done makes room.

An answer of a language model is such an item, and a token is a turn. On every instance `slots` items are under way
together; the next one begins at once where one is done (continuous batching). A call of x items lasts for P(x) turns,
until its longest straggler is done.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import numpy as np

DRAWS = 128
"""Sequences of items that are played."""
ROUNDS = 4
"""Items of each, in slots: from there on a call grows by what one more item adds to full slots."""


@dataclass(frozen=True)
class Turns:
    """Distribution of the turns that an item takes, and how many items take theirs together."""

    slots: int
    """Items under way together on one instance."""
    quantiles: tuple[float, ...]
    """Turns of an item in rising order; each value stands for an equal share of all items."""

    @cached_property
    def mean(self) -> float:
        return float(np.mean(self.quantiles))

    def passes(self, items: np.ndarray) -> np.ndarray:
        """P(x): the expected number of turns of a call with x items, for an array of x > 0. P never falls as x
        grows."""
        known = np.arange(len(self._played))
        beyond = np.maximum(np.asarray(items, dtype=float) - known[-1], 0.0) * self.mean / self.slots
        return np.interp(items, known, self._played) + beyond

    def waiting(self, items: float) -> float:
        """Share of a call in which slots are empty, out of the slots that it fills at first."""
        passes = float(self.passes(np.array([items]))[0])
        return max(0.0, 1 - items * self.mean / (min(items, self.slots) * passes))

    @cached_property
    def _played(self) -> np.ndarray:
        """P(0), P(1), ...: means over draws of items. Those of a longer call begin like those of a shorter one."""
        random = np.random.default_rng(0)
        found = np.zeros(ROUNDS * self.slots + 1)
        for _ in range(DRAWS):
            ready = [0.0] * self.slots
            done = []
            for turns in random.choice(self.quantiles, len(found) - 1).tolist():
                done.append(ready[0] + turns)
                heapq.heapreplace(ready, done[-1])
            found[1:] += list(accumulate(done, max))
        return found / DRAWS


def turns_of(lengths: Sequence[float], slots: int, most: int = 128) -> Turns:
    """The distribution of measured lengths, by at most `most` values: each the mean of an equal share of them."""
    parts = np.array_split(np.sort(np.asarray(lengths, dtype=float)), min(most, len(lengths)))
    return Turns(slots, tuple(float(part.mean()) for part in parts))
