"""A curriculum over the tasks of a run: those are rolled out less that are always or never solved."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from embodied.data.assembly import EndedEpisode
from embodied.workers.success_counts import SuccessCounts
from sim_farm.episodes import Float64

KEPT = 0.99
"""About the last 100 episodes of a task count."""


class TaskCurriculum:
    """Success counts of a run's tasks, and the decisions of a rollout that follow from them."""

    def __init__(self, tasks: int, share: float) -> None:
        """`share` of a task's decisions are taken in proportion to p (1 - p), the others always."""
        self._share = share
        self._counts = SuccessCounts(tasks, KEPT, "task")

    def count(self, ended: Sequence[EndedEpisode]) -> None:
        """Count the episodes that ended in a rollout."""
        self._counts.count([episode.task for episode in ended], [episode.success for episode in ended])

    def decisions(self, most: int) -> tuple[int, ...]:
        """Of each environment of each task in a rollout: `most` for the task whose p (1 - p) is highest, at least one
        for each other."""
        learnable = self._counts.learnable()
        part = self._share * learnable / learnable.max() + 1 - self._share
        return tuple(np.maximum(np.rint(most * part), 1).astype(int).tolist())

    def state(self) -> dict[str, Float64]:
        """What a checkpoint keeps."""
        return self._counts.state()

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from `state`. A checkpoint of another number of tasks, or without any, begins anew."""
        self._counts.load(state)
