"""What instances send one another: its laws played event by event, and planned for as by exhaustive search."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import permutations, product
from pathlib import Path

import numpy as np
import pytest

from benchmarks.scaling import machines, predicted, profile_of, workflow_of
from schedulers import (
    MODES,
    Cluster,
    Component,
    DeviceRange,
    Exchange,
    Node,
    Phase,
    Placement,
    Plan,
    PlanError,
    Profile,
    Workflow,
    alternatives,
    load,
    one_accelerator,
    plan,
    predict,
    save,
    scaling,
    simulate,
    validate,
)
from schedulers.cost.communication import exchange_seconds, fewest_nodes, weight_sync_seconds
from schedulers.cost.laws import broadcast_seconds, ring_seconds
from schedulers.profile import Collective
from tests.schedulers.baselines import SMALL, Exhaustive
from tests.schedulers.instances import NEAR, lowest, measured, random_problem, random_tasks, seconds, some
from tests.schedulers.test_planner import SHORT

# --- the laws


def played_ring(links: list[float], steps: int) -> float:
    """Every member sends a piece to the next in each step, once it has that of the step before and its link is free."""
    have = [0.0] * len(links)
    free = [0.0] * len(links)
    for _ in range(steps):
        sent = [max(have[i], free[i]) + link for i, link in enumerate(links)]
        free = sent
        have = [sent[i - 1] for i in range(len(links))]
    return max(have)


@pytest.mark.parametrize("seed", some(6, of=60))
@pytest.mark.parametrize("rounds", [1, 2])
def test_ring_law_equals_a_ring_of_links_that_differ(seed: int, rounds: int) -> None:
    random = np.random.default_rng(seed)
    members, size = int(random.integers(1, 9)), float(random.uniform(1, 100))
    speeds, waits = random.uniform(1, 9, size=members), random.uniform(0, 0.5, size=members)
    links = [size / members / speed + wait for speed, wait in zip(speeds, waits, strict=True)]
    slowest = int(np.argmax(links))
    law = ring_seconds(size, members, speeds[slowest], waits[slowest], rounds)
    assert law == pytest.approx(played_ring(links, rounds * (members - 1)), rel=1e-12)


def test_broadcast_law_is_the_limit_of_many_pieces() -> None:
    size, speeds, wait = 60.0, (5.0, 3.0, 4.0), 0.01
    for pieces, off in ((10, 0.3), (1000, 0.003)):
        done = [0.0] * len(speeds)
        for _ in range(pieces):
            before = 0.0
            for i, speed in enumerate(speeds):
                before = done[i] = max(before, done[i]) + size / pieces / speed
        assert done[-1] + len(speeds) * wait == pytest.approx(broadcast_seconds(size, min(speeds), 3, wait), rel=off)


def nodes(count: int, accelerators: int, cores: int = 4) -> tuple[Node, ...]:
    return tuple(Node(f"node{i}", cores, accelerators) for i in range(count))


LINKED = Cluster(nodes(3, 4), 2.0, 0.5, device_link_bytes_per_s=10.0)


def test_what_is_exchanged_goes_through_the_slowest_link_of_the_ring() -> None:
    reduce, gather = Exchange("all_reduce", 60.0, 3), Exchange("all_gather", 60.0, 3)

    def once(exchange: Exchange, counts: list[int], on: list[int], pool: str = "accelerators") -> list[float]:
        kind = "cores" if pool == "cores" else "accelerators"
        return list(exchange_seconds(LINKED, kind, [exchange], np.array(counts), np.array(on)))

    assert once(reduce, [1, 2, 4], [1, 1, 1]) == pytest.approx([0, 3 * 2 * 60 / 2 / 10, 3 * 6 * 60 / 4 / 10])
    assert once(reduce, [4], [2]) == pytest.approx([3 * 6 * (60 / 4 / 2 + 0.5)])
    assert once(gather, [4], [1]) == pytest.approx([3 * 3 * 60 / 4 / 10])
    # On cores a node is one instance, whatever the number of its cores.
    assert once(reduce, [4, 8], [1, 2], "cores") == pytest.approx([0.0, 3 * 2 * (60 / 2 / 2 + 0.5)])
    # Passes are shared out, down to what everybody makes.
    shared = replace(gather, times=12, fewest=2)
    assert once(shared, [2, 4], [1, 1]) == pytest.approx([6 * 60 / 2 / 10, 3 * 3 * 60 / 4 / 10])
    once_each = replace(gather, times=4, fewest=2)
    assert once(once_each, [4], [1]) == pytest.approx([2 * 3 * 60 / 4 / 10])


def test_devices_are_on_as_few_nodes_as_hold_them() -> None:
    cluster = Cluster((Node("a", 2, 1), Node("b", 8, 4), Node("c", 4, 2)))
    assert list(fewest_nodes(cluster, "accelerators", np.arange(1, 8))) == [1, 1, 1, 1, 2, 2, 3]
    assert list(fewest_nodes(cluster, "cores", np.array([8, 9, 13]))) == [1, 2, 3]


def place(*devices: str, name: str = "policy") -> Placement:
    ranges = []
    for text in devices:
        node, pool, numbers = text.split(":")
        first, _, last = numbers.partition("-")
        ranges.append(DeviceRange(node, pool, int(first), int(last or first) - int(first) + 1))  # type: ignore[arg-type]
    return Placement((name,), tuple(ranges))


@pytest.mark.parametrize(
    ("learner", "policy", "expected"),
    [
        (["node0:accelerators:0-3"], ["node0:accelerators:1-2"], 0.0),  # they are where ranks are
        (["node0:accelerators:0-1"], ["node0:accelerators:1-3"], 60 / 10),
        (["node0:accelerators:0"], ["node0:accelerators:0", "node1:accelerators:0"], 60 / 2 + 0.5),
        (["node0:accelerators:0"], ["node1:accelerators:0-3", "node2:accelerators:0"], 60 / 2 + 2 * 0.5),
        (["node0:accelerators:0", "node1:accelerators:0"], ["node1:accelerators:1"], 60 / 10),
        (["node0:cores:0-1"], ["node0:cores:2"], 0.0),  # shared memory
        (["node0:cores:0-1"], ["node1:cores:0"], 60 / 2 + 0.5),
        (["node0:cores:0"], ["node0:accelerators:0"], 60 / 10),
    ],
)
def test_weights_go_to_those_that_have_none(learner: list[str], policy: list[str], expected: float) -> None:
    found = weight_sync_seconds(LINKED, 60.0, place(*learner, name="learner"), place(*policy))
    assert found == pytest.approx(expected)


# --- plans


def with_exchanges(
    seed: int, workflow: Workflow, profile: Profile, cluster: Cluster, publishes: bool = False
) -> tuple[Profile, Cluster]:
    """What is outside the loops exchanges something, so that more devices may take longer; links that take time."""
    random = np.random.default_rng((seed, 5))
    loop = {name for loop in workflow.loops for name in loop.components}
    kinds: list[Collective] = ["all_reduce", "all_gather", "reduce_scatter"]
    components = {}
    for name, component in profile.components.items():
        exchange = Exchange(
            kinds[int(random.integers(0, 3))],
            float(random.uniform(0, 20)),
            float(random.integers(1, 6)),
            None if random.random() < 0.6 else 1.0,
        )
        if name not in loop and random.random() < 0.8:
            component = replace(component, exchanges=(exchange,))
            if publishes:
                component = replace(component, published_bytes=float(random.uniform(0, 20)))
        components[name] = component
    speed, within = float(random.uniform(5, 200)), float(random.uniform(20, 800))
    cluster = replace(cluster, link_bytes_per_s=speed, device_link_bytes_per_s=within, link_s=random.uniform(0, 0.02))
    return replace(profile, components=components), cluster


def communicating(seed: int, memory: bool = False, publishes: bool = False) -> tuple[Workflow, Profile, Cluster]:
    """A random problem whose components are all on accelerators, or on both pools, of one node."""
    workflow, profile, cluster = random_problem(seed, pools=1 + seed % 2, memory=memory)
    if not seed % 2:  # One pool: on accelerators, which are what exchanges.
        components = {name: replace(c, pool="accelerators") for name, c in profile.components.items()}
        profile = replace(profile, components=components)
        node = cluster.nodes[0]
        size = node.memory_bytes / node.cores
        cluster = Cluster((replace(node, accelerators=node.cores, cores=1, accelerator_bytes=size),))
    return (workflow, *with_exchanges(seed, workflow, profile, cluster, publishes))


@pytest.mark.parametrize("memory", [False, True])
@pytest.mark.parametrize("seed", some(6, of=60))
def test_planner_equals_exhaustive_search_with_communication(seed: int, memory: bool) -> None:
    workflow, profile, cluster = communicating(seed, memory)
    everything = Exhaustive(workflow, profile, cluster)
    found = alternatives(workflow, profile, cluster, search=SMALL)
    for mode in MODES:
        best = everything.best(mode)
        assert (mode in found) == (best < math.inf)
        if mode in found:
            assert seconds(found[mode]) == pytest.approx(best, rel=1e-9)
            assert lowest(found[mode]) == pytest.approx(best, rel=1e-9)
            validate(found[mode], workflow, cluster, profile)
            played = simulate(found[mode], workflow, profile, cluster).seconds
            assert played == pytest.approx(seconds(found[mode]), rel=1e-9)


@pytest.mark.parametrize("seed", some(4, of=30))
def test_two_tasks_are_planned_as_by_exhaustive_search_with_communication(seed: int) -> None:
    workflow, profile, cluster = random_tasks(seed, gpu=True)
    node = replace(cluster.nodes[0], cores=2, accelerators=3)
    profile, cluster = with_exchanges(seed, workflow, profile, replace(cluster, nodes=(node,)))
    everything = Exhaustive(workflow, profile, cluster)
    for mode, found in alternatives(workflow, profile, cluster, search=SMALL).items():
        best = everything.best(mode)
        assert best * (1 - 1e-9) <= seconds(found) <= max(lowest(found), best) * NEAR
        assert lowest(found) <= best * (1 + 1e-9)


def of_several_nodes(seed: int) -> tuple[Workflow, Profile, Cluster]:
    workflow, profile, cluster = communicating(2 * seed, publishes=True)
    return workflow, profile, replace(cluster, nodes=nodes(2, 2, cores=1))


def arranged(chosen: Plan) -> list[Plan]:
    """The plan with the devices of each phase given to its placements in any order, node after node."""
    every = [DeviceRange(f"node{i}", "accelerators", j, 1) for i in range(2) for j in range(2)]
    orders = []
    for phase in chosen.phases:
        found = set()
        for order in permutations(every):
            rest, placements = list(order), []
            for placement in phase.placements:
                mine = sorted(rest[: placement.count], key=lambda part: (part.node, part.first))
                placements.append(replace(placement, devices=tuple(mine)))
                rest = rest[placement.count :]
            found.add(replace(phase, placements=tuple(placements)))
        orders.append(found)
    return [replace(chosen, phases=tuple(phases)) for phases in product(*orders)]


@pytest.mark.parametrize("seed", some(6, of=25))
def test_on_several_nodes_the_bound_is_below_every_way_to_lay_a_plan_out(seed: int) -> None:
    workflow, profile, cluster = of_several_nodes(seed)
    for chosen in alternatives(workflow, profile, cluster, search=SMALL).values():
        ways = [predict(way, workflow, profile, cluster).iteration_s for way in arranged(chosen)]
        assert lowest(chosen) <= min(ways) * (1 + 1e-9)
        assert min(ways) <= seconds(chosen) * (1 + 1e-9)
        assert simulate(chosen, workflow, profile, cluster).seconds == pytest.approx(seconds(chosen), rel=1e-9)


@pytest.mark.parametrize("seed", some(6, of=25))
def test_more_devices_never_hurt_although_they_exchange_more(seed: int) -> None:
    workflow, profile, cluster = communicating(seed)
    node = cluster.nodes[0]
    few = alternatives(workflow, profile, cluster, search=SMALL)
    more = replace(cluster, nodes=(replace(node, accelerators=node.accelerators + 1),))
    many = alternatives(workflow, profile, more, search=SMALL)
    for mode in few:
        assert seconds(many[mode]) <= seconds(few[mode]) * (1 + 1e-9)


@pytest.mark.parametrize("seed", some(6, of=25))
def test_links_that_take_no_time_leave_plans_as_they_were(seed: int) -> None:
    workflow, profile, cluster = communicating(seed, publishes=True)
    free = replace(cluster, link_bytes_per_s=math.inf, link_s=0.0, device_link_bytes_per_s=math.inf)
    components = {n: replace(c, exchanges=(), published_bytes=0.0) for n, c in profile.components.items()}
    silent = replace(profile, components=components)
    once = alternatives(workflow, profile, free, search=SMALL)
    assert once == alternatives(workflow, silent, free, search=SMALL)


def test_a_learner_that_says_much_is_given_fewer_devices() -> None:
    workflow = Workflow("update", (Component("learner"),), (), (), 64)
    learner = measured("accelerators", {(64, 1): 6.4})
    cluster = Cluster(nodes(2, 8), 1e9, device_link_bytes_per_s=10e9)

    def devices(size: float) -> tuple[int, int]:
        """How many, and on how many nodes."""
        profile = Profile("update", {}, {"learner": replace(learner, exchanges=(Exchange("all_reduce", size, 10),))})
        chosen = plan(workflow, profile, cluster)
        (placement,) = chosen.phases[0].placements
        assert seconds(chosen) == pytest.approx(lowest(chosen))
        return placement.count, len(placement.nodes)

    assert [devices(size) for size in (1e3, 0.5e9, 50e9)] == [(16, 2), (8, 1), (1, 1)]


# --- files


def test_what_is_exchanged_is_written_and_read_and_links_are_checked(tmp_path: Path) -> None:
    workflow, profile, cluster = communicating(4, publishes=True)
    chosen = plan(workflow, profile, cluster)
    for kind, value in ((Profile, profile), (Cluster, cluster), (Plan, chosen)):
        save(value, tmp_path / "file.json")
        assert load(kind, tmp_path / "file.json") == value  # type: ignore[type-var]
    with pytest.raises(PlanError, match="device_link_bytes_per_s is 0"):
        plan(workflow, profile, replace(cluster, device_link_bytes_per_s=0.0))


def test_files_that_say_nothing_of_communication_are_read(tmp_path: Path) -> None:
    """Profiles, plans and clusters of earlier versions."""
    workflow, profile, cluster = random_problem(3)
    chosen = plan(workflow, profile, cluster)
    for kind, value in ((Profile, profile), (Cluster, cluster), (Plan, chosen)):
        save(value, tmp_path / "file.json")
        text = (tmp_path / "file.json").read_text()
        assert not any(word in text for word in ("exchanges", "communication", "device_link"))
        old = text.replace(',\n   "published_bytes": 0.0', "")
        assert (old != text) == (kind is Profile)
        (tmp_path / "file.json").write_text(old)
        assert load(kind, tmp_path / "file.json") == value  # type: ignore[type-var]


# --- instances


def test_each_accelerator_is_an_instance_and_each_node_whose_cores_are_used() -> None:
    gpus = place("node0:accelerators:2-3", "node1:accelerators:0")
    assert [devices[0] for devices in gpus.instances] == [
        DeviceRange("node0", "accelerators", 2, 1),
        DeviceRange("node0", "accelerators", 3, 1),
        DeviceRange("node1", "accelerators", 0, 1),
    ]
    cores = place("node1:cores:0-3", "node0:cores:0-1", "node1:cores:6")
    assert cores.instances == (
        (DeviceRange("node1", "cores", 0, 4), DeviceRange("node1", "cores", 6, 1)),
        (DeviceRange("node0", "cores", 0, 2),),
    )


def test_in_hybrid_replicas_leave_the_accelerators_and_ranks_take_them() -> None:
    loop = Phase((place("node0:cores:0-3", name="physics"), place("node0:accelerators:0-3")), 8)
    rest = Phase((place("node0:accelerators:0-3", name="learner"),), 8)
    hybrid = Plan("ppo", "collocated", (loop, rest))
    assert hybrid.phases[0].placements[1].instances == hybrid.phases[1].placements[0].instances


# --- scaling


def test_adapters_scale_nearly_perfectly_and_whole_networks_do_not() -> None:
    lora, full = (predicted(8, 256, full, "fast") for full in (False, True))
    beside = "predicted_efficiency_beside_a_share_of_the_work"
    assert 0.99 < lora[beside] <= 1.0 and full[beside] < lora[beside]
    assert full["predicted_communication_s"] > 30 * lora["predicted_communication_s"]
    workflow, profile, cluster = workflow_of(256), profile_of(256, False), machines(8, "fast")
    found = scaling(plan(workflow, profile, cluster), workflow, profile, cluster)
    assert found.bottleneck == "learner (accelerators)"
    assert "8 accelerators are" in str(found) and "learner (accelerators)" in str(found)
    assert (one_accelerator(cluster).nodes[0].cores, one_accelerator(cluster).nodes[0].accelerators) == (12, 1)


@pytest.mark.parametrize(
    ("physics", "policy", "learner", "size", "expected"),
    [
        (5.0, 0.1, 1.0, 0.0, "physics (cores)"),
        (0.1, 40.0, 1.0, 0.0, "policy (accelerators)"),
        (0.1, 0.1, 100.0, 0.0, "learner (accelerators)"),
        (0.1, 0.1, 100.0, 4e10, "communication"),
    ],
)
def test_the_bottleneck_is_what_would_gain_most(
    physics: float, policy: float, learner: float, size: float, expected: str
) -> None:
    components = {
        "physics": measured("cores", {(16, 1): physics}),
        "policy": measured("accelerators", {(16, 1): policy}),
        "learner": measured("accelerators", {(16, 1): learner}, exchanges=(Exchange("all_reduce", size, 1),)),
    }
    cluster = Cluster((Node("node0", 4, 4),), device_link_bytes_per_s=1e9)
    profile = Profile("short", {}, components)
    chosen = plan(SHORT, profile, cluster)
    assert scaling(chosen, SHORT, profile, cluster).bottleneck == expected


def test_one_accelerator_that_cannot_hold_it_has_no_speed_to_compare_with() -> None:
    gpu = {"bytes_per_item": 1e9}
    components = {
        "physics": measured("cores", {(16, 1): 0.1}),
        "policy": measured("accelerators", {(16, 1): 0.1}),
        "learner": measured("accelerators", {(16, 1): 1.0}, **gpu),
    }
    cluster = Cluster((Node("node0", 4, 4, accelerator_bytes=8e9),))
    profile = Profile("short", {}, components)
    found = scaling(plan(SHORT, profile, cluster), SHORT, profile, cluster)
    assert math.isinf(found.one_iteration_s) and "one has too little memory" in str(found)
    with pytest.raises(PlanError, match="no accelerators"):
        scaling(plan(SHORT, profile, cluster), SHORT, profile, Cluster((Node("node0", 4),)))
