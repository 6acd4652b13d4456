"""Workers as Ray actors: the same result as inline, errors and deaths that arrive, and nothing that stays behind."""

from __future__ import annotations

import gc
import importlib
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from embodied import progress
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.execution.session import Session
from embodied.reporting.metrics import read
from embodied.run import checkpoint
from embodied.run.folder import prepare_run
from embodied.runtime.api import InlineRuntime, Runtime
from embodied.runtime.deadlines import Deadline, Wait
from embodied.runtime.handles import Handle
from embodied.runtime.ray import cluster as ray_cluster
from embodied.runtime.ray.runtime import RayRuntime
from embodied.training import loop as training
from embodied.workflows.run_spec import RunSpec
from policies.contract import PolicyError
from sim_farm.client.farm import WorkerFailed, WorkerTimeout
from sim_farm.shared_memory.memory import FOLDER
from tests.embodied.conftest import SharedRay
from tests.embodied.runtime.test_relay import STATES
from tests.embodied.support.shared_blocks import mapped

ROOT = Path(__file__).resolve().parents[3]


def config_of(groups: int = 2, iterations: int = 3, **changes: Any) -> Config:
    settings = {
        "seed": 4,
        "iterations": iterations,
        "env": {"task": "tabletop/push", "num_envs": 4, "max_episode_steps": 13},
        "farm": {"groups": groups, "physics_workers": 2},
        "policy": {"options": {"widths": [16], "initial_log_std": 0.0}},
        "rollout": {"decisions": 16},
        "optim": {"epochs": 2, "minibatch": 24, "policy_lr": 3e-3},
        "runtime": {"deadline_s": 240.0},
    }
    return parse_config({**settings, **changes}, "test")


@pytest.fixture(scope="module")
def cluster(ray_runtime: RayRuntime) -> RayRuntime:
    return ray_runtime


def session_of(config: Config, runtime: Runtime) -> Session:
    return Session(config, runtime, tuple(sorted(os.sched_getaffinity(0))))


def train(config: Config, folder: Path, runtime: Runtime) -> dict[str, bytes]:
    """The bytes of the last checkpoint's tensors."""
    prepare_run(config, folder, resume=False)
    training.train(RunSpec.of(config), folder, session_of(config, runtime), None)
    last = checkpoint.latest(folder / "checkpoints")
    assert last is not None
    checkpoint.verify(last)
    return {str(path.relative_to(last)): path.read_bytes() for path in last.rglob("*.safetensors")}


# --- the same result


@pytest.mark.slow  # every plan is compared in test_executor.py, the loop and its checkpoints in test_recovery.py
@pytest.mark.parametrize("groups", (1, 2))
def test_training_under_ray_equals_training_inline(groups: int, cluster: RayRuntime, tmp_path: Path) -> None:
    """To the last bit: workers, batches and threads are the same, only the processes are not."""
    config = config_of(groups)
    assert train(config, tmp_path / "ray", cluster) == train(config, tmp_path / "inline", InlineRuntime(60.0))
    rows = read(tmp_path / "ray")
    assert len(rows) == 3 and any(row["env/episodes"] for row in rows)
    for row, expected in zip(rows, read(tmp_path / "inline"), strict=True):
        names = [name for name in row if name.startswith(("env/", "learner/", "lag/")) and name != "learner/update_s"]
        assert {name: row[name] for name in names} == {name: expected[name] for name in names}


# --- what goes wrong arrives


@dataclass
class Clumsy:
    """A worker that sleeps, fails or dies when told to."""

    wish: str = ""

    def __post_init__(self) -> None:
        if self.wish:
            raise PolicyError(self.wish)

    def sleep(self, seconds: float) -> str:
        time.sleep(seconds)
        return "awake"

    def work(self, steps: int, step_s: float) -> int:
        """Long work that reports each of its steps."""
        for _ in range(steps):
            time.sleep(step_s)
            progress.report()
        return steps

    def take(self, made: int) -> int:
        return made

    def long_work(self) -> int:
        return self.work(12, 0.2)

    def fail(self, message: str) -> None:
        raise UserError(message)

    def die(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


@dataclass
class Looker:
    """A worker that says what its process was given."""

    def variable(self, name: str) -> str | None:
        return os.environ.get(name)

    def imported(self, name: str) -> str:
        return str(importlib.import_module(name).__file__)

    def frozen(self) -> tuple[int, bool]:
        return gc.get_freeze_count(), gc.isenabled()


def test_workers_import_what_this_process_can_by_now(
    cluster: RayRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster.start("somebody", list).end()  # Ray has started
    (tmp_path / "written_later.py").touch()
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(cluster, "_spare", [])  # a process that was made before the path changed has the old one
    looker = cluster.start("looker", Looker)
    assert looker.call(Looker.imported, "written_later") == str(tmp_path / "written_later.py")


def test_a_ray_that_is_started_here_has_no_program_of_python_but_our_workers(cluster: RayRuntime) -> None:
    looker = cluster.start("looker", Looker)
    (raylet,) = (one for one in psutil.Process().children() if one.name() == "raylet")
    agents = [one for one in raylet.children() if not one.name().startswith("ray::_Workers")]
    assert [Path(one.cmdline()[3]).name for one in agents] == ["no_agent.py"] * 2
    assert looker.call(Looker.variable, "GOMP_SPINCOUNT") == "1000"


def test_what_a_worker_has_imported_when_it_begins_is_not_collected(cluster: RayRuntime) -> None:
    count, enabled = cluster.start("looker", Looker).call(Looker.frozen)
    assert count > 100_000 and enabled


@pytest.mark.slow
def test_workers_see_the_gpus_that_the_command_sees(cluster: RayRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray neither hides GPUs from workers that asked it for none nor deals them out."""
    cluster.start("somebody", list).end()  # Ray has started, without the variable
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "GPU-b,GPU-a")
    monkeypatch.setattr(cluster, "_spare", [])
    looker = cluster.start("looker", Looker)
    assert looker.call(Looker.variable, "CUDA_VISIBLE_DEVICES") == "GPU-b,GPU-a"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    monkeypatch.setattr(cluster, "_spare", [])
    looker = cluster.start("looker", Looker)
    assert looker.call(Looker.variable, "CUDA_VISIBLE_DEVICES") is None


@pytest.fixture(scope="module")
def clumsy(cluster: RayRuntime) -> Handle[Clumsy]:
    return cluster.start("clumsy", Clumsy)


def test_a_late_call_names_worker_method_and_time(clumsy: Handle[Clumsy]) -> None:
    clumsy.deadline = Deadline(1.0)
    with pytest.raises(
        WorkerTimeout, match=r"^clumsy did not finish 'sleep': no progress for 1\.. s, with a deadline of 1 s$"
    ):
        clumsy.call(Clumsy.sleep, 2.0)
    clumsy.deadline = Deadline(60.0)
    assert clumsy.call(Clumsy.sleep, 0.0) == "awake", "a worker that was late is of no use any more"


@pytest.mark.slow
def test_work_that_reports_progress_is_not_late(clumsy: Handle[Clumsy]) -> None:
    """Longer than the deadline; and it is late as soon as it stops to report."""
    clumsy.deadline = Deadline(1.5)
    assert clumsy.call(Clumsy.long_work) == 12
    with pytest.raises(WorkerTimeout, match=r"^clumsy did not finish 'work': no progress for \d\.\d s, .* of 1.5 s$"):
        clumsy.call(Clumsy.work, 1, 4.0)
    clumsy.deadline = Deadline(60.0)
    assert clumsy.call(Clumsy.sleep, 0.0) == "awake"


@pytest.mark.slow
def test_a_worker_that_waits_for_anothers_result_is_not_late_while_that_one_reports(
    cluster: RayRuntime, clumsy: Handle[Clumsy]
) -> None:
    waiting = cluster.start("waiting", Clumsy)
    waiting.deadline = Deadline(1.5)
    assert waiting.get(waiting.pipe(Clumsy.take, clumsy, Clumsy.long_work)) == 12
    assert waiting.get(waiting.submit(Clumsy.take, clumsy.submit(Clumsy.work, 12, 0.2))) == 12
    message = "^waiting did not finish 'take': no progress for .*; it was to have the result of clumsy's 'work' first$"
    with pytest.raises(WorkerTimeout, match=message):
        waiting.get(waiting.submit(Clumsy.take, clumsy.submit(Clumsy.work, 1, 4.0)))
    waiting.deadline = Deadline(60.0)
    waiting.end()


def test_reports_go_nowhere_in_this_process() -> None:
    worker = InlineRuntime(0.01).start("clumsy", Clumsy)
    assert worker.call(Clumsy.work, 3, 0.02) == 3


def test_deadlines_nest() -> None:
    """Whoever waits for somebody who waits has more time than that one; at each level enough to replace who is late."""
    call = Deadline(600.0)
    farm, worker = call.inner(), call.inner().inner()
    assert worker.seconds < farm.seconds < call.seconds
    assert farm.seconds - worker.seconds >= 120 and call.seconds - farm.seconds >= 120
    with pytest.raises(ValueError, match="a deadline is a positive number of seconds, got 0"):
        Deadline(0)


def test_a_wait_counts_from_its_beginning_or_the_last_progress() -> None:
    now = time.monotonic_ns()
    long_ago, deadline = now - 10 * 10**9, Deadline(10.0)
    assert Wait(deadline, begin_ns=long_ago - 10**9).late()
    assert not Wait(deadline, lambda: now, begin_ns=long_ago - 10**9).late(), "progress does not count"
    assert not Wait(deadline, lambda: long_ago - 10**9).late(), "it was late before it began"


def test_an_exception_in_a_worker_arrives_as_itself(clumsy: Handle[Clumsy]) -> None:
    with pytest.raises(UserError, match="^no such thing$") as caught:
        clumsy.call(Clumsy.fail, "no such thing")
    assert type(caught.value) is UserError
    with pytest.raises(UserError, match="^nor this$"):
        clumsy.get(clumsy.submit(Clumsy.fail, "nor this"))
    assert clumsy.call(Clumsy.sleep, 0.0) == "awake", "a mistake has killed the worker"


def test_an_exception_while_a_worker_is_made_arrives_as_itself(cluster: RayRuntime) -> None:
    with pytest.raises(PolicyError, match="^it cannot be built$"):
        cluster.start("clumsy", Clumsy, "it cannot be built")


@pytest.mark.slow
def test_a_worker_that_dies_is_named(cluster: RayRuntime) -> None:
    handle = cluster.start("mortal", Clumsy)
    with pytest.raises(WorkerFailed, match="^mortal died during 'die'"):
        handle.call(Clumsy.die)


@pytest.mark.slow
def test_a_worker_that_dies_is_named_also_where_another_was_to_have_its_result(cluster: RayRuntime) -> None:
    mortal, other = cluster.start("mortal", Clumsy), cluster.start("other", Clumsy)
    with pytest.raises(WorkerFailed, match="^mortal died during 'die'"):
        other.get(other.submit(Clumsy.take, mortal.submit(Clumsy.die)))  # type: ignore[arg-type]
    beside = cluster.start("beside", Clumsy, beside=other)
    with pytest.raises(WorkerFailed, match="^other and beside, which share a process, died during 'take'"):
        beside.get(beside.pipe(Clumsy.take, other, Clumsy.die))


def test_a_ray_that_is_slow_to_start_is_started_once_more_and_then_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray gives its own processes 30 s and leaves what it has started."""
    helpers: list[subprocess.Popen[bytes]] = []

    def init(**options: Any) -> None:
        if len(helpers) == late:
            return
        helpers.append(subprocess.Popen(["sleep", "60"]))
        raise Exception("The current node timed out during startup. This could happen because ...")

    monkeypatch.setattr(ray_cluster.ray, "init", init)
    late = 1
    ray_cluster._start({})
    starts = ray_cluster.STARTS
    late = 1 + starts
    with pytest.raises(UserError, match=f"were not up within 30 s, {starts} times: .* --runtime.mode inline"):
        ray_cluster._start({})
    assert len(helpers) == late and not any(psutil.pid_exists(helper.pid) for helper in helpers)


LATE = """
import time
import psutil
from ray._private import services
ask, begun = services.get_node, time.monotonic()

def late(*arguments):
    if time.monotonic() < begun + 32:
        time.sleep(0.2)
        raise RuntimeError("the raylet has not registered")
    return ask(*arguments)

services.get_node = late
from embodied.runtime.ray.runtime import RayRuntime
runtime = RayRuntime("local", 240.0)
assert len(runtime.nodes()) == 1
names = [process.name() for process in psutil.Process().children(recursive=True)]
assert names.count("gcs_server") == names.count("raylet") == 1, names
runtime.close()
assert not psutil.Process().children(recursive=True)
"""


@pytest.mark.slow
def test_a_second_start_of_ray_leaves_nothing_of_the_first() -> None:
    """Ray's own processes, of which one seems not to come up for longer than Ray waits."""
    subprocess.run([sys.executable, "-c", LATE], cwd=ROOT, check=True, timeout=240)


ORPHAN = """
import os, sys, time
from pathlib import Path
import psutil
from embodied.runtime.ray.runtime import RayRuntime
from sim_farm.client.farm import WorkerFailed
from tests.embodied.runtime.test_runtime import Clumsy

runtime = RayRuntime("local", 60.0)
runtime.start("before", Clumsy).call(Clumsy.work, 1, 0.0)
(raylet,) = [p for p in psutil.Process().children(recursive=True) if p.name() == "raylet"]
raylet.kill()
raylet.wait()
try:
    while True:
        runtime.watch()
        time.sleep(0.1)
except WorkerFailed:
    runtime.end_workers()
assert runtime.start("after", Clumsy).call(Clumsy.work, 1, 0.0) == 1
runtime.close()
Path(sys.argv[1]).write_text(str(os.getppid()))
"""


@pytest.mark.slow
def test_a_process_without_a_parent_outlives_its_raylet(tmp_path: Path) -> None:
    """As after `nohup`: Ray takes the raylet's death for that of a process whose parent is process 1."""
    script = tmp_path / "orphan.py"
    script.write_text(ORPHAN)
    command = f"{shlex.quote(sys.executable)} {script} {tmp_path / 'done'} > {tmp_path / 'said'} 2>&1 &"
    subprocess.run(["sh", "-c", command], cwd=ROOT, check=True, env={**os.environ, "PYTHONPATH": str(ROOT)})
    until = time.monotonic() + 120
    while not (tmp_path / "done").exists() and time.monotonic() < until:
        time.sleep(0.2)
    assert (tmp_path / "done").exists(), (tmp_path / "said").read_text()[-2000:]


# --- a physics worker that is killed or stopped


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_training_in_which_a_physics_worker_is_lost_equals_training_without_a_loss(
    blow: signal.Signals,
    cluster: RayRuntime,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Killed, or stopped: it is named and replaced, and its episodes are replayed. See also `test_lost_workers.py`."""
    config = config_of()
    undisturbed = train(config, tmp_path / "inline", InlineRuntime(60.0))
    host = cluster.host
    monkeypatch.setattr(host, "silent_s", 6.0)
    victims: list[int] = []
    workers: list[Any] = []

    def requests() -> int:
        slots = host._workers[0]._block.arrays if host._workers else {}
        return int(slots["requested"].max()) if slots else 0

    def strike() -> None:
        while requests() < 40:  # of 3 x 2 x 16
            time.sleep(1e-4)
        workers.extend(host._workers)
        victims.append(host.pids()[0])
        os.kill(victims[0], blow)

    striker = threading.Thread(target=strike)
    striker.start()
    found = train(config, tmp_path / "ray", cluster)
    striker.join()
    assert not psutil.pid_exists(victims[0]), "a stopped process is left behind"
    assert [worker.supervision.restarts for worker in workers] == [1, 0], "it was not lost, or more than once"
    messages = [record.getMessage() for record in caplog.records if record.name.startswith("sim_farm.workers")]
    why = (
        r"its process died \(signal 9\)"
        if blow is signal.SIGKILL
        else r"physics 0 has been .* for \d+\.\d s without progress.*"
    )
    *late, lost = messages
    assert re.fullmatch(f"physics 0 was lost and is replaced: {why}", lost), messages
    assert len(late) == (blow is signal.SIGSTOP) and all("; it is replaced after" in one for one in late), messages
    assert found == undisturbed


# --- the neighbours


def sockets(process: psutil.Process) -> tuple[str, list[Any]]:
    """The process's name and its sockets; none of a process that has ended meanwhile."""
    try:
        return process.name(), process.net_connections("inet")
    except psutil.NoSuchProcess:
        return "", []
    except psutil.AccessDenied:  # who is not root may not ask this of a child that has ended and was not waited for
        if process.status() != psutil.STATUS_ZOMBIE:
            raise
        return "", []


def test_every_listening_socket_is_bound_to_loopback(cluster: RayRuntime) -> None:
    cluster.start("somebody", list).end()
    everyone = [sockets(process) for process in (psutil.Process(), *psutil.Process().children(recursive=True))]
    names = {name for name, _ in everyone}
    assert {"gcs_server", "raylet"} <= names, f"Ray's processes are not among {names}"
    listening = [
        (name, connection.laddr.ip, connection.laddr.port)
        for name, connections in everyone
        for connection in connections
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening, "Ray listens to nothing: this test looks at the wrong processes"
    assert not [entry for entry in listening if entry[1] not in ("127.0.0.1", "::1", "::ffff:127.0.0.1")]


# --- nothing stays behind

RUN = """
import sys
from pathlib import Path
from embodied.execution.session import open_session
from embodied.run.folder import prepare_run
from embodied.training.loop import train
from embodied.workflows.run_spec import RunSpec
from tests.embodied.runtime.test_runtime import config_of
folder = Path(sys.argv[1])
config = config_of(iterations=100_000, rollout={"decisions": 200}, farm={"groups": 2, "physics_workers": 1})
prepare_run(config, folder, resume=False)
with open_session(config) as session:
    train(RunSpec.of(config), folder, session, None)
"""


@contextmanager
def training_process(folder: Path) -> Iterator[subprocess.Popen[str]]:
    process = subprocess.Popen(
        [sys.executable, "-c", RUN, str(folder)], cwd=ROOT, text=True, stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        yield process
    finally:
        if process.poll() is None:
            family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
            for member in family:
                member.kill()
        process.communicate()


def family_of(pid: int) -> list[psutil.Process]:
    """Its descendants, but for Python's resource tracker, which outlives everything but the process itself."""
    everyone = psutil.Process(pid).children(recursive=True)
    return [process for process in everyone if "resource_tracker" not in " ".join(process.cmdline())]


def assert_gone(family: list[psutil.Process], blocks: set[Path]) -> None:
    _, alive = psutil.wait_procs(family, timeout=240)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]
    assert blocks, "no shared memory was found that could be left behind"
    assert not [path for path in blocks if path.exists()], "shared memory is left behind"


@pytest.mark.slow
def test_an_interrupted_run_ends_with_a_checkpoint_of_its_last_iteration(tmp_path: Path) -> None:
    """Ctrl-C in a terminal reaches every process of the group."""
    folder = tmp_path / "run"
    with training_process(folder) as process:
        while not read(folder):
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.05)
        family = family_of(process.pid)
        assert len(family) >= 5, "gcs_server, raylet, a physics worker, policy and learner"
        blocks = mapped(member.pid for member in family)
        os.killpg(process.pid, signal.SIGINT)
        output, _ = process.communicate(timeout=240)
        assert process.returncode != 0 and "KeyboardInterrupt" in output
        assert_gone(family, blocks)
    rows = read(folder)
    assert f"iteration {len(rows)} is kept" in output
    last = checkpoint.latest(folder / "checkpoints")
    assert last is not None
    checkpoint.verify(last)
    assert checkpoint.read_state(last).iteration == rows[-1]["iteration"] == len(rows)


@pytest.mark.slow  # in the default run `SharedRay.close` says so, of whatever the tests have left
def test_closing_leaves_no_process_and_no_shared_memory(cluster: RayRuntime, shared_ray: SharedRay) -> None:
    """The last test of all that share the cluster (tests/conftest.py): it closes it."""
    cluster.prepare(1)
    with session_of(config_of(), cluster).farm(STATES) as farm:
        family = family_of(os.getpid())
        assert {"gcs_server", "raylet"} <= {process.name() for process in family}
        blocks = mapped([os.getpid(), *(member.pid for member in family)])
        mine = {FOLDER / name for name in (*farm.address.slots, farm.address.bell)}
        assert mine < blocks, "the farm's, and where workers report progress"
    shared_ray.close()
    assert_gone(family, blocks)
    assert not family_of(os.getpid())
