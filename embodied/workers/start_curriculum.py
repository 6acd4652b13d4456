"""A curriculum over the starts of training episodes: those are drawn more often that are solved sometimes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from embodied.data.assembly import EndedEpisode
from embodied.workers.success_counts import SuccessCounts
from sim_farm.episodes import Float64

KEPT = 0.97
"""About the last 30 episodes of a start count."""
BETWEEN = (0.1, 0.9)
"""Success rates of the starts that `figures` counts as solved sometimes."""


class StartCurriculum:
    """Success counts of one task's starts, and the shares that follow from them."""

    def __init__(self, starts: int, share: float) -> None:
        """`share` of the episodes are drawn by p (1 - p), the others alike."""
        self._starts, self._share = starts, share
        self._counts = SuccessCounts(starts, KEPT, "start")

    def count(self, ended: Sequence[EndedEpisode]) -> None:
        """Count the task's episodes that ended in a rollout, but for those whose start was not drawn here: in a run
        that is gone on with, episodes under way may be of other settings."""
        mine = [episode for episode in ended if 0 <= episode.start < self._starts]
        self._counts.count([episode.start for episode in mine], [episode.success for episode in mine])

    def rates(self) -> Float64:
        """[S] the success rate of each start."""
        return self._counts.rates()

    def shares(self) -> Float64:
        """[S] of the episodes to come; they add up to one."""
        learnable = self._counts.learnable()
        return np.asarray(self._share * learnable / learnable.sum() + (1 - self._share) / len(learnable))

    def figures(self) -> dict[str, float]:
        """For the record of metrics."""
        rates, shares, tried = self.rates(), self.shares(), self._counts.tried > 0
        low, high = BETWEEN
        return {
            "curriculum/tried": float(tried.mean()),
            "curriculum/solved_sometimes": float((tried & (rates > low) & (rates < high)).mean()),
            "curriculum/effective_starts": float(1 / (shares**2).sum()),
        }

    def state(self) -> dict[str, Float64]:
        """What a checkpoint keeps."""
        return self._counts.state()

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from `state`. A checkpoint of another number of starts, or without any, begins anew."""
        self._counts.load(state)
