"""A worker of a farm that dies or is stopped while somebody acts in it: it is named, replaced, and changes nothing."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from contextlib import closing
from dataclasses import dataclass, replace

import psutil  # type: ignore[import-untyped]
import pytest

from embodied.runtime.deadlines import Deadline
from embodied.runtime.ray.runtime import RayRuntime
from sim_farm.client.farm import Farm, FarmAddress
from sim_farm.episodes import EndlessEpisodes
from tests.embodied.runtime.test_relay import CHUNKS, PICTURES
from tests.sim_farm.driving import Trace, assert_same, drive, run

FUSED = replace(PICTURES, render_workers=0)


@dataclass
class Player:
    """The farm's client in a process of its own, as the policy worker is."""

    address: FarmAddress

    def play(self, deadline_s: float) -> Trace:
        with closing(Farm.attach(self.address)) as farm:
            return drive(farm, end=CHUNKS, deadline_s=deadline_s)


VICTIMS = {
    "physics": (PICTURES, 0, "physics 0"),
    "render": (PICTURES, 2, "render 0"),
    "fused": (FUSED, 1, "physics 1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("kind", VICTIMS)
def test_a_lost_worker_is_named_and_replaced_and_its_episodes_replayed(
    kind: str,
    blow: signal.Signals,
    ray_runtime: RayRuntime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Frames and all, to the last bit; and sooner than whoever collects from the farm gives up, as deadlines nest."""
    spec, victim, name = VICTIMS[kind]
    host = ray_runtime.host
    monkeypatch.setattr(ray_runtime, "deadline", Deadline(32.0))  # so 16 s are the farm's, and 8 s a worker's
    monkeypatch.setattr(host, "silent_s", 8.0)
    with closing(Farm.create(spec, host)) as farm:
        pids = host.pids()
        player = ray_runtime.start("player", Player, farm.address)
        requested = farm.tasks[0].slots["requested"]

        def strike() -> None:
            while requested.max() < CHUNKS:  # of 2 x (1 + CHUNKS) requests
                time.sleep(1e-4)
            os.kill(pids[victim], blow)

        striker = threading.Thread(target=strike)
        striker.start()
        found = player.call(Player.play, player.deadline.inner().seconds)
        striker.join()
        player.end()
    assert_same(run(spec, chunks=CHUNKS), found, f"losing {name} changes results")
    assert not psutil.pid_exists(pids[victim]), "a stopped process is left behind"
    (replaced,) = host.take_replaced()
    assert replaced.worker == name
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("sim_farm.workers")]
    stopped = f"{name} has been .* for \\d+\\.\\d s without progress.*"
    why = r"its process died \(signal 9\)" if blow is signal.SIGKILL else stopped
    *late, lost = messages
    assert re.fullmatch(f"{name} was lost and is replaced: {why}", lost), messages
    assert len(late) == (blow is signal.SIGSTOP) and all("; it is replaced after" in one for one in late), messages


@pytest.mark.slow
def test_tasks_of_one_shape_have_processes_of_their_own(ray_runtime: RayRuntime) -> None:
    """Two tasks of a farm; when it is closed, the next farm finds the processes again."""
    tasks = (FUSED, replace(FUSED, episodes=EndlessEpisodes(5)))
    host = ray_runtime.host
    with closing(Farm.create(tasks, host)) as farm:
        pids = host.pids()
        assert len(set(pids)) == 2 * FUSED.physics_workers
        for group in range(farm.groups):
            farm.reset(group)
        assert all(farm.collect(group, 60).active.all() for group in range(farm.groups))
    with closing(Farm.create(tasks, host)):
        assert set(host.pids()) == set(pids), "processes are left idle and others are started"
