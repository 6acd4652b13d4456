"""The phases of an iteration, and why a plan that (*) was predicted best was not the fastest."""

from __future__ import annotations

from typing import Any

import pytest

from embodied.reporting.phase_times import PhaseTimes, phase_times, rows_of, why_not_fastest
from embodied.reporting.plan_picture import Bar


def test_phases_are_from_the_first_work_to_the_last() -> None:
    bars = [Bar("a", "physics-1", 0.1, 0.3), Bar("b", "policy", 0.2, 0.4), Bar("a", "physics-1", 0.7, 0.8)]
    bars += [Bar("c", "learner", 0.9, 1.5)]
    found = phase_times(bars, 2.0)
    assert found.rollout_s == pytest.approx(0.7) and found.waiting_s == pytest.approx(0.3)
    assert found.update_s == pytest.approx(0.6)
    assert found.rest_s == pytest.approx(2.0 - 0.7 - 0.6), "0.1 s before, 0.1 s between and 0.5 s after"


def test_a_rollout_beside_the_update_is_counted_once_in_the_rest() -> None:
    found = phase_times([Bar("a", "physics", -0.5, 0.8), Bar("c", "learner", 0.0, 1.0)], 1.1)
    assert (found.rollout_s, found.update_s) == pytest.approx((0.8, 1.0))
    assert found.rest_s == pytest.approx(0.1)


def test_an_iteration_without_work_is_all_rest() -> None:
    assert phase_times([], 3.0) == PhaseTimes(0.0, 0.0, 0.0, 3.0)


def row(
    mode: str, predicted: tuple[float, float], measured: tuple[float, float], chosen: bool = False
) -> dict[str, Any]:
    """A row of a comparison with these seconds of rollout and update."""
    times = [PhaseTimes(rollout, 0.0, update, 0.1) for rollout, update in (predicted, measured)]
    middle = sum(measured) + 0.1
    return {
        "mode": mode,
        "chosen": chosen,
        "predicted_s": sum(predicted) + 0.1,
        "measured_s": middle,
        "measured_low_s": middle - 0.05,
        "measured_high_s": middle + 0.05,
        "phases": rows_of(*times),
    }


def test_the_phase_that_was_not_as_predicted_is_named() -> None:
    modes = [row("collocated", (1.0, 1.0), (1.0, 2.0), chosen=True), row("hybrid", (1.2, 1.0), (1.3, 1.0))]
    said = why_not_fastest(modes)
    assert said[0].startswith("collocated (*) was predicted best (2.100 s; hybrid 2.300 s), and hybrid was the fastest")
    assert "rollout -0.200 predicted, -0.300 measured; update +0.000 predicted, +1.000 measured" in said[1]
    assert said[2] == "What was not predicted is mostly in this phase: update."
    assert len(said) == 3, "3.1 s and 2.4 s are told apart"


def test_modes_that_the_measurements_do_not_tell_apart_are_said_to_be_so() -> None:
    modes = [row("collocated", (1.0, 1.0), (1.0, 1.06), chosen=True), row("hybrid", (1.2, 1.0), (1.0, 1.0))]
    assert "do not tell the two apart" in why_not_fastest(modes)[-1]


def test_a_plan_that_was_the_fastest_needs_no_reason() -> None:
    modes = [row("collocated", (1.0, 1.0), (1.0, 1.0), chosen=True), row("hybrid", (1.2, 1.0), (1.2, 1.0))]
    assert why_not_fastest(modes) == ["collocated (*) was predicted best, and was the fastest measured."]
