"""Calls whose items end at different times: the law of their turns, and components whose cost follows it."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest

import schedulers
from schedulers import PlanError, Profile, alternatives, from_data, predict, simulate, to_data
from schedulers.turns import Turns, turns_of
from tests.schedulers.instances import TWO_CORES, measured, ppo, ppo_profile

TAIL = Turns(8, tuple(float(n) for n in (2, 2, 3, 3, 4, 5, 8, 40)))


def played(turns: Turns, items: int, seed: int) -> float:
    """Turns of one call by list scheduling of drawn items, event by event."""
    drawn = np.random.default_rng(seed).choice(turns.quantiles, items)
    slots = [0.0] * turns.slots
    for taken in drawn:
        heapq.heapreplace(slots, slots[0] + float(taken))
    return max(slots)


@pytest.mark.parametrize("items", [1, 3, 8, 12, 24, 100])
def test_the_turns_of_a_call_are_those_of_drawn_items(items: int) -> None:
    mean = np.mean([played(TAIL, items, seed) for seed in range(1000)])
    assert float(TAIL.passes(np.array([items]))[0]) == pytest.approx(mean, rel=0.08)


def test_equal_items_take_turns_in_whole_rounds() -> None:
    found = Turns(8, (16.0,)).passes(np.array([1, 8, 9, 16, 800]))
    assert found.tolist() == [16, 16, 32, 32, 1600]
    assert Turns(8, (16.0,)).waiting(8) == 0 and TAIL.waiting(8) > 0.5


def test_measured_lengths_keep_their_mean() -> None:
    lengths = np.random.default_rng(0).integers(1, 100, 1000)
    found = turns_of(lengths.tolist(), 4, most=10)
    assert len(found.quantiles) == 10 and found.mean == pytest.approx(lengths.mean(), rel=0.01)


def test_a_component_of_turns_takes_what_was_measured_and_the_law_of_its_turns_elsewhere() -> None:
    """By the law a P(b) + c b, which two measured batches determine."""
    each_turn, each_item = 0.01, 0.002

    def law(items: float, instances: int = 1) -> float:
        return each_turn * float(TAIL.passes(np.array([items / instances]))[0]) + each_item * items / instances

    component = measured("accelerators", {(32, 1): law(32), (64, 1): law(64)}, turns=TAIL)
    for batch, devices in ((64, 1), (32, 1), (16, 1), (256, 1), (64, 8), (64, 64)):
        assert component.seconds(batch, devices) == pytest.approx(law(batch, devices), rel=1e-6)
    lines = replace(component, turns=None)  # two full batches say nothing of one item alone
    assert lines.seconds(64, 64) > 2 * component.seconds(64, 64)
    noisy = measured("cores", {(32, 1): 0.5, (64, 1): 1.1}, turns=TAIL)
    assert (noisy.seconds(32, 1), noisy.seconds(64, 1)) == pytest.approx((0.5, 1.1))
    seconds = [noisy.seconds(batch, 1) for batch in range(1, 300)]
    assert seconds == sorted(seconds)


def uneven() -> tuple[schedulers.Workflow, Profile]:
    """A rollout whose policy has a tail."""
    profile = ppo_profile(policy=0.02)
    policy = replace(profile.components["policy"], turns=TAIL)
    return ppo(), replace(profile, components={**profile.components, "policy": policy})


def test_plans_of_every_mode_are_predicted_and_the_waiting_is_said() -> None:
    workflow, profile = uneven()
    for plan in alternatives(workflow, profile, TWO_CORES).values():
        played = simulate(plan, workflow, profile, TWO_CORES).seconds
        assert predict(plan, workflow, profile, TWO_CORES).iteration_s == pytest.approx(played)
    why = schedulers.plan(workflow, profile, TWO_CORES).why
    assert any("An item of policy takes 2 to 40 turns, 8.38 on average" in sentence for sentence in why)


def test_files_keep_turns_and_refuse_what_cannot_be() -> None:
    _, profile = uneven()
    assert from_data(Profile, to_data(profile)) == profile
    for wrong in ({"slots": 0}, {"quantiles": []}, {"quantiles": [3, 2]}, {"quantiles": [0, 2]}):
        data = to_data(profile)
        data["components"]["policy"]["turns"] |= wrong
        with pytest.raises(PlanError, match="`turns` of 'policy' are one slot or more"):
            from_data(Profile, data)
