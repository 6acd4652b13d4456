"""Physics on another machine: the same trajectories, kilobytes on the wire, and losses that are mended or named.

Real Ray nodes on the loopback interface stand for machines. What needs no Ray (messages, far ends that die
at any moment) is tested in one process.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest

from embodied.config import UserError
from embodied.runtime import relay
from embodied.runtime.nodes import NodeInfo, require_software, software
from embodied.runtime.ray_farm import RayHost
from embodied.runtime.ray_runtime import RayRuntime
from embodied.runtime.relay import FarLost, FarPhysics, Relay
from sim_farm.contract import EpisodeSpec, FarmError, TaskSpec
from sim_farm.episodes import EndlessEpisodes, ListedEpisodes, evaluation_episodes
from sim_farm.farm import Farm, FarmAddress, WorkerFailed
from sim_farm.hosts import Handle, InProcess
from sim_farm.layout import FarmSpec
from sim_farm.memory import Block
from sim_farm.workers import WorkerSetup
from tests.sim_farm.driving import Trace, actions_for, append, assert_same, drive, run

ROOT = Path(__file__).resolve().parents[2]
SHM = Path("/dev/shm")
REACH = TaskSpec("tabletop/reach", max_episode_steps=7)
STATES = FarmSpec(REACH, EndlessEpisodes(3), num_envs=8, chunk=3, stages=2, physics_workers=2)
PICTURES = replace(
    STATES, task=replace(REACH, cameras=1, image_size=32), render_workers=1, final_frames="ended"
)  # fmt: skip
CHUNKS = 12


# --- in one process: the relay's law


@dataclass
class LocalFar:
    """A far end in this process. It is lost before or after the exchanges whose numbers are given."""

    setup: WorkerSetup
    dies_before: set[int] = field(default_factory=set)
    dies_after: set[int] = field(default_factory=set)
    requests: list[bytes] = field(default_factory=list)
    answers: list[bytes] = field(default_factory=list)
    renewed: int = 0
    far: FarPhysics | None = None

    def open(self, opening: bytes) -> Future[None]:
        self.far = FarPhysics(self.setup, opening)
        return _done(None)

    def exchange(self, request: bytes) -> Future[bytes]:
        number = len(self.requests)
        self.requests.append(request)
        if self.far is None or number in self.dies_before:
            self.far = None
            return _lost()
        answer = self.far.exchange(request)
        if number in self.dies_after:
            self.far = None
            return _lost()
        self.answers.append(answer)
        return _done(answer)

    def renew(self) -> None:
        assert self.far is None, "a far end that lives was replaced"
        self.renewed += 1


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


def _lost() -> Future[Any]:
    future: Future[Any] = Future()
    future.set_exception(FarLost())
    return future


class Relays(InProcess):
    """Every physics worker behind a relay, in the caller's process."""

    def __init__(self, **fate: set[int]) -> None:
        self.fate = fate
        self.fars: list[LocalFar] = []

    def launch(self, setup: WorkerSetup, block: Block) -> Handle:
        if not setup.is_physics:
            return super().launch(setup, block)
        self.fars.append(LocalFar(setup, **{name: set(when) for name, when in self.fate.items()}))
        worker = Relay(setup, block, self.fars[-1])
        worker.build()
        return _Pumped(worker)


@dataclass(frozen=True)
class _Pumped:
    worker: Relay

    def ring(self) -> None:
        while self.worker.run_pending():
            pass

    def close(self, deadline_s: float) -> None:
        self.worker.close()


SHAPES = {
    "states": STATES,
    "pictures": PICTURES,
    "listed": replace(PICTURES, episodes=ListedEpisodes(evaluation_episodes(2, 11), 8), final_frames="truncated"),
}
EVERY_SHAPE = pytest.mark.parametrize("spec", SHAPES.values(), ids=SHAPES.keys())


def trace_of(spec: FarmSpec, host: InProcess) -> Trace:
    with closing(Farm.create(spec, host)) as farm:
        return drive(farm, end=CHUNKS)


@EVERY_SHAPE
def test_physics_behind_a_relay_gives_what_physics_beside_the_client_gives(spec: FarmSpec) -> None:
    assert_same(run(spec, chunks=CHUNKS), trace_of(spec, Relays()), "a relay changes results")


@EVERY_SHAPE
def test_a_stage_in_parts_gives_the_same(spec: FarmSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "ANSWER_BYTES", 1)
    host = Relays()
    assert_same(run(spec, chunks=CHUNKS), trace_of(spec, host), "parts change results")
    assert len(host.fars[0].requests) == 4 * (CHUNKS + 1), "of a worker's four environments each is a part"


@EVERY_SHAPE
@pytest.mark.parametrize("when", ["dies_before", "dies_after"])
def test_a_far_end_that_is_lost_at_any_exchange_changes_nothing(spec: FarmSpec, when: str) -> None:
    expected = run(spec, chunks=CHUNKS)
    for numbers in ({0}, {1, 2}, {5, 6, 9}, {12}, {2 * CHUNKS + 1}):
        host = Relays(**{when: numbers})
        assert_same(expected, trace_of(spec, host), f"losses at {numbers} change results")
        assert all(far.renewed == len(numbers) for far in host.fars)


def test_a_snapshot_is_restored_behind_a_relay() -> None:
    """A reset that continues an episode carries the actions that lead there."""
    with closing(Farm.create(STATES, Relays())) as farm:
        drive(farm, end=4)
        snapshot = farm.snapshot()
        expected = drive(farm, begin=4, end=9, reset=False)
    assert snapshot["base_step"].any(), "no episode was under way"
    for host in (Relays(), Relays(dies_before={0, 3}), Relays(dies_after={1, 2})):
        with closing(Farm.create(STATES, host)) as farm:
            farm.restore(snapshot)
            resumed = drive(farm, begin=4, end=9)
        assert_same(expected, {env: rows[1:] for env, rows in resumed.items()}, "restoring changes results")


def test_every_field_that_physics_reads_or_writes_is_carried() -> None:
    """Whoever adds a field to the slots decides here whether a far end needs it."""
    answers = {*relay.OUTCOME, *relay.OBSERVED, *relay.SHOWN, *relay.BEGUN, *relay.ENDED, *relay.DRAWN}
    carried = {*relay.REQUEST, *relay.STANDING, *answers, "history"}
    own = {"bells", "stop", "phase", "since_ns", "built", "message", "drawn", "collected", "frames_of", "wire_bytes"}
    derived = {"final_instruction"}
    with closing(Farm.create(PICTURES, InProcess())) as farm:
        assert set(farm.block.fields) == carried | own | derived | set(relay.PICTURES)


def test_a_message_of_the_wrong_length_is_refused() -> None:
    host = Relays()
    with closing(Farm.create(STATES, host)) as farm:
        drive(farm, end=1)
        far, envs = host.fars[0], farm.envs_of(0)[::2]
        for answer in (far.answers[0][:-1], far.answers[0] + b"\0"):
            with pytest.raises(FarmError, match="message between farm and far physics"):
                relay.unpack_answer(answer, farm.block.arrays, envs)
        assert far.far is not None
        with pytest.raises(FarmError, match="message between farm and far physics"):
            far.far.exchange(far.requests[0][:-2])


def test_other_software_is_refused_by_name() -> None:
    require_software(software())
    with pytest.raises(FarmError, match=r"has numpy .* instead of 0\.1: the same trajectories need the same software"):
        require_software({**software(), "numpy": "0.1"})


# --- Ray nodes


CLUSTER = """
import json, sys
from ray._private import ray_constants
ray_constants.ENABLE_RAY_CLUSTER = False  # so that nothing listens but on the loopback interface
from ray.cluster_utils import Cluster
small = {"node_ip_address": "127.0.0.1", "num_cpus": 2, "num_gpus": 0, "object_store_memory": 80 * 2**20}
quick = {"health_check_initial_delay_ms": 500, "health_check_period_ms": 500, "health_check_failure_threshold": 4}
head = {"include_dashboard": False, "include_log_monitor": False, "node_name": "near", "_system_config": quick}
cluster = Cluster(initialize_head=True, head_node_args={**small, **head})
others = {name: cluster.add_node(**small, node_name=name) for name in ("far", "frail")}
raylets = {name: node.all_processes["raylet"][0].process.pid for name, node in others.items()}
print(json.dumps([cluster.address, raylets]), flush=True)
sys.stdin.read()
cluster.shutdown()
"""


@dataclass(frozen=True)
class Machines:
    address: str
    raylets: dict[str, int]
    """Process ids, by the node's name."""
    runtime: RayRuntime

    def node(self, name: str) -> NodeInfo:
        return next(node for node in self.runtime.nodes() if node.name == name)

    def host(self, spec: FarmSpec, far: int = 2) -> RayHost:
        """The first so many physics workers on the other node."""
        return self.runtime.farm_host(spec.physics_workers, spec.render_workers, (self.node("far").id,) * far)


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    before = blocks()
    folder = tempfile.mkdtemp(prefix="ray", dir="/tmp")  # short: it becomes part of the sockets' names
    process = subprocess.Popen(
        [sys.executable, "-c", CLUSTER, folder], stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL, text=True, env={**os.environ, "RAY_TMPDIR": folder}, cwd=ROOT,
    )  # fmt: skip
    family: list[psutil.Process] = []
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line, "the cluster did not start"
        address, raylets = json.loads(line)
        family = [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]
        runtime = RayRuntime(address, 60.0)
        try:
            yield Machines(address, raylets, runtime)
            family = [*family, *psutil.Process(process.pid).children(recursive=True)]
        finally:
            runtime.close()
    finally:
        try:
            process.communicate("", timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
        for member in family:
            if member.is_running():
                member.kill()
        _, alive = psutil.wait_procs(family, timeout=5)
        shutil.rmtree(folder, ignore_errors=True)
    assert not [member for member in alive if member.status() != psutil.STATUS_ZOMBIE]
    assert blocks() <= before, "shared memory is left behind"


def blocks() -> set[str]:
    return {path.name for path in SHM.glob("embodied-*")}


@contextmanager
def built(spec: FarmSpec, host: RayHost, machines: Machines) -> Iterator[Farm]:
    with closing(Farm.create(spec, host)) as farm:
        deadline = time.monotonic() + 60
        while farm.built() < spec.num_envs:
            farm.check()
            machines.runtime.watch()
            assert time.monotonic() < deadline, "not built within a minute"
            time.sleep(0.02)
        yield farm


def test_the_cluster_has_three_nodes_of_which_one_is_here(machines: Machines) -> None:
    here, far, frail = machines.runtime.nodes()
    assert (here.name, here.is_here, far.name, far.is_here) == ("near", True, "far", False)
    assert (frail.name, frail.is_here, here.cores) == ("frail", False, len(os.sched_getaffinity(0)))
    assert (far.address, far.cores, far.accelerators) == ("127.0.0.1", 2, 0)
    assert far.memory_bytes > 2**20 and len(far.id) == 56


@pytest.mark.parametrize(("spec", "far"), [(STATES, 2), (PICTURES, 2), (PICTURES, 1)])
def test_physics_on_another_node_gives_what_one_process_gives(spec: FarmSpec, far: int, machines: Machines) -> None:
    """Observations, rewards and frames to the last bit, over episodes that end and begin."""
    expected = run(spec, chunks=CHUNKS)
    assert max(row["episode"] for rows in expected.values() for row in rows) >= 3
    with built(spec, machines.host(spec, far), machines) as farm:
        found = drive(farm, end=CHUNKS)
        wire = farm.block.arrays["wire_bytes"].copy()
        sizes = {name: one.nbytes // one.shape[0] for name, one in farm.block.fields.items()}
    assert_same(expected, found, "another node changes results")
    assert not wire[far:].any(), "a worker on this node sends bytes to another"
    for worker in range(far):
        rows = [found[env] for env in range(spec.num_envs) if spec.worker_of(env) == worker]
        assert wire[worker].tolist() == expected_bytes(spec, sizes, rows), "more or less crosses than the layout says"
    steps = sum(int(row["steps"]) for env, rows in found.items() if spec.worker_of(env) < far for row in rows)
    assert wire.sum() / steps < 512, "bytes per env step"
    print(f"{wire.sum() / steps:.0f} bytes per env step")


def expected_bytes(spec: FarmSpec, sizes: dict[str, int], environments: list[list[dict[str, Any]]]) -> list[int]:
    """Sent to and received from one worker, from what its environments showed."""
    row = lambda names: sum(sizes[name] for name in names)  # noqa: E731
    rows = [row for rows in environments for row in rows]
    messages = len(environments[0]) * spec.stages
    opening = 4 + len(environments) * (8 + row((*relay.REQUEST, *relay.STANDING)))
    sent = opening + messages * 4 + len(rows) * (8 + row(relay.REQUEST))
    ended = [row for row in rows if "final state" in row]
    begun = len(environments) + len(ended)
    received = messages * 8 + len(rows) * row((*relay.OUTCOME, *relay.OBSERVED, *relay.SHOWN))
    received += begun * row(relay.BEGUN) + len(ended) * row(relay.ENDED)
    received += sum(bool(row["final drawn"]) for row in ended) * row(relay.DRAWN)
    return [sent, received]


# --- losses


def test_a_killed_far_process_is_replaced_and_its_episodes_replayed(machines: Machines) -> None:
    """While it waits, with work on its way to it, and with answers nobody has read."""
    expected = run(PICTURES, chunks=CHUNKS)
    host = machines.host(PICTURES)
    trace: Trace = {env: [] for env in range(PICTURES.num_envs)}
    pids = host.pids()
    with built(PICTURES, host, machines) as farm:
        for number in range(-1, CHUNKS):
            for stage in range(PICTURES.stages):
                if number < 0:
                    farm.reset(stage)
                else:
                    farm.submit(stage, actions_for(farm, stage, number))
            if number == 3:
                os.kill(pids[0], signal.SIGKILL)
            for stage in range(PICTURES.stages):
                append(trace, farm.collect(stage, 60))
            if number == 6:
                os.kill(pids[1], signal.SIGKILL)
                psutil.wait_procs([psutil.Process(pids[1])], timeout=5)
    assert_same(expected, trace, "a killed far process changes results")
    assert host.restarts == {0: 1, 1: 1}


class BrokenEpisodes(EndlessEpisodes):
    """The first episodes are as they should be; the second cannot be told."""

    def spec(self, env: int, episode: int) -> EpisodeSpec:
        if episode:
            raise KeyError("the list of episodes was lost")
        return super().spec(env, episode)


def test_a_far_workers_error_reaches_the_client_with_its_message(machines: Machines) -> None:
    """A user's mistake as one sentence, an error of our own with the traceback from where it happened."""
    absent = ListedEpisodes((EpisodeSpec(0, init_state=3),) * 8, 8)
    for episodes, message in ((absent, "^.*no recorded initial states.*$"), (BrokenEpisodes(2), "(?s)Traceback.*lost")):
        spec = replace(STATES, episodes=episodes)
        with built(spec, machines.host(spec), machines) as farm:
            with pytest.raises(WorkerFailed, match=message):
                drive(farm, end=4)


def test_frames_are_not_sent_instead(machines: Machines) -> None:
    fused = replace(PICTURES, render_workers=0)
    with pytest.raises(FarmError, match=r"physics 0 is to be on far .* set farm.render_workers to 1 or more"):
        Farm.create(fused, machines.host(fused))


def test_a_node_that_is_not_there_is_refused_with_those_that_are(machines: Machines) -> None:
    with pytest.raises(FarmError, match="no node 'mars' in the cluster: .* is near at 127.0.0.1; .* is far at"):
        machines.runtime.farm_host(2, 0, ("mars",))
    with pytest.raises(UserError, match="no Ray cluster with this machine as a node answers at '127.0.0.1:9'"):
        RayRuntime("127.0.0.1:9", 60.0)
    with pytest.raises(FarmError, match="3 nodes are named for 2 physics workers"):
        machines.runtime.farm_host(2, 0, ("",) * 3)


@dataclass
class Player:
    """The client in a process of its own, as the policy worker is."""

    address: FarmAddress

    def play(self) -> None:
        with closing(Farm.attach(self.address)) as farm:
            drive(farm, end=100_000)


@pytest.mark.parametrize(("name", "blow"), [("frail", signal.SIGSTOP), ("far", signal.SIGKILL)])
def test_a_lost_node_is_named_with_its_workers_within_the_deadline(
    name: str, blow: signal.Signals, machines: Machines
) -> None:
    """A machine that hangs and one that dies, with work on its way to it. The last tests: they cost a node each."""
    lost = machines.node(name)
    spec = replace(PICTURES, physics_workers=2)
    host = machines.runtime.farm_host(2, 1, (lost.id,) * 2)
    with built(spec, host, machines) as farm:
        player = machines.runtime.place("player", Player, farm.address)
        playing = player.refer(Player.play)
        while farm.block.arrays["requested"].max() < 40:
            time.sleep(1e-3)
        raylet = psutil.Process(machines.raylets[name])
        for process in (*raylet.children(recursive=True), raylet):
            process.send_signal(blow)
        begin = time.monotonic()
        message = f"the node {name} (127.0.0.1, {lost.id[:8]}) has left the cluster, and with it physics 0, physics 1:"
        with pytest.raises(WorkerFailed, match=re.escape(message)):
            player.fetch(playing)
        assert time.monotonic() - begin < 20
        player.end()
    assert time.monotonic() - begin < 40, "the farm does not close"
    with pytest.raises(FarmError, match="there is no node"):
        machines.runtime.farm_host(2, 1, (lost.id,))
