"""Clusters whose nodes differ in memory: the poor ones hide nothing, and what is certified is true."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from schedulers import MODES, Cluster, Node, Profile, Workflow, alternatives, plan, validate
from tests.schedulers.baselines import SMALL, Exhaustive
from tests.schedulers.instances import lowest, measured, random_home, some
from tests.schedulers.test_home import outside, profile_of, rollout, seconds

HOME, RICH, POOR = (
    Node("home", 4, memory_bytes=64e9),
    Node("rich", 32, memory_bytes=256e9),
    Node("poor", 64, memory_bytes=16e9),
)


def heavy(workers: float = 1e9) -> tuple[Workflow, Profile]:
    """A rollout in which physics holds so many bytes in each of its workers."""
    workflow = replace(rollout(), items=32)
    profile = profile_of(workflow, physics=0.5)
    physics = replace(profile.components["physics"], resident_bytes=workers)
    return workflow, replace(profile, components={**profile.components, "physics": physics})


def linked(*nodes: Node) -> Cluster:
    return Cluster(nodes, 1e9, 0.001, head_node=nodes[0].name)


def random_uneven(seed: int, home: bool) -> tuple[Workflow, Profile, Cluster]:
    workflow, profile, cluster = random_home(seed, 1 + seed % 2, memory=True)
    random = np.random.default_rng((seed, 3))
    nodes = tuple(
        replace(
            node,
            memory_bytes=node.memory_bytes * float(random.choice([0.4, 1.0, 2.0])),
            accelerator_bytes=node.accelerator_bytes * float(random.choice([0.4, 1.0, 2.0])),
        )
        for node in cluster.nodes
    )
    return workflow, profile, replace(cluster, nodes=nodes, head_node=cluster.head_node if home else None)


def test_a_poor_node_does_not_hide_a_rich_one() -> None:
    workflow, profile = heavy()
    without = plan(workflow, profile, linked(HOME, RICH))
    for nodes in ((HOME, RICH, POOR), (HOME, POOR, RICH)):
        cluster = linked(*nodes)
        chosen = plan(workflow, profile, cluster)
        assert seconds(chosen) == pytest.approx(seconds(without), rel=1e-9)
        assert lowest(chosen) == pytest.approx(seconds(chosen), rel=1e-9)
        assert outside(chosen, workflow, cluster) == {"physics"}
        validate(chosen, workflow, cluster, profile)
        why = "For want of memory physics cannot be on poor: 1 GB for each of its cores, where there are 0.25 GB."
        assert why in chosen.why
    assert not any("want of memory" in sentence for sentence in without.why)


def test_a_poor_home_limits_what_is_on_it_alone() -> None:
    workflow, profile = heavy()
    cluster = linked(replace(HOME, memory_bytes=1e9), RICH)
    chosen = plan(workflow, profile, cluster)
    places = {name: p.nodes for phase in chosen.phases for p in phase.placements for name in p.components}
    assert places == {"physics": {"rich"}, "policy": {"home"}, "learner": {"home"}}
    validate(chosen, workflow, cluster, profile)


def test_a_gpu_of_little_memory_does_not_hide_a_large_one() -> None:
    workflow, profile = rollout(), profile_of(rollout())
    learner = measured("accelerators", {(16, 1): 0.3}, resident_bytes=20e9)
    profile = replace(profile, components={**profile.components, "learner": learner})
    large, small = Node("large", 4, 1, accelerator_bytes=80e9), Node("small", 4, 1, accelerator_bytes=16e9)
    cluster = Cluster((small, large))
    chosen = plan(workflow, profile, cluster)
    places = {name: p.nodes for phase in chosen.phases for p in phase.placements for name in p.components}
    assert places["learner"] == {"large"}
    assert places["physics"] == {"small", "large"}  # the poor GPU's node keeps its cores
    validate(chosen, workflow, cluster, profile)


@pytest.mark.parametrize("home", [True, False])
@pytest.mark.parametrize("seed", some(4, of=20))
def test_no_choice_of_nodes_is_better_and_none_is_below_the_bound(seed: int, home: bool) -> None:
    workflow, profile, cluster = random_uneven(seed, home)
    first, *others = cluster.nodes
    found = alternatives(workflow, profile, cluster, search=SMALL)
    chosen = [nodes for size in range(len(others) + 1) for nodes in combinations(others, size)]
    searches = [Exhaustive(workflow, profile, where) for where in _possible(workflow, profile, cluster, first, chosen)]
    for mode in MODES:
        best = min((search.best(mode) for search in searches), default=math.inf)
        assert mode in found or best == math.inf
        if mode in found:
            assert seconds(found[mode]) <= best * (1 + 1e-9)
            assert lowest(found[mode]) <= min(best, seconds(found[mode])) * (1 + 1e-9)
            validate(found[mode], workflow, cluster, profile)
            assert not home or outside(found[mode], workflow, cluster) <= workflow.movable


def _possible(
    workflow: Workflow, profile: Profile, cluster: Cluster, first: Node, chosen: list[tuple[Node, ...]]
) -> list[Cluster]:
    """Clusters of the first node and some others that have all pools that are needed."""
    needs = {component.pool for component in profile.components.values()}
    result = []
    for nodes in ((first, *more) for more in chosen):
        pools = {"cores"} | ({"accelerators"} if any(node.accelerators for node in nodes) else set())
        if needs <= pools:
            result.append(replace(cluster, nodes=nodes))
    return result


@pytest.mark.parametrize("home", [True, False])
@pytest.mark.parametrize("seed", some(3, of=12))
def test_an_added_poor_node_never_hurts(seed: int, home: bool) -> None:
    workflow, profile, cluster = random_uneven(seed, home)
    least = min(node.memory_bytes / node.cores for node in cluster.nodes)
    less = min(node.accelerator_bytes for node in cluster.nodes)
    few = alternatives(workflow, profile, cluster, search=SMALL)
    poor = Node("poor", 3, seed % 2, memory_bytes=least * 3 / 4, accelerator_bytes=less / 4)
    many = alternatives(workflow, profile, replace(cluster, nodes=(*cluster.nodes, poor)), search=SMALL)
    for mode in few:
        assert seconds(many[mode]) <= seconds(few[mode]) * (1 + 1e-9)
