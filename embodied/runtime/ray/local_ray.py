"""A Ray that this process starts: its private folder, its token, its guard process, and its own processes.

Ray makes its folder, with its sockets, writable for every user, and a process that reaches a socket of the raylet may
have it run code. So the folder lies within one that no other user may enter. Connections to Ray's ports need the token;
Ray's own token would lie in a file in the user's home that every user may read.
"""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import psutil  # type: ignore[import-untyped]
from ray._private import ray_constants, services
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader, Config  # type: ignore[attr-defined]

from embodied.errors import UserError
from embodied.runtime.ray import guard, no_agent

LOCK = ".lock"
MODE, TOKEN, TOKEN_PATH = AUTHENTICATION = ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")
LONGEST = 107 - len("/session_2026-11-24_19-15-10_157370_4194304/sockets/plasma_store")
"""Longest path of a folder, so that a socket below it can have a name."""
NAME = 11
"""Length of the name of a folder below the user's."""
GUARD_S = 2 * guard.REMOVING_S
"""Longest wait for the guard to end."""


class RaySession:
    """The folder, token and guard of one Ray, until `close`. Leftovers of earlier ones are removed.

    Raises `UserError` where no folder can be this user's alone.
    """

    def __init__(self) -> None:
        home = private_folder()
        with _locked(home):
            _sweep(home)
            self.folder = Path(tempfile.mkdtemp(dir=home))
            # The guard has it too: it is free when both have ended.
            self._lock = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o600)
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        self._guard = subprocess.Popen(
            [sys.executable, "-I", "-S", guard.__file__, str(self.folder)],
            stdin=subprocess.PIPE, text=True, pass_fds=[self._lock], start_new_session=True,
        )  # fmt: skip
        self._before = {name: os.environ.get(name) for name in AUTHENTICATION}
        if not any(self._before.values()):
            os.environ.update({MODE: "token", TOKEN: secrets.token_hex(32)})
            _read_again()

    def watch(self, processes: Iterable[int]) -> None:
        """Have the guard end these when this process ends, or is killed."""
        self._send(processes)

    def close(self, keep: bool = False) -> None:
        """Remove the folder, unless Ray's logs in it are to stay until Ray is started again."""
        if keep:
            self._send([guard.KEEP])
        assert self._guard.stdin is not None
        self._guard.stdin.close()
        try:
            self._guard.wait(GUARD_S)
        except subprocess.TimeoutExpired:
            self._guard.kill()
            self._guard.wait()
        os.close(self._lock)
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value
        _read_again()

    def _send(self, lines: Iterable[object]) -> None:
        assert self._guard.stdin is not None
        self._guard.stdin.writelines(f"{line}\n" for line in lines)
        self._guard.stdin.flush()


def private_folder() -> Path:
    """The folder, below RAY_TMPDIR or /tmp, of all Rays of this user; no other user may enter it.

    Raises `UserError` if it is another user's, or open to others, or its path too long.
    """
    base = os.environ.get("RAY_TMPDIR") or "/tmp"  # noqa: S108 - owner and permissions are checked
    folder = Path(base) / f"embodied-{os.getuid()}"
    if len(str(folder / ("x" * NAME))) > LONGEST:
        raise UserError(f"{folder} is too long a path for Ray's sockets: set RAY_TMPDIR to a shorter one")
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise UserError(f"{folder}, for Ray's sockets and logs, cannot be made ({error.strerror})") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or stat.S_IMODE(found.st_mode) & 0o077:
        raise UserError(
            f"{folder}, for Ray's sockets and logs, is not a folder of this user alone: remove it or make it so "
            f"(chmod 700 {folder}), or set RAY_TMPDIR to another place"
        )
    return folder


def _sweep(home: Path) -> None:
    """Remove the folders whose locks are free."""
    for folder in home.iterdir():
        if folder.is_dir():
            with (folder / LOCK).open("a") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    continue
            shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def _locked(home: Path) -> Iterator[None]:
    """One process at a time: a folder that is made but not yet locked would look free."""
    with (home / LOCK).open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _read_again() -> None:
    """Have Ray, which is loaded, read the environment again."""
    Config.initialize("")
    AuthenticationTokenLoader.instance().reset_cache()


# --- Ray's own processes on this machine

NEEDED = ("gcs_server", "raylet")
"""Processes that starting and finding an actor need: the store of the cluster's state, and the node's manager."""
UNREAD = ("start_monitor", "start_log_monitor", "start_api_server")
"""Ray's methods that start its autoscaler, log monitor and dashboard. Nothing reads what these write; they take 2.5 s
of CPU time, and Ray waits for one of them before it starts the raylet (docs/decisions/0203)."""
AGENTS = {
    "dashboard_agent": ("metrics_agent_port", "metrics_export_port", "dashboard_agent_listen_port"),
    "runtime_env_agent": ("runtime_env_agent_port",),
}
"""The raylet's agents, each with the files in which the raylet waits for its ports before it serves. They are Python
programs of 1.6 s of CPU time. Nothing reads what the first reports; the second makes environments of actors, which
ours do themselves. A small process takes the place of each (docs/decisions/0203)."""
STOPPED_S = 3.0
"""Longest time that one may be stopped by a signal: a terminal stops and continues a run's processes one by one."""
END_S = 10.0
"""Longest wait for the end of processes that were killed."""


@contextmanager
def only_needed(environment: Mapping[str, str]) -> Iterator[None]:
    """A Ray that is started in the block has none of the processes of `UNREAD` and `AGENTS`, and its actors begin with
    these environment variables."""
    before, starting = {name: getattr(Node, name) for name in UNREAD}, cast(Any, services)
    start = starting.start_ray_process

    def start_process(command: list[str], process_type: str, **options: Any) -> Any:
        if process_type == ray_constants.PROCESS_TYPE_RAYLET:
            command = _without_agents(command)
            options["env_updates"] = {**(options["env_updates"] or {}), **environment}
        return start(command, process_type, **options)

    for name in UNREAD:
        setattr(Node, name, lambda self, **options: None)
    starting.start_ray_process = start_process
    try:
        yield
    finally:
        starting.start_ray_process = start
        for name, method in before.items():
            setattr(Node, name, method)


def _without_agents(command: Sequence[str]) -> list[str]:
    """The raylet's command with the commands of its agents replaced. Raises `KeyError` where it has another form."""
    options = dict(option.split("=", 1) for option in command[1:] if "=" in option)
    for agent, ports in AGENTS.items():
        del options[f"--{agent}_command"]
        own = [sys.executable, "-I", "-S", no_agent.__file__, options["--session_dir"], *ports]
        options[f"--{agent}_command"] = subprocess.list2cmdline(own)
    flags = [option for option in command[1:] if "=" not in option]
    return [command[0], *(f"{name}={value}" for name, value in options.items()), *flags]


@dataclass
class RayProcesses:
    """The processes that `ray.init` has started from this one; none where it has joined a cluster."""

    started: tuple[psutil.Process, ...] = ()
    names: Mapping[int, str] = field(default_factory=dict)
    """Names of the needed ones, by process id."""
    _stopped: dict[int, float] = field(default_factory=dict)
    """Time since which each is seen to be stopped, by process id."""

    @contextmanager
    def noted(self) -> Iterator[None]:
        """Count the processes that this one starts in the block as Ray's."""
        before = set(psutil.Process().children())
        yield
        self.started = tuple(set(psutil.Process().children()) - before)
        self.names = {one.pid: one.name() for one in self.started if one.name() in NEEDED}
        self._stopped.clear()

    def lost(self, stopped_s: float = STOPPED_S) -> str | None:
        """A message that names the one that died, or was stopped for so long; None where all live."""
        missing = [name for name in NEEDED if name not in self.names.values()]
        if self.started and missing:  # it died, and was reaped, before it could be noted
            return f"Ray's {missing[0]} died"
        for process in self.started:
            name, now = self.names.get(process.pid), time.monotonic()
            if name is None:
                continue
            status = _status(process)
            if status in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                return f"Ray's {name} died"
            if status != psutil.STATUS_STOPPED:
                self._stopped.pop(process.pid, None)
            elif now - self._stopped.setdefault(process.pid, now) >= stopped_s:
                return f"Ray's {name} has been stopped for {now - self._stopped[process.pid]:.1f} s"
        return None

    def end(self) -> None:
        """End them, in any state, with all that they have started."""
        every = set(self.started)
        for process in self.started:
            try:
                every |= set(process.children(recursive=True))
            except psutil.NoSuchProcess:
                continue
        for process in every:
            try:
                process.kill()
            except psutil.NoSuchProcess:
                continue
        psutil.wait_procs(every, timeout=END_S)
        self.started, self.names = (), {}


def _status(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return str(psutil.STATUS_DEAD)
