"""Recorded episodes: what is written is what was there, and a dataset is complete or absent."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest
import torch

import policies
from embodied import cli
from embodied.commands import record as recording_module
from embodied.commands.record import demonstration_episodes, record_run
from embodied.config.files import load_config, parse_config, save_config
from embodied.config.schema import Config, RuntimeConfig
from embodied.demonstrations import Dataset, DatasetError, DatasetWriter
from embodied.demonstrations.writer import new_folder
from embodied.errors import UserError
from embodied.rollout.evaluator import EpisodeResult
from embodied.run import checkpoint
from embodied.runtime.api import InlineRuntime
from policies.scripted import tabletop
from sim_farm.client.episode_replay import Replayer
from sim_farm.conformance.checks import random_actions
from sim_farm.contract import EpisodeSpec, TaskInfo
from sim_farm.episodes import evaluation_episodes
from sim_farm.registry import make_physics, make_renderer
from tests.embodied.demonstrations.examples import CODEC_ERROR, PUSH, Replays, write

COMMAND = Path(sys.executable).parent / "embodied"


def configuration(task: str, **env: object) -> Config:
    """A policy that needs no training: actions drawn at random. Of 32 x 32 pictures x264 makes, in one of a hundred
    tries, another file; of 40 x 40 and larger ones it was not seen to, in 400 tries of each of five sizes."""
    return parse_config(
        {
            "env": {"task": task, "num_envs": 2, "cameras": 2, "image_size": 64, "max_episode_steps": 12, **env},
            "policy": {"kind": "random", "chunk": 5},
            "farm": {"groups": 1},
            "eval": {"greedy": False},
            "runtime": {"mode": "inline"},
        },
        "test",
    )


@pytest.fixture(scope="module", params=["tabletop/reach", "tabletop/push"])
def recording(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Three episodes, recorded as `embodied record` does."""
    out = tmp_path_factory.mktemp("recorded") / "demos"
    record_run("test", configuration(request.param), None, out, 3, False, Path("no-runs"))
    return Dataset(out)


# --- what is recorded


def test_row_i_is_what_the_policy_saw_before_action_i_and_what_came_of_it(recording: Dataset) -> None:
    """Replayed by the simulator's own two halves, from what the dataset says of itself."""
    task = recording.task
    assert task is not None
    with closing(make_physics(task)) as physics, closing(make_renderer(task)) as renderer:
        for episode in recording.episodes:
            assert episode.spec is not None
            seen = physics.reset(episode.spec)
            for row in range(episode.begin, episode.end):
                batch = recording.batch([row])
                assert batch.proprio is not None and np.array_equal(batch.proprio[0], seen.proprio)
                assert batch.state is not None and np.array_equal(batch.state[0], seen.state)
                assert batch.instruction == (seen.instruction,)
                drawn = renderer.render([seen.scene], physics.info.cameras)
                for camera, frames in batch.frames.items():
                    assert np.abs(frames.astype(int) - drawn[camera]).mean() < CODEC_ERROR, (row, camera)
                seen = physics.step(batch.actions[0])
                assert seen.reward == recording.column("next.reward")[row]
                assert seen.success == recording.column("next.success")[row]
                assert seen.ended == recording.column("next.done")[row] == (row == episode.end - 1)


def test_actions_are_recorded_as_the_policy_gave_them(info: TaskInfo, tmp_path: Path) -> None:
    """Outside the simulator's bounds, which clips them, and none after the episode's end."""
    given = 3 * random_actions(info, 20)
    with closing(Replayer(PUSH)) as replayer:
        replay = replayer.replay(EpisodeSpec(7), given)
    dataset = write(tmp_path / "demos", info, [(EpisodeSpec(7), replay)])
    assert np.abs(given).max() > 2 and np.array_equal(dataset.column("action"), given[:12])


def test_episodes_have_seeds_that_evaluation_never_draws(recording: Dataset) -> None:
    specs = demonstration_episodes(0, 50)
    assert [spec.init_state for spec in demonstration_episodes(0, 5, (4, 9))] == [4, 9, 4, 9, 4]
    assert [episode.spec for episode in recording.episodes] == list(specs[:3])
    assert not set(specs) & set(evaluation_episodes(0, 50)) and len(set(specs)) == 50


def test_a_row_of_an_episode_says_how_to_replay_it_and_how_it_went(recording: Dataset) -> None:
    for number, episode in enumerate(recording.episodes):
        assert episode.row["episode_index"] == number and episode.row["init_state"] is None
        rows = slice(episode.begin, episode.end)
        assert episode.row["success"] == recording.column("next.success")[rows].any()
        assert (recording.column("episode_index")[rows] == number).all()
        assert recording.column("frame_index")[rows].tolist() == list(range(episode.length))
        assert np.allclose(recording.column("timestamp")[rows], np.arange(episode.length) / 20)


def test_the_shape_of_the_farm_changes_nothing(recording: Dataset, tmp_path: Path) -> None:
    assert recording.task is not None
    config = configuration(recording.task.name, num_envs=4)
    config = config.model_copy(update={"farm": config.farm.model_copy(update={"groups": 2, "physics_workers": 2})})
    record_run("test", config, None, tmp_path / "demos", 3, False, Path("no-runs"))
    files = sorted(path.relative_to(recording.folder) for path in recording.folder.rglob("*") if path.is_file())
    assert len(files) == 8
    for name in files:
        assert (tmp_path / "demos" / name).read_bytes() == (recording.folder / name).read_bytes(), name


@pytest.mark.slow
def test_only_successes_leaves_out_exactly_the_failures(tmp_path: Path) -> None:
    config = configuration("tabletop/reach", max_episode_steps=1500, cameras=0)
    result = record_run("test", config, None, tmp_path / "all", 6, False, Path("no-runs"))
    part = record_run("test", config, None, tmp_path / "part", 6, True, Path("no-runs"))
    everything, solved = Dataset(tmp_path / "all"), Dataset(tmp_path / "part")
    expected = [episode.spec for episode in everything.episodes if episode.row["success"]]
    assert 0 < len(expected) < 6, "the policy should solve some of these and fail others"
    assert [episode.spec for episode in solved.episodes] == expected
    assert result["solved"] == part["solved"] == part["episodes"] == len(expected) and result["episodes"] == 6
    assert part["episodes_run"] == 6 and part["success_rate"] == len(expected) / 6


@pytest.mark.slow
def test_wordings_are_recorded_in_turn_in_place_of_the_tasks_own(recording: Dataset, tmp_path: Path) -> None:
    assert recording.task is not None
    config, wordings = configuration(recording.task.name), ("go to the ball", "reach for it")
    record_run("test", config, None, tmp_path / "demos", 3, False, Path("no-runs"), wordings)
    found = Dataset(tmp_path / "demos")
    instructions = [found.batch([episode.begin, episode.end - 1], 1, ()).instruction for episode in found.episodes]
    assert instructions == [(wordings[0],) * 2, (wordings[1],) * 2, (wordings[0],) * 2]
    assert (found.column("action") == recording.column("action")).all(), "who acts was told something else"
    with pytest.raises(UserError, match="--instructions"):
        record_run("test", config, None, tmp_path / "other", 1, False, Path("no-runs"), ("", "go"))


def test_disturbed_episodes_show_what_the_policy_would_have_done_where_it_came_to_be(tmp_path: Path) -> None:
    """Executed is something else: the recorded actions are the script's answers to the recorded states, and do not
    lead from one of them to the next."""
    config = load_config("tabletop_scripted").model_copy(update={"runtime": RuntimeConfig(mode="inline")})
    for name in ("once", "again"):
        record_run("test", config, None, tmp_path / name, 4, False, Path("no-runs"), disturb=0.7)
    once, again = Dataset(tmp_path / "once"), Dataset(tmp_path / "again")
    assert once.provenance is not None and once.provenance["disturb"] == 0.7
    for column in ("action", "observation.environment_state"):
        assert np.array_equal(once.column(column), again.column(column)), "another stream of disturbances"
    rows = once.batch(list(range(len(once))))
    assert rows.state is not None
    labels = [
        tabletop.act(state.astype(np.float64), text) for state, text in zip(rows.state, rows.instruction, strict=True)
    ]
    assert np.array_equal(rows.actions[:, 0], np.array(labels, np.float32))
    task, (first, *_) = once.task, once.episodes
    assert task is not None and first.spec is not None
    with closing(make_physics(task)) as physics:
        seen = physics.reset(first.spec)
        assert np.array_equal(rows.state[0], seen.state)
        seen = physics.step(rows.actions[0])
        assert not np.allclose(rows.state[1], seen.state, atol=1e-4)


@pytest.mark.parametrize("disturb", [-0.1, float("nan"), float("inf")])
def test_a_disturbance_that_is_no_deviation_is_refused(disturb: float, out: Path) -> None:
    with pytest.raises(UserError, match="--disturb is a standard deviation"):
        record_run("test", configuration("tabletop/push"), None, out, 1, False, Path("no-runs"), disturb=disturb)


def test_an_episode_that_comes_out_otherwise_is_left_out_and_counted(
    info: TaskInfo, replays: Replays, tmp_path: Path
) -> None:
    """One outcome and one length are not what the simulator gives for the actions."""
    results = [
        EpisodeResult("tabletop/push", number, spec, number == 0, number == 0, 0.0, length, 12, replay.actions)
        for number, (spec, replay) in enumerate(replays)
        for length in [12 if number == 1 else replay.steps]
    ]
    writer = DatasetWriter(tmp_path, info, {"task": {}})
    assert recording_module._write(writer, [InlineRuntime(60).start("replayer", Replayer, PUSH)], results, ()) == 2
    assert [episode.spec for episode in Dataset(tmp_path).episodes] == [spec for spec, _ in replays[2:]]


def test_without_cameras_numbers_alone_are_recorded(tmp_path: Path) -> None:
    record_run("test", configuration("tabletop/reach", cameras=0), None, tmp_path / "demos", 1, False, Path("no-runs"))
    dataset = Dataset(tmp_path / "demos")
    assert dataset.info["video_path"] is None and not (dataset.folder / "videos").exists()
    assert dataset.batch([0, 1]).frames == {}


# --- complete or absent


@pytest.fixture
def out(tmp_path: Path) -> Iterator[Path]:
    """Where a recording is to go; nothing else may be left beside it."""
    yield tmp_path / "demos"
    assert {path.name for path in tmp_path.iterdir()} <= {"demos"}


def test_an_existing_folder_is_refused_and_left_alone(out: Path) -> None:
    out.mkdir()
    (out / "mine").touch()
    with pytest.raises(DatasetError, match=f"{out} exists already.*--out"):
        record_run("test", configuration("tabletop/reach"), None, out, 1, False, Path("no-runs"))
    assert (out / "mine").exists()


def test_a_recording_that_fails_leaves_nothing(out: Path) -> None:
    hopeless = configuration("tabletop/reach", max_episode_steps=1, cameras=0)
    with pytest.raises(UserError, match="none of the 2 episodes was solved.*--only-successes"):
        record_run("test", hopeless, None, out, 2, True, Path("no-runs"))
    assert not out.exists()


def test_no_episodes_are_refused(out: Path) -> None:
    with pytest.raises(UserError, match="--episodes is at least 1, got 0"):
        record_run("test", configuration("tabletop/reach"), None, out, 0, False, Path("no-runs"))


@pytest.mark.slow
def test_a_killed_recording_is_no_dataset_and_in_nobodys_way(out: Path) -> None:
    code = f"""
import os, pathlib
from embodied.demonstrations.writer import new_folder
from embodied.rollout.evaluator import EpisodeResult
from embodied.runtime.api import InlineRuntime
with new_folder(pathlib.Path({str(out)!r})) as folder:
    (folder / "meta").mkdir()
    (folder / "meta/stats.json").write_text("half")
    os._exit(9)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 9
    partial = out.parent / ".demos.partial"
    assert partial.is_dir() and not out.exists()
    with pytest.raises(DatasetError, match=r"no complete LeRobot dataset.*info\.json is missing"):
        Dataset(partial)
    with new_folder(out) as folder:
        assert not list(folder.iterdir())
    assert out.is_dir()


@pytest.mark.parametrize("room", [100, 3000, 12000])
def test_a_full_disk_is_a_message_and_leaves_nothing(room: int, info: TaskInfo, replays: Replays, out: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))  # no file may grow larger than this
        with pytest.raises(DatasetError, match="cannot write .*demos.*--out"), new_folder(out) as folder:
            writer = DatasetWriter(folder, info, {})
            for spec, replay in replays:
                writer.add(spec, replay)
            writer.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert not out.exists()


def test_a_folder_that_cannot_be_made_is_refused() -> None:
    with (
        pytest.raises(DatasetError, match="/dev/null/demos cannot be written.*--out"),
        new_folder(Path("/dev/null/demos")),
    ):
        pass


# --- as a user types it


def test_the_newest_checkpoint_of_a_run_acts_whatever_the_size_of_the_recorded_pictures(tmp_path: Path) -> None:
    config = load_config("reach").model_copy(update={"runtime": RuntimeConfig(mode="inline")})
    config = config.model_copy(update={"farm": config.farm.model_copy(update={"groups": 1})})
    (tmp_path / "run").mkdir()
    save_config(config, tmp_path / "run/config.yaml")
    spec = policies.PolicySpec(3, config.policy.chunk, state_dim=16)
    policy = policies.build(config.policy.kind, spec, 123, **config.policy.options)
    optimizer = torch.optim.Adam(policy.parameters())
    checkpoint.write(tmp_path / "run/checkpoints", checkpoint.RunState(1, 0, 0.0, ()), policy, optimizer, {})
    env = config.env.model_copy(update={"cameras": ("side",), "image_size": 48, "max_episode_steps": 6})
    changed = config.model_copy(update={"env": env})
    record_run("run", changed, None, tmp_path / "demos", 2, False, tmp_path)
    batch = Dataset(tmp_path / "demos").batch(range(12))
    assert batch.frames["side"].shape == (12, 48, 48, 3)
    assert np.allclose(batch.actions, policy.act(batch.inputs(), None).chunk.numpy(), atol=1e-6)


@pytest.mark.slow
def test_the_command_records_a_run_and_says_what_it_did(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = tmp_path / "random.yaml"
    config.write_text(
        "env: {task: tabletop/reach, cameras: 1, image_size: 32, num_envs: 2, max_episode_steps: 8}\n"
        "policy: {kind: random}\nfarm: {groups: 1}\nruntime: {mode: inline}\n"
    )
    command = [str(COMMAND), "record", str(config), "--out", str(tmp_path / "demos"), "--episodes", "2"]
    command += ["--json", str(tmp_path / "r.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["episodes"] == 2 and result["env_steps"] == len(Dataset(tmp_path / "demos")) == 16
    assert result["cameras"] == ["front"] and result["not_reproduced"] == 0 and result["wall_s"] > 0
    assert cli.main(command[1:]) == 2
    assert "exists already" in capsys.readouterr().err


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.yaml").write_text("{}\n")
    with pytest.raises(UserError, match="has no checkpoint yet"):
        record_run("empty", load_config("reach"), None, tmp_path / "demos", 1, False, tmp_path)
