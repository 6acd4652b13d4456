"""A worker that holds more memory than it may is replaced, and the run ends as one without a limit: bit for bit."""

from __future__ import annotations

import os
import subprocess
import sys
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

import schedulers
from embodied.execution.recovery import FILE
from embodied.runtime.handles import Handle
from embodied.runtime.ray import actors
from embodied.runtime.ray.actors import RayHandle
from embodied.runtime.ray.runtime import RayRuntime
from schedulers import DeviceRange, Phase, Placement, Plan
from sim_farm.client.farm import Farm, WorkerFailed
from sim_farm.workers.hosts import InProcess
from sim_farm.workers.supervision import LimitTooSmall, MemoryChecks, MemoryLimit, WorkerTooLarge
from tests.embodied.execution.test_lost_workers import Player
from tests.embodied.execution.test_recovery import config_of, run
from tests.embodied.run.test_resume import assert_same_run
from tests.embodied.runtime.test_relay import CHUNKS, PICTURES
from tests.sim_farm.driving import assert_same, drive

SMALL = MemoryLimit(1e-3, "runtime.worker_gb")


def test_a_process_is_measured_from_outside() -> None:
    hold = "import sys; held = b'x' * 300_000_000; print(flush=True); sys.stdin.read()"
    process = subprocess.Popen([sys.executable, "-c", hold], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert process.stdout is not None
    process.stdout.readline()
    watched = MemoryChecks(settles=1)
    assert MemoryLimit(0.5).exceeded("worker", process.pid, watched) is None and watched.within == 1
    wrong = MemoryLimit(0.25, "runtime.worker_gb").exceeded("worker", process.pid, watched)
    assert isinstance(wrong, WorkerTooLarge)
    assert str(wrong).startswith("worker has 0.3") and "runtime.worker_gb is 0.25" in str(wrong)
    process.communicate()
    assert MemoryLimit(0.25).exceeded("worker", process.pid, watched) is None, "it has ended"


def test_no_limit_is_none_and_a_process_that_has_not_begun_holds_nothing() -> None:
    assert MemoryLimit(None).exceeded("worker", os.getpid(), MemoryChecks(0)) is None
    assert SMALL.exceeded("worker", 0, MemoryChecks(0)) is None


def test_what_a_new_worker_needs_is_the_users_to_give() -> None:
    for within in (0, 1):
        wrong = SMALL.exceeded("learner", os.getpid(), MemoryChecks(settles=2, within=within))
        assert isinstance(wrong, LimitTooSmall) and not isinstance(wrong, WorkerFailed)
        assert "set runtime.worker_gb higher" in str(wrong)
    assert isinstance(SMALL.exceeded("learner", os.getpid(), MemoryChecks(settles=2, within=2)), WorkerTooLarge)


@pytest.mark.slow
def test_a_run_whose_workers_are_replaced_ends_as_one_without_a_limit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch alone takes more than the limit: policy worker or learner is replaced after every iteration."""
    run(config_of("inline"), tmp_path / "whole")
    monkeypatch.setattr(actors, "SETTLES", 0)
    config = config_of("ray")
    limited = config.model_copy(update={"runtime": config.runtime.model_copy(update={"worker_gb": 0.15})})
    result = run(limited, tmp_path / "run")
    assert result["recoveries"] == config.iterations - 1 and "replaced" not in result, "simulators are smaller"
    lost = (tmp_path / "run" / FILE).read_text()
    assert "of private memory, and runtime.worker_gb is 0.15" in lost
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_where_rollouts_run_ahead_a_replacement_waits_for_a_checkpoint_of_the_configuration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that goes on from another checkpoint would act with other weights."""
    core = [DeviceRange("here", "cores", number, 1) for number in (0, 1)]
    phase = Phase((Placement(("physics", "policy"), (core[0],)), Placement(("learner",), (core[1],))), 4)
    schedulers.save(Plan("ppo", "disaggregated", (phase,), ahead=1), tmp_path / "plan.json")
    config = config_of("ray")
    config = config.model_copy(update={"plan": config.plan.model_copy(update={"mode": tmp_path / "plan.json"})})
    run(config, tmp_path / "whole")
    monkeypatch.setattr(actors, "SETTLES", 0)
    limited = config.model_copy(update={"runtime": config.runtime.model_copy(update={"worker_gb": 0.15})})
    assert run(limited, tmp_path / "run")["recoveries"] == 2, "after iterations 2 and 4 of 5"
    assert_same_run(tmp_path / "run", tmp_path / "whole")


@pytest.mark.slow
def test_a_run_without_enough_memory_ends_with_a_checkpoint_of_what_it_has_done(tmp_path: Path) -> None:
    config = config_of("ray")
    limited = config.model_copy(update={"runtime": config.runtime.model_copy(update={"worker_gb": 0.15})})
    with pytest.raises(LimitTooSmall, match=r"(policy|learner) has .* set runtime\.worker_gb higher"):
        run(limited, tmp_path / "run")
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir() if path.is_dir()] == ["000001"]


@pytest.mark.slow
def test_a_process_that_waits_for_workers_is_ended_and_one_that_has_some_is_named() -> None:
    """The next worker would be placed in the first one, and be too large at once."""
    runtime = RayRuntime("local", 60.0, SMALL.gb)
    try:
        spare = placed(runtime, "first", end=True)
        assert psutil.pid_exists(spare)
        assert runtime.too_large() is None
        second = placed(runtime, "held", end=False)
        assert second != spare and not lives(spare)
        assert str(runtime.too_large()).startswith("held has")
        runtime.end_workers()
        assert not lives(second), "it would serve again"
    finally:
        runtime.close()


def placed(runtime: RayRuntime, name: str, end: bool) -> int:
    """Number of the process of a worker that is placed, and perhaps ended at once."""
    handle: Handle[Any] = runtime.start(name, list)
    assert isinstance(handle, RayHandle)
    pid = handle.process.pid
    if end:
        handle.end()
    return pid


def lives(pid: int) -> bool:
    """True if the process is still there after the time that it may take to end."""
    try:
        psutil.Process(pid).wait(120)
    except psutil.TimeoutExpired:
        return True
    except psutil.NoSuchProcess:
        pass
    return False


@dataclass(frozen=True)
class Once(MemoryLimit):
    """Too small for one worker, from the second look at it until it was replaced."""

    looks: list[int] = field(default_factory=list)

    def exceeded(self, worker: str, pid: int, checks: MemoryChecks) -> WorkerTooLarge | LimitTooSmall | None:
        if worker != "physics 1" or not pid:
            return None
        self.looks.append(pid)
        budget = self if len(self.looks) == 2 else MemoryLimit(100.0)
        return MemoryLimit.exceeded(budget, worker, pid, checks)


@pytest.mark.slow
def test_a_simulator_that_has_grown_is_replaced_and_its_episodes_replayed(
    ray_runtime: RayRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = ray_runtime.host
    monkeypatch.setattr(host, "_idle", [])
    monkeypatch.setattr(host, "limit", Once(1e-3))
    with closing(Farm.create(PICTURES, host)) as farm:
        player = ray_runtime.start("player", Player, farm.address)
        found = player.call(Player.play, 60.0)
        player.end()
    (replaced,) = host.take_replaced()
    assert replaced.worker == "physics 1" and "of private memory" in replaced.why
    with closing(Farm.create(PICTURES, InProcess())) as farm:
        assert_same(found, drive(farm, end=CHUNKS), "a replaced worker changes nothing")
