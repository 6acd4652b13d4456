"""Films drawn by the processes of a farm that is closed are those of the caller's own process."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest

from sim_farm.client.episode_replay import FilmRequest
from sim_farm.client.farm import Farm
from sim_farm.contract import EpisodeSpec, FarmError, TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from sim_farm.workers.processes import Processes
from sim_farm.workers.supervision import WorkerFailed

PUSH, REACH = (
    TaskSpec(f"tabletop/{name}", cameras=1, image_size=16, max_episode_steps=4) for name in ("push", "reach")
)
SPEC = FarmSpec(REACH, EndlessEpisodes(2), num_envs=2, physics_workers=2)


def request(task: TaskSpec, seed: int) -> FilmRequest:
    actions = np.random.default_rng(seed).uniform(-1, 1, (1 + seed % 3, 3)).astype(np.float32)
    return FilmRequest(task, EpisodeSpec(seed), actions)


REQUESTS = [request(PUSH, 1), request(PUSH, 2), request(REACH, 3), request(REACH, 4), request(REACH, 5)]


@pytest.fixture
def host() -> Iterator[Processes]:
    with closing(Processes(240.0, 240.0)) as host:
        yield host


def test_films_are_equal_in_order_and_drawn_by_the_farms_processes(host: Processes) -> None:
    with closing(Farm.create(SPEC, host)):
        pids = set(host.pids())
    found = list(host.films(REQUESTS, 2))
    assert {process.pid for process in host._idle} == pids and len(pids) == 2
    expected = list(InProcess().films(REQUESTS, 2))
    assert [len(frames) for frames in found] == [1 + len(one.actions) for one in REQUESTS]
    for mine, its in zip(found, expected, strict=True):
        assert np.array_equal(mine, its)
    with closing(Farm.create(SPEC, host)):
        assert set(host.pids()) == pids, "they serve the next farm"


def test_what_goes_wrong_in_a_simulator_is_said(host: Processes) -> None:
    with pytest.raises(FarmError, match="tabletop/push has no camera to film with"):
        list(host.films([request(TaskSpec("tabletop/push"), seed) for seed in range(3)], 1))
    assert len(list(host.films(REQUESTS[:1], 1))) == 1


def test_a_process_that_dies_is_said_and_the_next_film_has_another(host: Processes) -> None:
    list(host.films(REQUESTS[:1], 1))
    (process,) = host._idle
    long = replace(PUSH, image_size=256, max_episode_steps=10_000)
    films = host.films([REQUESTS[0], FilmRequest(long, EpisodeSpec(1), np.zeros((10_000, 3), np.float32))], 1)
    next(films)
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WorkerFailed, match=r"a process of tabletop/push died \(signal 9\)"):
        next(films)
    assert not host._idle
    assert len(list(host.films(REQUESTS[:2], 1))) == 2
