"""What processes answer about tasks: how one ended that did not answer, and that no answer outlives its farm."""

from __future__ import annotations

import os
import socket
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import gymnasium
import numpy as np
import pytest

from sim_farm.client.farm import Farm
from sim_farm.contract import FarmError, TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.processes import Processes
from sim_farm.workers.supervision import WorkerFailed

OWN = f"{__name__}:gymnasium/farm-described"
MENDED = "FARM_TESTS_MENDED"
"""Variable that names a file, without which `Mended` cannot be made."""


class Leaves(gymnasium.Env[Any, Any]):
    """Its process closes its end of the pipe, and ends a second later."""

    def __init__(self) -> None:
        for number in map(int, os.listdir("/proc/self/fd")):
            if os.path.realpath(f"/proc/self/fd/{number}").rpartition("/")[2].startswith("socket:"):
                socket.socket(fileno=os.dup(number)).shutdown(socket.SHUT_WR)
        time.sleep(1)
        os._exit(3)


class Mended(gymnasium.Env[Any, Any]):
    def __init__(self) -> None:
        if not Path(os.environ[MENDED]).exists():
            raise RuntimeError("not mended yet")
        self.observation_space = self.action_space = gymnasium.spaces.Box(-1.0, 1.0, (2,))

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Any, dict[str, Any]]:
        return np.zeros(2, np.float32), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        return np.zeros(2, np.float32), 0.0, False, False, {}


class Wrong(gymnasium.Env[Any, Any]):
    def __init__(self) -> None:
        raise RuntimeError("always wrong")


for name in ("Leaves", "Mended", "Wrong"):
    if f"farm-described/{name}-v0" not in gymnasium.registry:
        gymnasium.register(f"farm-described/{name}-v0", entry_point=f"{__name__}:{name}", max_episode_steps=5)


def task(kind: type) -> TaskSpec:
    return TaskSpec(f"{OWN}/{kind.__name__}-v0")


def test_a_process_that_ends_in_place_of_an_answer_is_said_to_have_ended() -> None:
    with closing(Processes(240.0, 240.0)) as host:
        with pytest.raises(WorkerFailed, match=r"Leaves-v0 ended \(status 3\)"):
            host.describe(task(Leaves))
        assert not host._idle


def test_what_was_wrong_for_an_earlier_farm_is_asked_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MENDED, str(tmp_path / "mended"))
    wrong, mended = task(Wrong), task(Mended)
    with closing(Processes(240.0, 240.0)) as host:
        host.prepare([(wrong, None)])
        (process,) = host._idle
        host._ask(mended, process)
        with pytest.raises(FarmError, match="always wrong"):  # the farm's first task, so that no more is looked at
            host.describe(wrong)
        assert process.receive(240.0), "the answer about the second task comes later"
        (tmp_path / "mended").touch()
        host.prepare([(mended, None)])
        assert host.describe(mended).action_dim == 2


def test_processes_are_prepared_for_the_device_that_they_are_to_draw_on() -> None:
    seen = TaskSpec("tabletop/reach", cameras=1, image_size=16, max_episode_steps=7)
    spec = FarmSpec(seen, EndlessEpisodes(2), num_envs=2, physics_workers=2, devices=("cpu",))
    with closing(Processes(240.0, 240.0)) as host:
        with closing(Farm.create(spec, host)):
            pass
        other = replace(spec, devices=())
        host.prepare(other.processes)
        prepared = {process.pid for process in host._idle}
        with closing(Farm.create(other, host)):
            assert {*host.pids()} <= prepared, "processes are started late, and those that were prepared stay idle"
