"""Clusters with a home: what does not travel stays there, and messages to other nodes are paid for."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from schedulers import (
    MODES,
    Cluster,
    Component,
    DeviceRange,
    Edge,
    Loop,
    Node,
    Phase,
    Placement,
    Plan,
    PlanError,
    Profile,
    SearchOptions,
    Workflow,
    alternatives,
    plan,
    predict,
    simulate,
    validate,
)
from schedulers.cluster import only_head
from schedulers.plan import ranges_text
from tests.schedulers.baselines import SMALL, Exhaustive
from tests.schedulers.instances import measured, random_home, seconds, some

KINDS = {"free": {}, "memory": {"memory": True}, "links": {"links": True}}


def outside(chosen: Plan, workflow: Workflow, cluster: Cluster) -> set[str]:
    """Components that have devices away from home."""
    placements = [placement for phase in chosen.phases for placement in phase.placements]
    return {name for placement in placements if placement.nodes != {cluster.head_node} for name in placement.components}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("seed", some(4, of=20))
def test_planner_equals_exhaustive_search_on_clusters_with_a_home(seed: int, kind: str) -> None:
    workflow, profile, cluster = random_home(seed, 1 + seed % 2, **KINDS[kind])
    # With less memory at other nodes than at home, what stays may hold more than what leaves.
    everything = [Exhaustive(workflow, profile, where) for where in (cluster, only_head(cluster))]
    found = alternatives(workflow, profile, cluster, search=SMALL)
    for mode in MODES:
        best = min(search.best(mode) for search in everything)
        if mode not in found:
            assert best == math.inf
            continue
        assert seconds(found[mode]) == pytest.approx(best, rel=1e-9)
        prediction = found[mode].prediction
        assert prediction is not None and prediction.lower_bound_s == pytest.approx(best, rel=1e-9)
        validate(found[mode], workflow, cluster, profile)
        assert outside(found[mode], workflow, cluster) <= workflow.movable
        played = simulate(found[mode], workflow, profile, cluster).seconds
        assert predict(found[mode], workflow, profile, cluster).iteration_s == pytest.approx(played, rel=1e-9)


@pytest.mark.parametrize("links", [False, True])
@pytest.mark.parametrize("seed", some(3, of=10))
def test_an_added_node_never_hurts(seed: int, links: bool) -> None:
    workflow, profile, cluster = random_home(seed, 1 + seed % 2, links=links)
    few = alternatives(workflow, profile, cluster, search=SMALL)
    larger = replace(cluster, nodes=(*cluster.nodes, Node("more", 2, seed % 2)))
    many = alternatives(workflow, profile, larger, search=SMALL)
    for mode in few:
        assert seconds(many[mode]) <= seconds(few[mode]) * (1 + 1e-9)


@pytest.mark.slow
def test_a_node_of_little_memory_never_hurts() -> None:
    for seed in range(10):
        workflow, profile, cluster = random_home(seed, memory=True)
        home = only_head(cluster)
        poor = replace(home, nodes=(*home.nodes, Node("poor", 4, memory_bytes=0.1)))
        found = alternatives(workflow, profile, home, search=SMALL)
        for mode, other in alternatives(workflow, profile, poor, search=SMALL).items():
            assert seconds(other) <= seconds(found[mode]) * (1 + 1e-9)


# --- a rollout whose simulator may leave


def rollout(draws: bool = False) -> Workflow:
    names = ("physics", "render", "policy", "learner") if draws else ("physics", "policy", "learner")
    return Workflow(
        "rollout",
        tuple(Component(name, movable=name == "physics") for name in names),
        tuple(Edge(a, b, "data") for a, b in zip(names, names[1:], strict=False)),
        (Loop(names[:-1], 20),),
        16,
    )


TIMES = {"physics": 0.16, "render": 0.002, "policy": 0.03, "learner": 0.3}


def profile_of(workflow: Workflow, **times: float) -> Profile:
    """Everything in proportion to its items and cores; a hundred bytes per item on every edge."""
    components = {name: measured("cores", {(16, 1): (TIMES | times)[name]}) for name in workflow.names}
    loop = workflow.loops[0].components if workflow.loops else ()
    transfers = {f"{a}>{b}": 100.0 for a, b in zip(loop, (*loop[1:], loop[0]), strict=True)}
    return Profile("rollout", {}, components, transfers=transfers)


def pair(link_s: float = 0.0, far: int = 8) -> Cluster:
    return Cluster((Node("far", far), Node("here", 2)), 1e9, link_s, head_node="here")


@pytest.mark.parametrize("draws", [False, True])
def test_physics_leaves_where_that_pays_and_stays_where_messages_take_too_long(draws: bool) -> None:
    workflow = rollout(draws)
    profile = profile_of(workflow)
    near, slow = (plan(workflow, profile, pair(link_s)) for link_s in (0.001, 0.2))
    assert outside(near, workflow, pair()) == {"physics"}
    assert any("On this machine alone an iteration would take" in sentence for sentence in near.why)
    assert outside(slow, workflow, pair()) == set()
    (why,) = [sentence for sentence in slow.why if sentence.startswith("Nothing is on far.")]
    assert "Only physics may leave this machine, and " in why
    words = "the best plan in which it does would take", "no plan is faster for it: a message to another node takes 200"
    assert words[draws] in why
    assert seconds(slow) == pytest.approx(seconds(plan(workflow, profile, only_head(pair()), explain=False)))
    for chosen in (near, slow):
        assert chosen.prediction is not None and chosen.prediction.lower_bound_s == pytest.approx(seconds(chosen))


def test_where_nothing_is_movable_only_the_head_node_is_used() -> None:
    workflow = rollout()
    rooted = replace(workflow, components=tuple(replace(c, movable=False) for c in workflow.components))
    chosen = plan(rooted, profile_of(rooted), pair())
    assert seconds(chosen) == pytest.approx(seconds(plan(rooted, profile_of(rooted), only_head(pair()))))
    assert "Nothing is on far: no component may leave this machine." in chosen.why


def test_groups_hide_messages_behind_the_policy() -> None:
    """One group waits for its messages; of two, one waits while the policy decides for the other."""
    workflow, cluster = rollout(), pair(0.005, far=4)
    profile = profile_of(workflow, physics=0.08, policy=0.02)
    places = (
        Placement(("physics",), (DeviceRange("far", "cores", 0, 4),)),
        Placement(("policy",), (DeviceRange("here", "cores", 0, 1),)),
    )
    last = Phase((Placement(("learner",), (DeviceRange("here", "cores", 0, 2),)),), 16)
    one, two = (Plan("rollout", "hybrid", (Phase(places, 16), last), (groups,)) for groups in (1, 2))
    for chosen in (one, two):
        validate(chosen, workflow, cluster, profile)
        played = simulate(chosen, workflow, profile, cluster)
        assert predict(chosen, workflow, profile, cluster).iteration_s == pytest.approx(played.seconds)
        assert {event.component for event in played.events} == {"physics", "policy", "learner"}
    wire = 2 * 0.005 + 2 * 16 * 100 / 1e9
    assert predict(one, workflow, profile, cluster).phases_s[0] == pytest.approx(20 * (0.02 + 0.02 + wire))
    half = 0.01 + 0.01 + 2 * 0.005 + 2 * 8 * 100 / 1e9
    assert predict(two, workflow, profile, cluster).phases_s[0] == pytest.approx(20 * half + 0.01)


def test_where_the_link_is_the_slowest_it_is_named() -> None:
    workflow, cluster = rollout(), pair(0.02, far=4)
    profile = profile_of(workflow, physics=0.08, policy=0.016)
    short = replace(cluster, nodes=(cluster.nodes[0], Node("here", 1)))
    chosen = plan(workflow, profile, short, mode="hybrid", search=SearchOptions(groups=(4,)))
    assert outside(chosen, workflow, short) == {"physics"}
    assert any("; the loop waits for the link between nodes" in sentence for sentence in chosen.why)
    near = plan(workflow, profile, replace(short, link_s=1e-4), mode="hybrid", search=SearchOptions(groups=(4,)))
    assert any("; the loop waits for physics" in sentence for sentence in near.why)


def test_home_comes_first_where_nothing_of_the_pool_is_bound_to_it() -> None:
    """Policy and learner on the GPU, no cameras: only physics is on cores, and all of those at home are left for it."""
    workflow = rollout()
    gpu = {
        name: measured("accelerators", {(16, 1): TIMES[name]}, data_parallel=False) for name in ("policy", "learner")
    }
    cluster = Cluster((Node("far", 8), Node("here", 8, 1)), head_node="here")
    for physics, expected in (
        (2.0, (DeviceRange("here", "cores", 0, 8), DeviceRange("far", "cores", 0, 8))),
        (0.16, (DeviceRange("here", "cores", 0, 8),)),
    ):
        profile = profile_of(workflow, physics=physics)
        profile = replace(profile, components={**profile.components, **gpu})
        chosen = plan(workflow, profile, cluster)
        spans = {name: p.devices for phase in chosen.phases for p in phase.placements for name in p.components}
        assert spans["physics"] == expected


@pytest.mark.parametrize("link_s", [0.0, 0.001])
def test_where_several_are_movable_the_bound_leaves_messages_out(link_s: float) -> None:
    """The price of messages is that of all that travels, which is no bound where some of it could stay."""
    workflow = rollout(draws=True)
    both = tuple(replace(c, movable=c.name in ("physics", "render")) for c in workflow.components)
    workflow = replace(workflow, components=both)
    profile, cluster = profile_of(workflow), replace(pair(link_s), link_bytes_per_s=math.inf)
    free = plan(workflow, profile, replace(cluster, link_s=0.0), explain=False)
    found = alternatives(workflow, profile, cluster)
    stays = alternatives(workflow, profile, only_head(cluster))
    for mode, chosen in found.items():
        assert chosen.prediction is not None and chosen.prediction.lower_bound_s <= seconds(chosen)
        assert mode not in stays or seconds(chosen) <= seconds(stays[mode]) * (1 + 1e-9)
        validate(chosen, workflow, cluster, profile)
    best = plan(workflow, profile, cluster)
    assert best.prediction is not None and best.prediction.lower_bound_s == pytest.approx(seconds(free))


@pytest.mark.parametrize(
    ("names", "node", "message"),
    [
        (("policy",), "far", r"puts policy on far:cores:0, but only physics may leave node 'here'"),
        (("physics", "render"), "far", r"puts render on far:cores:0.*or what may leave it a placement of its own"),
    ],
)
def test_a_plan_that_moves_what_is_not_movable_is_refused(names: tuple[str, ...], node: str, message: str) -> None:
    workflow = rollout(draws=True)
    rest = tuple(name for name in workflow.names if name not in names)
    there, here = DeviceRange(node, "cores", 0, 1), DeviceRange("here", "cores", 0, 1)
    phase = Phase((Placement(names, (there,)), Placement(rest, (here,))), 16)
    with pytest.raises(PlanError, match=message):
        validate(Plan("rollout", "disaggregated", (phase,)), workflow, pair())
    validate(Plan("rollout", "disaggregated", (phase,)), workflow, replace(pair(), head_node=None))


def test_a_small_home_is_shared_out_core_by_core() -> None:
    """On a large cluster too: units of many cores would leave the policy too few or too many of those at home."""
    workflow = replace(rollout(), items=960)
    large = Cluster((Node("here", 6), *(Node(f"far{i}", 64) for i in range(8))), 1e9, 1e-4, head_node="here")
    scaled = {name: measured("cores", {(960, 1): TIMES[name]}) for name in workflow.names}
    chosen = plan(workflow, Profile("rollout", {}, scaled), large)
    learner = next(p for phase in chosen.phases for p in phase.placements if "learner" in p.components)
    assert learner.count == 6 and outside(chosen, workflow, large) == {"physics"}
    huge = replace(large, nodes=(large.nodes[0], *(Node(f"far{i}", 64) for i in range(100))))
    assert seconds(plan(workflow, Profile("rollout", {}, scaled), huge, explain=False)) <= seconds(chosen) * (1 + 1e-9)


def test_a_home_that_is_no_node_or_lacks_a_pool_is_refused() -> None:
    workflow, profile = rollout(), profile_of(rollout())
    with pytest.raises(PlanError, match="head_node 'her' is none of its nodes; nearest: here"):
        plan(workflow, profile, replace(pair(), head_node="her"))
    on_gpu = replace(profile, components={**profile.components, "policy": measured("accelerators", {(16, 1): 0.1})})
    gpu_elsewhere = Cluster((Node("here", 2), Node("far", 2, 1)), head_node="here")
    with pytest.raises(PlanError, match="'policy' occupies accelerators, and its node 'here' has none"):
        plan(workflow, on_gpu, gpu_elsewhere)
    # The other way round: a home without cores sends physics away.
    there = Cluster((Node("here", 0, 1), Node("far", 2)), head_node="here")
    all_gpu = {name: replace(c, pool="accelerators") for name, c in profile.components.items() if name != "physics"}
    chosen = plan(workflow, replace(profile, components={**profile.components, **all_gpu}), there)
    assert outside(chosen, workflow, there) == {"physics"}
    assert "On this machine alone there is no such plan." in chosen.why


def test_devices_are_named_in_words_for_people() -> None:
    here, far = DeviceRange("here", "cores", 0, 1), [DeviceRange(f"far{i}", "accelerators", 0, 8) for i in range(3)]
    assert ranges_text([here]) == "core 0 of this machine"
    assert ranges_text([here, *far]) == "core 0 of this machine, accelerators 0-7 of far0..far2 (3 nodes)"
