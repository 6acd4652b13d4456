"""What a plan leaves unused, and what the explanation says about it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import schedulers
from schedulers import Cluster, Component, ComponentProfile, Edge, Loop, Node, Plan, Point, Profile, Workflow
from schedulers.cost.prediction import problem_of
from schedulers.explain import in_words
from schedulers.plan import one_by_one
from schedulers.profile import Exchange
from schedulers.unused import unused_devices
from tests.schedulers.recorded_problems import instance

FLOW = Workflow(
    "ppo",
    (Component("physics"), Component("policy"), Component("learner")),
    (Edge("physics", "policy", "states"), Edge("policy", "learner", "trajectories")),
    (Loop(("physics", "policy"), 10),),
    16,
)


def profile(physics: float, policy: float, learner: float, **more: Any) -> Profile:
    """Seconds for all 16 environments on one device."""
    pools: dict[str, Any] = {"physics": "cores", "policy": "accelerators", "learner": "accelerators"}
    times = {"physics": physics, "policy": policy, "learner": learner}
    found = {name: ComponentProfile(pools[name], (Point(16, 1, s, s, s),)) for name, s in times.items()}
    return Profile("ppo", {}, {**found, "learner": replace(found["learner"], **more)})


def sentences(plan: Plan) -> list[str]:
    return [text for text in plan.why if " unused " in text]


@pytest.mark.parametrize(
    ("key", "said"),
    [
        (
            "random:1",
            "1 of 5 cores is unused in phase 1 (core 4 of node0): no larger number fits c0, c1 (workers of",
        ),
        ("random:1", "2 of 2 accelerators are unused (accelerators 0-1 of node0): nothing of the plan computes on"),
        (
            "random:14",
            "1 of 3 cores is unused (core 2 of node0): the best plan found that uses more of them is disagg",
        ),
        (
            "memory:0",
            "1 of 5 cores is unused (core 4 of node0): with 1 more for c2 an iteration would take 0.3% long",
        ),
        ("home:2", "1 of 2 cores is unused (core 0 of node1): c0, c1, c2, c3 may not leave node0."),
        ("uneven:8", "2 of 3 cores are unused in phases 2 and 3 (cores 0-1 of node1): c2, c3 may not leave node0."),
    ],
)
def test_what_a_recorded_plan_leaves_unused_is_said(key: str, said: str) -> None:
    assert any(text.startswith(said) for text in sentences(schedulers.plan(*instance(key))))


@pytest.mark.parametrize("key", ["ppo:barrier", "random:3", "random:12", "memory:2"])
def test_nothing_is_said_where_all_devices_are_used(key: str) -> None:
    assert not sentences(schedulers.plan(*instance(key)))


@pytest.mark.parametrize("key", [*(f"memory:{i}" for i in (0, 3, 4)), *(f"home:{i}" for i in (1, 4, 10)), "uneven:13"])
def test_a_better_plan_uses_more_and_takes_the_time_that_is_said(key: str) -> None:
    workflow, profile, cluster = instance(key)
    best = schedulers.plan(workflow, profile, cluster)
    considered = schedulers.alternatives(workflow, profile, cluster)
    gaps = unused_devices(best, list(considered.values()), problem_of(best, workflow, profile, cluster))
    assert gaps
    for gap in gaps:
        busy = {d for i in gap.phases for p in best.phases[i].placements for d in one_by_one(p.devices)}
        assert busy.isdisjoint(one_by_one(gap.devices))
        if gap.better is None:
            continue
        schedulers.validate(gap.better, workflow, cluster, profile)
        seconds = schedulers.predict(gap.better, workflow, profile, cluster).iteration_s
        assert best.prediction is not None and seconds >= best.prediction.lower_bound_s * (1 - 1e-9)
        assert any(in_words(seconds) in text for text in sentences(best)), "the time of the best one is named"
        more = sum(p.count for phase in gap.better.phases for p in phase.placements if p.pool == gap.pool)
        assert gap.more == 0 or more == gap.more + sum(
            p.count for phase in best.phases for p in phase.placements if p.pool == gap.pool
        )


def test_workers_that_need_one_group_are_priced_in_one_group() -> None:
    """Eight physics workers share a group of eight environments; sixteen one group of all."""
    best = schedulers.plan(FLOW, profile(1.0, 0.5, 0.5), Cluster((Node("here", 16, 1),)))
    (text,) = sentences(best)
    assert text.startswith("8 of 16 cores are unused (cores 8-15 of this machine): with 8 more for physics and one gr")
    assert text.endswith(": the components of one group wait for each other.") and "longer (" in text
    more = replace(best, groups=(1,), prediction=None)
    assert best.prediction is not None and best.groups == (2,)
    seconds = schedulers.predict(more, FLOW, profile(0.5, 0.5, 0.5), Cluster((Node("here", 16, 1),))).iteration_s
    assert f"({in_words(seconds)})" in text, "sixteen workers of one second take as long as eight of half a second"


def test_ranks_that_communication_eats_are_named_with_its_seconds() -> None:
    sent = (Exchange("all_reduce", 1e9, 10.0),)
    slow = Cluster((Node("here", 1, 2),), device_link_bytes_per_s=1e9)
    best = schedulers.plan(FLOW, profile(0.1, 0.01, 2.0, exchanges=sent), slow)
    (text,) = sentences(best)
    assert "with 1 more for" in text and "learner" in text and "longer" in text
    assert "communication" in text and "10.0 s more" in text, text
    fast = replace(slow, device_link_bytes_per_s=1e12)
    assert not sentences(schedulers.plan(FLOW, profile(0.1, 0.01, 2.0, exchanges=sent), fast))
