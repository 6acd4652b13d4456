"""Rooflines of published cards, and what the planner says of times that come from one."""

from __future__ import annotations

from dataclasses import replace

import pytest

import schedulers
from schedulers import Cluster, Node, PlanError, Profile
from schedulers.cards import CARDS, find_card
from tests.schedulers.test_unused import FLOW, profile


@pytest.mark.parametrize("name", CARDS)
def test_a_computation_takes_as_long_as_the_slower_of_arithmetic_and_memory(name: str) -> None:
    card = find_card(name)
    assert card.seconds(card.flops_per_s, 0.0, 0.5) == pytest.approx(2.0)
    assert card.seconds(card.flops_per_s, 3 * card.bytes_per_s, 0.5) == pytest.approx(3.0)
    # FLOPs for each byte where the two are as long: between those of a gaming card and of a data centre's.
    assert 100 < card.flops_per_s / card.bytes_per_s < 500


def test_newer_cards_of_a_family_are_not_slower() -> None:
    for slower, faster in (("A100", "H100"), ("H100", "H200"), ("RTX 4090", "L40S")):
        assert CARDS[slower].flops_per_s <= CARDS[faster].flops_per_s
    assert CARDS["A100"].bytes_per_s < CARDS["H100"].bytes_per_s < CARDS["H200"].bytes_per_s


def test_an_unknown_card_is_refused_with_the_nearest() -> None:
    with pytest.raises(PlanError, match="'H1000'; nearest: H100"):
        schedulers.from_data(Cluster, {"nodes": [{"cores": 4, "accelerators": 1, "card": "H1000"}]})
    cluster = Cluster((Node("node0", 4, 1, card="RTX 4090"),))
    assert schedulers.from_data(Cluster, schedulers.to_data(cluster)) == cluster


def test_estimated_times_are_marked_in_the_profile_and_in_the_explanation() -> None:
    measured, cluster = profile(1.0, 0.5, 0.5), Cluster((Node("here", 4, 1),))
    components = {**measured.components, "policy": replace(measured.components["policy"], estimated="roofline of it")}
    found = replace(measured, components=components)
    assert schedulers.from_data(Profile, schedulers.to_data(found)) == found
    assert "estimated" not in schedulers.text_of(measured)
    said = "Times of policy are estimated: roofline of it."
    assert said in schedulers.plan(FLOW, found, cluster).why
    assert not any("estimated" in text for text in schedulers.plan(FLOW, measured, cluster).why)
