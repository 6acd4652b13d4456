"""Checkpoints are evaluated beside the run where it leaves room; whatever happens there, the results are the same."""

from __future__ import annotations

import os
import shutil
import signal
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.errors import UserError
from embodied.execution.assignment import Assignment, FarmAssignment, configured
from embodied.execution.session import Session
from embodied.reporting.metrics import SELECTION, read
from embodied.run import checkpoint
from embodied.training import loop, selection
from embodied.training.selection import VISIBLE_GPUS, BackgroundError, BackgroundProcess, Room, free_room
from embodied.workflows.run_spec import RunSpec
from tests.embodied.run.test_resume import assert_same_run, rewind, run
from tests.embodied.training.test_selection import SETTINGS
from tests.variants import often

INLINE = {"mode": "inline"}
ONE_WORKER = {"farm": {"physics_workers": 1}, "runtime": {"mode": "ray"}}
"""It leaves all cores but one."""


def config_of(every: int, **changes: object) -> Config:
    evaluation = {"every": every, "videos": 0} | ({"episodes": 12} if every else {})
    return parse_config({**SETTINGS, "iterations": 4, "eval": evaluation, **ONE_WORKER, **changes}, "test")


def rows_of(folder: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in row.items() if "wall_s" not in k} for row in read(folder, SELECTION)]


@pytest.fixture(scope="module")
def waited(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that waits for its evaluations: everything is one process."""
    folder = tmp_path_factory.mktemp("runs") / "waited"
    run(config_of(1, runtime=INLINE), folder)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("mode", often(["inline"], ["inline", "ray"]))
def test_it_changes_nothing_of_run_and_evaluations(
    mode: str, waited: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With workers in processes; or in this one, which leaves no core of its own accord."""
    if mode == "inline":
        monkeypatch.setattr(loop, "free_room", lambda *_: Room(max(os.sched_getaffinity(0))))
    run(config_of(1, **({"runtime": INLINE} if mode == "inline" else {})), tmp_path / "beside")
    assert (tmp_path / "beside" / "evals" / "selection" / "background.log").exists(), "the run waited"
    assert rows_of(tmp_path / "beside") == rows_of(waited) and len(rows_of(waited)) == 4
    assert_same_run(tmp_path / "beside", waited)


class KilledAtWork(BackgroundProcess):
    """Its process is killed while it works."""

    def begin(self, work: Any) -> None:
        super().begin(work)
        self._process.kill()


class KilledBefore(BackgroundProcess):
    """Its process is killed before it is asked for anything."""

    def begin(self, work: Any) -> None:
        self._process.kill()
        self._process.join()
        super().begin(work)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [KilledAtWork, KilledBefore])
def test_where_its_process_is_killed_the_run_waits(
    killed: type[BackgroundProcess],
    waited: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(loop, "free_room", lambda *_: Room(max(os.sched_getaffinity(0))))
    monkeypatch.setattr(selection, "BackgroundProcess", killed)
    run(config_of(1, runtime=INLINE, checkpoint_every=1, keep_checkpoints=1), tmp_path / "killed")
    assert rows_of(tmp_path / "killed") == rows_of(waited)
    assert "evaluating iteration 1 in the background" in capsys.readouterr().out
    best = checkpoint.best(tmp_path / "killed" / "checkpoints")
    kept = {path.name for path in (tmp_path / "killed" / "checkpoints").iterdir() if path.is_dir()}
    assert best is not None and kept == {best.name, "000004"}


@pytest.mark.slow
def test_what_was_begun_beside_an_interrupted_run_is_completed(waited: Path, tmp_path: Path) -> None:
    """The run had come to its third iteration while its second was evaluated."""
    stopped = tmp_path / "stopped"
    rewind(waited, stopped, 3)
    folder = stopped / "evals" / "selection"
    lines = (folder / "000002" / "episodes.jsonl").read_text().splitlines(keepends=True)
    (folder / "000002" / "episodes.jsonl").write_text("".join(lines[:5]))
    shutil.rmtree(folder / "000003")
    rows = (stopped / SELECTION).read_text().splitlines(keepends=True)
    (stopped / SELECTION).write_text("".join(rows[:1]))
    run(config_of(1, runtime=INLINE, checkpoint_every=1), stopped, resume=True)
    assert rows_of(stopped) == rows_of(waited)


def _core(session: Session) -> dict[str, Any]:
    return {"cores": sorted(os.sched_getaffinity(0)), "mode": session.config.runtime.mode, "process": os.getpid()}


def _fail(text: str, session: Session) -> dict[str, Any]:
    raise UserError(text)


def _die(session: Session) -> dict[str, Any]:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError("it is dead")


@pytest.mark.slow
def test_a_process_works_on_its_core_and_says_what_went_wrong(tmp_path: Path) -> None:
    core = max(os.sched_getaffinity(0))
    process = BackgroundProcess(Room(core).applied(config_of(1)), Room(core), tmp_path / "background.log")
    process.begin(_core)
    found = process.result(block=True)
    assert found is not None and found["cores"] == [core] and found["mode"] == "inline"
    assert process.result(block=False) is None
    process.begin(partial(_fail, "no such task"))
    with pytest.raises(UserError, match="no such task"):
        process.result(block=True)
    process.begin(_die)
    with pytest.raises(BackgroundError, match="exit status -9"):
        process.result(block=True)
    process.close()


def _assignment(physics: tuple[int | None, ...], **components: Affinity) -> Assignment:
    farm = FarmAssignment(2, physics, ("",) * len(physics))
    return Assignment("test", (farm,), {name: (place,) for name, place in components.items()})


def test_room_is_what_no_worker_is_pinned_to_and_no_thread_needs() -> None:
    cores, gpus = (0, 1, 2, 3), [torch.device("cuda", 0), torch.device("cuda", 1)]
    one = _assignment((0, 1, 2), policy=Affinity(), learner=Affinity(threads=3))
    assert free_room(one, cores, []) == Room(3)
    assert free_room(_assignment((0, 1, 2, 3), policy=Affinity()), cores, []) is None
    assert free_room(_assignment((0, 1), learner=Affinity((2, 3), 2)), cores, []) is None
    assert free_room(_assignment((0,), learner=Affinity(threads=4)), cores, []) is None, "its threads are everywhere"
    assert free_room(_assignment((None,), policy=Affinity()), cores, []) is None, "nobody knows where they are"
    with_gpus = _assignment((0, 1), policy=Affinity(device="cuda:0"), learner=Affinity(threads=4, device="cuda:0"))
    with_gpus = replace(with_gpus, farms=(replace(with_gpus.farms[0], devices=(0, "cpu")),))
    assert free_room(with_gpus, cores, gpus) == Room(3, 1)
    assert free_room(with_gpus, cores, gpus[:1]) is None, "the policy's GPU is the learner's"
    unspecified = _assignment((0, 1), learner=Affinity(threads=4))
    assert free_room(unspecified, cores, gpus) == Room(3, 1), "without a name it is the first"
    drawing = replace(with_gpus, farms=(replace(with_gpus.farms[0], devices=(0, 1)),))
    assert free_room(drawing, cores, gpus) is None, "frames are drawn on the second"


@pytest.mark.parametrize(("visible", "seen"), [("", "1"), ("4,6,7", "6"), ("GPU-a,GPU-b", "GPU-b")])
def test_a_room_shows_its_process_one_gpu(visible: str, seen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A policy whose device is `auto` finds it there, and what an evaluation is identified by is that of the run."""
    monkeypatch.setenv(VISIBLE_GPUS, visible)
    before = os.sched_getaffinity(0)
    try:
        Room(max(before), 1).enter()
    finally:
        os.sched_setaffinity(0, before)
    assert os.environ[VISIBLE_GPUS] == seen
    config = config_of(1)
    assert Room(1, 1).applied(config).policy == config.policy
    drawing = config_of(1, farm={"physics_workers": 1, "devices": [2]})
    assert Room(1, 1).applied(drawing).farm.devices == (0,), "it sees no third"
    assert Room(1).applied(drawing).farm.devices == (2,)


def test_a_configured_run_leaves_room_only_if_its_settings_do() -> None:
    cores = (0, 1)
    assert free_room(configured(RunSpec.of(config_of(1, farm={})), cores), cores, []) is None
    assert free_room(configured(RunSpec.of(config_of(1)), cores), cores, []) == Room(1)
    inline = config_of(1, runtime=INLINE)
    assert free_room(configured(RunSpec.of(inline), cores), cores, []) is None
