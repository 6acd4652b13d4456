"""A run that loses a worker goes on, and ends with the parameters of one that has lost none: bit for bit."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file

from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.errors import PeerFailed, UserError
from embodied.execution.recovery import FILE, Recovery
from embodied.execution.session import Session, open_session
from embodied.run.folder import prepare_run
from embodied.runtime.api import RuntimeLost
from embodied.runtime.ray.runtime import RayRuntime
from embodied.training import checkpoints
from embodied.training.loop import train
from embodied.workflows.run_spec import RunSpec
from sim_farm.client.farm import WorkerFailed, WorkerTimeout
from sim_farm.contract import FarmError
from sim_farm.workers import faults
from sim_farm.workers.supervision import FRUITLESS, OFTEN, WITHIN_S
from tests.embodied.run.test_resume import STATES, assert_same_run
from tests.full_disk import full_disk

DEADLINE_S = 60.0
"""Of every call, so that of a worker's start too, which takes long while two cores are busy; a stopped worker costs so
much, twice."""
FAULTS = {
    "learner": {"worker": "learner", "phase": "finish", "kind": "kill", "nth": 3},
    "physics": {"worker": "physics 1", "phase": "step", "kind": "raise", "nth": 40},
}
MORE = [
    {"worker": worker, "phase": phase, "kind": kind, "nth": nth}
    for worker, phase, nth in (
        ("learner", "receive", 2), ("learner", "finish", 5), ("learner", "save", 1), ("policy", "rollout", 2),
        ("policy", "snapshot", 4), ("physics 0", "step", 9), ("physics 1", "step", 50),
    )
    for kind in ("kill", "stop", "raise")
]  # fmt: skip


def config_of(mode: str, deadline_s: float = 240.0) -> Config:
    runtime = {"mode": mode, "deadline_s": deadline_s}
    settings = {**STATES, "iterations": 5, "checkpoint_every": 2, "runtime": runtime, "farm": {"physics_workers": 2}}
    return parse_config(settings, "test")


def run(config: Config, folder: Path, shared: RayRuntime | None = None) -> dict[str, Any]:
    """The result of a run in a Ray of its own, or in the one that is shared."""
    prepare_run(config, folder, False)
    if shared is not None:
        return train(RunSpec.of(config), folder, Session(config, shared, tuple(sorted(os.sched_getaffinity(0)))), None)
    with open_session(config) as session:
        return train(RunSpec.of(config), folder, session, None)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """In one process."""
    folder = tmp_path_factory.mktemp("undisturbed") / "run"
    run(config_of("inline"), folder)
    return folder


def disturbed(
    found: list[dict[str, Any]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    config: Config,
    shared: RayRuntime | None = None,
) -> tuple[Path, dict[str, Any]]:
    file = tmp_path / "faults.json"
    file.write_text(json.dumps(found))
    monkeypatch.setenv(faults.VARIABLE, str(file))
    result = run(config, tmp_path / "run", shared)
    for number in range(len(found)):
        assert Path(f"{file}.fired-{number}").exists(), "the fault has not struck"
    return tmp_path / "run", result


def test_a_run_that_loses_workers_ends_as_one_that_lost_none(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, ray_runtime: RayRuntime
) -> None:
    for part, name in ((ray_runtime, "_spare"), (ray_runtime.host, "_idle")):  # they know nothing of the faults
        monkeypatch.setattr(part, name, [])
    folder, result = disturbed(list(FAULTS.values()), tmp_path, monkeypatch, config_of("ray"), ray_runtime)
    assert_same_run(folder, undisturbed)
    assert result["recoveries"] == len(FAULTS)
    rows = [json.loads(line) for line in (folder / FILE).read_text().splitlines()]
    assert [row["outcome"] for row in rows] == ["the run goes on", "the run is back"] * len(FAULTS)
    assert all(row["down_s"] > 0 for row in rows[1::2])
    for name, fault in FAULTS.items():
        assert any(str(fault["worker"]) in row["error"] for row in rows[::2]), f"{name} is not named: {rows}"


@pytest.mark.slow
def test_a_run_that_loses_ray_ends_as_one_that_lost_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    long = {"iterations": 60, "checkpoint_every": 20}  # in a short one nobody would miss the raylet
    run(config_of("inline").model_copy(update=long), tmp_path / "undisturbed")
    lost = {"worker": "driver", "phase": "rollout", "kind": "kill", "nth": 5, "child": "raylet"}
    folder, result = disturbed([lost], tmp_path, monkeypatch, config_of("ray").model_copy(update=long))
    assert_same_run(folder, tmp_path / "undisturbed")
    first, back = (json.loads(line) for line in (folder / FILE).read_text().splitlines())
    assert "raylet" in first["error"] and back["outcome"] == "the run is back" and result["recoveries"] == 1


@pytest.mark.slow
def test_a_run_goes_on_from_a_checkpoint_made_between_where_they_are_cheap(
    undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(checkpoints, "SHARE", float("inf"))  # of any time they may take what they take
    lost = {"worker": "learner", "phase": "finish", "kind": "raise", "nth": 5}
    config = config_of("ray").model_copy(update={"checkpoint_every": 100})
    folder, _ = disturbed([lost], tmp_path, monkeypatch, config)
    row = json.loads((folder / FILE).read_text().splitlines()[0])
    assert row["iteration"] == 4
    (begun,) = re.findall(r"goes on from iteration (\d)", capsys.readouterr().out)
    # The last one, or an earlier one where the last was still being written: on a busy machine that takes iterations.
    assert 1 <= int(begun) <= 4
    expected, found = (load_file(run / "checkpoints/000005/policy/model.safetensors") for run in (undisturbed, folder))
    assert expected.keys() == found.keys()
    assert all(np.array_equal(expected[name], found[name]) for name in expected)
    assert not (folder / "checkpoints" / "interim").exists(), "of no use once there is a later one"


@pytest.mark.slow
@pytest.mark.parametrize("fault", MORE, ids=lambda fault: "-".join(str(value) for value in fault.values()))
def test_whatever_befalls_a_worker(
    fault: dict[str, Any], undisturbed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = disturbed(
        [fault], tmp_path, monkeypatch, config_of("ray", DEADLINE_S if fault["kind"] == "stop" else 240.0)
    )
    assert_same_run(folder, undisturbed)


def test_an_error_that_comes_again_at_the_same_iteration_ends_the_run(tmp_path: Path) -> None:
    recovery = Recovery(tmp_path)
    assert recovery.goes_on(WorkerFailed("learner died"), 3)
    assert recovery.goes_on(WorkerFailed("learner died"), 4)
    assert not recovery.goes_on(WorkerFailed("learner died"), 4)
    rows = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [row["outcome"] for row in rows] == ["the run goes on", "the run goes on", "the run ends"]


def test_a_runtime_that_is_lost_again_at_the_same_iteration_is_an_accident(tmp_path: Path) -> None:
    recovery = Recovery(tmp_path)
    found = [recovery.goes_on(RuntimeLost("Ray's raylet died"), 4) for _ in range(FRUITLESS)]
    assert found == [True] * (FRUITLESS - 1) + [False]


def test_losses_without_progress_end_the_run(tmp_path: Path) -> None:
    recovery = Recovery(tmp_path)
    found = [recovery.goes_on(WorkerFailed(f"the {n}th"), 7) for n in range(FRUITLESS)]
    assert found == [True] * (FRUITLESS - 1) + [False]


def test_many_losses_within_a_minute_end_the_run_and_over_a_longer_time_do_not(tmp_path: Path) -> None:
    for seconds, goes_on in ((WITHIN_S / OFTEN / 2, False), (WITHIN_S / OFTEN * 2, True)):
        now = [0.0]
        recovery = Recovery(tmp_path, clock=lambda now=now: now[0])
        found = []
        for number in range(OFTEN):
            found.append(recovery.goes_on(WorkerTimeout(f"the {number}th"), number))
            now[0] += seconds
        assert found == [True] * (OFTEN - 1) + [goes_on]


@pytest.mark.parametrize(
    ("error", "goes_on"),
    [
        (WorkerFailed("died"), True),
        (WorkerTimeout("late"), True),
        (PeerFailed("gone"), True),
        (RuntimeError("whatever a simulator raises"), True),
        (UserError("a setting is wrong"), False),
        (FarmError("a task is wrong"), False),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_a_user_must_change_is_not_tried_again(error: Exception, goes_on: bool, tmp_path: Path) -> None:
    assert Recovery(tmp_path).goes_on(error, 1) is goes_on
    assert (tmp_path / FILE).exists() is goes_on


def test_a_fault_strikes_once_at_its_point(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "faults.json"
    worker = f"worker of {os.getpid()}"
    file.write_text(json.dumps([{"worker": worker, "phase": "save", "kind": "raise", "nth": 2}]))
    monkeypatch.setenv(faults.VARIABLE, str(file))
    faults.point(worker, "save")
    faults.point(worker, "load")
    with pytest.raises(faults.InjectedFault, match="'save'"):
        faults.point(worker, "save")
    faults._seen.clear()  # as in a process that has taken its place
    faults.point(worker, "save")
    faults.point(worker, "save")


@pytest.mark.parametrize(
    "text", ["{", "[1]", '[{"worker": "a"}]', '[{"worker": "a", "phase": "b", "kind": "explode"}]']
)
def test_a_file_that_is_no_list_of_faults_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=r"faults.json is not a list of faults"):
        faults.read(file)


def test_a_loss_is_a_line_whatever_a_crash_left_of_the_one_before(tmp_path: Path) -> None:
    (tmp_path / FILE).write_bytes(b'{"iteration": 1}\n{"iterat\0\0')
    assert Recovery(tmp_path).goes_on(RuntimeError("lost"), 2)
    assert [json.loads(line)["iteration"] for line in (tmp_path / FILE).read_text().splitlines()] == [1, 2]
    with full_disk(1):  # and whether there is room for it decides nothing
        assert Recovery(tmp_path).goes_on(RuntimeError("lost"), 2)
