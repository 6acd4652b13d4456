"""Weights that are on an accelerator once: what the planner makes of ranks that act while they wait."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from schedulers import (
    MODES,
    Cluster,
    DeviceRange,
    Mode,
    Node,
    Phase,
    Placement,
    Plan,
    PlanError,
    Profile,
    Workflow,
    alternatives,
    from_data,
    plan,
    predict,
    simulate,
    to_data,
    validate,
)
from tests.schedulers.baselines import SMALL, Exhaustive
from tests.schedulers.instances import measured, some
from tests.schedulers.test_communication import communicating, lowest, seconds
from tests.schedulers.test_planner import SHORT

GB = 1e9


def sharing(seed: int) -> tuple[Workflow, Profile, Cluster]:
    """A random problem on accelerators of little memory, in which what follows the loop shares weights."""
    workflow, profile, cluster = communicating(2 * seed, memory=True)
    loop = {name for loop in workflow.loops for name in loop.components}
    learner = [name for name in workflow.names if name not in loop][-1:]
    components = {n: replace(c, shares_weights=n in learner) for n, c in profile.components.items()}
    return workflow, replace(profile, components=components), cluster


@pytest.mark.parametrize("seed", some(6, of=60))
def test_planner_equals_exhaustive_search_with_shared_weights(seed: int) -> None:
    """Where everything stays loaded. Who unloads what depends on two phases: the search counts the least that it can
    be, and the plan has what it is."""
    workflow, profile, cluster = sharing(seed)
    everything = Exhaustive(workflow, profile, cluster)
    policies = [profile.components[loop.components[-1]] for loop in workflow.loops]
    found = alternatives(workflow, profile, cluster, search=SMALL)
    for mode in MODES:
        best = everything.best(mode)
        assert (mode in found) == (best < math.inf)
        if mode in found:
            chosen = found[mode]
            validate(chosen, workflow, cluster, profile)
            assert lowest(chosen) == pytest.approx(best, rel=1e-9)
            more = 2 * sum(weights.unload_s + weights.load_s for weights in policies) if chosen.unload else 0.0
            assert best * (1 - 1e-9) <= seconds(chosen) <= (best + more) * (1 + 1e-9)
            assert simulate(chosen, workflow, profile, cluster).seconds == pytest.approx(seconds(chosen), rel=1e-9)


# --- eight GPUs

NODE = Node("node0", 16, 8, accelerator_bytes=80 * GB)
EIGHT = Cluster((NODE,))


def profile_of(shares_weights: bool, learner_on: int = 8, **learner: Any) -> Profile:
    """A 7B policy: simulation takes as long as inference on six GPUs; the update is as fast as ranks are many, up to
    `learner_on`."""
    moves = {"unload_s": 2.0, "load_s": 2.0}
    times = {(16, n): 80.0 / n for n in range(1, learner_on + 1)}
    learner = {
        "resident_bytes": 60 * GB,
        "unload_s": 3.0,
        "load_s": 4.0,
        "data_parallel": False,
        "shares_weights": shares_weights,
    } | learner
    components = {
        "physics": measured("cores", {(16, n): 1.6 / n for n in (1, 2, 4, 8, 16)}),
        "policy": measured("accelerators", {(16, n): 0.6 / n for n in range(1, 9)}, resident_bytes=30 * GB, **moves),
        "learner": measured("accelerators", times, **learner),
    }
    return Profile("short", {}, components)


def places(chosen: Plan) -> dict[str, Placement]:
    return {name: p for phase in chosen.phases for p in phase.placements for name in p.components}


def by_hand(policy: tuple[int, int], learner: tuple[int, int], unload: bool = False) -> Plan:
    """First device and number of devices of each."""

    def on(*where: int) -> tuple[DeviceRange, ...]:
        return (DeviceRange("node0", "accelerators", *where),)

    physics = Placement(("physics",), (DeviceRange("node0", "cores", 0, 16),))
    rolling = Phase((physics, Placement(("policy",), on(*policy))), 16)
    return Plan("short", "collocated", (rolling, Phase((Placement(("learner",), on(*learner)),), 16)), unload=unload)


@pytest.mark.parametrize(
    ("policy", "learner", "hosts"),
    [
        ((0, 8), (0, 8), tuple(range(8))),
        ((2, 6), (0, 8), (2, 3, 4, 5, 6, 7)),
        ((0, 8), (4, 4), (None, None, None, None, 0, 1, 2, 3)),
        ((0, 4), (4, 4), (None,) * 4),
    ],
)
def test_instances_on_the_same_devices_hold_the_weights_once(
    policy: tuple[int, int], learner: tuple[int, int], hosts: tuple[int | None, ...]
) -> None:
    chosen = by_hand(policy, learner)
    found = places(chosen)
    assert found["policy"].hosts(found["learner"]) == hosts
    validate(chosen, SHORT, EIGHT, profile_of(shares_weights=True))
    larger = profile_of(shares_weights=True, resident_bytes=81 * GB)
    with pytest.raises(PlanError, match="needs 81.0 GB"):
        validate(chosen, SHORT, EIGHT, larger)
    if any(host is not None for host in hosts):
        with pytest.raises(PlanError, match="needs 90.0 GB"):
            validate(chosen, SHORT, EIGHT, profile_of(shares_weights=False))


@pytest.mark.parametrize(
    ("policy", "learner", "switch_s"),
    [
        ((0, 8), (0, 8), 7.0 - 4.0),  # the optimiser's state alone leaves
        ((2, 6), (0, 8), 7.0),  # ranks that nobody acts beside leave with their weights
        ((0, 8), (4, 4), 4.0 + 3.0),  # replicas without a rank leave
        ((0, 4), (4, 4), 4.0 + 7.0),
    ],
)
def test_components_that_share_weights_do_not_unload_them(
    policy: tuple[int, int], learner: tuple[int, int], switch_s: float
) -> None:
    chosen = by_hand(policy, learner, unload=True)
    found = predict(chosen, SHORT, profile_of(shares_weights=True), EIGHT)
    assert found.switch_s == pytest.approx(switch_s)
    assert simulate(chosen, SHORT, profile_of(shares_weights=True), EIGHT).seconds == pytest.approx(found.iteration_s)
    assert predict(chosen, SHORT, profile_of(shares_weights=False), EIGHT).switch_s == pytest.approx(4.0 + 7.0)


def test_one_copy_saves_unloading_what_does_not_fit_twice() -> None:
    twice, once = (plan(SHORT, profile_of(shared), EIGHT, "collocated") for shared in (False, True))
    assert twice.unload and not once.unload
    assert seconds(once) == pytest.approx(seconds(twice) - 11.0) == pytest.approx(lowest(once))
    shared = (
        "On 8 of 8 accelerators of policy it takes turns with learner in one process, with one copy of the weights."
    )
    assert shared in once.why
    assert not any("one copy" in sentence for sentence in twice.why)


def test_replicas_share_processes_with_ranks_where_there_are_more_replicas() -> None:
    """Four ranks, all that the learner was measured on; eight replicas, four of them the ranks."""
    profile = profile_of(shares_weights=True, learner_on=4)
    chosen = plan(SHORT, profile, EIGHT)
    found = places(chosen)
    assert (found["policy"].count, found["learner"].count) == (8, 4)
    assert found["policy"].hosts(found["learner"]) == (0, 1, 2, 3, None, None, None, None)
    assert not chosen.unload
    apart = alternatives(SHORT, profile, EIGHT)["disaggregated"]
    assert seconds(apart) > seconds(chosen)


@pytest.mark.parametrize("mode", ["collocated", "hybrid"])
def test_components_that_share_weights_are_on_the_first_devices(mode: Mode) -> None:
    """Beside renderers on the accelerators too: else replicas would be beside ranks on fewer than could be."""
    names = ("physics", "render", "policy", "learner")
    workflow = replace(SHORT, components=tuple(replace(SHORT.components[0], name=name) for name in names))
    loop = replace(SHORT.loops[0], components=names[:3])
    edges = (replace(SHORT.edges[0], target="render"), replace(SHORT.edges[0], source="render"), SHORT.edges[1])
    workflow = replace(workflow, loops=(loop,), edges=edges)
    profile = profile_of(shares_weights=True, learner_on=6)
    drawn = measured("accelerators", {(16, n): 0.3 / n for n in (1, 2, 4)}, resident_bytes=5 * GB)
    profile = replace(profile, components={**profile.components, "render": drawn})
    chosen = alternatives(workflow, profile, EIGHT)[mode]
    validate(chosen, workflow, EIGHT, profile)
    found = places(chosen)
    hosts = found["policy"].hosts(found["learner"])
    assert len(hosts) - hosts.count(None) == min(len(hosts), found["learner"].count)


def test_profiles_say_that_weights_are_shared() -> None:
    profile = profile_of(shares_weights=True)
    assert from_data(Profile, json.loads(json.dumps(to_data(profile)))) == profile
