"""Renderers that leave the memory between two rounds and come back: nothing that is drawn differs."""

from __future__ import annotations

import signal
from contextlib import closing
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from sim_farm.client.farm import Farm, GroupError, RendererSwitch, WorkerTimeout
from sim_farm.contract import TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from tests.sim_farm.driving import Trace, actions_for, append, assert_same, drive, run
from tests.sim_farm.test_workers import Fate, MortalWorkers, processes, until
from tests.variants import often

CHUNKS = 4
REACH = TaskSpec("tabletop/reach", cameras=1, image_size=16, max_episode_steps=7)
SPEC = FarmSpec(REACH, EndlessEpisodes(2), num_envs=4, chunk=3, final_frames="ended")
SHAPES: dict[str, dict[str, Any]] = {
    "fused": {},
    "fused, 2 workers, 2 groups": {"physics_workers": 2, "groups": 2},
    "split": {"physics_workers": 2, "render_workers": 1, "groups": 2},
    "2 render workers": {"render_workers": 2},
}


def drive_with_switches(farm: Farm, end: int = CHUNKS) -> Trace:
    """Like `drive`, but renderers leave and come back whenever all groups are collected."""
    trace = drive(farm, end=0)
    for number in range(end):
        switch(farm)
        append_all(trace, drive(farm, number, number + 1, reset=False))
    return trace


def switch(farm: Farm) -> None:
    farm.unload_renderers(deadline_s=60)
    farm.load_renderers(deadline_s=60)


def append_all(trace: Trace, more: Trace) -> None:
    for env, rows in more.items():
        trace[env] += rows


@pytest.mark.slow
@pytest.mark.parametrize("shape", often(("split",), SHAPES))
def test_frames_after_the_return_are_those_without_leaving(shape: str) -> None:
    spec = replace(SPEC, **SHAPES[shape])
    with closing(Farm.create(spec, InProcess())) as farm:
        trace = drive_with_switches(farm)
    assert_same(run(spec, chunks=CHUNKS), trace, "leaving changes results")


@pytest.mark.parametrize("shape", [SHAPES["fused"], SHAPES["2 render workers"]], ids=["fused", "split"])
def test_renderers_that_are_away_hold_nothing_and_both_ways_may_be_requested_twice(shape: dict[str, Any]) -> None:
    with closing(Farm.create(replace(SPEC, **shape), InProcess())) as farm:
        writers = lambda: [vars(handle)["worker"]._frame_writer for handle in farm.tasks[0].handles]  # noqa: E731
        before = sum(writer is not None for writer in writers())
        assert before == max(1, farm.specs[0].render_workers)
        drive(farm, end=1)
        for _ in range(2):
            assert farm.unload_renderers().bytes == 0, "this process is the caller's own"
            assert not any(writers())
        for _ in range(2):
            farm.load_renderers()
            assert sum(writer is not None for writer in writers()) == before


def test_calls_out_of_turn_are_refused() -> None:
    with closing(Farm.create(replace(SPEC, groups=2), InProcess())) as farm:
        with pytest.raises(GroupError, match="collect every group before the renderers leave"):
            farm.unload_renderers()
        trace = drive(farm, end=1)
        farm.submit(1, actions_for(farm, 1, 1))
        with pytest.raises(GroupError, match="collect every group"):
            farm.unload_renderers()
        append(trace, farm.collect(1))
        farm.unload_renderers()
        farm.snapshot()
        for call in (lambda: farm.submit(0, actions_for(farm, 0, 1)), lambda: farm.reset(0)):
            with pytest.raises(GroupError, match="renderers are away; load_renderers"):
                call()
        farm.load_renderers()
        farm.submit(0, actions_for(farm, 0, 1))
        append(trace, farm.collect(0))
    assert_same(run(replace(SPEC, groups=2), chunks=2), trace, "refused calls change results")


def test_where_there_are_no_cameras_nothing_happens() -> None:
    with closing(Farm.create(replace(SPEC, task=replace(REACH, cameras=0), render_workers=1), InProcess())) as farm:
        drive(farm, end=1)
        assert farm.unload_renderers() == farm.load_renderers() == RendererSwitch(0, 0.0)
        drive(farm, 1, 2, reset=False)


# --- workers that die


@pytest.mark.slow
@pytest.mark.parametrize("shape", [{}, {"render_workers": 1}], ids=["fused", "split"])
def test_a_worker_that_dies_while_its_renderer_leaves_or_comes_back_changes_nothing(shape: dict[str, Any]) -> None:
    """Before each of its writes during a switch."""
    spec = replace(SPEC, num_envs=2, **shape)
    expected = run(spec, chunks=2)
    counted = Fate()
    with closing(Farm.create(spec, MortalWorkers(counted))) as farm:
        drive(farm, end=1)
        counted.armed = True
        switch(farm)
        counted.armed = False
    writes = {name: count for name, count in counted.writes.items() if count}
    assert writes.keys() == {"phase", "since_ns", "left"}, "memory is told by processes of their own alone"
    for name, count in writes.items():
        for number in range(1, count + 1):
            fate = Fate(name, number)
            with closing(Farm.create(spec, MortalWorkers(fate))) as farm:
                trace = drive(farm, end=1)
                fate.armed = True
                switch(farm)
                fate.armed = False
                append_all(trace, drive(farm, 1, 2, reset=False))
            assert_same(expected, trace, f"death before write {number} to {name} changes results")


@pytest.mark.slow
def test_processes_free_their_memory_and_may_be_killed_while_renderers_are_away() -> None:
    """Asked by a client that has attached, as the policy worker is one."""
    spec = replace(SPEC, physics_workers=1, render_workers=1)
    render = 1
    with processes(spec) as (creator, host):
        farm = Farm.attach(creator.address)
        trace = drive(farm, end=1)
        left = farm.unload_renderers(deadline_s=60)
        assert left.bytes > 5e6 and left.seconds > 0, "an OpenGL context takes tens of megabytes"
        creator.tasks[0].slots["built"][render] = 0
        host.replace_worker(render)  # while away
        until(lambda: creator.tasks[0].slots["built"][render])
        assert creator.tasks[0].slots["left"][render], "the new worker has opened a renderer that was to be away"
        back = farm.load_renderers(deadline_s=60)
        assert back.bytes > 5e6 and back.seconds > 0
        append_all(trace, drive(farm, 1, 2, reset=False))
        farm.unload_renderers(deadline_s=60)
        host.signal(render, signal.SIGSTOP)
        with pytest.raises(WorkerTimeout, match=r"render 0 .* 1 s: .* waiting for work .* with its renderer to start"):
            farm.load_renderers(deadline_s=1)
        host.replace_worker(render)  # asked to come back, and dead
        farm.load_renderers(deadline_s=60)
        append_all(trace, drive(farm, 2, 3, reset=False))
        farm.detach()
    assert_same(run(spec, chunks=3), trace, "leaving changes results")


# --- other simulators


def drives_alike(task: TaskSpec, actions: int) -> None:
    """One environment that draws its own frames, with and without a switch between its two chunks."""
    spec = FarmSpec(replace(task, cameras=1, image_size=32), EndlessEpisodes(2), num_envs=1, chunk=3)
    shown = []
    for switches in (False, True):
        with closing(Farm.create(spec, InProcess())) as farm:
            draws = np.random.default_rng(0).uniform(-1, 1, (2, 1, 3, actions)).astype(np.float32)
            farm.reset(0)
            seen = [farm.collect(0)]
            for chunk in draws:
                if switches:
                    switch(farm)
                farm.submit(0, chunk)
                seen.append(farm.collect(0))
            shown.append([(one.state.tobytes(), *(f.tobytes() for f in one.frames.values())) for one in seen])
    assert shown[0] == shown[1] and len(set(shown[0])) == 3


@pytest.mark.slow
def test_frames_of_libero_do_not_change() -> None:
    drives_alike(TaskSpec("libero/libero_spatial/0"), 7)


@pytest.mark.slow
def test_frames_of_maniskill_do_not_change() -> None:
    drives_alike(TaskSpec("maniskill/PushCube-v1"), 8)
