"""Temporal ensembling: the executed action is a mean of what several decisions predicted for its env step."""

from __future__ import annotations

from collections import deque

import numpy as np

from sim_farm.contract import Float32


class TemporalEnsemble:
    """The decisions of one episode, one at each env step.

    a_t = sum_i w_i a_t^(i) / sum_i w_i with w_i = exp(-m i), where a_t^(0) is the oldest of the predictions for env
    step t (arXiv 2304.13705, algorithm 2). P actions of A numbers are predicted.
    """

    def __init__(self, coefficient: float) -> None:
        """`coefficient` m: above 0 older predictions count more, below 0 newer ones."""
        self._coefficient = coefficient
        self._decisions: deque[Float32] = deque()

    def action(self, predicted: Float32) -> Float32:
        """[A] the action of the next env step, for which [P, A] was decided."""
        self._decisions.append(predicted)
        if len(self._decisions) > len(predicted):
            self._decisions.popleft()
        count = len(self._decisions)
        of_this_step = [decided[count - 1 - i] for i, decided in enumerate(self._decisions)]
        exponents = -self._coefficient * np.arange(count)
        weights = np.exp(exponents - exponents.max())  # a common factor, so that none overflows
        return (weights @ np.stack(of_this_step) / weights.sum()).astype(np.float32)
