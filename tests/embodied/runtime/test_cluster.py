"""Physics on another machine: the same trajectories, bytes instead of frames, and losses that are mended or named.

Real Ray nodes on the loopback interface stand for machines. What needs no Ray is in `test_relay.py`.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
from torch import Tensor

import schedulers
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity, fingerprint
from embodied.errors import UserError
from embodied.execution import delivery
from embodied.execution.assignment import Assignment, assign
from embodied.execution.delivery import FrameSourceReader
from embodied.execution.iteration import start_run
from embodied.execution.session import Session
from embodied.planning.clusters import run_cluster
from embodied.planning.profiler import work_of
from embodied.planning.run_plans import plan_run
from embodied.reporting.metrics import read
from embodied.runtime import remote
from embodied.runtime.api import InlineRuntime
from embodied.runtime.deadlines import Deadline
from embodied.runtime.ray import cluster as ray_cluster
from embodied.runtime.ray.actors import RayHandle
from embodied.runtime.ray.far_physics import FarHost
from embodied.runtime.ray.runtime import RayRuntime
from embodied.workflows.run_spec import RunSpec
from schedulers import ComponentProfile, Plan, Point, Profile
from sim_farm.client.farm import Farm, FarmAddress, WorkerFailed
from sim_farm.contract import EpisodeSpec, FarmError
from sim_farm.episodes import ANY, EndlessEpisodes, ListedEpisodes
from sim_farm.shared_memory.memory import FOLDER
from sim_farm.shared_memory.slot_layout import FarmSpec
from tests.embodied.learning import test_learner_ranks
from tests.embodied.rollout.test_policies_elsewhere import learned_alike_apart
from tests.embodied.runtime.test_relay import CHUNKS, PICTURES, STATES
from tests.embodied.runtime.test_runtime import config_of, session_of, train
from tests.embodied.support.ray_nodes import Machines, started
from tests.embodied.support.runs import assert_equal
from tests.sim_farm.driving import Trace, actions_for, append, assert_same, drive, run
from tests.variants import often

pytestmark = pytest.mark.slow  # every test needs Ray nodes of its own


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with started("near", "far", "frail") as found:
        yield found


@contextmanager
def built(spec: FarmSpec, host: FarHost, machines: Machines) -> Iterator[Farm]:
    with closing(Farm.create(spec, host)) as farm:
        while farm.built() < spec.num_envs:
            farm.check()  # raises where a worker is not built within the runtime's deadline
            machines.runtime.watch()
            time.sleep(0.02)
        yield farm
        memories = [FOLDER / name for name in (*farm.address.slots, farm.address.bell)]
        assert all(memory.exists() for memory in memories)
    assert not any(memory.exists() for memory in memories), "shared memory is left behind"


def test_the_cluster_has_three_nodes_of_which_one_is_here(machines: Machines) -> None:
    here, far, frail = machines.runtime.nodes()
    assert (here.name, here.is_here, far.name, far.is_here) == ("near", True, "far", False)
    assert (frail.name, frail.is_here, here.cores) == ("frail", False, len(os.sched_getaffinity(0)))
    assert (far.address, far.cores, far.accelerators) == ("127.0.0.1", 2, 0)
    assert far.memory_bytes > 2**20 and len(far.id) == 56


def test_nodes_of_one_name_are_distinguished(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [entry | {"NodeName": "twin"} for entry in ray_cluster.ray.nodes()]
    monkeypatch.setattr(ray_cluster.ray, "nodes", lambda: entries)
    assert {node.name for node in machines.runtime.nodes()} == {f"twin-{entry['NodeID'][:8]}" for entry in entries}


@pytest.mark.parametrize(("spec", "far"), often([(PICTURES, 1)], [(STATES, 2), (PICTURES, 2), (PICTURES, 1)]))
def test_physics_on_another_node_gives_what_one_process_gives(spec: FarmSpec, far: int, machines: Machines) -> None:
    """Observations, rewards and frames to the last bit, over episodes that end and begin."""
    expected = run(spec, chunks=CHUNKS)
    assert max(row["episode"] for rows in expected.values() for row in rows) >= 3
    with built(spec, machines.host(far), machines) as farm:
        found = drive(farm, end=CHUNKS)
        wire = farm.tasks[0].slots["wire_bytes"].copy()
        fields = farm.tasks[0].memory.slots.fields
        sizes = {name: one.nbytes // one.shape[0] for name, one in fields.items()}
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

    def size(names: tuple[str, ...]) -> int:
        return sum(sizes[name] for name in names)

    rows = [row for rows in environments for row in rows]
    shown = remote.SHOWN if spec.task.cameras else ()
    messages = len(environments[0]) * spec.groups
    opening = 4 + len(environments) * (8 + size((*remote.REQUEST, *remote.STANDING)))
    sent = opening + messages * 4 + len(rows) * (8 + size(remote.REQUEST))
    ended = [row for row in rows if "final state" in row]
    told = len(environments)  # once: every episode of a task is told the same
    received = messages * 8 + len(rows) * size((*remote.OUTCOME, *remote.OBSERVED, *shown))
    received += told * size(remote.TOLD) + len(ended) * size(remote.ENDED)
    received += sum(bool(shown) and bool(row["final drawn"]) for row in ended) * size(remote.DRAWN)
    return [sent, received]


def test_training_with_physics_on_another_node_equals_training_inline(
    machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To the last bit: the policy worker and the learner cannot tell where physics is."""
    config = config_of()
    inline = train(config, tmp_path / "inline", InlineRuntime(60.0))
    machines.place_physics(monkeypatch, "far", "frail")
    assert train(config, tmp_path / "ray", machines.runtime) == inline


# --- policy replicas and ranks of the learner on another machine; more of them in `test_far_replicas.py`


@pytest.mark.slow
def test_replicas_and_ranks_on_another_machine_learn_what_one_process_learns(
    machines: Machines, tmp_path: Path
) -> None:
    """A replica there is sent its work, a rank there its rows; of frames it fetches those that it evaluates."""
    found, expected = learned_alike_apart(test_learner_ranks.IMAGES, machines, tmp_path)
    paths = {span.args["trajectories"] for one in found.iterations for span in one.spans if "trajectories" in span.args}
    assert paths == {
        "trajectory memory, rows shared memory and Ray, between machines; frames fetched where they are evaluated"
    }
    for mine, its in zip(found.iterations, expected.iterations, strict=True):
        assert mine.learned["learner/frames_read"] < its.learned["learner/frames_read"]


@dataclass(frozen=True)
class Recorded(FrameSourceReader):
    """Writes down, in the process of the rank, which rows are fetched."""

    folder: Path

    def read(self, rows: Tensor) -> Tensor:
        with (self.folder / str(os.getpid())).open("a") as file:
            print(*rows.tolist(), file=file)
        return super().read(rows)


def of_two_ranks(machines: Machines, node: str) -> Assignment:
    """Both on that node, '' being the one with the frames."""
    place = Affinity(node=machines.node(node).id if node else "")
    plan = test_learner_ranks.of_ranks(2)
    return replace(plan, components={**plan.components, "learner": (place, place)})


@pytest.mark.parametrize(
    ("epochs", "ahead"),
    [(1, 0), (2, 0), (2, 1)],
)
def test_far_ranks_fetch_the_frames_that_they_evaluate_once(
    epochs: int, ahead: int, machines: Machines, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where a row is evaluated once, one of them fetches it; where it is more often, each of them once at most."""
    settings = {**test_learner_ranks.IMAGES, "workflow": "ppo"}
    settings = test_learner_ranks.with_optim(settings, epochs=epochs, micro_batch=3)
    session = Session(Config(), machines.runtime, tuple(sorted(os.sched_getaffinity(0))))
    folders: list[Path] = []

    def recorded(caller: Any) -> Recorded:
        folders.append(tmp_path / f"fetched {len(folders)}")
        folders[-1].mkdir()
        return Recorded(caller, folders[-1])

    near, far = (replace(of_two_ranks(machines, node), ahead=ahead) for node in ("", "far"))
    expected = test_learner_ranks.run(settings, session, near, tmp_path / "near")
    monkeypatch.setattr(delivery, "FrameSourceReader", recorded)
    found = test_learner_ranks.run(settings, session, far, tmp_path / "far")
    assert_equal(found, expected)
    assert len(folders) == len(found.iterations) == 3
    decisions = settings["env"]["num_envs"] * settings["rollout"]["decisions"]
    for folder in folders:
        calls = [[line.split() for line in rank.read_text().splitlines()] for rank in folder.iterdir()]
        assert len(calls) == 2 and all(1 <= len(rows) <= 3 for rank in calls for rows in rank), "by micro-batch"
        first, second = ([row for rows in rank for row in rows] for rank in calls)
        assert len(set(first)) == len(first) and len(set(second)) == len(second), "a frame was fetched twice"
        assert len({*first, *second}) == decisions
        assert epochs > 1 or len(first) == len(second) == decisions / 2


def test_a_frame_source_that_dies_is_named_with_the_rank_that_called_it(machines: Machines, tmp_path: Path) -> None:
    session = Session(Config(), machines.runtime, tuple(sorted(os.sched_getaffinity(0))))
    config = parse_config({**test_learner_ranks.IMAGES, "workflow": "ppo"}, "test")
    with (
        pytest.raises(WorkerFailed, match="^learner [01]: frame source of learner died during 'frames'"),
        start_run(RunSpec.of(config), tmp_path, session, of_two_ranks(machines, "far")) as workers,
    ):
        workers.begin(None, 0)
        workers.iterate(0)
        (source,) = workers.delivery.helpers[0].handles
        assert isinstance(source, RayHandle)
        os.kill(source.process.pid, signal.SIGKILL)
        workers.iterate(1)
    for process in list(machines.runtime._processes):
        machines.runtime._end(process)


# --- planned


def profiled(config: Config, physics: float) -> Profile:
    """Times as if from this machine: a round of all environments takes so many seconds of one core."""
    times = {"physics": physics, "policy": 1e-3, "learner": 1e-3}
    components = {
        name: ComponentProfile("cores", tuple(Point(4, n, s / n, s / n, s / n) for n in (1, 2)))
        for name, s in times.items()
    }
    transfers = {"physics>policy": 100.0, "policy>physics": 50.0}
    return Profile("ppo", {**fingerprint(), **work_of(config)}, components, transfers=transfers)


def on_nodes(machines: Machines, **changes: Any) -> Config:
    """A run that may use all nodes of the cluster, whose address it names."""
    return config_of(runtime={"address": machines.address, "deadline_s": 240.0}, **changes)


def planned_run(machines: Machines, physics: float, folder: Path) -> Config:
    """A run that plans for itself with those times."""
    path = folder / f"{physics}.json"
    schedulers.save(profiled(config_of(), physics), path)
    return on_nodes(machines, plan={"mode": "auto", "profile": str(path)})


@pytest.mark.slow
def test_auto_uses_other_nodes_and_computes_the_same(
    machines: Machines, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """To the last bit what one process computes in as many groups, with physics on a node that the planner chose."""
    found = train(planned_run(machines, 1.0, tmp_path), tmp_path / "ray", machines.runtime)
    plan = schedulers.load(Plan, tmp_path / "ray" / "plan.json")
    places = {name: p.nodes for phase in plan.phases for p in phase.placements for name in p.components}
    assert places["physics"] & {"far", "frail"} and places["policy"] == places["learner"] == {"here"}
    why, printed = " ".join(plan.why), " ".join(capsys.readouterr().out.split())
    assert "On this machine alone an iteration would take" in why in printed
    wire = [row["farm/wire_bytes_per_env_step"] for row in read(tmp_path / "ray")]
    assert all(bytes_ > 10 for bytes_ in wire), "nothing crossed"
    assert found == train(config_of(*plan.groups), tmp_path / "inline", InlineRuntime(60.0))


@pytest.mark.slow
def test_auto_stays_where_messages_take_longer_than_they_save(machines: Machines, tmp_path: Path) -> None:
    """The link was measured: hundreds of microseconds a message, more than all the physics takes."""
    config = planned_run(machines, 1e-4, tmp_path)
    placed = plan_run(RunSpec.of(config), session_of(config, machines.runtime), tmp_path)
    assert placed.plan is not None and placed.cluster is not None
    assert {node for phase in placed.plan.phases for p in phase.placements for node in p.nodes} == {"here"}
    away = "Nothing is on far, frail. Only physics may leave this machine"
    assert any(text.startswith(away) for text in placed.plan.why)
    cluster = placed.cluster
    assert 5e-5 < cluster.link_s < 0.05 and 1e6 < cluster.link_bytes_per_s < 1e12
    assert (cluster.head_node, [node.name for node in cluster.nodes]) == ("here", ["here", "far", "frail"])


@pytest.mark.slow
def test_a_plan_file_may_put_the_learner_on_another_node(machines: Machines, tmp_path: Path) -> None:
    """On accelerators too, which processes on the CPU stand in for where that is asked for."""
    ranks = ["here:accelerators:0", "far:accelerators:3"]
    plan = {
        "workflow": "ppo",
        "mode": "collocated",
        "phases": [
            {
                "micro_batch": 4,
                "placements": [
                    {"components": ["physics"], "devices": ["far:cores:0"]},
                    {"components": ["policy"], "devices": ["here:accelerators:0"]},
                ],
            },
            {"micro_batch": 4, "placements": [{"components": ["learner"], "devices": ranks}]},
        ],
    }
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    config = on_nodes(machines, plan={"mode": str(tmp_path / "plan.json")}, policy={"device": "cpu"})
    found = plan_run(RunSpec.of(config), session_of(config, machines.runtime), tmp_path).assignment
    far = machines.node("far").id
    assert [(a.node, a.device) for a in found.components["policy"]] == [("", "cpu")]
    assert [(a.node, a.device) for a in found.components["learner"]] == [("", "cpu"), (far, "cpu")]


def test_physics_that_a_plan_gives_to_a_node_that_has_left_is_nowhere_else(machines: Machines) -> None:
    """Between planning and placing minutes may pass."""
    config = config_of()
    places = [{"components": ["physics"], "devices": ["gone:cores:0"]},
              {"components": ["policy", "learner"], "devices": ["here:cores:0"]}]  # fmt: skip
    plan = {"workflow": "ppo", "mode": "disaggregated", "phases": [{"micro_batch": 4, "placements": places}]}
    with pytest.raises(UserError, match="the node gone .* has left the cluster"):
        assign(schedulers.from_data(Plan, plan), RunSpec.of(config), (0,), session_of(config, machines.runtime).nodes)


@pytest.mark.slow
def test_nodes_without_cores_are_not_planned_for(machines: Machines, monkeypatch: pytest.MonkeyPatch) -> None:
    nodes = tuple(replace(node, cores=node.cores * (node.name != "far")) for node in machines.runtime.nodes())
    monkeypatch.setattr(machines.runtime, "nodes", lambda: nodes)
    cluster = run_cluster(session_of(on_nodes(machines), machines.runtime))
    assert [node.name for node in cluster.nodes] == ["here", "frail"]


# --- losses


@pytest.mark.slow
@pytest.mark.parametrize("blow", [signal.SIGKILL, pytest.param(signal.SIGSTOP, marks=pytest.mark.slow)])
def test_a_far_process_that_is_lost_is_replaced_and_its_episodes_replayed(
    blow: signal.Signals, machines: Machines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits, with work on its way to it, and with answers nobody has read; killed or stopped."""
    if blow is signal.SIGSTOP:  # only its silence tells
        monkeypatch.setattr(machines.runtime, "deadline", Deadline(60.0))  # so 15 s are the far end's
    expected = run(PICTURES, chunks=CHUNKS)
    trace: Trace = {env: [] for env in range(PICTURES.num_envs)}
    with built(PICTURES, machines.host(), machines) as farm:
        everyone = psutil.Process(machines.raylets["far"]).children(recursive=True)
        pids = [process.pid for process in everyone if "_FarActor" in " ".join(process.cmdline())]
        assert len(pids) == 2
        for number in range(-1, CHUNKS):
            for group in range(PICTURES.groups):
                if number < 0:
                    farm.reset(group)
                else:
                    farm.submit(group, actions_for(farm, group, number))
            if number == 3:
                os.kill(pids[0], blow)
            for group in range(PICTURES.groups):
                append(trace, farm.collect(group, 60))
            if number == 6:
                os.kill(pids[1], blow)
                if blow is signal.SIGKILL:
                    psutil.wait_procs([psutil.Process(pids[1])], timeout=240)
    assert_same(expected, trace, "a far process that was lost changes results")
    assert len(machines.runtime.host.take_replaced()) == 2
    left = [process for pid in pids[:2] if psutil.pid_exists(pid) and (process := psutil.Process(pid))]
    assert not psutil.wait_procs(left, timeout=240)[1], "a stopped process is left behind"


class BrokenEpisodes(EndlessEpisodes):
    """The first episodes are as they should be; the second cannot be told."""

    def spec(self, env: int, episode: int, start: int = ANY) -> EpisodeSpec:
        if episode:
            raise KeyError("the list of episodes was lost")
        return super().spec(env, episode, start)


@pytest.mark.slow
def test_a_far_workers_error_reaches_the_client_with_its_message(machines: Machines) -> None:
    """A user's mistake as one sentence, an error of our own with the traceback from where it happened."""
    absent = ListedEpisodes((EpisodeSpec(0, init_state=3),) * 8, 8)
    for episodes, message in ((absent, "^.*no recorded initial states.*$"), (BrokenEpisodes(2), "(?s)Traceback.*lost")):
        spec = replace(STATES, episodes=episodes)
        with built(spec, machines.host(), machines) as farm:
            with pytest.raises(WorkerFailed, match=message):
                drive(farm, end=4)


def test_frames_are_not_sent_instead(machines: Machines) -> None:
    fused = replace(PICTURES, render_workers=0)
    with pytest.raises(FarmError, match=r"physics 0 is to be on far .* set farm.render_workers to 1 or more"):
        Farm.create(fused, machines.host())


def test_a_node_that_is_not_there_is_refused_with_those_that_are(machines: Machines) -> None:
    with pytest.raises(FarmError, match="no node 'mars' in the cluster: .* is near at 127.0.0.1; .* is far at"):
        machines.runtime.far_host(("mars",))
    with pytest.raises(UserError, match="no Ray cluster with this machine as a node answers at '127.0.0.1:9'"):
        RayRuntime("127.0.0.1:9", 60.0).start_ray()


@dataclass
class Player:
    """The client in a process of its own, as the policy worker is."""

    address: FarmAddress

    def play(self) -> None:
        with closing(Farm.attach(self.address)) as farm:
            drive(farm, end=100_000)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "blow"), [pytest.param("frail", signal.SIGSTOP, marks=pytest.mark.slow), ("far", signal.SIGKILL)]
)
def test_a_lost_node_is_named_with_its_workers(name: str, blow: signal.Signals, machines: Machines) -> None:
    """A machine that hangs and one that dies, with work on its way to it. The last tests: they cost a node each."""
    lost = machines.node(name)
    spec = replace(PICTURES, physics_workers=2)
    host = machines.runtime.far_host((lost.id,) * 2)
    with built(spec, host, machines) as farm:
        player = machines.runtime.start("player", Player, farm.address)
        playing = player.submit(Player.play)
        deadline = time.monotonic() + 240
        while farm.tasks[0].slots["requested"].max() < 40:
            assert time.monotonic() < deadline, "the player does not play"
            time.sleep(1e-3)
        raylet = psutil.Process(machines.raylets[name])
        for process in (*raylet.children(recursive=True), raylet):
            process.send_signal(blow)
        message = f"the node {name} (127.0.0.1, {lost.id[:8]}) has left the cluster, and with it physics 0, physics 1:"
        with pytest.raises(WorkerFailed, match=re.escape(message)):
            player.get(playing)
        player.end()
    with pytest.raises(FarmError, match="there is no node"):
        machines.runtime.far_host((lost.id,))
