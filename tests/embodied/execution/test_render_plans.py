"""Render workers on accelerators: which devices a plan gives them, and that it changes nothing of what is computed.

There is no GPU here: workers on accelerators are processes that draw in software, as on any machine without one.
"""

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
from embodied.errors import UserError
from embodied.execution.assignment import Assignment, assign, configured, farm_specs
from embodied.execution.iteration import start_run
from embodied.execution.session import Session, open_session
from embodied.learning.learner import TrainedBytes
from embodied.learning.offload import Switch
from embodied.planning import profiler as profiling
from embodied.planning.probes import GpuDrawing, drawing_devices, probes_of
from embodied.planning.profiler import Measured, Probed
from embodied.runtime.ray.runtime import RayRuntime
from embodied.workflows.run_spec import RunSpec
from embodied.workflows.sizes import workflow_of
from schedulers import Plan
from tests.embodied.support.pretend_device import PretendDevice
from tests.embodied.support.runs import IMAGES, assert_equal, assert_was_a_test, inline, run
from tests.variants import often

CORES = tuple(sorted(os.sched_getaffinity(0))[:2])
GPU = torch.device("cuda", 0)


def config_of(device: str = "cpu", **sections: Any) -> Config:
    policy = {**IMAGES["policy"], "device": device}
    return parse_config({**IMAGES, "policy": policy, **sections}, "test")


def planned(render: str, fused: bool = False) -> Plan:
    """Physics on the first core, policy and learner on the second one, and frames drawn there or with physics."""
    places = (
        [(["physics", "render"], "here:cores:0")] if fused else [(["physics"], "here:cores:0"), (["render"], render)]
    )
    places += [(["policy"], "here:cores:1"), (["learner"], "here:cores:1")]
    placements = [{"components": names, "devices": [where]} for names, where in places]
    phases = [{"micro_batch": 4, "placements": placements[:-1]}, {"micro_batch": 4, "placements": placements[-1:]}]
    data = {"workflow": "ppo", "mode": "hybrid", "phases": phases, "groups": 1}
    return schedulers.from_data(Plan, data)


# --- which devices


@pytest.fixture
def two_gpus(gpu: PretendDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)


def test_without_a_plan_replicas_and_ranks_are_dealt_out_over_the_gpus(two_gpus: None) -> None:
    config = config_of("auto", optim={"ranks": 2})
    config = config.model_copy(update={"policy": config.policy.model_copy(update={"replicas": 3})})
    config = config.model_copy(update={"runtime": config.runtime.model_copy(update={"mode": "ray"})})
    found = configured(RunSpec.of(config), CORES).components
    assert [place.device for place in found["policy"]] == ["cuda:0", "cuda:1", "cuda:0"]
    assert [place.device for place in found["learner"]] == ["cuda:0", "cuda:1"]


def test_a_render_worker_is_on_each_accelerator_that_the_plan_gives(two_gpus: None) -> None:
    both = assign(planned("here:accelerators:0-1"), RunSpec.of(config_of("auto")), CORES).farms[0]
    assert (both.render, both.devices) == ((None, None), (0, 1))
    second = assign(planned("here:accelerators:1"), RunSpec.of(config_of("auto")), CORES).farms[0]
    assert (second.render, second.devices) == ((None,), (1,))
    named = assign(planned("here:accelerators:0"), RunSpec.of(config_of("cuda:1")), CORES).farms[0]
    assert named.devices == (1,), "accelerators are those that policy.device leaves"
    (spec,) = farm_specs(
        RunSpec.of(config_of("auto")), assign(planned("here:accelerators:0-1"), RunSpec.of(config_of("auto")), CORES)
    )
    assert (spec.render_workers, spec.devices) == (2, (0, 1))


def test_on_cores_frames_are_drawn_in_software_although_there_are_gpus(two_gpus: None) -> None:
    split = assign(planned("here:cores:1"), RunSpec.of(config_of("auto")), CORES).farms[0]
    assert (split.render, split.devices) == ((CORES[1 % len(CORES)],), ("cpu",))
    fused = assign(planned("", fused=True), RunSpec.of(config_of("auto")), CORES).farms[0]
    assert (fused.render, fused.devices) == ((), ("cpu",))


def test_an_accelerator_that_is_not_there_is_refused_where_there_are_others(two_gpus: None) -> None:
    with pytest.raises(UserError, match=r"puts render on accelerator 2; policy.device leaves cuda:0, cuda:1"):
        assign(planned("here:accelerators:1-2"), RunSpec.of(config_of("auto")), CORES)


def test_without_gpus_workers_on_accelerators_draw_as_the_configuration_says() -> None:
    found = assign(planned("here:accelerators:0-1"), RunSpec.of(config_of("cpu")), CORES).farms[0]
    assert (found.render, found.devices) == ((None, None), ())
    named = assign(
        planned("here:accelerators:0-1"), RunSpec.of(config_of("cpu", farm={"devices": "cpu"})), CORES
    ).farms[0]
    assert named.devices == ("cpu",)


def test_without_a_plan_farm_devices_says_it() -> None:
    devices = [
        configured(RunSpec.of(config_of(farm=farm)), CORES).farms[0].devices for farm in ({}, {"devices": "cpu"})
    ]
    assert devices == [(), ("cpu",)]
    several = config_of(farm={"devices": [1, 0], "render_workers": 2})
    assert configured(RunSpec.of(several), CORES).farms[0].devices == (1, 0)
    with pytest.raises(UserError, match=r"farm.devices"):
        config_of(farm={"devices": "cuda"})


# --- that it changes nothing


@pytest.fixture(scope="module")
def ray(ray_runtime: RayRuntime) -> Session:
    ray_runtime.prepare(2)
    return Session(Config(), ray_runtime, CORES)


@pytest.mark.slow
@pytest.mark.parametrize("devices", often(("here:accelerators:0-1",), ("here:accelerators:0", "here:accelerators:0-1")))
def test_frames_of_workers_on_accelerators_are_those_of_one_process(devices: str, ray: Session, tmp_path: Path) -> None:
    assignment = assign(planned(devices), RunSpec.of(config_of("cpu")), CORES)
    found = run(IMAGES, ray, assignment, tmp_path / "ray")
    assert_was_a_test(found)
    with open_session(parse_config({"runtime": {"mode": "inline"}}, "test")) as here:
        fused = replace(inline(assignment), farms=tuple(replace(f, render=()) for f in assignment.farms))
        assert_equal(found, run(IMAGES, here, inline(fused), tmp_path / "here"))


@pytest.mark.slow
def test_a_device_that_is_requested_draws_the_same_and_has_processes_of_its_own(ray: Session, tmp_path: Path) -> None:
    plain = assign(planned("here:accelerators:0"), RunSpec.of(config_of("cpu")), CORES)
    on_cpu = assign(planned("here:accelerators:0"), RunSpec.of(config_of("cpu", farm={"devices": "cpu"})), CORES)
    assert_equal(run(IMAGES, ray, plain, tmp_path / "plain"), run(IMAGES, ray, on_cpu, tmp_path / "asked"))
    runtime = ray.runtime
    assert isinstance(runtime, RayRuntime)
    assert {process.device for process in runtime.host._idle if process.drew} >= {None, "cpu"}


# --- what is measured


def test_what_can_draw_is_found_by_drawing() -> None:
    assert drawing_devices(config_of(), ()) == ()
    assert drawing_devices(config_of(), (GPU,)) == ("cpu",), "there is no GPU here that draws"
    states = parse_config({"env": {"task": "tabletop/reach"}}, "test")
    assert drawing_devices(states, (GPU,)) == ()


def drawing(assignment: Assignment) -> tuple[Any, Any]:
    return assignment.farms[0].render, assignment.farms[0].devices


def test_frames_are_probed_in_software_and_on_a_gpu() -> None:
    both, gpu_only, none = (
        probes_of(RunSpec.of(config_of()), CORES, (GPU,), found) for found in (("cpu", 0), (0,), ())
    )
    assert drawing(both["all cores"][1]) == drawing(both["one core, half"][1]) == ((), ("cpu",))
    assert drawing(both["drawn"][1]) == drawing(both["drawn, half"][1]) == ((None,), (0,))
    assert both["drawn"][1].farms[0].physics == CORES and both["drawn"][1].farms[0].groups == 1
    assert both["drawn, half"][0].environments == both["drawn"][0].environments // 2
    assert drawing(gpu_only["all cores"][1]) == ((), (0,)) and "drawn" in gpu_only
    assert drawing(none["all cores"][1]) == ((), ()) and "drawn" not in none


@pytest.mark.slow
def test_a_profile_has_drawing_on_both_pools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The probes themselves, with a render worker that draws in software where that on the GPU would be."""
    monkeypatch.setattr(profiling, "MOST", profiling.LEAST)
    config = config_of("cpu", workflow="ppo", runtime={"mode": "inline"})
    probed = probe(config, tmp_path)
    found = profiling._drawing(probed)
    gpu = found.other_pool
    assert found.pool == "cores" and gpu is not None and gpu.pool == "accelerators" and gpu.data_parallel
    assert (
        {(p.batch, p.devices) for p in gpu.points} == {(4, 1), (2, 1)} == {(p.batch, p.devices) for p in found.points}
    )
    assert all(point.seconds > 0 for point in gpu.points)
    assert (gpu.resident_bytes, gpu.unload_s, gpu.load_s) == (7e6, 0.25, 0.5)
    alone = profiling._drawing(replace(probed, draws_on=(0,)))
    assert alone.pool == "accelerators" and alone.other_pool is None, "software could not be had"


def probe(config: Config, folder: Path) -> Probed:
    taken: dict[str, Measured] = {}
    infos: tuple[Any, ...] = ()
    with open_session(config) as session:
        for name, (changed, assignment) in probes_of(RunSpec.of(config), CORES[:1], (GPU,), ("cpu", 0)).items():
            if name not in ("all cores", "all cores, half", "drawn", "drawn, half"):
                continue
            farms = tuple(replace(farm, devices=()) for farm in assignment.farms)
            components = {
                key: tuple(replace(a, device="cpu") for a in own) for key, own in assignment.components.items()
            }
            here = replace(assignment, farms=farms, components=components)
            with start_run(changed, folder, session, here) as workers:
                infos = workers.farm.infos
                taken[name] = profiling.measure(workers)
    switch = Switch(0, 0.1), Switch(0, 0.1)
    workflow = workflow_of(RunSpec.of(config), [infos[0].max_episode_steps])
    drawn = GpuDrawing(7_000_000, (Switch(0, 0.25), Switch(0, 0.5)))
    return Probed(workflow, infos, taken, 1, False, {"render": switch}, 0, TrainedBytes(0, 0, 0), ("cpu", 0), drawn)
