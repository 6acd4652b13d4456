"""A worker is hung if it has work and gets nothing done; real processes, stopped and slow."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from sim_farm.client.farm import Farm, WorkerTimeout
from sim_farm.client.health import hung, restarted, stuck_since_ns
from sim_farm.contract import TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.shared_memory import slot_layout
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from tests.sim_farm.driving import actions_for, drive
from tests.sim_farm.test_workers import Fate, MortalWorkers, processes, until

REACH = TaskSpec("tabletop/reach", cameras=1, image_size=16, max_episode_steps=7)
SPEC = FarmSpec(REACH, EndlessEpisodes(2), num_envs=4, chunk=3, physics_workers=2, render_workers=1)
PHYSICS, RENDER = 1, 2
SOON, NEVER = 0.2, 600.0


@pytest.fixture
def farm() -> Iterator[Farm]:
    """In one process, where the slots can be set as a worker's would be."""
    with closing(Farm.create(SPEC, InProcess())) as farm:
        drive(farm, end=1)
        yield farm


def ago(seconds: float) -> int:
    return time.monotonic_ns() - int(seconds * 1e9)


def test_an_idle_worker_is_never_hung(farm: Farm) -> None:
    slots = farm.tasks[0].slots
    slots["since_ns"][:] = ago(3600)
    assert [hung(slots, worker, SOON) for worker in range(3)] == [None] * 3
    assert stuck_since_ns(slots, PHYSICS) is None


@pytest.mark.parametrize("phase", [slot_layout.BUILDING, slot_layout.WORKING, slot_layout.OPENING, slot_layout.CLOSING])
def test_a_worker_that_is_busy_is_hung_once_it_makes_no_progress_for_so_long(farm: Farm, phase: int) -> None:
    slots = farm.tasks[0].slots
    slots["phase"][RENDER] = phase
    slots["since_ns"][RENDER] = ago(50)
    assert hung(slots, RENDER, 60) is None
    message = hung(slots, RENDER, 40)
    assert message is not None and message.startswith(f"render 0 has been {slot_layout.PHASES[phase]} for 50.")
    assert hung(slots, PHYSICS, 40) is None, "another worker's work is not its own"


def test_a_request_that_is_not_taken_up_counts_from_when_it_was_made_or_the_last_progress(farm: Farm) -> None:
    slots = farm.tasks[0].slots
    slots["since_ns"][:] = ago(3600)
    slots["requested"][[1, 3]] += 1
    slots["requested_ns"][[1, 3]] = ago(50), ago(20)
    assert hung(slots, PHYSICS, 60) is None and hung(slots, 0, SOON) is None
    message = hung(slots, PHYSICS, 40)
    assert (
        message is not None and "physics 1 has been waiting for work for 50." in message and "has not begun" in message
    )
    slots["since_ns"][PHYSICS] = ago(10)
    assert hung(slots, PHYSICS, 40) is None, "it has done something since"


def test_a_scene_that_is_not_drawn_counts_from_when_it_was_simulated(farm: Farm) -> None:
    slots = farm.tasks[0].slots
    slots["since_ns"][:] = ago(3600)
    slots["requested"][2] += 1
    slots["requested_ns"][2] = ago(100)
    slots["simulated"][2] += 1
    slots["times_ns"][2, slot_layout.PHYSICS_END] = ago(50)
    assert hung(slots, RENDER, 60) is None and hung(slots, 0, SOON) is None
    assert "render 0 has been waiting for work for 50." in str(hung(slots, RENDER, 40))


def test_a_worker_that_met_an_error_is_not_hung(farm: Farm) -> None:
    slots = farm.tasks[0].slots
    slots["phase"][0], slots["since_ns"][0] = slot_layout.FAILED, ago(3600)
    slots["requested"][0] += 1
    assert hung(slots, 0, SOON) is None


def test_the_successor_of_a_hung_worker_is_given_time_of_its_own(farm: Farm) -> None:
    slots = farm.tasks[0].slots
    slots["phase"][0], slots["since_ns"][0] = slot_layout.WORKING, ago(50)
    slots["requested"][0] += 1
    slots["requested_ns"][0] = ago(50)
    assert hung(slots, 0, 40) is not None
    restarted(slots, 0)
    assert hung(slots, 0, 40) is None and hung(slots, 0, -1) is not None, "a start may hang too"


@pytest.mark.slow
def test_a_stopped_worker_that_is_waiting_is_hung_as_soon_as_it_has_work_and_not_after_it_went_on() -> None:
    """Physics with a request, and rendering with a scene or the wish that it frees its renderer."""
    with processes(SPEC) as (farm, host):
        slots = farm.tasks[0].slots
        drive(farm, end=1)
        until(lambda: (slots["phase"] == slot_layout.WAITING).all())
        host.signal(PHYSICS, signal.SIGSTOP)
        time.sleep(2 * SOON)
        assert hung(slots, PHYSICS, SOON) is None, "it has no work"
        farm.submit(0, actions_for(farm, 0, 1))
        assert hung(slots, PHYSICS, NEVER) is None
        until(lambda: hung(slots, PHYSICS, SOON))
        until(lambda: slots["drawn"][0] == slots["requested"][0])
        assert hung(slots, 0, SOON) is None and hung(slots, RENDER, SOON) is None, "they have done what they could"
        host.signal(PHYSICS, signal.SIGCONT)
        farm.collect(0, deadline_s=60)
        until(lambda: (slots["phase"] == slot_layout.WAITING).all())
        assert [hung(slots, worker, 0) for worker in range(3)] == [None] * 3
        host.signal(RENDER, signal.SIGSTOP)
        with pytest.raises(WorkerTimeout, match="render 0 .* with its renderer to free"):
            farm.unload_renderers(deadline_s=1)
        assert hung(slots, RENDER, SOON) is not None
        host.signal(RENDER, signal.SIGCONT)
        farm.load_renderers(deadline_s=60)
        until(lambda: slots["phase"][RENDER] == slot_layout.WAITING)
        assert hung(slots, RENDER, SOON) is None


@pytest.mark.slow
def test_a_worker_that_is_stopped_while_it_works_is_hung_and_its_replacement_is_not() -> None:
    slow = replace(REACH, image_size=128)
    spec = replace(SPEC, task=slow, num_envs=64, physics_workers=1, render_workers=0)
    with processes(spec) as (farm, host):
        slots = farm.tasks[0].slots
        drive(farm, end=0)
        farm.submit(0, actions_for(farm, 0, 0))
        until(lambda: slots["phase"][0] == slot_layout.WORKING)
        host.signal(0, signal.SIGSTOP)
        until(lambda: hung(slots, 0, SOON))
        assert "physics 0 has been working for" in str(hung(slots, 0, SOON))
        restarted(slots, 0)
        host.replace_worker(0)
        assert farm.collect(0, deadline_s=60).steps.all()
        assert hung(slots, 0, NEVER) is None


@pytest.mark.slow
def test_a_farm_waits_longer_than_its_deadline_while_a_worker_goes_on() -> None:
    """The worker is stopped, and the progress that it would have made is noted in its stead."""
    with processes(SPEC) as (farm, host):
        drive(farm, end=1)
        slots = farm.tasks[0].slots
        until(lambda: (slots["phase"] == slot_layout.WAITING).all())
        host.signal(PHYSICS, signal.SIGSTOP)
        farm.submit(0, actions_for(farm, 0, 1))
        deadline_s, stopped = 1.0, time.monotonic()

        def goes_on() -> None:
            while time.monotonic() - stopped < 3 * deadline_s:
                slots["since_ns"][PHYSICS] = time.monotonic_ns()
                time.sleep(0.02)
            host.signal(PHYSICS, signal.SIGCONT)

        with ThreadPoolExecutor(1) as thread:
            gone_on = thread.submit(goes_on)
            assert farm.wait_ready(deadline_s) == 0 and farm.collect(0, deadline_s).steps.all()
            gone_on.result()


def test_progress_is_noted_at_every_environment() -> None:
    """While a worker serves many, the time it reports moves on, so that it is not hung however long that takes."""
    for render_workers, least in ((0, 16), (2, 32)):
        fate = Fate()
        spec = replace(SPEC, num_envs=16, render_workers=render_workers)
        with closing(Farm.create(spec, MortalWorkers(fate))) as farm:
            drive(farm, end=0)
            fate.armed = True
            farm.submit(0, actions_for(farm, 0, 0))
            assert fate.writes["since_ns"] >= least, "progress is told at a change of the phase alone"


@pytest.mark.slow
def test_the_late_worker_is_the_one_that_makes_no_progress() -> None:
    """Two of the workers have work of the group; the message names the stopped one, not the first."""
    with processes(SPEC) as (farm, host):
        drive(farm, end=1)
        slots = farm.tasks[0].slots
        until(lambda: (slots["phase"] == slot_layout.WAITING).all())
        for worker in (0, PHYSICS):
            host.signal(worker, signal.SIGSTOP)
        farm.submit(0, actions_for(farm, 0, 1))
        time.sleep(2 * SOON)
        slots["since_ns"][0] = time.monotonic_ns()  # as if it had just served an environment
        with pytest.raises(WorkerTimeout, match="physics 1 did not answer .* environment 1 to simulate"):
            farm.collect(0, deadline_s=SOON)
        for worker in (0, PHYSICS):
            host.signal(worker, signal.SIGCONT)
        assert np.all(farm.collect(0, deadline_s=60).steps)
