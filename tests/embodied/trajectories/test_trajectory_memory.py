"""The trajectory memory: frames are drawn where the learner reads them, and copied once on their way to a device."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.execution.assignment import HERE, Assignment, FarmAssignment
from embodied.execution.iteration import OnPolicy, start_run
from embodied.execution.roles import LearnerRole, PolicyRole, RolloutRole
from embodied.execution.session import Session, open_session
from embodied.reporting.metrics import read
from embodied.run.folder import prepare_run
from embodied.runtime.ray.runtime import RayRuntime
from embodied.training import loop as training
from embodied.trajectories.batch import Trajectories
from embodied.trajectories.memory import MemoryLayout, MemoryShape, TrajectoryMemory
from embodied.workflows.run_spec import RunSpec
from policies.contract import Action, Inputs
from sim_farm.contract import EpisodeSpec, FarmError, TaskSpec
from sim_farm.episodes import ListedEpisodes
from sim_farm.registry import make_renderer
from sim_farm.shared_memory.memory import FOLDER
from tests.embodied.rollout.test_policy_worker import CHUNK, ENVS, Watcher, replay, roll, worker
from tests.embodied.support.copied_out import copied_out
from tests.embodied.support.shared_blocks import mapped

ROOT = Path(__file__).resolve().parents[3]
CORES = sorted(os.sched_getaffinity(0))
WATCHED = TaskSpec("tabletop/reach", max_episode_steps=3, cameras=1, image_size=16)


def config_of(decisions: int = 5, **changes: Any) -> Config:
    settings: dict[str, Any] = {
        "seed": 3,
        "iterations": 2,
        "env": {"task": "tabletop/reach", "num_envs": 4, "max_episode_steps": 9, "cameras": 1, "image_size": 32},
        "policy": {
            "kind": "flow",
            "reads": ["proprio", "images"],
            "chunk": 2,
            "options": {"encoder": "cnn", "features": 8, "widths": [8], "critic_widths": [8], "steps": 2},
        },
        "rollout": {"decisions": decisions},
        "optim": {"epochs": 2, "minibatch": 5},
        "farm": {"groups": 2, "physics_workers": 1},
        "runtime": {"mode": "inline", "deadline_s": 120},
    }
    return parse_config({**settings, **changes}, "test")


def assigned(one_process: bool = False, groups: int = 2, ahead: int = 0) -> Assignment:
    farm = FarmAssignment(groups, (None,), (HERE,))
    components = {"policy": (Affinity(),), "learner": (Affinity(),)}
    return Assignment("test", (farm,), components, (0,) if one_process else (), ahead)


def tensors(batch: Trajectories) -> dict[str, Tensor]:
    named = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    named |= {f"trace.{key}": value for key, value in batch.trace.items()}
    return named | {f"frames.{key}": value for key, value in batch.inputs.frames.items()}


def assert_same(found: Trajectories, expected: Trajectories) -> None:
    mine, other = tensors(found), tensors(expected)
    assert mine.keys() == other.keys() and "frames.front" in mine
    for name, tensor in other.items():
        assert torch.equal(mine[name], tensor), name


# --- what is read is what was drawn


@pytest.mark.parametrize("groups", [1, 2])
def test_the_learner_reads_what_the_simulators_own_renderer_shows(groups: int) -> None:
    with worker(Watcher(), groups=groups, task=WATCHED) as made:
        batch, _ = roll(made, 8)
    shown = batch.inputs.frames["front"].view(8, ENVS, 16, 16, 3)
    truth, renderer = replay(batch, WATCHED), make_renderer(WATCHED)
    for t in range(8):
        for env in range(ENVS):
            expected = renderer.render([truth.before[t][env].scene], ["front"])["front"][0]
            assert torch.equal(shown[t, env], torch.from_numpy(expected)), (t, env)
    renderer.close()
    assert len({frame.numpy().tobytes() for frame in shown.flatten(0, 1)}) > 16, "all frames look alike"


def test_a_ring_that_comes_round_shows_what_a_memory_without_end_shows() -> None:
    """Rollouts of 5 decisions in a memory of 5, whose rows are used again from the second one on."""
    with worker(Watcher(), task=WATCHED, rounds=5) as ring, worker(Watcher(), task=WATCHED, rounds=15) as large:
        assert ring.memory.shape.rows < large.memory.shape.rows
        for _ in range(3):
            (found, ended), (expected, as_well) = roll(ring, 5), roll(large, 5)
            assert ended == as_well and expected.truncated.any()
            assert_same(found, expected)


def test_final_observations_that_find_no_row_are_copied_and_valued_alike() -> None:
    with worker(Watcher(), task=WATCHED, finals=ENVS) as short, worker(Watcher(), task=WATCHED, finals=99) as ample:
        (found, _), (expected, _) = roll(short), roll(ample)
    assert expected.final_value.count_nonzero() > 2 * ENVS
    assert_same(found, expected)


def test_final_observations_are_never_drawn_over_trajectories() -> None:
    with pytest.raises(ValueError, match="has 3 rows beyond the trajectories' for final observations of 4 environm"):
        with worker(Watcher(), task=WATCHED, finals=ENVS - 1):
            pass


# --- who copies


def test_acting_copies_no_frame_and_learning_copies_each_that_it_reads_once(tmp_path: Path) -> None:
    config = config_of()
    with open_session(config) as session, start_run(RunSpec.of(config), tmp_path, session, assigned()) as workers:
        workers.begin(None, 0)
        for number in range(2):
            one = workers.iterate(number)
            assert workers.farm.frame_copies == 0, "the client copies frames to act on them"
            learned, epochs, rows = one.learned, 2, 5 * 4
            assert learned["learner/frames_read"] == learned["learner/frame_copies"] == epochs * rows
            finals = sum(episode.length == 9 for episode in one.summary.episodes)  # truncated
            assert one.summary.frames.read == one.summary.frames.copied == 4 + finals, "beside the last observations"


class NewPixels(TorchDispatchMode):
    """Counts the bytes of uint8 tensors that operations make, views of existing ones left out."""

    nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        given = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)}
        for made in tree_leaves(out):
            if isinstance(made, Tensor) and made.dtype == torch.uint8:
                fresh = made.untyped_storage().data_ptr() not in given
                self.nbytes += made.nbytes if fresh else 0
        return out


def test_what_is_counted_is_all_that_is_copied(tmp_path: Path) -> None:
    """Of every uint8 tensor that torch makes in an iteration, acting and learning."""
    config = config_of()
    with open_session(config) as session, start_run(RunSpec.of(config), tmp_path, session, assigned()) as workers:
        workers.begin(None, 0)
        workers.iterate(0)
        with NewPixels() as pixels:
            one = workers.iterate(1)
    frame_bytes = 32 * 32 * 3
    assert pixels.nbytes == frame_bytes * (one.learned["learner/frames_read"] + one.summary.frames.read)


def test_frames_of_a_group_of_which_some_rest_are_counted_as_copied() -> None:
    specs = tuple(EpisodeSpec(seed) for seed in range(ENVS + 1))  # environment 0 has two episodes, the others one
    with worker(Watcher(), groups=1, task=WATCHED, episodes=ListedEpisodes(specs, ENVS)) as made:
        summary = made.rollout(10)
        batch = copied_out(made.trajectories())
    alone = int(batch.mask[:, 0].sum()) - int(batch.mask[:, 1].sum())
    assert alone > 0 and summary.frames.copied == summary.frames.read + alone


@pytest.mark.slow
@pytest.mark.parametrize("one_process", [False, True])
def test_a_frame_is_copied_once_between_renderer_and_device(
    one_process: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As the run records it, by configuration or with one policy for acting and learning."""
    config = config_of()
    prepare_run(config, tmp_path, resume=False)
    with pytest.MonkeyPatch.context() as patch, open_session(config) as session:
        placed = training.plan_run(RunSpec.of(config), session, tmp_path)
        vars(placed)["assignment"] = assigned(one_process)
        patch.setattr(training, "plan_run", lambda *_: placed)
        training.train(RunSpec.of(config), tmp_path, session, None)
    rows = read(tmp_path)
    assert len(rows) == 2 and all(row["farm/frame_copies"] == 1 for row in rows)
    assert "Trajectory memory: 0.1 MB (frames 0.1 MB) in this process" in " ".join(capsys.readouterr().out.split())


def test_runs_without_frames_count_none(tmp_path: Path) -> None:
    config = config_of(env={"task": "tabletop/reach", "num_envs": 4}, policy={"options": {"widths": [8]}})
    prepare_run(config, tmp_path, resume=False)
    with open_session(config) as session:
        training.train(RunSpec.of(config), tmp_path, session, None)
    assert not [key for row in read(tmp_path) for key in row if "frame" in key]


def layout_of(rows: int) -> MemoryLayout:
    chunk = torch.zeros(1, CHUNK, 3)
    return MemoryLayout.of(MemoryShape(rows, ENVS, ()), Inputs(), Action(chunk, chunk, torch.zeros(1), {}))


def test_a_memory_that_does_not_fit_is_refused_with_the_remedy(own_memory: Callable[[], set[Path]]) -> None:
    says = r"the trajectory memory \(10,0.* decisions of 4 env.* MiB .* remount.*--shm-size"
    with pytest.raises(FarmError, match=says):
        TrajectoryMemory.create(layout_of(10**10), None, shared=True)
    assert not own_memory()


# --- on Ray


@pytest.fixture(scope="module")
def ray(ray_runtime: RayRuntime) -> Session:
    return Session(config_of(runtime={"mode": "ray"}), ray_runtime, tuple(CORES))


def blocks_of(workers: OnPolicy) -> list[Path]:
    """All shared memory of a run."""
    memory, farm = workers.memory.address, workers.farm.address
    assert memory.frames is not None
    return [FOLDER / name for name in (memory.block, memory.frames.memory, *farm.slots, farm.bell)]


@pytest.mark.slow
def test_frames_too_large_are_refused_before_anything_is_drawn(ray: Session, tmp_path: Path) -> None:
    config = config_of(10**9)
    with pytest.raises(FarmError, match=r"the frame memory \(.* rows of 1 x 32 x 32 pixels\) needs .* remount"):
        with start_run(RunSpec.of(config), tmp_path, ray, assigned()):
            pass


@pytest.mark.slow
@pytest.mark.parametrize("fails", [False, True], ids=["as it should", "by an exception"])
def test_nothing_is_left_in_shared_memory_however_a_run_ends(fails: bool, ray: Session, tmp_path: Path) -> None:
    blocks: list[Path] = []

    @contextmanager
    def ends() -> Iterator[None]:
        if not fails:
            yield
            return
        with pytest.raises(ZeroDivisionError):
            yield

    with ends(), start_run(RunSpec.of(config_of()), tmp_path, ray, assigned()) as workers:
        blocks += blocks_of(workers)
        workers.begin(None, 0)
        one = workers.iterate(0)
        assert one.learned["learner/frames_read"] == one.learned["learner/frame_copies"] == 40
        assert len(blocks) == 4 and all(block.exists() for block in blocks)
        assert f"GB in {FOLDER}" in workers.memory.describe()
        if fails:
            _ = 1 // 0
    assert not [block for block in blocks if block.exists()]


KILLED = """
import os, sys
from pathlib import Path
from embodied.workflows.run_spec import RunSpec
from embodied.execution.iteration import start_run
from embodied.execution.session import open_session
from tests.embodied.trajectories.test_trajectory_memory import assigned, blocks_of, config_of
config = config_of(runtime={"mode": "ray"})
with open_session(config) as session, start_run(RunSpec.of(config), Path(sys.argv[1]), session, assigned()) as workers:
    workers.begin(None, 0)
    workers.iterate(0)
    print(*blocks_of(workers), flush=True)
    sys.stdin.read()
"""


@pytest.mark.slow
def test_a_killed_driver_leaves_nothing_in_shared_memory(tmp_path: Path) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", KILLED, str(tmp_path)], cwd=ROOT, text=True, stdin=subprocess.PIPE,
        stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        blocks: list[Path] = []
        for line in process.stdout:  # whatever else is said comes before
            if line.startswith(str(FOLDER)):
                blocks = [Path(name) for name in line.split()]
                break
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(blocks) == 4 and all(block.exists() for block in blocks)
        blocks += mapped([process.pid, *(member.pid for member in family)])  # and what workers lend each other
        assert len(set(blocks)) > 4
        os.kill(process.pid, signal.SIGKILL)
        process.wait(240)
    try:
        deadline = time.monotonic() + 240
        while any(block.exists() for block in blocks):
            assert time.monotonic() < deadline, "shared memory outlives a killed driver"
            time.sleep(0.05)
    finally:
        for member in family:
            if member.is_running():
                member.kill()


# --- how much memory it takes


class AnonymousPeak:
    """The most memory of its own, beyond what it had, that each process takes within the block; sampled."""

    def __init__(self, pids: list[int]) -> None:
        self._before = {pid: self._bytes(pid) for pid in pids}
        self.growth = dict.fromkeys(pids, 0)
        self.samples = 0
        self._done = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> AnonymousPeak:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._done.is_set():
            for pid, before in self._before.items():
                self.growth[pid] = max(self.growth[pid], self._bytes(pid) - before)
            self.samples += 1
            time.sleep(0.005)

    @staticmethod
    def _bytes(pid: int) -> int:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("Anonymous:"))


@pytest.mark.slow
def test_policy_worker_and_learner_take_a_fifth_of_a_rollouts_bytes_for_themselves(
    ray: Session, ray_runtime: RayRuntime, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some 100 MB of frames. A short rollout before it fills PyTorch's own pools. No episode is truncated: all final
    observations are valued in one forward pass, whose activations are no frames."""
    monkeypatch.setattr(ray_runtime, "_spare", [])  # new processes, whose memory no other test has filled
    config = config_of(
        84,
        env={"task": "tabletop/reach", "num_envs": 8, "cameras": 1, "image_size": 224, "max_episode_steps": 500},
        optim={"epochs": 1, "minibatch": 4, "micro_batch": 4},
    )
    with start_run(RunSpec.of(config), tmp_path, ray, assigned()) as workers:
        workers.begin(None, 0)

        def iterate(decisions: int, number: int) -> None:
            workers.rollout_worker.call(RolloutRole.rollout, decisions, 100.0)
            source, produce = workers.rollout_worker, RolloutRole.trajectories
            workers.learner.get(workers.learner.pipe(LearnerRole.receive, source, produce, number))
            workers.learner.call(LearnerRole.finish, number)
            weights = workers.acting.pipe(PolicyRole.load_weights, workers.learner, LearnerRole.weights, number + 1)
            workers.acting.get(weights)

        iterate(2, 0)
        everyone = psutil.Process().children(recursive=True)
        block = workers.memory.address.block
        pids = [p.pid for p in everyone if any(Path(mapped.path).name == block for mapped in p.memory_maps())]
        assert len(pids) == 2, "policy worker and learner map the memory"
        with AnonymousPeak(pids) as peak:
            iterate(84, 1)
    rollout = 84 * 8 * 224 * 224 * 3
    assert peak.samples > 20 and rollout > 100e6
    growth = sum(peak.growth.values())
    assert growth < 0.2 * rollout, f"{growth / 1e6:.0f} MB of {rollout / 1e6:.0f} MB: {peak.growth}"
    print(f"{growth / 1e6:.1f} MB beside {rollout / 1e6:.0f} MB")
