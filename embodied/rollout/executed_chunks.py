"""Actions that an episode executes, of decisions that predict more than one and may arrive late.

A decision on the observation of env step t predicts the actions of steps t, t + 1, ... With a delay of d it arrives
when step t + d begins. Until then the rest of the last decision is executed, and its own first d actions are past:

    interval k      last chunk [s .. s+d-1],  new chunk [d .. s-1]         s env steps from one decision to the next

Decisions are s = C env steps apart (policy.chunk) where a policy predicts P >= C + d actions, d being the largest delay
that may be drawn. Otherwise a decision begins when d actions of the last one are left: s = P - d. Nothing is executed
before the first decision of an episode has arrived, so that it has no delay.

In training the policy is built for P = C + d actions, so that all that are executed are scored. Decisions are C env
steps apart.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from embodied.config.schema import DelayMethod, delay_of, delay_text
from embodied.trajectories.random_streams import DELAY, generator
from sim_farm.contract import Float32

COEFFICIENT = 0.01
"""Coefficient of temporal ensembling under a delay (ALOHA's, arXiv 2304.13705)."""
REAL_TIME = ("rtc", "rtc_lerobot")
"""Methods by which a decision continues what is left of the last one."""


@dataclass(frozen=True)
class Delayed:
    """Delays of an episode's decisions, and the method under them."""

    method: DelayMethod | Literal["wait"]
    """`wait`: the simulator waits for decisions, which have no delay."""
    delay: str
    """Delays in env steps as `delay_text` writes them: `3`, or `2:0.8,3:0.2`. One is drawn for each decision."""
    interval: int
    """Env steps from one decision to the next."""

    @property
    def most(self) -> int:
        """The largest delay, in env steps."""
        return delay_of(self.delay)[-1][0]

    @property
    def axis(self) -> str:
        """Name of the curve that its results belong to: the method and, of delays that are drawn, these."""
        return self.method if len(delay_of(self.delay)) == 1 else f"{self.method} {self.delay}"

    @property
    def level(self) -> int:
        """Place on the curve."""
        return self.most

    @property
    def from_step(self) -> int:
        return 0

    def drawn(self, seed: int, key: int, trial: int, step: int) -> int:
        """The delay of the decision at an env step of a trial, a function of these numbers alone."""
        steps, shares = zip(*delay_of(self.delay), strict=True)
        if len(steps) == 1:
            return steps[0]
        place = np.searchsorted(np.cumsum(shares), generator(DELAY, seed, trial, key, step).random(), side="right")
        return steps[min(int(place), len(steps) - 1)]


def measured_delay(latencies_s: Sequence[float], control_hz: float) -> str:
    """The delay of decisions with these latencies where env steps follow each other at that rate, as `eval.delay` takes
    it: an action that comes within an env step is one step late. Empty where nothing was measured."""
    counts = Counter(max(1, math.ceil(latency * control_hz)) for latency in latencies_s)
    return delay_text((steps, count / counts.total()) for steps, count in sorted(counts.items())) if counts else ""


class ExecutedChunks:
    """The decisions of one episode, each `interval` env steps after the last.

    An env step's action is that of the newest decision which has arrived; with a coefficient it is the mean of all that
    have, by temporal ensembling: a_t = sum_i w_i a_t^(i) / sum_i w_i with w_i = exp(-m i), where a_t^(0) is the oldest
    of the predictions for env step t (arXiv 2304.13705, algorithm 2). A decision predicts P actions of A numbers.
    """

    def __init__(self, interval: int, coefficient: float | None = None, left_over: Float32 | None = None) -> None:
        """`coefficient` m: above 0 older predictions count more, below 0 newer ones. None: the newest alone counts.
        `left_over` [P - interval, A] of the last decision, in an episode that is continued."""
        self._interval, self._coefficient = interval, coefficient
        self._decisions: deque[Float32] = deque()
        if left_over is not None:
            past = np.zeros((interval, left_over.shape[1]), np.float32)
            self._decisions.append(np.concatenate([past, left_over]))

    @property
    def left_over(self) -> Float32 | None:
        """[P - interval, A] of the last decision, beginning with the next env step's action; None before the first."""
        return self._decisions[-1][self._interval :] if self._decisions else None

    def execute(self, predicted: Float32, delay: int = 0) -> Float32:
        """[interval, A] the actions of the next env steps, for which [P, A] was decided and arrives after `delay`."""
        late = delay if self._decisions else 0
        self._decisions.append(predicted)
        while (len(self._decisions) - 1) * self._interval >= len(self._decisions[0]):
            self._decisions.popleft()
        return np.stack([self._action(step, step < late) for step in range(self._interval)])

    def _action(self, step: int, waits: bool) -> Float32:
        """[A] the action `step` env steps after the last decision; `waits`: that one has not arrived."""
        places = [(len(self._decisions) - 1 - i) * self._interval + step for i in range(len(self._decisions))]
        found = [decided[place] for decided, place in zip(self._decisions, places, strict=True) if place < len(decided)]
        if waits:
            found.pop()
        if self._coefficient is None:
            return found[-1]
        exponents = -self._coefficient * np.arange(len(found))
        weights = np.exp(exponents - exponents.max())  # a common factor, so that none overflows
        return (weights @ np.stack(found) / weights.sum()).astype(np.float32)
