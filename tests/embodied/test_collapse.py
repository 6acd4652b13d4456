"""When a run says that it unlearns: not for noise, once for each fall."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from embodied.training.iteration_metrics import PATIENCE, CollapseWatch


def warned_at(rates: Sequence[float | None]) -> list[int]:
    """The iterations at which something is said of these success rates of the last 100 episodes."""
    watch = CollapseWatch(100)
    rows = [{"iteration": i, "env/success_recent": rate, "learner/approx_kl": 0.5} for i, rate in enumerate(rates, 1)]
    return [i for i, row in enumerate(rows, 1) if watch.see(row) is not None]


def test_a_fall_that_lasts_is_reported_once() -> None:
    assert warned_at([None, 0.5, 0.9] + [0.3] * 20) == [3 + PATIENCE]


def test_a_second_fall_after_a_recovery_is_reported_again() -> None:
    rates = [0.9, *[0.3] * PATIENCE, 0.9, *[0.3] * PATIENCE]
    assert warned_at(rates) == [1 + PATIENCE, 2 + 2 * PATIENCE]


def test_noise_is_not_a_fall() -> None:
    """100 episodes each, of a policy that stays as it is."""
    random = np.random.default_rng(0)
    assert not warned_at((random.binomial(100, 0.6, 300) / 100).tolist())


def test_a_short_fall_is_not_reported() -> None:
    assert not warned_at([0.9, *[0.3] * (PATIENCE - 1), 0.85, *[0.3] * (PATIENCE - 1)])


def test_the_note_names_the_rates_with_intervals_and_what_explains_them() -> None:
    watch = CollapseWatch(100)
    message = None
    for i, rate in enumerate([0.9] + [0.3] * PATIENCE):
        message = watch.see(
            {"iteration": i, "env/success_recent": rate, "learner/approx_kl": 0.5, "learner/entropy": 2.0}
        )
    assert message is not None
    assert (
        "30% (22% to 40%)" in message
        and "90% (83% to 94%) at iteration 0" in message
        and "approx_kl 0.5, entropy 2" in message
    )
