"""A worker of a farm that dies or is stopped while somebody acts in it: it is named, replaced, and changes nothing."""

from __future__ import annotations

import os
import re
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass, replace

import psutil  # type: ignore[import-untyped]
import pytest

from embodied.runtime.ray.runtime import RayRuntime
from embodied.runtime.supervision import Deadline
from sim_farm.client.farm import Farm, FarmAddress
from sim_farm.episodes import EndlessEpisodes
from tests.embodied.runtime.test_relay import CHUNKS, PICTURES
from tests.sim_farm.driving import Trace, assert_same, drive, run

FUSED = replace(PICTURES, render_workers=0)


@pytest.fixture(scope="module")
def cluster(ray_runtime: RayRuntime) -> Iterator[RayRuntime]:
    """With no farm's processes but those of this module: they know the deadline that they were started with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_runtime, "_hosts", [])
        yield ray_runtime


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
    cluster: RayRuntime,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Frames and all, to the last bit; and sooner than whoever collects from the farm gives up, as deadlines nest."""
    spec, victim, name = VICTIMS[kind]
    monkeypatch.setattr(cluster, "deadline", Deadline(32.0))  # so 16 s are the farm's, and 8 s a worker's
    host = cluster.farm_host(spec.physics_workers, spec.render_workers)
    pids, before = host.pids(), dict(host.restarts)
    with closing(Farm.create(spec, host)) as farm:
        player = cluster.start("player", Player, farm.address)
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
    assert host.restarts == {**before, victim: before.get(victim, 0) + 1}, "not lost, or replaced more than once"
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("embodied.runtime")]
    stopped = f"{name} has been .* for \\d+\\.\\d s without progress.*"
    why = "its process died" if blow is signal.SIGKILL else stopped
    *late, lost = messages
    assert re.fullmatch(f"{name} was lost and is replaced: {why}", lost), messages
    assert len(late) == (blow is signal.SIGSTOP) and all("; it is replaced after" in one for one in late), messages


@pytest.mark.slow
def test_tasks_of_one_shape_have_processes_of_their_own(cluster: RayRuntime) -> None:
    """Two tasks of a farm; when it is closed, the next farm finds the processes again."""
    tasks = (FUSED, replace(FUSED, episodes=EndlessEpisodes(5)))
    hosts = [cluster.farm_host(FUSED.physics_workers, 0) for _ in tasks]
    pids = [host.pids() for host in hosts]
    assert len({pid for several in pids for pid in several}) == 2 * FUSED.physics_workers
    with closing(Farm.create(tasks, hosts)) as farm:
        for group in range(farm.groups):
            farm.reset(group)
        assert all(farm.collect(group, 60).active.all() for group in range(farm.groups))
    again = [cluster.farm_host(FUSED.physics_workers, 0) for _ in tasks]
    assert sorted(map(id, again)) == sorted(map(id, hosts)), "processes are left idle and others are started"
