"""The outcome of an interval of env steps, divided between the decision that it begins with and the one before.

A decision owns the env steps that execute its actions. With a delay of d the first d env steps of an interval of C
execute actions of the decision before, so that decision k, taken at env step kC, owns the env steps from kC + d_k to
(k + 1) C + d_{k+1} - 1: their rewards, a success in them, and the episode's end if it is one of them. Its value is of
its own observation, and expects the rewards from the first of its own env steps on: those between the observation and
that step are the decision's before. A decision whose episode ends before the first of its env steps owns none, and
neither does one that the next overtakes, by a delay of 0 after one of C.
"""

from __future__ import annotations

import numpy as np

from sim_farm.client.observations import Observations


def ended_before(seen: Observations, late: np.ndarray) -> np.ndarray:
    """bool [n]: the episode has ended before the decision that the interval begins with arrived, by an action of the
    decision before. `late` [n]: the number of env steps that execute those."""
    return (seen.terminated | seen.truncated) & (seen.steps <= late)


def own_outcome(seen: Observations, late: np.ndarray, chunk: int) -> dict[str, np.ndarray]:
    """Outcome of the decision that the interval begins with, by the names of the trajectory memory's fields; `seen` is
    what follows the interval. `chunk` actions of a decision may be executed."""
    own, places = np.arange(seen.reward.shape[1]) >= late[:, None], np.arange(seen.reward.shape[1])
    executed = seen.steps - np.minimum(late, seen.steps)
    return {"first": late, **_share(seen, own, ~ended_before(seen, late), executed, places, chunk)}


def outcome_before(seen: Observations, late: np.ndarray, chunk: int) -> dict[str, np.ndarray]:
    """Outcome of the decision before, as far as the interval adds to it; names and arguments as in `own_outcome`."""
    interval = seen.reward.shape[1]
    theirs, places = np.arange(interval) < late[:, None], np.arange(interval, chunk)
    return _share(seen, theirs, ended_before(seen, late), np.minimum(late, seen.steps), places, chunk)


def _share(
    seen: Observations, mine: np.ndarray, ends: np.ndarray, executed: np.ndarray, places: np.ndarray, chunk: int
) -> dict[str, np.ndarray]:
    """The share of decisions that own the env steps `mine` [n, C], whose actions are at `places` of their chunks, and
    the episode's end where `ends` [n]."""
    reward = np.where(mine, seen.reward, np.float32(0))
    step_reward = np.zeros((len(reward), chunk), np.float32)
    step_reward[:, places] = reward[:, : len(places)]
    return {
        "reward": reward.sum(1),
        "step_reward": step_reward,
        "executed": executed,
        "success": np.asarray((seen.success & mine).any(1)),
        "terminated": seen.terminated & ends,
        "truncated": seen.truncated & ends,
    }
