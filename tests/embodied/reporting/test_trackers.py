"""Trackers repeat the record under its names, by the libraries themselves and offline; their failures are warnings."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import embodied
from embodied import cli
from embodied.commands.train import train_run
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.reporting import trackers
from embodied.reporting.metrics import SELECTION, MetricsWriter, read
from embodied.reporting.trackers import FILE, TRACKERS, TensorBoard, Tracking, check_packages, tracked
from tests.full_disk import full_disk

ROOT = Path(__file__).parents[3]
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
"""TensorBoard writes in a thread, which a full disk ends."""
SETTINGS: dict[str, Any] = {
    "iterations": 2,
    "env": {"task": "tabletop/reach", "num_envs": 2, "max_episode_steps": 4},
    "policy": {"options": {"widths": [8]}},
    "rollout": {"decisions": 4},
    "optim": {"epochs": 1},
    "eval": {"episodes": 2, "every": 1, "videos": 1},
    "runtime": {"mode": "inline"},
}
Points = dict[str, list[tuple[int, float]]]
"""(env steps, value) of each metric."""


def config_of(*track: str) -> Config:
    return parse_config({"track": list(track)}, "test")


def write_rows(run_dir: Path, tracking: Tracking, iterations: range, success: float) -> None:
    with MetricsWriter(run_dir, tracking) as writer:
        writer.truncate(iterations.start - 1)
        for i in iterations:
            writer.write(i, 100 * i, {"wall_s": 2.0 * i, "env/success_once": success, "nothing": float("nan")})


# --- what each library has written, read back


def of_tensorboard(run_dir: Path) -> Points:
    found = EventAccumulator(str(run_dir / "tensorboard")).Reload()
    return {name: [(one.step, one.value) for one in found.Scalars(name)] for name in found.scalars.Keys()}


def wandb_records(path: Path) -> Iterator[Any]:
    """The records of a .wandb file: LevelDB's log format, blocks of 32 KiB of parts with checksum, length and type."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, place, parts = path.read_bytes(), 7, b""
    while place + 7 <= len(data):
        if 2**15 - place % 2**15 < 7:  # too little is left of the block for another part
            place += 2**15 - place % 2**15
            continue
        _, length, kind = struct.unpack("<IHB", data[place : place + 7])
        parts += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def wandb_files(run_dir: Path) -> list[Path]:
    import wandb

    wandb.teardown()  # its own process writes the files, and may not have written all of them before it ends
    return sorted((run_dir / "wandb").glob("offline-run-*/run-*.wandb"))


def of_wandb(run_dir: Path) -> Points:
    points: Points = {}
    for path in wandb_files(run_dir):
        for record in wandb_records(path):
            row = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
            for name, value in row.items():
                if not name.startswith("_"):
                    points.setdefault(name, []).append((row["env_steps"], value))
    return points


READ: dict[str, Callable[[Path], Points]] = {"tensorboard": of_tensorboard, "wandb": of_wandb}


@pytest.fixture(autouse=True)
def offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")


@pytest.mark.parametrize("name", READ)
def test_rows_that_are_computed_again_are_there_once(name: str, tmp_path: Path) -> None:
    with tracked(config_of(name), tmp_path) as tracking:
        write_rows(tmp_path, tracking, range(1, 8), 0.5)
    time.sleep(1.1)  # TensorBoard's files are read in the order of their names, which have the second
    with tracked(config_of(name), tmp_path) as tracking:
        write_rows(tmp_path, tracking, range(5, 10), 0.75)
    found = READ[name](tmp_path)
    assert "nothing" not in found, "what is not finite is left out"
    assert [step for step, _ in found["env/success_once"]] == [100 * i for i in range(1, 10)]
    forgets = name == "tensorboard"
    assert [value for _, value in found["env/success_once"]] == [0.5] * (4 if forgets else 7) + [0.75] * (
        5 if forgets else 2
    )


@pytest.mark.slow
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("name", ["mlflow", "trackio"])
def test_rows_of_a_library_of_another_environment_are_there_once(name: str, tmp_path: Path) -> None:
    """It is installed into one that sees the packages of this one: of what is pinned, Trackio wants other versions."""
    venv.create(tmp_path / "venv", with_pip=True)
    python = tmp_path / "venv" / "bin" / "python"
    (site,) = (tmp_path / "venv" / "lib").glob("*/site-packages")
    (site / "outer.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    subprocess.run([python, "-m", "pip", "install", "--quiet", *TRACKERS[name].install.split()], check=True)
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TRACKIO_DIR": str(tmp_path / "trackio")}
    environment.pop("MLFLOW_TRACKING_URI", None)
    command = [python, "-m", "tests.embodied.reporting.tracked_run", name, tmp_path / "run"]
    output = subprocess.run(command, check=True, env=environment, cwd=ROOT, stdout=subprocess.PIPE, text=True).stdout
    found = json.loads(output.splitlines()[-1])
    success = [[100 * i, 0.5] for i in range(1, 5)] + [[500, 0.75], [600, 0.75]]
    assert found["points"]["env/success_once"] == found["points"]["env/success_once/tabletop/reach"] == success
    assert "nothing" not in found["points"] and found["points"]["final/return"][-1] == [600, 3.0]
    assert found["task"] == Config().env.task and found["files"] == ["report.html"]


@pytest.mark.parametrize("name", READ)
def test_a_run_may_go_back_while_it_is_tracked(name: str, tmp_path: Path) -> None:
    with tracked(config_of(name), tmp_path) as tracking, MetricsWriter(tmp_path, tracking) as writer:
        for number in (1, 2, 3):
            writer.write(number, 100 * number, {"env/success_once": 0.5})
        time.sleep(1.1)  # as above
        writer.truncate(after_iteration=1)
        writer.write(2, 200, {"env/success_once": 0.5})
        with MetricsWriter(tmp_path, tracking, SELECTION) as selection:  # in the background, it comes late
            selection.write(1, 100, {"wall_s": 1.0, "eval/success_rate": 1.0})
    found = READ[name](tmp_path)
    assert sorted(found["env/success_once"]) == [(100, 0.5), (200, 0.5)] + ([(300, 0.5)] if name == "wandb" else [])
    assert found["eval/success_rate"] == [(100, 1.0)]


def test_a_tracker_that_a_resumed_run_begins_with_has_all_rows_from_there(tmp_path: Path) -> None:
    with tracked(config_of("tensorboard"), tmp_path) as tracking:
        write_rows(tmp_path, tracking, range(1, 8), 0.5)
    with tracked(config_of("wandb"), tmp_path) as tracking:
        write_rows(tmp_path, tracking, range(5, 8), 0.75)
    assert of_wandb(tmp_path)["env/success_once"] == [(500, 0.75), (600, 0.75), (700, 0.75)]


def test_a_run_is_followed_from_its_first_row_to_its_page(tmp_path: Path) -> None:
    config = parse_config({**SETTINGS, "name": "run", "track": ["tensorboard", "wandb"]}, "test")
    result = train_run(config, "test", tmp_path, resume=False)
    run_dir, rows = tmp_path / "run", read(tmp_path / "run")
    for name, points in ((name, READ[name](run_dir)) for name in READ):
        assert points["env/return"] == [(row["env_steps"], pytest.approx(row["env/return"])) for row in rows], name
        assert {key for key, value in rows[-1].items() if value is not None} <= points.keys(), name
        assert len(points["eval/return"]) == 2 and len(points["wall_s"]) == 2, name
    assert of_tensorboard(run_dir)["final/return"] == [(rows[-1]["env_steps"], pytest.approx(result["return"]))]
    (file,) = wandb_files(run_dir)
    records = list(wandb_records(file))
    noted = {u.key: json.loads(u.value_json) for record in records for u in record.summary.update}
    assert noted["final/return"] == pytest.approx(result["return"])
    (begun,) = [record.run for record in records if record.WhichOneof("record_type") == "run"]
    assert begun.run_id == json.loads((run_dir / FILE).read_text())["wandb"] and begun.display_name == "run"
    settings = {update.key: json.loads(update.value_json) for update in begun.config.update}
    assert settings["env"]["task"] == "tabletop/reach" and settings["iterations"] == 2
    kept = {entry.path for record in records for entry in record.request.log_artifact.artifact.manifest.contents}
    kept |= {entry.path for record in records for entry in record.artifact.manifest.contents}
    assert {"evaluation.mp4", "report.html"} <= kept


def test_a_run_goes_on_as_the_same_tracked_run(tmp_path: Path) -> None:
    for _ in range(2):
        with tracked(config_of("wandb"), tmp_path):
            pass
    ids = {
        record.run.run_id
        for path in wandb_files(tmp_path)
        for record in wandb_records(path)
        if record.WhichOneof("record_type") == "run"
    }
    assert ids == {json.loads((tmp_path / FILE).read_text())["wandb"]}


# --- failures


class Failing(TensorBoard):
    """Its disk, or its server, is gone after the first row."""

    def log(self, row: Any, env_steps: int) -> None:
        if env_steps > 100:
            raise ConnectionError("the server is gone")
        super().log(row, env_steps)


def test_a_failure_in_the_middle_is_one_warning_and_the_others_go_on(tmp_path: Path) -> None:
    said: list[str] = []
    tracking = Tracking(tmp_path, {"failing": Failing(), "tensorboard": TensorBoard()}, said.append)
    tracking.begin(Config())
    write_rows(tmp_path, tracking, range(1, 5), 0.5)
    tracking.close()
    (warning,) = said
    assert "Warning: failing does not follow" in warning and "ConnectionError: the server is gone" in warning
    assert len(read(tmp_path)) == 4
    assert {step for step, _ in of_tensorboard(tmp_path)["env/success_once"]} == {100, 200, 300, 400}


def test_tensorboard_that_has_no_room_does_not_end_a_run(tmp_path: Path) -> None:
    said: list[str] = []
    tracking = Tracking(tmp_path, {"tensorboard": TensorBoard()}, said.append)
    with MetricsWriter(tmp_path, tracking) as writer:
        tracking.begin(Config())
        with full_disk(1000):
            for number in range(1, 5):
                many = {f"a long name of a metric {n}": 0.5 for n in range(5 if number > 1 else 1)}
                writer.write(number, number, many)
        assert [row["iteration"] for row in read(tmp_path)] == [1, 2, 3, 4]
    assert len(said) == 1 and "File too large" in said[0]


@pytest.fixture
def absent(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> str:
    """A tracker whose package is not installed, in a folder that has a folder of its name."""
    without = replace(TRACKERS["trackio"], package="not_installed")  # in whatever environment the test is run
    monkeypatch.setitem(TRACKERS, "trackio", without)
    (tmp_path / "not_installed").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return "trackio"


@pytest.mark.parametrize("verb", ["train", "sft"])
def test_a_missing_package_is_refused_before_the_run(
    verb: str, absent: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([verb, "reach", "--track", "tensorboard", absent]) == 2
    message = capsys.readouterr().err
    assert "trackio, whose package is not installed: pip install trackio, or" in message
    assert not (tmp_path / "runs").exists()


def test_a_missing_package_is_refused_from_python_too(absent: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="pip install trackio"):
        embodied.train(parse_config({**SETTINGS, "track": absent}, "test"), runs_dir=tmp_path)
    check_packages([])


def test_no_library_is_imported_before_it_is_asked_for() -> None:
    code = f"import sys, {trackers.__name__}; assert not {{'wandb', 'mlflow', 'trackio', 'torch'}} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_tracker_of_the_setting_is_there() -> None:
    assert set(TRACKERS) == set(parse_config({"track": sorted(TRACKERS)}, "test").track)
