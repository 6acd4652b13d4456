"""A curriculum over the starts of training episodes: those are drawn more often that are solved sometimes.

A start that is always or never solved teaches nothing: the gradient of an episode's success grows with its variance
p (1 - p), by which starts are drawn here (Foster et al. 2025, "Learning to Reason at the Frontier of Learnability").
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from embodied.data.assembly import EndedEpisode
from sim_farm.episodes import Float64

KEPT = 0.97
"""What is kept of a start's counts for each new episode of it that is counted, since policies change: about the last 30
count."""
BETWEEN = (0.1, 0.9)
"""Success rates of the starts that `figures` counts as solved sometimes."""


class StartCurriculum:
    """Success counts of one task's starts, and the shares that follow from them.

    They are a function of the outcomes that `count` was given, rollout by rollout, whatever their order within one.
    """

    def __init__(self, starts: int, share: float) -> None:
        """`share` of the episodes are drawn by p (1 - p), the others alike."""
        self._share = share
        self._tried, self._solved = np.zeros(starts), np.zeros(starts)

    def count(self, ended: Sequence[EndedEpisode]) -> None:
        """Count the task's episodes that ended in a rollout, but for those whose start was not drawn here: in a run
        that is gone on with, episodes under way may be of other settings."""
        mine = [episode for episode in ended if 0 <= episode.start < len(self._tried)]
        starts = np.array([episode.start for episode in mine], np.int64)
        solved = np.array([episode.success for episode in mine], np.float64)
        new = np.bincount(starts, minlength=len(self._tried))
        self._tried = self._tried * KEPT**new + new
        self._solved = self._solved * KEPT**new + np.bincount(starts, solved, len(self._tried))

    def rates(self) -> Float64:
        """[S] the success rate of each start, as of one more success and one more failure: 1/2 where none is known."""
        return np.asarray((self._solved + 1) / (self._tried + 2))

    def shares(self) -> Float64:
        """[S] of the episodes to come; they add up to one."""
        rates = self.rates()
        learnable = rates * (1 - rates)
        return np.asarray(self._share * learnable / learnable.sum() + (1 - self._share) / len(rates))

    def figures(self) -> dict[str, float]:
        """For the record of metrics."""
        rates, shares, tried = self.rates(), self.shares(), self._tried > 0
        low, high = BETWEEN
        return {
            "curriculum/tried": float(tried.mean()),
            "curriculum/solved_sometimes": float((tried & (rates > low) & (rates < high)).mean()),
            "curriculum/effective_starts": float(1 / (shares**2).sum()),
        }

    def state(self) -> dict[str, Float64]:
        """What a checkpoint keeps."""
        return {"start_tried": self._tried.copy(), "start_solved": self._solved.copy()}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from `state`. A checkpoint of another number of starts, or without any, begins anew."""
        if "start_tried" in state and state["start_tried"].shape == self._tried.shape:
            self._tried, self._solved = state["start_tried"].copy(), state["start_solved"].copy()
