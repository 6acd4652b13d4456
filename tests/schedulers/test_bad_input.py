"""Mistakes that users make: one message that says what is wrong and what would be right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import schedulers
from schedulers import (
    Cluster,
    DeviceRange,
    Node,
    Phase,
    Placement,
    Plan,
    PlanError,
    Profile,
    Workflow,
    check_profile,
    from_data,
    load,
    save,
    to_data,
    validate,
)
from schedulers.profile import ComponentProfile
from tests.schedulers.instances import TWO_CORES, measured, ppo, ppo_profile, random_problem

LOOP = ("physics", "render", "policy")
REST = ("advantage", "learner", "sync")


def cores(first: int, count: int = 1, node: str = "node0") -> tuple[DeviceRange, ...]:
    return (DeviceRange(node, "cores", first, count),)


def hybrid(**changes: Any) -> Plan:
    plan = Plan(
        "ppo",
        "hybrid",
        (
            Phase((Placement(("physics", "render"), cores(0)), Placement(("policy",), cores(1))), 16),
            Phase((Placement(REST, cores(0, 2)),), 16),
        ),
        groups=(2,),
    )
    return replace(plan, **changes)


def loop_phase(*placements: Placement, micro_batch: int = 16) -> tuple[Phase, ...]:
    return (Phase(placements, micro_batch), hybrid().phases[1])


def refused(plan: Plan, *words: str, workflow: Workflow | None = None, **tight: Any) -> None:
    with pytest.raises(PlanError) as error:
        validate(plan, workflow or ppo(), tight.get("cluster", TWO_CORES), tight.get("profile", ppo_profile()))
    for word in words:
        assert word in str(error.value), str(error.value)


def test_a_good_plan_passes() -> None:
    validate(hybrid(), ppo(), TWO_CORES, ppo_profile())
    validate(hybrid(), ppo(), TWO_CORES)


def test_device_that_is_not_there() -> None:
    beyond = loop_phase(Placement(("physics", "render"), cores(0)), Placement(("policy",), cores(2)))
    refused(hybrid(phases=beyond), "policy", "node0:cores:2", "node0:cores:0-1")
    typo = loop_phase(Placement(("physics", "render"), cores(0)), Placement(("policy",), cores(1, node="nod0")))
    refused(hybrid(phases=typo), "'nod0'", "nearest: node0")
    gpu = (DeviceRange("node0", "accelerators", 0, 1),)
    refused(hybrid(phases=loop_phase(Placement(LOOP, gpu))), "physics", "occupies cores", "accelerators")


def test_device_given_twice() -> None:
    twice = loop_phase(Placement(("physics", "render"), cores(0)), Placement(("policy",), cores(0, 2)))
    refused(hybrid(phases=twice), "node0:cores:0", "physics", "policy")


def test_component_left_out_unknown_or_placed_twice() -> None:
    refused(hybrid(phases=loop_phase(Placement(LOOP[:2], cores(0)))), "leaves out policy")
    refused(hybrid(phases=loop_phase(Placement((*LOOP[:2], "polcy"), cores(0)))), "'polcy'", "nearest: policy")
    more = loop_phase(Placement(LOOP, cores(0)), Placement(("sync",), cores(1)))
    refused(hybrid(phases=more), "'sync' 2 times")


def test_memory() -> None:
    node = replace(TWO_CORES.nodes[0], memory_bytes=8e9)
    heavy = ppo_profile(resident_bytes=1e9)
    refused(hybrid(), "9.0 GB", "8.0 GB", "unload", cluster=Cluster((node,)), profile=heavy)
    validate(hybrid(unload=True), ppo(), Cluster((node,)), heavy)
    small = replace(node, memory_bytes=2e9)
    refused(hybrid(unload=True), "node0", "2.0 GB", cluster=Cluster((small,)), profile=heavy)


def test_more_devices_than_a_component_can_use() -> None:
    profile = ppo_profile()
    one = replace(profile.components["learner"], data_parallel=False, points=profile.components["learner"].points[:1])
    profile = replace(profile, components={**profile.components, "learner": one})
    give = "give the placement of advantage, learner, sync 1, or learner a placement of its own"
    refused(hybrid(), "gives learner 2 cores", "the 1 it was measured on", give, profile=profile)
    validate(hybrid(), ppo(), TWO_CORES)
    apart = (hybrid().phases[0], Phase((Placement(REST, cores(0)),), 16))
    validate(hybrid(phases=apart), ppo(), TWO_CORES, profile)


def test_uneven_batches() -> None:
    refused(hybrid(groups=(3,)), "3 groups", "16 items", "2, 4")
    whole = loop_phase(Placement(("physics", "render"), cores(0, 3)), Placement(("policy",), cores(3)))
    refused(hybrid(phases=whole), "8 items", "3 devices", "2, 4", cluster=Cluster((Node("node0", 4),)))
    phase = hybrid().phases[1]
    refused(hybrid(phases=(hybrid().phases[0], replace(phase, micro_batch=5))), "5", "16 items", "4, 8")
    grouped = ppo(flow="micro_batch")
    grouped = replace(grouped, edges=tuple(replace(e, unit=8) if e.flow == "micro_batch" else e for e in grouped.edges))
    split = hybrid(phases=(hybrid().phases[0], replace(phase, micro_batch=4)))
    refused(split, "micro-batches of 4", "units of 8", "8, 16", workflow=grouped)


def test_wrong_order() -> None:
    refused(hybrid(phases=hybrid().phases[::-1]), "later phase")
    apart = (
        Phase((Placement(("physics", "render"), cores(0)),), 16),
        Phase((Placement(("policy",), cores(0)), Placement(REST, cores(1))), 16),
    )
    refused(hybrid(phases=apart), "loop", "one phase")
    tangled = ppo(flow="micro_batch")
    circle = (
        hybrid().phases[0],
        Phase((Placement(("advantage", "sync"), cores(0)), Placement(("learner",), cores(1))), 4),
    )
    validate(hybrid(phases=circle), tangled, TWO_CORES)  # A barrier separates what shares the placement.


def test_modes() -> None:
    refused(hybrid(mode="hybird"), "no mode 'hybird'", "nearest: hybrid")
    refused(hybrid(mode="collocated"), "says it is collocated", "hybrid")
    refused(hybrid(ahead=1), "one step ahead", "hybrid")
    with pytest.raises(PlanError, match="no mode 'colocated'; nearest: collocated"):
        schedulers.plan(ppo(), ppo_profile(), TWO_CORES, mode="colocated")  # type: ignore[arg-type]
    refused(hybrid(workflow="grpo"), "'grpo'", "'ppo'")


def test_no_plan_for_a_mode_names_the_others() -> None:
    one = Cluster((Node("node0", 1),))
    with pytest.raises(PlanError, match="no hybrid plan .* possible: collocated"):
        schedulers.plan(ppo(), ppo_profile(), one, mode="hybrid")
    tiny = Cluster((Node("node0", 2, memory_bytes=1.0),))
    with pytest.raises(PlanError, match="memory"):
        schedulers.plan(ppo(), ppo_profile(resident_bytes=5.0), tiny)


def test_pool_that_the_cluster_lacks() -> None:
    profile = ppo_profile()
    learner = replace(profile.components["learner"], pool="accelerators")
    with pytest.raises(PlanError, match="'learner' occupies accelerators, and the cluster has none"):
        schedulers.plan(ppo(), replace(profile, components={**profile.components, "learner": learner}), TWO_CORES)


def test_profile_of_another_workflow_or_hardware() -> None:
    profile = ppo_profile()
    check_profile(profile, ppo(), {"cpu": "test"})
    with pytest.raises(PlanError, match="of workflow 'ppo', not of 'grpo'"):
        check_profile(profile, replace(ppo(), name="grpo"), {"cpu": "test"})
    with pytest.raises(PlanError, match="cpu: test in the profile, other here"):
        check_profile(profile, ppo(), {"cpu": "other"})
    check_profile(profile, ppo(), {"cpu": "other"}, any_hardware=True)
    fewer = {name: component for name, component in profile.components.items() if name != "policy"}
    with pytest.raises(PlanError, match="no times of component 'policy'"):
        schedulers.plan(ppo(), replace(profile, components=fewer), TWO_CORES)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        ({"nodes": []}, "no nodes"),
        ({"nodes": [{"cores": 4, "count": 0}]}, "at least 1, not 0"),
        ({"nodes": [{"cores": 0}]}, "at least one"),
        ({"nodes": [{"core": 4}]}, "unknown key 'core'; nearest: cores"),
        ({"nodes": [{"name": "a", "cores": 1}, {"name": "a", "cores": 1}]}, "two nodes named 'a'"),
        ({"nodes": [{"cores": "four"}]}, "a whole number, not the text 'four'"),
        ({"nodes": [{"cores": 1}], "link_bytes_per_s": 0}, "link_bytes_per_s is 0.0; it is more than 0"),
        ({"nodes": [{"cores": 1}], "link_s": -1}, "link_s is -1.0; it cannot be less than 0"),
        ({}, "lacks 'nodes'"),
        ({"nodes": [{"cores": 1, "count": 2**31}]}, "2147483648 nodes are more than the 10000"),
        ({"nodes": [{"cores": 2**30, "name": "a"}]}, "has 1073741824 cores; at most 1000000"),
        ({"nodes": [{"cores": 10**30}]}, "it can be at most 2147483647"),
        ({"nodes": [{"cores": 1}], "link_s": 10**400}, "is infinite, or nearly"),
        ({"nodes": [{"cores": 1}], "head_node": "\ud800"}, "half a character"),
        ([], "not a list"),
        ({"format": 9, "nodes": []}, "format 9"),
        ({"kind": "plan", "nodes": []}, "a cluster is expected here, not a plan"),
    ],
)
def test_cluster_files(data: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        from_data(Cluster, data)


@pytest.mark.parametrize(
    ("links", "message"),
    [
        ({"link_bytes_per_s": 0.0}, "link_bytes_per_s is 0.0; it is more than 0"),
        ({"link_bytes_per_s": -1.0}, "more than 0"),
        ({"link_bytes_per_s": float("nan")}, "more than 0"),
        ({"link_s": -1.0}, "link_s is -1.0; it is at least 0, and finite"),
        ({"link_s": float("inf")}, "finite"),
        ({"link_s": float("nan")}, "finite"),
    ],
)
def test_links_that_cannot_be(links: dict[str, Any], message: str) -> None:
    cluster = Cluster((Node("node0", 2), Node("node1", 2)), **links)
    with pytest.raises(PlanError, match=message):
        schedulers.plan(ppo(), ppo_profile(), cluster)
    with pytest.raises(PlanError, match=message):
        validate(hybrid(), ppo(), cluster)


def test_equal_nodes_are_written_once() -> None:
    cluster = from_data(Cluster, {"nodes": [{"cores": 96, "accelerators": 8, "count": 64}]})
    assert [node.name for node in cluster.nodes[:2]] == ["node0", "node1"]
    assert len(cluster.nodes) == 64 and cluster.nodes[63].name == "node63"


@pytest.mark.parametrize("text", ["node0:cores:x", "node0:core:0", "node0:cores:3-1", 7])
def test_device_ranges(text: object) -> None:
    data = to_data(hybrid())
    data["phases"][0]["placements"][0]["devices"] = [text]
    with pytest.raises(PlanError):
        from_data(Plan, data)


def test_workflows_that_contradict_themselves() -> None:
    workflow = ppo()
    for broken, message in (
        (replace(workflow, edges=(*workflow.edges, replace(workflow.edges[0], target="polcy"))), "nearest: policy"),
        (replace(workflow, edges=(*workflow.edges, replace(workflow.edges[-1], target="advantage"))), "cycle"),
        (replace(workflow, episodes_per_env=3), "3 episodes per environment"),
        (replace(workflow, components=workflow.components * 2), "twice"),
        (replace(workflow, edges=tuple(replace(e, unit=3) for e in workflow.edges)), "units of 3"),
    ):
        with pytest.raises(PlanError, match=message):
            schedulers.plan(broken, ppo_profile(), TWO_CORES)


@pytest.mark.parametrize("seed", range(10))
def test_files_give_back_what_was_written(seed: int, tmp_path: Path) -> None:
    workflow, profile, cluster = random_problem(seed, pools=2, memory=True)
    plan = schedulers.plan(workflow, profile, cluster, explain=False)
    for kind, value in ((Workflow, workflow), (Profile, profile), (Cluster, cluster), (Plan, plan)):
        save(value, tmp_path / "file.json")
        assert load(kind, tmp_path / "file.json") == value  # type: ignore[type-var]
        assert json.loads((tmp_path / "file.json").read_text())["format"] == 1


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="no plan file"):
        load(Plan, tmp_path / "none.json")
    for text, message in (
        ("{", "cannot be read as JSON"),
        ("[" * 100_000, "nested too deeply"),
        ('{"groups": 1, "groups": 2}', "'groups' stands there twice"),
        ("9" * 5000, "cannot be read as JSON"),
    ):
        (tmp_path / "broken.json").write_text(text)
        with pytest.raises(PlanError, match=rf"broken\.json.*{message}"):
            load(Plan, tmp_path / "broken.json")
    with pytest.raises(PlanError, match="it is no file"):
        load(Plan, tmp_path)


def test_times_that_no_measurement_gives() -> None:
    for seconds in (-1.0, float("inf"), float("nan")):
        broken = replace(ppo_profile(), components={"physics": measured("cores", {(1, 1): seconds})})
        with pytest.raises(PlanError):
            from_data(Profile, to_data(broken))


def test_times_between_and_beyond_what_was_measured() -> None:
    component: ComponentProfile = measured("cores", {(8, 1): 1.0, (16, 1): 1.4, (16, 4): 0.5})
    assert component.seconds(12, 1) == pytest.approx(1.2)
    assert component.seconds(32, 1) == pytest.approx(2.2)
    assert component.seconds(1, 1) == pytest.approx(0.65)
    assert component.seconds(16, 2) == pytest.approx(component.seconds(8, 1))
    assert component.seconds(32, 4) == pytest.approx(1.0)
    assert component.seconds(32, 8) == pytest.approx(0.5)
    assert measured("cores", {(8, 1): 0.1, (16, 1): 2.0}).seconds(1, 1) == 0.0
