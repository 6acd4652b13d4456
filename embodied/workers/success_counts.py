"""How often things are solved, as far as the episodes that ended tell."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from embodied.errors import CheckpointError
from sim_farm.episodes import Float64


class SuccessCounts:
    """Success counts of a number of things: starts, tasks. Later episodes count for more, since policies change.

    They are a function of what `count` was given, call by call, whatever the order within one call.
    """

    def __init__(self, number: int, kept: float, name: str) -> None:
        """`kept` is what is kept of a thing's counts for each new episode of it: about the last 1 / (1 - kept) count.
        `name` is that of the counts in checkpoints."""
        self._kept, self._name = kept, name
        self.tried, self._solved = np.zeros(number), np.zeros(number)

    def count(self, things: Sequence[int], successes: Sequence[bool]) -> None:
        """Count an episode for each of `things`."""
        number, which = len(self.tried), np.array(things, np.int64)
        new = np.bincount(which, minlength=number)
        self.tried = self.tried * self._kept**new + new
        self._solved = self._solved * self._kept**new + np.bincount(which, np.array(successes, np.float64), number)

    def rates(self) -> Float64:
        """The success rate of each, as of one more success and one more failure: 1/2 where none is known."""
        return np.asarray((self._solved + 1) / (self.tried + 2))

    def learnable(self) -> Float64:
        """p (1 - p) of each: what is always or never solved teaches nothing, and the gradient of an episode's success
        grows with its variance (Foster et al. 2025, "Learning to Reason at the Frontier of Learnability")."""
        rates = self.rates()
        return np.asarray(rates * (1 - rates))

    def state(self) -> dict[str, Float64]:
        """What a checkpoint keeps."""
        return {f"{self._name}_tried": self.tried.copy(), f"{self._name}_solved": self._solved.copy()}

    def load(self, state: Mapping[str, np.ndarray]) -> None:
        """Go on from `state`. A checkpoint of another number of things, or without any, begins anew. Raises
        `CheckpointError` for what are no counts."""
        tried, solved = (state.get(key) for key in self.state())
        if tried is None or solved is None or tried.shape != self.tried.shape:
            return
        if solved.shape != tried.shape or {tried.dtype.kind, solved.dtype.kind} != {"f"}:
            raise CheckpointError(f"the checkpoint's counts of {self._name}s do not fit each other: use an earlier one")
        if not np.isfinite(tried).all() or not ((solved >= 0) & (solved <= tried)).all():
            raise CheckpointError(f"the checkpoint's counts of {self._name}s cannot be: use an earlier one")
        self.tried, self._solved = tried.astype(np.float64), solved.astype(np.float64)
