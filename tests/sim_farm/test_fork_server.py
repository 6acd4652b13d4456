"""Worker processes are forks of one process, whatever happens to it and to them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest

from sim_farm.backends.libero import BACKEND as LIBERO
from sim_farm.backends.libero import environment
from sim_farm.backends.libero.tasks import find_task
from sim_farm.client.farm import Farm
from sim_farm.contract import TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.processes import Processes
from sim_farm.workers.supervision import WorkerFailed
from tests.sim_farm.driving import assert_same, run
from tests.sim_farm.noted_environment import FOLDER
from tests.sim_farm.test_workers import ENDLESS, MortalProcesses, collect, request, until

NOTED = "tests.sim_farm.noted_environment:gymnasium/farm-forks/Noted-v0"
THREADED = "tests.sim_farm.threaded_simulator:gymnasium/farm-forks/Threaded-v0"
TWO = replace(ENDLESS, physics_workers=2)
ROOT = Path(__file__).resolve().parents[2]


def notes_of_two_workers(task: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, Any], list[int]]:
    """What the environments of a farm's two workers have noted, by process, and the workers' processes."""
    monkeypatch.setenv(FOLDER, str(folder))
    spec = FarmSpec(TaskSpec(task), EndlessEpisodes(2), num_envs=2, physics_workers=2)
    with closing(Processes(240.0, 240.0)) as host, closing(Farm.create(spec, host)) as farm:
        farm.reset(0)
        farm.collect(0, 240)
        return {int(path.name): json.loads(path.read_text()) for path in folder.iterdir()}, host.pids()


def test_workers_are_forks_of_the_process_that_has_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    notes, pids = notes_of_two_workers(NOTED, tmp_path, monkeypatch)
    assert len({*pids}) == 2 and {*pids} <= {*notes}
    (server,) = {notes[pid]["imported_in"] for pid in pids}
    assert server not in pids and {notes[pid]["parent"] for pid in pids} == {server}
    assert len({notes[pid]["drawn"] for pid in pids}) == 2, "what is drawn without a seed is equal in all workers"


def test_a_simulator_that_starts_threads_is_imported_in_each_fork(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes, pids = notes_of_two_workers(THREADED, tmp_path, monkeypatch)
    assert all(notes[pid]["thread"] and notes[pid]["imported_in"] == pid for pid in pids)


def test_a_process_has_the_present_environment_variables(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(FOLDER, str(tmp_path / "absent"))
    with closing(Processes(240.0, 240.0)) as host:
        host.prepare([(TaskSpec(NOTED), None)])
        (process,) = host._idle
        until(lambda: process._fork.begun())
        until(lambda: process.receive(1.0))
        process.end()
        host.prepare([])
        monkeypatch.setenv(FOLDER, str(tmp_path))
        assert host.describe(TaskSpec(NOTED)).action_dim == 2
        assert len(host._servers) == 1 and [path.name for path in tmp_path.iterdir()] == [str(host._idle[0].pid)]


@pytest.mark.parametrize("blow", [signal.SIGKILL, signal.SIGSTOP])
def test_a_lost_server_is_replaced_when_it_is_needed(blow: signal.Signals) -> None:
    """Workers serve on. A successor that a stopped server does not fork is found silent, and ends with the server."""
    trace: dict[int, Any] = {env: [] for env in range(2)}
    with closing(MortalProcesses()) as host, closing(Farm.create(TWO, host)) as farm:
        request(farm, -1)
        collect(farm, trace)
        (server,) = host._servers.values()
        os.kill(server._popen.pid, blow)
        request(farm, 0)
        collect(farm, trace)
        first, second = host.pids()
        host.signal(0, signal.SIGKILL)
        request(farm, 1)  # a worker without work is never silent
        host.silent_s = 10.0
        until(lambda: (host.watch(), host._servers["tabletop"] is not server)[1])
        host.silent_s = 240.0
        until(lambda: (host.watch(), host.take_replaced())[1])
        assert host.pids()[0] != first and host.pids()[1] == second
        collect(farm, trace)
    assert_same(run(TWO, chunks=2), trace, "a lost server changes results")
    assert not psutil.pid_exists(server._popen.pid)


OWNER = """
import os, sys, time
from sim_farm.contract import TaskSpec
from sim_farm.workers.processes import Processes
host = Processes(240.0, 240.0)
host.describe(TaskSpec("tabletop/reach"))
host.prepare([(TaskSpec("tabletop/reach"), None), (TaskSpec("tabletop/push"), None)])
if sys.argv[1] == "close":
    host.close()
print("here", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["close", "kill"])
def test_no_process_is_left_when_the_host_is_closed_or_its_process_killed(how: str) -> None:
    with subprocess.Popen([sys.executable, "-c", OWNER, how], cwd=ROOT, stdout=subprocess.PIPE, text=True) as owner:
        try:
            assert owner.stdout is not None and owner.stdout.readline() == "here\n"
            everyone = psutil.Process(owner.pid).children(recursive=True)
            family = [process for process in everyone if "resource_tracker" not in " ".join(process.cmdline())]
        finally:
            owner.kill()
    assert len(family) >= 2 if how == "kill" else not family, "a server and a process that has described its task"
    _, alive = psutil.wait_procs(family, timeout=240)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_server_that_does_not_finish_its_import_is_reported_and_ended(tmp_path: Path) -> None:
    (tmp_path / "sleeping_simulator.py").write_text("import time\ntime.sleep(600)\n")
    with pytest.MonkeyPatch.context() as patch, closing(Processes(240.0, 240.0)) as host:
        patch.syspath_prepend(tmp_path)
        task = TaskSpec("sleeping_simulator:BACKEND/any")
        host.prepare([(task, None)])
        (server,) = host._servers.values()
        host.start_s = 0.5
        with pytest.raises(WorkerFailed, match="did not describe its task within 0 s"):
            host.describe(task)
        assert not server.alive and not host._idle


@pytest.mark.parametrize("platform", ["egl", "osmesa"])
def test_a_named_opengl_platform_is_not_started_before_the_fork(platform: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MUJOCO_GL", platform)
    with closing(Processes(240.0, 240.0)) as host:
        host.describe(TaskSpec("tabletop/reach"))
        (server,) = host._servers.values()
        assert psutil.Process(server._popen.pid).cmdline()[-1] == "early"
        assert "libEGL" not in Path(f"/proc/{server._popen.pid}/maps").read_text()


def test_libero_loads_the_model_that_its_environments_share() -> None:
    name = "libero/libero_object/3"
    LIBERO.load(name)
    compiled = environment.shared_model.cache_info().misses
    assert environment.shared_model(find_task(name)).model.nq > 0
    assert environment.shared_model.cache_info().misses == compiled
