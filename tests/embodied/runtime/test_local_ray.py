"""The folder, the token and the guard of a Ray that is started here."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import stat
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import ray

from embodied.errors import UserError
from embodied.runtime.ray import local_ray, no_agent
from embodied.runtime.ray.local_ray import (
    AGENTS,
    LOCK,
    LONGEST,
    RayProcesses,
    RaySession,
    _without_agents,
    private_folder,
)

NOBODY = 65534


@pytest.fixture
def base(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A short path in which Rays have their folders."""
    folder = Path(tempfile.mkdtemp(prefix="s", dir="/tmp"))
    folder.chmod(0o755)
    monkeypatch.setenv("RAY_TMPDIR", str(folder))
    for name in local_ray.AUTHENTICATION:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(local_ray, "_read_again", lambda: None)  # the Ray that modules share needs its token still
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


def as_nobody(code: str) -> str:
    """What another user's Python prints; this user's own, where it may not become another."""
    become = "" if os.getuid() else f"os.setgroups([]); os.setgid({NOBODY}); os.setuid({NOBODY}); "
    command = ["/usr/bin/env", "python3", "-c", f"import os, socket; {become}{code}"]
    path = os.pathsep.join(["/usr/bin", "/bin"]) if become else os.environ["PATH"]
    return subprocess.run(command, capture_output=True, text=True, check=True, env={"PATH": path}).stdout.strip()


TRY_CONNECT = """
for attempt in ({call}):
    try:
        attempt()
        print("reached")
    except PermissionError:
        print("refused")
"""


def test_nobody_else_reaches_a_socket_of_ray_or_lists_its_folder(ray_runtime: Any) -> None:
    """By the modes of the folders above it; and by trying, where this user may become another."""
    ray_runtime.start_ray()
    node: Any = ray._private.worker._global_node
    there = Path(node.raylet_socket_name)
    folder = ray_runtime._session.folder
    assert folder in there.parents and stat.S_ISSOCK(there.stat().st_mode)
    with socket.socket(socket.AF_UNIX) as mine:
        mine.connect(str(there))
    assert stat.S_IMODE(folder.parent.stat().st_mode) == 0o700 and folder.parent.stat().st_uid == os.getuid()
    if os.getuid() == 0:
        tries = f"lambda: socket.socket(socket.AF_UNIX).connect({str(there)!r}), lambda: os.listdir({str(folder)!r})"
        tries += f", lambda: os.listdir({str(folder.parent)!r})"
        assert as_nobody(f"exec({TRY_CONNECT.format(call=tries)!r})").split() == ["refused"] * 3


ASK = """
import sys
from ray._private import ray_constants
ray_constants.ENABLE_RAY_CLUSTER = False
from ray._raylet import GcsClient
from ray.exceptions import AuthenticationError
try:
    GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None)
    print("reached")
except AuthenticationError:
    print("refused")
"""


def test_a_port_of_ray_is_of_no_use_without_the_token(ray_runtime: Any, tmp_path: Path) -> None:
    ray_runtime.start_ray()
    address = ray.get_runtime_context().gcs_address
    mine = {name: value for name, value in os.environ.items() if name.startswith("RAY_AUTH")}
    others = {name: value for name, value in os.environ.items() if name not in mine} | {"HOME": str(tmp_path)}
    for env, answer in ((others | mine, "reached"), (others, "refused")):
        result = subprocess.run([sys.executable, "-c", ASK, address], env=env, capture_output=True, text=True)
        assert result.stdout.strip() == answer, result
    assert mine["RAY_AUTH_TOKEN"] not in " ".join(
        argument for process in psutil.Process().children(recursive=True) for argument in process.cmdline()
    ), "everybody sees the arguments of a process"


def test_a_folder_goes_with_its_session_and_the_environment_is_as_before(base: Path) -> None:
    before = dict(os.environ)
    session = RaySession()
    (session.folder / "logs").mkdir()
    assert session.folder.parent == private_folder() and os.environ["RAY_AUTH_MODE"] == "token"
    session.close()
    assert not session.folder.exists()
    assert dict(os.environ) == before


def test_a_choice_of_the_users_own_stands(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    session = RaySession()
    assert os.environ["RAY_AUTH_MODE"] == "disabled" and "RAY_AUTH_TOKEN" not in os.environ
    session.close()
    assert os.environ["RAY_AUTH_MODE"] == "disabled"


def test_what_failed_leaves_its_logs_until_the_next_start(base: Path) -> None:
    first = RaySession()
    first.close(keep=True)
    assert first.folder.exists()
    second, third = RaySession(), RaySession()
    assert not first.folder.exists()
    assert second.folder.exists(), "it is in use"
    second.close()
    third.close()
    assert [path.name for path in private_folder().iterdir()] == [LOCK]


KILLED = """
import os, signal, subprocess, sys
from embodied.runtime.ray.local_ray import RaySession
session = RaySession()
helper = subprocess.Popen(["sleep", "600"], start_new_session=True)
session.watch([helper.pid])
print(helper.pid, session._guard.pid, session.folder, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_guard_ends_what_a_killed_process_leaves(base: Path) -> None:
    result = subprocess.run([sys.executable, "-c", KILLED], capture_output=True, text=True)
    assert result.returncode == -signal.SIGKILL, result.stderr
    helper, guard, folder = result.stdout.split()
    alive = [psutil.Process(int(pid)) for pid in (helper, guard) if psutil.pid_exists(int(pid))]
    _, left = psutil.wait_procs(alive, timeout=60)
    assert not [process for process in left if process.status() != psutil.STATUS_ZOMBIE]
    assert not Path(folder).exists()


def test_what_stands_for_an_agent_has_no_port_and_ends_with_the_raylet(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", no_agent.__file__, str(tmp_path), *AGENTS["dashboard_agent"]]
    environment = os.environ | {"RAY_NODE_ID": "abc"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, env=environment) as agent:
        pass  # the end of the block closes its standard input and waits for it
    assert agent.returncode == 0
    expected = {"metrics_agent_port_abc", "metrics_export_port_abc", "dashboard_agent_listen_port_abc"}
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == dict.fromkeys(expected, "-1")


def test_a_raylet_whose_agents_have_other_names_is_not_started() -> None:
    with pytest.raises(KeyError, match="--dashboard_agent_command"):
        _without_agents(["raylet", "--session_dir=/tmp", "--head"])


def test_a_folder_that_others_may_enter_is_refused(base: Path) -> None:
    folder = base / f"embodied-{os.getuid()}"
    folder.mkdir()
    folder.chmod(0o755)
    with pytest.raises(UserError, match=f"not a folder of this user alone: .*chmod 700 {folder}"):
        private_folder()
    folder.rmdir()
    folder.symlink_to(tempfile.mkdtemp(dir=base))
    with pytest.raises(UserError, match="not a folder of this user alone"):
        private_folder()
    folder.unlink()
    folder.write_text("")
    with pytest.raises(UserError, match="cannot be made"):
        private_folder()


def test_a_path_that_is_too_long_for_sockets_is_refused(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_TMPDIR", str(base / ("x" * LONGEST)))
    with pytest.raises(UserError, match="set RAY_TMPDIR to a shorter one"):
        private_folder()


def test_a_ray_that_lost_a_process_while_it_started_is_lost() -> None:
    processes = RayProcesses()
    with processes.noted():
        subprocess.Popen(["sleep", "60"])
    try:
        assert processes.lost() == "Ray's gcs_server died"
    finally:
        processes.end()
    assert processes.lost() is None, "nothing is Ray's any more"
