"""Checkpoints are written beside the run: of the moment in which they were asked for, complete or absent."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file
from torch.distributed.checkpoint import HuggingFaceStorageWriter

from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.errors import UserError
from embodied.execution.assignment import configured
from embodied.execution.iteration import OnPolicy, start_run
from embodied.execution.session import open_session
from embodied.learning.learner import Learner
from embodied.reporting.metrics import read
from embodied.run import checkpoint, optimizer_shards
from embodied.run.background_writer import BackgroundWriter
from embodied.run.checkpoint import CheckpointError, RunState
from embodied.run.folder import prepare_run
from embodied.run.trace import load
from embodied.runtime.api import InlineRuntime
from embodied.runtime.ranks import Ranks
from embodied.runtime.ray.runtime import RayRuntime
from embodied.training import loop as training
from embodied.training.checkpoints import FailedWrites, RunCheckpoints
from embodied.training.selection import Candidate, Selection
from embodied.workflows.run_spec import RunSpec
from policies.contract import Policy
from sim_farm.workers.supervision import WorkerTooLarge
from tests.embodied.learning.test_learner import make_batch, make_policy
from tests.embodied.learning.test_learner_ranks import config_of, connected
from tests.embodied.run.test_checkpoint import content, files_of
from tests.embodied.run.test_resume import STATES
from tests.embodied.run.test_resume import config_of as run_config
from tests.full_disk import full_disk

WAIT_S = 240.0
ENVIRONMENTS = {"base_step": np.arange(4, dtype=np.int32)}


def state_at(iteration: int) -> RunState:
    return RunState(iteration, 0, 0.0, ())


def until(happened: Callable[[], bool]) -> None:
    end = time.monotonic() + WAIT_S
    while not happened():
        assert time.monotonic() < end, "it did not happen"
        time.sleep(0.01)


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, no writer of this process gets further than to begin."""
    opened, begin = threading.Event(), checkpoint.begin

    def delayed_begin(root: Path, state: RunState) -> Path:
        assert opened.wait(WAIT_S), "nobody has let it go on"
        return begin(root, state)

    monkeypatch.setattr(checkpoint, "begin", delayed_begin)
    yield opened
    opened.set()


@pytest.fixture
def only_lasting(monkeypatch: pytest.MonkeyPatch) -> None:
    """No interim checkpoints."""
    monkeypatch.setattr(RunCheckpoints, "save_between", lambda *_: None)


# --- one rank


def frozen_in_part() -> Policy:
    policy = make_policy()
    next(policy.value_head.parameters()).requires_grad_(False)
    return policy


@pytest.mark.parametrize("make", [make_policy, frozen_in_part])
def test_what_is_written_is_of_the_moment_in_which_it_was_requested(
    make: Callable[[], Policy], gate: threading.Event, tmp_path: Path
) -> None:
    learner = Learner(make(), RunSpec.of(config_of()), tmp_path)
    environments = {name: array.copy() for name, array in ENVIRONMENTS.items()}
    for number in range(2):  # the copy is made once, and filled again for each checkpoint
        gate.set()
        learner.update(replace(make_batch(), version=-1), number)
        then = checkpoint.write(tmp_path / "then", state_at(number), learner.policy, learner.optimizer, ENVIRONMENTS)
        gate.clear()
        learner.save(tmp_path / "beside", state_at(number), environments)
        learner.update(replace(make_batch(1), version=-1), number)
        environments["base_step"] += 7
        assert not (tmp_path / "beside" / f"{number:06d}").exists()
        gate.set()
        written = learner.saved()
        assert written is not None and written.seconds > 0 and learner.saved() is None
        environments["base_step"] -= 7
        found = content(tmp_path / "beside" / f"{number:06d}")
        assert found == content(then)
        after = checkpoint.write(tmp_path / "after", state_at(number), learner.policy, learner.optimizer, ENVIRONMENTS)
        assert content(after) != found, "the update changed nothing: the test would not see it"


def test_what_is_frozen_does_not_leave_before_it_is_written(gate: threading.Event, tmp_path: Path) -> None:
    learner = Learner(frozen_in_part(), RunSpec.of(config_of()), tmp_path)
    learner.save(tmp_path, state_at(1), ENVIRONMENTS)
    leaving = threading.Thread(target=learner.unload, args=(True,))
    leaving.start()
    leaving.join(0.2)
    assert leaving.is_alive()
    gate.set()
    leaving.join(WAIT_S)
    assert not leaving.is_alive()
    learner.saved()
    checkpoint.verify(tmp_path / "000001")


def test_one_thing_is_written_at_a_time() -> None:
    writer, first, order = BackgroundWriter(), threading.Event(), list[str]()

    def slow() -> None:
        assert first.wait(WAIT_S)
        order.append("first")

    writer.begin(slow)
    second = threading.Thread(target=writer.begin, args=(lambda: order.append("second"),))
    second.start()
    second.join(0.1)
    assert second.is_alive() and not order, "it did not wait for the one before"
    first.set()
    second.join(WAIT_S)
    writer.wait()
    assert order == ["first", "second"]


def test_a_checkpoint_that_has_no_room_is_reported_and_the_next_is_written(tmp_path: Path) -> None:
    config = run_config(STATES, 3)
    with (
        open_session(config) as session,
        start_run(RunSpec.of(config), tmp_path, session, configured(RunSpec.of(config), session.cores)) as workers,
    ):
        workers.begin(None, 0)
        done = workers.iterate(0)
        workers.save(tmp_path, state_at(1), done.environments)
        workers.saved()
        with full_disk():
            workers.save(tmp_path, state_at(2), workers.iterate(1).environments)
            workers.learner.handles[0].worker._writer.settle()  # type: ignore[attr-defined]
        assert checkpoint.latest(tmp_path) == tmp_path / "000001"
        environments = workers.iterate(2).environments
        with pytest.raises(CheckpointError, match="cannot write the checkpoint .*000002.*File too large"):
            workers.saved()
        workers.save(tmp_path, state_at(3), environments)
        assert workers.saved() is not None and workers.saved() is None, "it is told once"
    checkpoint.verify(tmp_path / "000003")
    assert {path.name for path in tmp_path.iterdir() if path.is_dir()} == {"000001", "000003"}, "something was left"


def run_out_of_room(monkeypatch: pytest.MonkeyPatch, iterations: tuple[int, ...], rooms: tuple[int, ...] = ()) -> None:
    """Have no room for the checkpoints of these iterations, whenever they are tried; `rooms`: of each try, in turn."""
    save, left = OnPolicy.save, list(rooms)

    def out_of_room(workers: OnPolicy, root: Path, state: RunState, environments: checkpoint.Arrays) -> None:
        if state.iteration not in iterations:
            return save(workers, root, state, environments)
        with full_disk(left.pop(0) if left else 1000):
            save(workers, root, state, environments)
            workers.learner.handles[0].worker._writer.settle()  # type: ignore[attr-defined]

    monkeypatch.setattr(OnPolicy, "save", out_of_room)


def test_a_run_goes_on_where_a_checkpoint_has_no_room(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = run_config({**STATES, "checkpoint_every": 1}, 5)
    run_out_of_room(monkeypatch, (2, 3))
    prepare_run(config, tmp_path, False)
    with open_session(config) as session:
        result = training.train(RunSpec.of(config), tmp_path, session, None)
    output = capsys.readouterr().out
    assert output.count("cannot write the checkpoint") == 1, "it is said once"
    assert "000002: " in output and "File too large" in output and "--keep-checkpoints" in output
    assert output.count("checkpoints are written again") == 1
    assert result["iterations"] == 5 and len(read(tmp_path)) == 5
    root = tmp_path / "checkpoints"
    assert {path.name for path in root.iterdir()} == {"000001", "000004", "000005", "latest"}
    assert checkpoint.recover(root) == (root / "000005", [])


@pytest.mark.parametrize("rooms", [(1000, 1 << 30), (1000, 64)], ids=["the second time", "never"])
def test_a_run_ends_with_its_last_checkpoint_or_with_the_error(
    rooms: tuple[int, ...], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config = run_config(STATES, 2)
    run_out_of_room(monkeypatch, (2,), rooms)
    prepare_run(config, tmp_path, False)
    with open_session(config) as session:
        if rooms[1] > 1000:
            training.train(RunSpec.of(config), tmp_path, session, None)
            checkpoint.verify(tmp_path / "checkpoints" / "000002")
            return
        with pytest.raises(CheckpointError, match="cannot write .*000002"):
            training.train(RunSpec.of(config), tmp_path, session, None)
    assert len(read(tmp_path)) == 2 and checkpoint.latest(tmp_path / "checkpoints") is None


def test_what_ends_a_run_does_not_hide_what_came_first() -> None:
    failed_writes = FailedWrites()
    for text in ("no room", "no folder"):
        with failed_writes.noted():
            raise CheckpointError(text)
    assert str(failed_writes.error()) == "no folder. The first that could not be written was another: no room"


def test_a_checkpoint_that_has_no_room_is_not_evaluated(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config = run_config({**STATES, "eval": {"every": 1, "episodes": 2}}, 2)
    run_out_of_room(monkeypatch, (1,))
    prepare_run(config, tmp_path, False)
    with open_session(config) as session:
        training.train(RunSpec.of(config), tmp_path, session, None)
    assert "iteration 1 is not evaluated" in capsys.readouterr().out
    assert [row["iteration"] for row in read(tmp_path, "selection.jsonl")] == [2]


@pytest.mark.slow
def test_an_evaluation_that_has_no_room_does_not_end_a_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    config, evaluate = run_config({**STATES, "eval": {"every": 1, "episodes": 2}}, 2), Selection.evaluate

    def out_of_room(selection: Selection, candidate: Candidate) -> str:
        with full_disk(64 if candidate.iteration == 1 else 1 << 40):
            return evaluate(selection, candidate)

    monkeypatch.setattr(Selection, "evaluate", out_of_room)
    prepare_run(config, tmp_path, False)
    with open_session(config) as session:
        training.train(RunSpec.of(config), tmp_path, session, None)
    assert "iteration 1 is not evaluated: " in capsys.readouterr().out
    assert [row["iteration"] for row in read(tmp_path, "selection.jsonl")] == [2]


def test_a_run_without_room_for_its_timeline_ends_as_it_would(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    finish = Learner.finish

    def failing(learner: Learner, iteration: int) -> dict[str, float]:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
        if iteration == 1:
            raise UserError("nothing can be learned from it")
        return finish(learner, iteration)

    monkeypatch.setattr(Learner, "finish", failing)
    config = run_config({**STATES, "runtime": {"mode": "inline"}}, 3)
    prepare_run(config, tmp_path, False)
    with full_disk(1 << 40), open_session(config) as session:
        with pytest.raises(UserError, match="nothing can be learned from it"):
            training.train(RunSpec.of(config), tmp_path, session, None)
    output = capsys.readouterr().out
    assert "the run is without a timeline" in output and not (tmp_path / "trace.json").exists()


def test_a_worker_that_is_too_large_stays_where_no_checkpoint_can_be_written_for_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Its replacement would go on from an earlier one, and compute again what was computed."""
    # No room for the checkpoint of iteration 2: the one that is due because the learner is first found too large there.
    run_out_of_room(monkeypatch, (2,))
    found = iter([None, WorkerTooLarge("learner has grown"), None, WorkerTooLarge("learner has grown"), None])
    # Inline nothing is measured: what a process holds is no part of this law.
    monkeypatch.setattr(InlineRuntime, "too_large", lambda runtime: next(found))
    config = run_config({**STATES, "checkpoint_every": 100, "runtime": {"mode": "inline"}}, 5)
    prepare_run(config, tmp_path, False)
    with open_session(config) as session, pytest.raises(WorkerTooLarge):
        training.train(RunSpec.of(config), tmp_path, session, None)
    assert read(tmp_path)[-1]["iteration"] == 4, "the second time there was room"


# --- a run


def test_a_run_that_fails_keeps_the_checkpoint_that_was_being_written(
    only_lasting: None, gate: threading.Event, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    finish, saved = Learner.finish, OnPolicy.saved

    def failing(learner: Learner, iteration: int) -> dict[str, float]:
        if iteration == 4:
            raise UserError("nothing can be learned from it")
        return finish(learner, iteration)

    def release_and_save(workers: OnPolicy) -> Any:
        gate.set()
        return saved(workers)

    monkeypatch.setattr(Learner, "finish", failing)
    monkeypatch.setattr(OnPolicy, "saved", release_and_save)
    config = run_config(STATES, 6)
    prepare_run(config, tmp_path, False)
    with open_session(config) as session, pytest.raises(UserError, match="nothing can be learned from it"):
        training.train(RunSpec.of(config), tmp_path, session, None)
    assert len(read(tmp_path)) == 4, "the run did not go on while the checkpoint was written"
    found, _ = checkpoint.recover(tmp_path / "checkpoints")
    assert found is not None and found.name == "000003"


@pytest.mark.slow
def test_a_run_says_how_long_it_stood_still_and_how_long_was_written(only_lasting: None, tmp_path: Path) -> None:
    config = run_config({**STATES, "runtime": {"mode": "inline"}}, 7)
    prepare_run(config, tmp_path, False)
    with open_session(config) as session:
        training.train(RunSpec.of(config), tmp_path, session, None)
    rows = read(tmp_path)
    stalled = [row["iteration"] for row in rows if row["time/checkpoint_stall_s"] > 0]
    written = [row["iteration"] for row in rows if row["time/checkpoint_write_s"] > 0]
    assert stalled == [4, 7] and written == [7], "in the row after it is known"
    spans = load(tmp_path / "trace.json")
    assert [span.name for span in spans if span.track == "checkpoint"] == ["write"] * 3
    driver = [span.name for span in spans if span.track == "driver" and "checkpoint" in span.name]
    assert driver == ["copy for a checkpoint"] * 3 + ["complete the checkpoint"]


# --- ranks that hold shards


def numbers(folder: Path) -> dict[str, bytes]:
    """Of every file the bits of its numbers: the order in a file of shards is torch's."""
    files = sorted(folder.rglob("*.safetensors"))
    found = {f"{path.relative_to(folder)} {k}": a.tobytes() for path in files for k, a in load_file(path).items()}
    return found | {name: data for name, data in content(folder).items() if name.endswith("e.json")}


class PausedLearner(Learner):
    def limit(self, room: int) -> None:
        """Let no file of this process grow beyond that."""
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))

    def hold(self, gate: str) -> None:
        """Write no shard before there is such a file."""
        write = HuggingFaceStorageWriter.write_data

        def delayed_write(writer: Any, *args: Any) -> Any:
            until(Path(gate).exists)
            return write(writer, *args)

        setattr(HuggingFaceStorageWriter, "write_data", delayed_write)  # noqa: B010

    def pid(self) -> int:
        return os.getpid()


def make_paused(config: Config, folder: Path, rank: int) -> PausedLearner:
    return PausedLearner(make_policy(), RunSpec.of(config), folder, Affinity(), Ranks("learner", rank, 2))


@pytest.mark.slow
def test_ranks_learn_on_while_they_write(ray_runtime: RayRuntime, tmp_path: Path) -> None:
    """And what they have not finished when one of them is killed is no checkpoint."""
    config, batch = config_of(sharding="sharded"), make_batch()
    later = replace(batch, version=-1)
    first, second, gate = tmp_path / "first", tmp_path / "second", tmp_path / "gate"
    ranks = ray_runtime.start_group("learner", make_paused, 2, lambda rank: (config, tmp_path, rank))
    try:
        ranks.call_all(Learner.join, ranks.call_one(0, Learner.listen), 60.0)
        ranks.call_all(Learner.update, batch, 0)
        ranks.call_all(Learner.save, first, state_at(1), ENVIRONMENTS)
        assert all(ranks.call_all(Learner.saved))
        expected = numbers(first / "000001")
        assert {name for name in files_of(first / "000001") if "optimizer" in name} == {
            f"optimizer/shard-0000{rank}-model-00001-of-00001.safetensors" for rank in (1, 2)
        }
        ranks.call_all(PausedLearner.hold, str(gate))
        ranks.call_all(Learner.save, second, state_at(1), ENVIRONMENTS)
        ranks.call_all(Learner.update, later, 1)  # with gradients summed while the writers wait
        assert checkpoint.latest(second) is None
        gate.touch()
        ranks.call_all(Learner.saved)
        assert numbers(second / "000001") == expected
        gate.unlink()
        ranks.call_all(Learner.save, second, state_at(2), ENVIRONMENTS)
        os.kill(ranks.call_one(1, PausedLearner.pid), signal.SIGKILL)
        gate.touch()
        with pytest.raises(Exception, match="learner 1 died during 'saved'"):
            ranks.call_all(Learner.saved)
        assert checkpoint.recover(second) == (second / "000001", [])
    finally:
        ranks.abandon()


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("room", [64, 1000])
def test_ranks_go_on_where_one_of_them_has_no_room(
    rank: int, room: int, ray_runtime: RayRuntime, tmp_path: Path
) -> None:
    config, batch = config_of(sharding="sharded"), make_batch()
    ranks = ray_runtime.start_group("learner", make_paused, 2, lambda rank: (config, tmp_path, rank))
    try:
        ranks.call_all(Learner.join, ranks.call_one(0, Learner.listen), 60.0)
        ranks.call_all(Learner.update, batch, 0)
        ranks.call_one(rank, PausedLearner.limit, room)
        ranks.call_all(Learner.save, tmp_path, state_at(1), ENVIRONMENTS)
        with pytest.raises(CheckpointError, match="cannot write the checkpoint .*000001.*large"):
            ranks.call_all(Learner.saved)
        ranks.call_one(rank, PausedLearner.limit, 1 << 40)
        ranks.call_all(Learner.update, replace(batch, version=-1), 1)
        ranks.call_all(Learner.save, tmp_path, state_at(2), ENVIRONMENTS)
        assert all(ranks.call_all(Learner.saved))
        assert checkpoint.recover(tmp_path) == (tmp_path / "000002", [])
    finally:
        ranks.abandon()


@pytest.mark.slow
def test_a_rank_whose_file_is_missing_is_noticed(ray_runtime: RayRuntime, tmp_path: Path) -> None:
    with connected(ray_runtime, 2, config_of(sharding="sharded"), tmp_path) as group:
        group.call_all(Learner.update, make_batch(), 0)
        group.call_all(Learner.save, tmp_path, state_at(1), {})
    folder = tmp_path / "000001" / checkpoint.SHARDS
    shapes = {name: tensor.shape for name, tensor in optimizer_shards.read(folder).items()}
    optimizer_shards.require_whole(folder, shapes)
    next(folder.glob("shard-00002*")).unlink()
    with pytest.raises(OSError, match="numbers of exp_avg.*lacks a rank's file"):
        optimizer_shards.require_whole(folder, shapes)
