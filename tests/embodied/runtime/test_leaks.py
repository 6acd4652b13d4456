"""However a run on Ray ends, no process and no shared memory of it is left, and no folder of Ray's."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import psutil  # type: ignore[import-untyped]
import pytest

from embodied.config.files import parse_config, save_config
from embodied.reporting.metrics import read
from sim_farm.shared_memory.memory import FOLDER, PREFIX
from tests.embodied.support import stranger

ROOT = Path(__file__).resolve().parents[3]
GONE_S = 20.0
"""Longest until everything has gone: Ray's workers look every second or two whether their raylet lives."""


def family(pid: int) -> set[psutil.Process]:
    try:
        process = psutil.Process(pid)
        return {process, *process.children(recursive=True)}
    except psutil.NoSuchProcess:
        return set()


def blocks(processes: set[psutil.Process]) -> set[Path]:
    """The shared memory that they map."""
    found = set()
    for process in processes:
        try:
            found |= {Path(part.path) for part in process.memory_maps() if part.path.startswith(f"{FOLDER}/{PREFIX}")}
        except (psutil.Error, OSError):
            continue
    return {path for path in found if path.exists()}


def alive(process: psutil.Process) -> bool:
    try:
        return bool(process.is_running() and process.status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


TRAIN = [sys.executable, "-m", "embodied.cli", "train"]


def run_leaves_nothing(
    command: list[str], runs_dir: Path, number: signal.Signals | None = None, *, logs: bool = False, **variables: str
) -> int:
    """Run a command on Ray, and send it the signal once an iteration is recorded. Returns its exit status. `logs`:
    Ray's logs stay, as after every failure."""
    base = Path(tempfile.mkdtemp(prefix="l", dir="/tmp"))  # short: it becomes part of the sockets' names
    env = {**os.environ, "RAY_TMPDIR": str(base), **variables}
    driver = subprocess.Popen(command, cwd=ROOT, env=env, stdout=subprocess.DEVNULL, start_new_session=True)
    folders = base / f"embodied-{os.getuid()}"
    seen: set[psutil.Process] = set()
    memory: set[Path] = set()
    try:
        while driver.poll() is None:
            seen |= family(driver.pid)
            memory |= blocks(seen)
            if number is not None and (runs_dir / "run" / "metrics.jsonl").is_file() and read(runs_dir / "run"):
                driver.send_signal(number)
                break
            time.sleep(0.2)
        status = driver.wait(timeout=120)
        assert len(seen) > 8 and memory, "the run was not seen"
        until = time.monotonic() + GONE_S
        while True:
            left = [process.pid for process in seen if alive(process)]
            kept = [path for path in memory if path.exists()]
            kept += [path for path in folders.iterdir() if path.is_dir() and not logs]
            if not left and not kept or time.monotonic() > until:
                break
            time.sleep(0.2)
        assert not left and not kept
        return status
    finally:
        for process in seen:
            if alive(process):
                process.kill()
        shutil.rmtree(base, ignore_errors=True)


@pytest.mark.slow
@pytest.mark.parametrize("number", [None, signal.SIGINT, signal.SIGKILL], ids=["exit", "Ctrl-C", "kill -9"])
def test_a_run_leaves_nothing_however_it_ends(number: signal.Signals | None, tmp_path: Path) -> None:
    command = [*TRAIN, "reach", "--runs-dir", str(tmp_path), "--name", "run"]
    command += ["--iterations", "1" if number is None else "1000", "--eval.episodes", "2", "--eval.videos", "0"]
    run_leaves_nothing(command, tmp_path, number)


def test_a_run_that_is_refused_while_ray_is_started_leaves_nothing(tmp_path: Path) -> None:
    stranger.write(tmp_path / "packages")
    task = f"{stranger.NAMES['env.task']}/reach"  # of a simulator that is not quick
    config = {"env": {"task": task, "num_envs": 2, "init_states": 3}, "farm": {"physics_workers": 1}}
    save_config(parse_config(config, "test"), tmp_path / "own.yaml")
    command = [*TRAIN, str(tmp_path / "own.yaml"), "--runs-dir", str(tmp_path), "--name", "run"]
    path = f"{ROOT}:{tmp_path / 'packages'}"
    assert run_leaves_nothing(command, tmp_path, logs=True, PYTHONPATH=path) == 2
