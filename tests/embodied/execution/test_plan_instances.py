"""Plans that name instances: each replica and rank is assigned to where its plan says, on one node or on many."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import schedulers
from embodied.commands.plan import plan_command
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.execution.assignment import Assignment, assign
from embodied.planning.clusters import leaving_home, planned_for, with_stand_ins
from embodied.planning.profiler import work_of
from embodied.workflows.run_spec import RunSpec
from embodied.workflows.sizes import workflow_of
from schedulers import (
    Cluster,
    ComponentProfile,
    DeviceRange,
    Exchange,
    Node,
    Phase,
    Placement,
    Plan,
    PlanError,
    Point,
    Pool,
    Profile,
    Workflow,
)
from tests.embodied.support.pretend_device import PretendDevice

Places = dict[tuple[str, ...], tuple[DeviceRange, ...]]
"""Of a phase, the devices of each placement by its components."""
CORES = tuple(sorted(os.sched_getaffinity(0))[:2])
NODES = {"here": "", "far1": "a1", "far2": "b2", "far3": "c3"}
"""Names and ids."""
FOUR = Cluster(tuple(Node(name, 16, 8) for name in NODES), 1e10, 1e-5, "here", device_link_bytes_per_s=1e11)


def config_of(device: str = "cpu", **sections: Any) -> Config:
    settings: dict[str, Any] = {
        "env": {"task": "tabletop/reach", "num_envs": 64, "max_episode_steps": 8},
        "policy": {"device": device, "options": {"widths": [8]}},
        "rollout": {"decisions": 4},
        "optim": {"minibatch": 64},
    }
    return parse_config({**settings, **sections}, "test")


CONFIG = config_of()
WORKFLOW = leaving_home(workflow_of(RunSpec.of(CONFIG), [8]))


def gpus(node: str, first: int, count: int = 1) -> DeviceRange:
    return DeviceRange(node, "accelerators", first, count)


def plan_of(*phases: Places, groups: int = 2) -> Plan:
    found = Plan(
        "ppo",
        "collocated",
        tuple(Phase(tuple(Placement(names, where) for names, where in phase.items()), 64) for phase in phases),
        (groups,),
    )
    return replace(found, mode=found.classified)


def on_all(plan: Plan, config: Config = CONFIG) -> Assignment:
    """Of a plan that is valid on the four nodes."""
    schedulers.validate(plan, WORKFLOW, FOUR)
    return assign(plan, RunSpec.of(config), CORES, NODES)


PHYSICS: Places = {("physics",): (DeviceRange("here", "cores", 0, 2),)}


def test_every_replica_and_rank_is_where_the_plan_says() -> None:
    half, whole = [tuple(gpus(name, 0, count) for name in NODES) for count in (4, 8)]
    found = on_all(plan_of({**PHYSICS, ("policy",): half}, {("learner",): whole}))
    replicas, ranks = found.components["policy"], found.components["learner"]
    assert [affinity.node for affinity in replicas] == [ident for ident in NODES.values() for _ in range(4)]
    assert [affinity.node for affinity in ranks] == [ident for ident in NODES.values() for _ in range(8)]
    # Processes on the CPU, of one thread each, stand in for accelerators.
    assert {(a.device, a.threads, a.cores) for a in (*replicas, *ranks)} == {("cpu", 1, ())}
    # The replicas of each node act in its first four ranks.
    assert found.hosts == tuple(8 * node + i for node in range(4) for i in range(4))
    # Two groups, of which each of 16 replicas decides for a share.
    assert found.farms[0].groups == 32


def test_accelerators_are_numbered_on_their_node(gpu: PretendDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    where = (gpus("here", 6, 2), gpus("far2", 3))
    found = on_all(plan_of({**PHYSICS, ("policy", "learner"): where}), config_of("auto"))
    expected = [("cuda:6", ""), ("cuda:7", ""), ("cuda:3", "b2")]
    for name, threads in (("policy", [1, 1, 1]), ("learner", [1, 1, len(CORES)])):
        assert [(a.device, a.node) for a in found.components[name]] == expected
        assert [a.threads for a in found.components[name]] == threads  # ranks of a node share its threads out
    assert found.hosts == (0, 1, 2)


@pytest.mark.parametrize(
    ("policy", "learner", "hosts"),
    [
        ((gpus("here", 0, 4),), (gpus("here", 0, 4),), (0, 1, 2, 3)),
        ((gpus("here", 0, 2), gpus("far1", 0)), (gpus("here", 0, 2), gpus("far1", 0)), (0, 1, 2)),
        ((gpus("here", 2, 2),), (gpus("here", 0, 4),), (2, 3)),  # some of the ranks act, then all learn
        ((gpus("here", 0, 4),), (gpus("here", 2, 2),), (None, None, 0, 1)),  # ranks act with others while they wait
        ((gpus("here", 0),), (gpus("here", 1),), (None,)),  # although the same process could stand in for both
        ((gpus("here", 0), gpus("here", 1)), (gpus("here", 1), gpus("here", 0)), (1, 0)),
        ((gpus("here", 0),), (gpus("far1", 0),), (None,)),
        ((DeviceRange("here", "cores", 1, 1),), (DeviceRange("here", "cores", 0, 2),), (0,)),
        ((DeviceRange("here", "cores", 0, 2),), (DeviceRange("here", "cores", 1, 1),), (None,)),
        ((DeviceRange("far1", "cores", 1, 1),), (DeviceRange("here", "cores", 0, 2),), (None,)),
    ],
)
def test_a_replica_where_a_rank_is_acts_in_its_process(
    policy: tuple[DeviceRange, ...], learner: tuple[DeviceRange, ...], hosts: tuple[int | None, ...]
) -> None:
    physics: Places = {("physics",): (DeviceRange("far3", "cores", 0, 2),)}
    found = on_all(plan_of({**physics, ("policy",): policy}, {("learner",): learner}))
    assert found.hosts == hosts
    assert found.guests == tuple(i for i, host in enumerate(hosts) if host is not None)


def test_components_that_work_at_the_same_time_have_processes_of_their_own() -> None:
    """On other devices; one step ahead a shared policy would change under who acts with it."""
    everything: Places = {**PHYSICS, ("policy",): (gpus("here", 0, 4),), ("learner",): (gpus("here", 4, 4),)}
    plan = plan_of(everything)
    assert not on_all(plan).guests
    assert on_all(replace(plan, ahead=1)).hosts == ()


def test_on_cores_there_is_one_instance_a_node() -> None:
    cores = (DeviceRange("here", "cores", 0, 2), DeviceRange("far1", "cores", 4, 3), DeviceRange("far1", "cores", 9, 1))
    physics: Places = {("physics",): (DeviceRange("far3", "cores", 0, 2),)}
    found = on_all(plan_of({**physics, ("policy", "learner"): cores}))
    here, far = found.components["learner"]
    assert (here.node, here.cores, here.threads) == ("", CORES, len(CORES))
    assert (far.node, far.cores, far.threads, far.device) == ("a1", (4, 5, 6, 9), 4, "cpu")
    assert found.hosts == (0, 1)


def test_a_group_is_cut_as_far_as_environments_divide() -> None:
    """64 environments on 4 workers in 2 groups: shares of 8, which can be halved thrice."""
    physics: Places = {("physics",): (DeviceRange("here", "cores", 0, 4),)}
    for replicas, groups in ((1, 2), (2, 4), (3, 4), (7, 8), (8, 16)):
        rolling: Places = {**physics, ("policy",): (gpus("far1", 0, replicas),)}
        found = on_all(plan_of(rolling, {("learner",): (gpus("here", 0),)}))
        assert found.farms[0].groups == groups


def test_nodes_that_are_not_there_are_named_at_once() -> None:
    plan = plan_of(
        {("physics",): (DeviceRange("gone", "cores", 0, 2),), ("policy",): (gpus("here", 0), gpus("lost", 1))},
        {("learner",): (gpus("here", 0),)},
    )
    with pytest.raises(UserError, match="the nodes gone, lost of the plan have left the cluster, or never"):
        assign(plan, RunSpec.of(CONFIG), CORES, NODES)
    with pytest.raises(UserError, match="the node far1 of the plan has left the cluster"):
        assign(plan_of({**PHYSICS, ("policy", "learner"): (gpus("far1", 0),)}), RunSpec.of(CONFIG), CORES)


@pytest.mark.parametrize("where", [(gpus("here", 0, 2),), (gpus("far1", 0),)])
def test_what_trajectories_pass_through_is_one_process_here(where: tuple[DeviceRange, ...]) -> None:
    config = config_of(workflow="ppo_reference")
    plan = plan_of({**PHYSICS, ("policy", "learner"): (gpus("here", 3),), ("reference",): where})
    with pytest.raises(UserError, match="the plan (gives reference 2 accel|puts reference on far1)"):
        assign(plan, RunSpec.of(config), CORES, NODES)


# --- whatever is valid is assigned


def random_plan(seed: int) -> Plan:
    """Physics on cores; policy and learner on any devices of any nodes; one phase or two."""
    random = np.random.default_rng(seed)

    def some(pool: Pool, free: set[tuple[str, int]]) -> tuple[DeviceRange, ...]:
        size = 2 ** int(random.integers(0, int(np.log2(len(free)))))
        chosen = [sorted(free)[int(i)] for i in random.permutation(len(free))[:size]]
        free -= set(chosen)
        return tuple(DeviceRange(node, pool, device, 1) for node, device in chosen)

    def all_devices() -> set[tuple[str, int]]:
        return {(node.name, i) for node in FOUR.nodes for i in range(8)}

    pools: list[Pool] = ["cores", "accelerators"]
    first, second = (pools[int(random.random() < 0.7)] for _ in range(2))
    free = {pool: all_devices() for pool in pools}
    rolling: Places = {("physics",): some("cores", free["cores"])}
    together = first == second and random.random() < 0.3
    rolling[("policy", "learner") if together else ("policy",)] = some(first, free[first])
    phases = [rolling]
    if not together:
        if random.random() < 0.6:  # after the rollout, on devices that it has left
            phases.append({})
            free = {pool: all_devices() for pool in pools}
        phases[-1][("learner",)] = some(second, free[second])
    return plan_of(*phases, groups=int(random.choice([1, 2])))


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_valid_is_assigned_instance_by_instance(seed: int) -> None:
    plan = random_plan(seed)
    try:
        schedulers.validate(plan, WORKFLOW, FOUR)
    except PlanError as error:
        assert "do not divide" in str(error)  # of physics alone: the devices were drawn freely
        return
    found = assign(plan, RunSpec.of(CONFIG), CORES, NODES)
    assert schedulers.from_data(Plan, json.loads(json.dumps(schedulers.to_data(plan)))) == plan
    for phase in plan.phases:
        for placement in phase.placements:
            for name in set(placement.components) - {"physics"}:
                affinities = found.components[name]
                assert [a.node for a in affinities] == [NODES[devices[0].node] for devices in placement.instances]
                if placement.pool == "accelerators":
                    assert {(a.device, a.threads) for a in affinities} == {("cpu", 1)}
    each = len(found.farms[0].physics) * found.farms[0].groups
    assert CONFIG.env.num_envs % each == 0


def test_random_plans_are_mostly_valid() -> None:
    """Else the property above would be empty."""
    valid = 0
    for seed in range(60):
        try:
            schedulers.validate(random_plan(seed), WORKFLOW, FOUR)
            valid += 1
        except PlanError:
            continue
    assert valid > 40


# --- what the planner finds for such a cluster


def profile_of() -> Profile:
    def component(pool: Pool, seconds: float, **more: Any) -> ComponentProfile:
        return ComponentProfile(pool, (Point(64, 1, seconds, seconds, seconds),), **more)

    learner = {"exchanges": (Exchange("all_reduce", 1e8, 4),), "published_bytes": 1e8}
    return Profile(
        "ppo",
        {},
        {
            "physics": component("cores", 1.0),
            "policy": component("accelerators", 2.0),
            "learner": component("accelerators", 60.0, **learner),
        },
    )


def test_the_planner_uses_other_nodes_accelerators_and_assign_runs_its_plan() -> None:
    profile, plain = profile_of(), workflow_of(RunSpec.of(CONFIG), [8])
    workflow = planned_for(plain, profile, FOUR)
    assert workflow == WORKFLOW
    best = schedulers.plan(workflow, profile, FOUR)
    schedulers.validate(best, workflow, FOUR, profile)
    found = assign(best, RunSpec.of(CONFIG), CORES, NODES)
    assert len(found.components["learner"]) == 32 and len({a.node for a in found.components["learner"]}) == 4
    # Where nothing computes on accelerators elsewhere, policy and learner stay at home.
    assert planned_for(plain, profile, replace(FOUR, nodes=(FOUR.nodes[0], Node("far1", 16)))) == plain
    on_cores = {name: replace(c, pool="cores") for name, c in profile.components.items()}
    assert planned_for(plain, replace(profile, components=on_cores), FOUR) == plain


def test_ranks_act_while_they_wait_where_that_is_planned_to_be_faster() -> None:
    """The update gains from four GPUs, inference from all eight."""
    profile = profile_of()
    points = tuple(Point(64, n, 60.0 / n, 60.0 / n, 60.0 / n) for n in (1, 2, 4))
    learner = replace(profile.components["learner"], points=points, data_parallel=False, shares_weights=True)
    profile = replace(profile, components={**profile.components, "learner": learner})
    cluster = replace(FOUR, nodes=FOUR.nodes[:1])
    best = schedulers.plan(planned_for(workflow_of(RunSpec.of(CONFIG), [8]), profile, cluster), profile, cluster)
    found = assign(best, RunSpec.of(CONFIG), CORES, NODES)
    assert len(found.components["learner"]) == 4
    assert found.hosts == (0, 1, 2, 3, None, None, None, None)


def test_the_cpu_stands_in_for_a_plans_accelerators_only_where_it_is_the_device(tmp_path: Path) -> None:
    machines = Cluster((Node("here", 2), Node("far1", 2)), head_node="here")
    plan = plan_of({**PHYSICS, ("policy",): (gpus("here", 0, 4),)}, {("learner",): (gpus("far1", 2, 2),)})
    stood_in = with_stand_ins(machines, plan, "cpu")
    assert [node.accelerators for node in stood_in.nodes] == [4, 4]
    schedulers.validate(plan, WORKFLOW, stood_in)
    assert with_stand_ins(machines, plan, "auto") == machines
    with pytest.raises(PlanError, match="has no accelerators"):
        schedulers.validate(plan, WORKFLOW, machines)
    rooted: Workflow = workflow_of(RunSpec.of(CONFIG), [8])
    with pytest.raises(PlanError, match="only physics may leave node 'here'"):
        schedulers.validate(plan, rooted, stood_in)


def test_plans_for_several_accelerators_say_how_efficient_they_are(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    schedulers.save(replace(profile_of(), fingerprint=work_of(CONFIG)), tmp_path / "profile.json")
    nodes = "nodes:\n  - {count: 8, cores: 96, accelerators: 8}\n"
    (tmp_path / "cluster.yaml").write_text(nodes + "link_bytes_per_s: 5.0e10\ndevice_link_bytes_per_s: 4.5e11\n")
    result = plan_command(CONFIG, tmp_path / "profile.json", str(tmp_path / "cluster.yaml"), tmp_path / "plan")
    assert result["accelerators"] == 64 and 0.5 < result["efficiency"] <= 1
    assert result["bottleneck"] == "learner (accelerators)"
    output = capsys.readouterr().out
    assert f"an efficiency of {result['efficiency']:.0%}. The bottleneck is learner (accelerators)" in output
    assert "Communication takes" in output
