"""GPUs as devices that a plan hands out: what is measured on one, who gets which, and that nothing else changes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import schedulers
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity, accelerators, device_of, fingerprint
from embodied.errors import UserError
from embodied.execution.assignment import assign
from embodied.execution.session import open_session
from embodied.learning.learner import Learner
from embodied.planning import profiler as profiling
from embodied.planning.clusters import local_cluster, read_cluster
from embodied.planning.probes import probes_of
from embodied.planning.profiler import work_of
from embodied.planning.run_plans import checked_profile, sized_workflow
from embodied.rollout.policy_worker import PolicyWorker
from embodied.run import checkpoint
from embodied.run.folder import prepare_run
from embodied.training import loop as training
from embodied.workflows.context import WorkerContext
from embodied.workflows.run_spec import RunSpec
from policies.contract import PolicySpec
from schedulers import Cluster, ComponentProfile, DeviceRange, Node, Phase, Placement, Plan, PlanError, Point, Profile
from sim_farm.client.farm import Farm
from sim_farm.contract import TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from tests.embodied.support.pretend_device import GPU_BYTES, PretendDevice

CORES = tuple(sorted(os.sched_getaffinity(0))[:2])


def config_of(device: str = "auto", **sections: Any) -> Config:
    settings: dict[str, Any] = {
        "seed": 3,
        "iterations": 2,
        "env": {"task": "tabletop/reach", "num_envs": 4, "max_episode_steps": 9},
        "policy": {"chunk": 2, "device": device, "options": {"widths": [16]}},
        "rollout": {"decisions": 6},
        "optim": {"epochs": 1, "minibatch": 12},
        "runtime": {"mode": "inline"},
    }
    return parse_config({**settings, **sections}, "test")


@pytest.fixture
def two_gpus(gpu: PretendDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


# --- which there are


def test_a_device_setting_says_which_gpus_there_are_to_choose_from(two_gpus: None) -> None:
    first, second = torch.device("cuda", 0), torch.device("cuda", 1)
    assert accelerators("auto") == accelerators("cuda") == (first, second)
    assert (accelerators("cuda:1"), accelerators("cpu")) == ((second,), ())
    with pytest.raises(UserError, match="cuda:2, and there is cuda:0"):
        accelerators("cuda:2")
    node = local_cluster(3, "auto").nodes[0]
    assert (node.cores, node.accelerators, node.accelerator_bytes) == (3, 2, GPU_BYTES)
    assert read_cluster("local", "cuda:1").nodes[0].accelerators == 1
    assert read_cluster("local", "cpu").nodes[0].accelerators == 0


# --- who gets which


def planned(policy: str, learner: str, mode: schedulers.Mode = "disaggregated") -> Plan:
    """Physics on the cores, policy and learner there, all at once."""
    places = {"physics": "here:cores:0-1", "policy": policy, "learner": learner}
    data = [{"components": [name], "devices": [where]} for name, where in places.items()]
    phases = [{"micro_batch": 4, "placements": data}]
    if policy == learner:
        phases = [{"micro_batch": 4, "placements": data[:2]}, {"micro_batch": 4, "placements": data[2:]}]
    return schedulers.from_data(Plan, {"workflow": "ppo", "mode": mode, "phases": phases, "groups": 2})


def computing(policy: str, learner: str, config: Config, mode: schedulers.Mode = "disaggregated") -> list[Affinity]:
    """Where policy and learner compute."""
    found = assign(planned(policy, learner, mode), RunSpec.of(config), CORES)
    assert set(found.farms[0].physics) == set(CORES)
    assert found.hosts == ((0,) if policy == learner else (None,))
    return [found.first_of("policy"), found.first_of("learner")]


def test_policy_and_learner_get_the_gpus_that_the_plan_says(two_gpus: None) -> None:
    first, second = "here:accelerators:0", "here:accelerators:1"
    assert computing(first, second, config_of()) == [Affinity(device="cuda:0"), Affinity((), len(CORES), "cuda:1")]
    turns = computing(second, second, config_of(), "collocated")
    assert [affinity.device for affinity in turns] == ["cuda:1", "cuda:1"]
    named = computing(first, first, config_of("cuda:1"))
    assert [affinity.device for affinity in named] == ["cuda:1", "cuda:1"], "the only one that the setting leaves"


def test_accelerators_that_a_worker_cannot_compute_on_are_refused(two_gpus: None) -> None:
    with pytest.raises(UserError, match="puts policy on accelerator 1; policy.device leaves cuda:0"):
        assign(planned("here:accelerators:1", "here:cores:0"), RunSpec.of(config_of("cuda:0")), CORES)


def test_each_of_several_accelerators_has_a_replica_or_a_rank(two_gpus: None) -> None:
    found = assign(
        planned("here:accelerators:0-1", "here:accelerators:0-1", "collocated"),
        RunSpec.of(config_of(runtime={})),
        CORES,
    )
    assert [a.device for a in found.components["policy"]] == ["cuda:0", "cuda:1"]
    assert [a.device for a in found.components["learner"]] == ["cuda:0", "cuda:1"] and found.hosts == (0, 1)


def test_processes_on_the_cpu_stand_in_for_accelerators_where_that_is_requested(two_gpus: None) -> None:
    config = config_of("cpu", runtime={})
    found = assign(planned("here:accelerators:0-1", "here:cores:0", "hybrid"), RunSpec.of(config), CORES)
    assert found.components["policy"] == (Affinity(device="cpu"),) * 2


def test_a_policy_on_cores_computes_there(two_gpus: None) -> None:
    """Although `auto` would choose a GPU."""
    found = computing("here:cores:0", "here:accelerators:0", config_of(), "hybrid")
    assert [affinity.device for affinity in found] == ["cpu", "cuda:0"]


def test_physics_on_an_accelerator_is_refused(two_gpus: None) -> None:
    place = Placement(("physics", "policy", "learner"), (DeviceRange("here", "accelerators", 0, 1),))
    with pytest.raises(UserError, match="puts physics on accelerators: its processes occupy cores"):
        assign(Plan("ppo", "collocated", (Phase((place,), 4),)), RunSpec.of(config_of()), CORES)


def test_a_worker_computes_where_its_affinity_says(gpu: PretendDevice, tmp_path: Path) -> None:
    """Whatever the configuration says: a plan was made from it."""
    spec = PolicySpec(action_dim=3, chunk=2, state_dim=16)
    context = WorkerContext(RunSpec.of(config_of("cpu")), spec, tmp_path, Affinity(device="cuda:0"), rounds=6)
    learner = Learner.make(context)
    assert device_of(learner.policy).type == "cuda" and learner.peak_bytes() == 0
    task = TaskSpec("tabletop/reach", max_episode_steps=9)
    farm = Farm.create(FarmSpec(task, EndlessEpisodes(3), 4, 2, 2, 1, final_frames="never"), InProcess())
    try:
        worker = PolicyWorker.make(replace(context, farm=farm))
        assert device_of(worker.policy).type == "cuda"
    finally:
        farm.close()


# --- planning with them


def component(pool: schedulers.Pool, seconds: float, **more: Any) -> ComponentProfile:
    return ComponentProfile(pool, (Point(4, 1, seconds, seconds, seconds),), **more)


def profile_of(resident_bytes: float) -> Profile:
    """Policy and learner as measured on one GPU, each holding so many bytes of it."""
    gpu = {"data_parallel": False, "resident_bytes": resident_bytes, "unload_s": 0.1, "load_s": 0.1}
    physics, policy = component("cores", 0.02), component("accelerators", 0.01, **gpu)
    return Profile("ppo", {}, {"physics": physics, "policy": policy, "learner": component("accelerators", 0.3, **gpu)})


def test_more_gpus_than_processes_are_not_taken_to_help() -> None:
    workflow = schedulers.Workflow(
        "ppo",
        tuple(schedulers.Component(name) for name in ("physics", "policy", "learner")),
        (schedulers.Edge("physics", "policy", "observations"), schedulers.Edge("policy", "learner", "trajectories")),
        (schedulers.Loop(("physics", "policy"), 6),),
        4,
    )
    profile = profile_of(6e9)
    assert profile.components["policy"].seconds(4, 8) == profile.components["policy"].seconds(4, 1)
    spread = replace(profile.components["policy"], data_parallel=True)
    assert spread.seconds(4, 4) == pytest.approx(spread.seconds(4, 1) / 4)
    one, two, eight = (Cluster((Node("here", 2, gpus, accelerator_bytes=16e9),)) for gpus in (1, 2, 8))
    plans = [schedulers.plan(workflow, profile, cluster) for cluster in (one, eight)]
    plans.append(schedulers.plan(workflow, profile, two, "disaggregated"))
    assert plans[0].prediction == plans[1].prediction and not plans[0].unload
    for plan in plans:
        taken = [p.count for phase in plan.phases for p in phase.placements if p.pool == "accelerators"]
        assert taken == [1] * len(taken)
    places = {p.components: p.devices for p in plans[2].phases[0].placements}
    assert places["policy",] != places["learner",]
    # On one GPU both fit, or take turns in its memory.
    tight = schedulers.plan(workflow, profile_of(10e9), one)
    assert tight.unload and tight.prediction is not None and tight.prediction.switch_s == pytest.approx(0.4)


def test_cores_are_varied_for_the_farm_alone_and_ahead_takes_another_gpu() -> None:
    gpus = [torch.device("cuda", i) for i in range(2)]
    ahead = config_of(plan={"ahead": True})
    one, two, none = (probes_of(RunSpec.of(ahead), (4, 5), found) for found in (gpus[:1], gpus, []))
    assert "beside" in none and "ahead" in none and "ahead" not in one
    assert all(a.first_of("policy").device == "cuda:0" and not a.first_of("policy").cores for _, a in two.values())
    assert two["ahead"][1].first_of("learner").device == "cuda:1" and not two["ahead"][1].guests
    assert {name: a.farms[0].physics for name, (_, a) in one.items()} == {
        "all cores": (4, 5), "all cores, half": (4, 5), "one core": (4,), "one core, half": (4,), "shared": (4, 5),
    }  # fmt: skip
    assert all(a.first_of("policy").device is None for _, a in none.values())


# --- from a configuration to a run


@pytest.mark.slow
def test_a_run_that_plans_for_a_gpu_computes_what_one_on_the_cpu_does(
    gpu: PretendDevice, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profiling, "MOST", profiling.LEAST)
    config = config_of(plan={"mode": "auto"})
    found = run(config, tmp_path / "gpu")
    profile = schedulers.load(Profile, tmp_path / "gpu" / "profile.json")
    assert profile.fingerprint["hardware.accelerator"] == "Pretence" and not profile.together
    pools = {name: (component.pool, component.data_parallel) for name, component in profile.components.items()}
    assert pools == {
        "physics": ("cores", True), "policy": ("accelerators", True), "learner": ("accelerators", True),
    }  # fmt: skip
    for name in ("policy", "learner"):
        measured = profile.components[name]
        assert {(point.batch, point.devices) for point in measured.points} == {(4, 1), (2, 1)}
        assert measured.resident_bytes == measured.process_bytes > 0 and measured.contention >= 1
    # Two minibatches, each in one pass; all is trained, so ranks would hold shards.
    gathered, scattered = profile.components["learner"].exchanges
    assert (gathered.collective, gathered.times, gathered.fewest) == ("all_gather", 4, 4)
    assert (scattered.collective, scattered.times, scattered.fewest) == ("reduce_scatter", 2, None)
    assert not profile.components["learner"].shares_weights
    assert gathered.bytes == scattered.bytes > 0 and profile.components["learner"].published_bytes >= scattered.bytes
    plan = schedulers.load(Plan, tmp_path / "gpu" / "plan.json")
    places = {name: p.devices for phase in plan.phases for p in phase.placements for name in p.components}
    assert places["policy"] == places["learner"] == (DeviceRange("here", "accelerators", 0, 1),)
    assert places["physics"][0].pool == "cores"
    assert gpu.waits
    assert found == run(config_of("cpu", farm={"groups": plan.groups[0]}), tmp_path / "cpu")


def run(config: Config, folder: Path) -> dict[str, bytes]:
    """The tensors of its last checkpoint."""
    found = prepare_run(config, folder, resume=False)
    with open_session(config) as session:
        training.train(RunSpec.of(config), folder, replace(session, cores=CORES), found)
    last = checkpoint.latest(folder / "checkpoints")
    assert last is not None
    return {str(path.relative_to(last)): path.read_bytes() for path in sorted(last.rglob("*.safetensors"))}


def test_a_gpus_profile_is_refused_where_there_is_none(tmp_path: Path) -> None:
    config, path = config_of("auto"), tmp_path / "profile.json"
    measured = {**fingerprint(), **work_of(config), "hardware.accelerator": "Pretence"}
    schedulers.save(replace(profile_of(1e6), fingerprint=measured), path)
    with pytest.raises(UserError, match="hardware.accelerator: Pretence in the profile"):
        checked_profile(path, RunSpec.of(config), sized_workflow(RunSpec.of(config)))
    found = checked_profile(path, RunSpec.of(config), sized_workflow(RunSpec.of(config)), any_hardware=True)
    with pytest.raises(PlanError, match="occupies accelerators, and the cluster has none"):
        schedulers.plan(sized_workflow(RunSpec.of(config)), found, local_cluster(2))
