"""The observation history of a decision: which earlier observations it is made on, and in which rows of a frame memory
their pictures are.

A decision is made on K observations, d env steps apart, the present one last; the first observation of an episode
stands for those before it. Decisions are C env steps apart, so that one of a chunk's observations may be looked at
again by a later decision. A picture is drawn once, when a decision looks at it first, and a decision refers to rows:

    K = 2, d = 1, C = 1     each decision draws its own observation and refers to the one before
    K = 2, d = 1, C = 8     each decision draws its own observation and the one of the env step before
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ObservationHistory:
    """K observations of a decision, d env steps apart, in a farm whose decisions are C env steps apart."""

    observations: int = 1
    """K, the present observation among them."""
    distance: int = 1
    """d, in env steps."""
    chunk: int = 1
    """C: env steps from a decision to the next."""

    @cached_property
    def back(self) -> tuple[int, ...]:
        """[K - 1] env steps from each earlier observation to the present one, the earliest observation first."""
        return tuple(k * self.distance for k in range(self.observations - 1, 0, -1))

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """[U] env steps back of the observations whose pictures this decision or a later one refers to, the latest
        first."""
        later = {back - further * self.chunk for back in self.back for further in range(back // self.chunk + 1)}
        return tuple(sorted(later - {0}))

    @cached_property
    def new(self) -> int:
        """J: how many of `kept`, the first ones, are of the chunk that has just been executed."""
        return sum(back < self.chunk for back in self.kept)

    @property
    def final(self) -> int:
        """Pictures that are drawn for the final observation of an episode beside its own. With chunks of one action
        decisions have drawn all of them; else an episode may end anywhere in a chunk."""
        return 0 if self.chunk == 1 else self.observations - 1

    @property
    def rounds(self) -> int:
        """Decisions before a decision whose rows it may refer to."""
        return -(-max(self.back, default=0) // self.chunk)

    @property
    def observations_kept(self) -> int:
        """Consecutive observations of an episode that a physics worker keeps, the present one among them."""
        return 1 + max(self.back, default=0)

    def rows_of(self, rows: Int) -> Int:
        """[B, K] rows of a decision's observations, of [B, 1 + U]: the present one's, and those of `kept`."""
        return rows[:, [*(1 + self.kept.index(back) for back in self.back), 0]]

    def next_rows(self, rows: Int, drawn: Int) -> Int:
        """[B, 1 + U] rows after a further chunk: `drawn` [B, 1 + J] are those of its own observations, and the others
        have been drawn before."""
        of = {back: place for place, back in enumerate((0, *self.kept))}
        older = [of[back - self.chunk] for back in self.kept[self.new :]]
        return np.concatenate([drawn, rows[:, older]], axis=1)

    def final_rows_of(self, rows: Int) -> Int:
        """[B, K - 1] rows of the earlier observations of an episode that ends after the next env step, of [B, 1 + U]
        rows; for chunks of one action."""
        of = {back: place for place, back in enumerate((0, *self.kept))}
        return rows[:, [of[back - 1] for back in self.back]]


@dataclass(frozen=True)
class FrameRows:
    """Rows of a frame memory for a ring of T rounds of decisions of N environments, from row `first` on.

    The first T * N are those of present observations, as flat rows round * N + column; J * T * N follow, for earlier
    observations that a decision draws; then (U - J) * N for those that are drawn again where episodes are continued
    from a snapshot.
    """

    history: ObservationHistory
    rounds: int
    """T."""
    columns: int
    """N."""
    first: int = 0

    @property
    def count(self) -> int:
        """Number of rows."""
        history = self.history
        return self.columns * (self.rounds * (1 + history.new) + len(history.kept) - history.new)

    def at(self, number: int, columns: Int) -> Int:
        """[n, 1 + J] rows of the observations that are drawn for round `number` of decisions, in these columns."""
        flat = self.first + number * self.columns + columns
        return np.stack([flat + drawn * self.rounds * self.columns for drawn in range(1 + self.history.new)], axis=1)

    def at_reset(self, number: int, columns: Int) -> Int:
        """[n, 1 + U] rows: as `at`, and for the observations before that no decision has drawn."""
        history = self.history
        spare = self.first + self.rounds * self.columns * (1 + history.new)
        again = [spare + place * self.columns + columns for place in range(len(history.kept) - history.new)]
        return np.concatenate([self.at(number, columns), *(rows[:, None] for rows in again)], axis=1)
