"""`embodied runs`: runs of every state, and folders that hold anything."""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from embodied import cli
from embodied.commands import runs
from embodied.config.files import parse_config, save_config

CONFIG: dict[str, Any] = {"env": {"task": "tabletop/reach"}, "policy": {"kind": "flow"}, "iterations": 4}
ROW = {"env_steps": 512, "wall_s": 61.5, "env/success_recent": 0.25, "env/return": 0.5}


def make(folder: Path, iterations: int, evaluated: float | None = None, **settings: Any) -> Path:
    """A run's folder after so many iterations, as far as it is listed."""
    (folder / "checkpoints").mkdir(parents=True)
    save_config(parse_config({**CONFIG, **settings}, "test"), folder / "config.yaml")
    rows = [json.dumps({"iteration": i, **ROW, "env_steps": 512 * i}) + "\n" for i in range(1, iterations + 1)]
    (folder / "metrics.jsonl").write_text("".join(rows))
    if evaluated is not None:
        (folder / "eval.json").write_text(json.dumps({"episodes": 4, "success_rate": evaluated, "return": 0.75}))
    return folder


@pytest.fixture()
def root(tmp_path: Path) -> Iterator[Path]:
    """Runs of every state."""
    make(tmp_path / "done", 4, 0.875)
    make(tmp_path / "early", 3, 1.0, stop_at=0.2)
    make(tmp_path / "group/stopped", 2)
    make(tmp_path / "unseen", 4)
    make(tmp_path / "begun", 0)
    running = make(tmp_path / "running", 1)
    with (running / ".owner").open("w") as owner:
        json.dump({"process": os.getpid(), "host": os.uname().nodename}, owner)
        owner.flush()
        fcntl.flock(owner, fcntl.LOCK_EX)
        yield tmp_path


def found(root: Path) -> dict[str, runs.Listed]:
    return {one.name: one for one in (runs.listed(folder, root) for folder in runs.run_folders(root))}


def test_each_run_has_its_state(root: Path) -> None:
    assert {name: one.state for name, one in found(root).items()} == {
        "done": "finished",
        "early": "finished",
        "group/stopped": "stopped at iteration 2 of 4",
        "unseen": "trained, not evaluated",
        "begun": "stopped at iteration 0 of 4",
        "running": "running, iteration 1 of 4",
    }


def test_a_run_is_listed_with_what_it_has_reached(root: Path) -> None:
    done, stopped = found(root)["done"], found(root)["group/stopped"]
    assert (done.policy, done.task) == ("flow", "tabletop/reach")
    assert (done.success, done.mean_return, done.evaluated) == (0.875, 0.75, True)
    assert (stopped.success, stopped.mean_return, stopped.evaluated) == (0.25, 0.5, False)
    assert (stopped.env_steps, stopped.wall_s, stopped.problem) == (1024, 61.5, None)


def test_the_table_and_the_result_say_the_same(root: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert cli.main(["runs", "--runs-dir", str(root), "--json", str(tmp_path / "r.json")]) == 0
    shown = capsys.readouterr().out
    result = json.loads((tmp_path / "r.json").read_text())["runs"]
    assert {one["name"] for one in result} == found(root).keys()
    for one in result:
        (line,) = [line for line in shown.splitlines() if f"| {one['name']} " in line]
        assert one["state"] in line and "flow on tabletop/reach" in line
    assert "87.5%" in shown and "25.0% (training)" in shown and "1 min 02 s" in shown and "1,024" in shown


def test_a_task_that_knows_no_success_is_listed_by_its_return(tmp_path: Path) -> None:
    folder = make(tmp_path / "balanced", 4, env={"task": "gymnasium/CartPole-v1"})
    (folder / "eval.json").write_text(json.dumps({"episodes": 4, "return": 475.0}))
    one = found(tmp_path)["balanced"]
    assert (one.state, one.success, one.mean_return, one.problem) == ("finished", None, 475.0, None)


def test_optimiser_steps_of_supervised_learning_are_its_iterations(tmp_path: Path) -> None:
    folder = make(tmp_path / "learned", 0, sft={"steps": 200})
    (folder / "metrics.jsonl").write_text(json.dumps({"iteration": 100, "env_steps": 6400, "sft/loss": 0.1}) + "\n")
    one = found(tmp_path)["learned"]
    assert (one.state, one.env_steps) == ("stopped at iteration 100 of 200", None)


BROKEN = {
    "no configuration": ("config.yaml", None, "config.yaml is missing"),
    "a folder": ("config.yaml", "folder", "config.yaml cannot be read: Is a directory"),
    "no mapping": ("config.yaml", b"- 1\n", "config.yaml cannot be read"),
    "no text": ("config.yaml", b"\xff\xfe\x00env:", "config.yaml cannot be read"),
    "another task": ("config.yaml", b"env: [1, 2]\npolicy:\n  kind: flow\n", "config.yaml cannot be read"),
    "no row": ("metrics.jsonl", b"{]\n", "metrics.jsonl cannot be read"),
    "a list": ("metrics.jsonl", b"[1, 2]\n", "metrics.jsonl cannot be read"),
    "deep": ("metrics.jsonl", b"[" * 50_000 + b"\n", "metrics.jsonl cannot be read"),
    "no counts": ("metrics.jsonl", b'{"iteration": null, "env_steps": 1}\n', "metrics.jsonl cannot be read"),
    "endless": ("metrics.jsonl", b'{"iteration": Infinity, "env_steps": 1}\n', "metrics.jsonl cannot be read"),
    "no result": ("eval.json", b"[]", "eval.json cannot be read"),
    "not JSON": ("eval.json", b"\xff", "eval.json cannot be read"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_folder_says_what_is_wrong_in_its_row(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    make(tmp_path / "sound", 4, 1.0)
    file, content, message = BROKEN[kind]
    path = make(tmp_path / "broken", 2, 0.5) / file
    path.unlink()
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    assert cli.main(["runs", "--runs-dir", str(tmp_path)]) == 0
    (broken,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| broken ")]
    assert message in broken
    assert found(tmp_path)["sound"].problem is None


def test_what_a_crash_left_of_a_last_row_is_not_read(tmp_path: Path) -> None:
    with (make(tmp_path / "torn", 2) / "metrics.jsonl").open("ab") as record:
        record.write(b'{"iteration": 3, "env_')
    one = found(tmp_path)["torn"]
    assert (one.state, one.problem) == ("stopped at iteration 2 of 4", None)


def test_a_name_cannot_speak_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make(tmp_path / "red\033[31m", 1)
    assert cli.main(["runs", "--runs-dir", str(tmp_path)]) == 0
    assert "\033" not in capsys.readouterr().out


def test_evaluations_without_a_run_and_other_folders_are_not_listed(tmp_path: Path) -> None:
    evaluation = tmp_path / "evals/reach"
    evaluation.mkdir(parents=True)
    for name in ("config.yaml", "protocol.json"):
        (evaluation / name).write_text("{}")
    (tmp_path / "notes").mkdir()
    assert not found(tmp_path)


def test_no_runs_and_no_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["runs", "--runs-dir", str(tmp_path)]) == 0
    assert "no runs below" in capsys.readouterr().out
    assert cli.main(["runs", "--runs-dir", str(tmp_path / "none")]) == 2
    assert "--runs-dir" in capsys.readouterr().err


def test_listing_imports_nothing_that_computes(root: Path) -> None:
    code = f"""
import sys
from embodied import cli
assert cli.main(["runs", "--runs-dir", {str(root)!r}]) == 0
assert not {{"torch", "ray", "pydantic", "mujoco"}} & sys.modules.keys()
"""
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
