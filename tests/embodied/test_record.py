"""Recorded episodes: what is read back is what was there, in a layout that LeRobot reads, and nothing half-written.

`lerobot_dataset/` was written by LeRobot 0.4.4 itself (LeRobotDataset.create, add_frame, save_episode): three episodes
of 4, 5 and 6 steps at 10 fps, two AV1 cameras, one camera of encoded images, several files and chunks. Step t of
episode e has state [e, t, e + t], action [10 e + t, -t] and pictures of the grey 40 e + 7 t.
"""

from __future__ import annotations

import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

import policies
from embodied import checkpoint
from embodied.config import Config, RuntimeConfig, UserError, load_config, parse_config, save_config
from embodied.demonstrations import Dataset, DatasetError, DatasetWriter, FileSizes
from embodied.demonstrations import recording as recording_module
from embodied.demonstrations.recording import demonstration_episodes, record_run
from embodied.demonstrations.writer import new_folder
from embodied.evaluation import EpisodeResult
from embodied.runtime.handles import InlineRuntime
from sim_farm.contract import EpisodeSpec, TaskInfo, TaskSpec
from sim_farm.episodes import evaluation_episodes
from sim_farm.registry import make_physics, make_renderer
from sim_farm.replay import ReplayedEpisode, Replayer
from tests.sim_farm.conformance import random_actions

COMMAND = Path(sys.executable).parent / "embodied"
FOREIGN = Path(__file__).parent / "lerobot_dataset"
CODEC_ERROR = 4.0
"""Of 255, mean: 1.8 to 2.2 measured on these scenes, of which halving the colour planes makes 1.8."""
PUSH = TaskSpec("tabletop/push", cameras=2, image_size=32, max_episode_steps=12)
KEYS_OF_INFO = {
    *("codebase_version", "robot_type", "total_episodes", "total_frames", "total_tasks", "chunks_size"),
    *("data_files_size_in_mb", "video_files_size_in_mb", "fps", "splits", "data_path", "video_path", "features"),
}


def configuration(task: str, **env: object) -> Config:
    """A policy that needs no training: actions drawn at random."""
    return parse_config(
        {
            "env": {"task": task, "num_envs": 2, "cameras": 2, "image_size": 32, "max_episode_steps": 12, **env},
            "policy": {"kind": "random", "chunk": 5},
            "farm": {"stages": 1},
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


@pytest.fixture(scope="module")
def info() -> TaskInfo:
    with closing(make_physics(PUSH)) as physics:
        return physics.info


@pytest.fixture(scope="module")
def replays(info: TaskInfo) -> list[tuple[EpisodeSpec, ReplayedEpisode]]:
    """Four episodes of 12, 9, 12 and 9 steps."""
    with closing(Replayer(PUSH)) as replayer:
        specs = [EpisodeSpec(seed) for seed in range(4)]
        return [(spec, replayer.replay(spec, random_actions(info, 12 if spec.seed % 2 == 0 else 9))) for spec in specs]


def write(
    folder: Path, info: TaskInfo, replays: list[tuple[EpisodeSpec, ReplayedEpisode]], sizes: FileSizes | None = None
) -> Dataset:
    folder.mkdir(parents=True)
    writer = DatasetWriter(folder, info, {"task": {}}, sizes)
    for spec, replay in replays:
        writer.add(spec, replay)
    writer.close()
    return Dataset(folder)


@pytest.fixture(scope="module")
def written(
    tmp_path_factory: pytest.TempPathFactory, info: TaskInfo, replays: list[tuple[EpisodeSpec, ReplayedEpisode]]
) -> Dataset:
    return write(tmp_path_factory.mktemp("written") / "demos", info, replays)


def copied(dataset: Dataset, folder: Path) -> Path:
    shutil.copytree(dataset.folder, folder)
    return folder


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


STATE = "observation.environment_state"


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
    config = config.model_copy(update={"farm": config.farm.model_copy(update={"stages": 2, "physics_workers": 2})})
    record_run("test", config, None, tmp_path / "demos", 3, False, Path("no-runs"))
    files = sorted(path.relative_to(recording.folder) for path in recording.folder.rglob("*") if path.is_file())
    assert len(files) == 8
    for name in files:
        assert (tmp_path / "demos" / name).read_bytes() == (recording.folder / name).read_bytes(), name


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


def test_an_episode_that_comes_out_otherwise_is_left_out_and_counted(
    info: TaskInfo, replays: list[tuple[EpisodeSpec, ReplayedEpisode]], tmp_path: Path
) -> None:
    """One outcome and one length are not what the simulator gives for the actions."""
    results = [
        EpisodeResult("tabletop/push", number, spec, number == 0, 0.0, 12 if number == 1 else replay.steps, 12, given)
        for number, (spec, replay) in enumerate(replays)
        for given in [replay.actions]
    ]
    writer = DatasetWriter(tmp_path, info, {"task": {}})
    assert recording_module._write(writer, [InlineRuntime(60).place("replayer", Replayer, PUSH)], results) == 2
    assert [episode.spec for episode in Dataset(tmp_path).episodes] == [spec for spec, _ in replays[2:]]


def test_without_cameras_numbers_alone_are_recorded(tmp_path: Path) -> None:
    record_run("test", configuration("tabletop/reach", cameras=0), None, tmp_path / "demos", 1, False, Path("no-runs"))
    dataset = Dataset(tmp_path / "demos")
    assert dataset.info["video_path"] is None and not (dataset.folder / "videos").exists()
    assert dataset.batch([0, 1]).frames == {}


# --- the layout


def test_the_layout_is_what_lerobot_reads(written: Dataset, info: TaskInfo) -> None:
    described = json.loads((written.folder / "meta/info.json").read_text())
    assert described.keys() == KEYS_OF_INFO and described["codebase_version"] == "v3.0"
    assert described["fps"] == 20 and isinstance(described["fps"], int)
    assert (described["total_episodes"], described["total_frames"], described["total_tasks"]) == (4, 42, 1)
    for camera in info.cameras:
        feature = described["features"][f"observation.images.{camera}"]
        assert (feature["dtype"], feature["shape"]) == ("video", [32, 32, 3])
        assert feature["names"] == ["height", "width", "channels"] and feature["info"]["video.codec"] == "h264"
    data = pq.read_schema(written.folder / "data/chunk-000/file-000.parquet")
    expected = {
        "observation.state": pa.list_(pa.float32(), 10),
        STATE: pa.list_(pa.float32(), info.state_dim),
        "action": pa.list_(pa.float32(), 3),
        "next.reward": pa.float32(),
        "next.success": pa.bool_(),
        "next.done": pa.bool_(),
        "timestamp": pa.float32(),
        **dict.fromkeys(("frame_index", "episode_index", "index", "task_index"), pa.int64()),
    }
    assert dict(zip(data.names, data.types, strict=True)) == expected
    assert {name for name, feature in described["features"].items() if feature["dtype"] != "video"} == set(expected)


def test_the_rows_of_episodes_say_where_everything_is(written: Dataset) -> None:
    schema = pq.read_schema(written.folder / "meta/episodes/chunk-000/file-000.parquet")
    types = dict(zip(schema.names, schema.types, strict=True))
    integers = ["episode_index", "length", "dataset_from_index", "dataset_to_index", "seed", "init_state"]
    places = ["data", "meta/episodes", "videos/observation.images.front", "videos/observation.images.wrist"]
    for name in integers + [f"{place}/{key}" for place in places for key in ("chunk_index", "file_index")]:
        assert types[name] == pa.int64(), name
    assert types["tasks"] == pa.list_(pa.string()) and types["success"] == pa.bool_()
    for place in places[2:]:
        assert types[f"{place}/from_timestamp"] == types[f"{place}/to_timestamp"] == pa.float64()
    assert types["stats/action/mean"] == pa.list_(pa.float64()) and types["stats/action/count"] == pa.list_(pa.int64())
    assert pq.ParquetFile(written.folder / "data/chunk-000/file-000.parquet").num_row_groups == 4


def test_the_files_have_the_schema_of_those_that_lerobot_writes(written: Dataset) -> None:
    """Beside the dataset that it wrote: the same keys, the same columns of episodes, the same types."""
    assert Dataset(FOREIGN).info.keys() == written.info.keys()
    ours, theirs = (
        {field.name.replace(".top", ".front"): field.type for field in pq.read_schema(folder / EPISODES)}
        for folder in (written.folder, FOREIGN)
    )
    for name, kind in theirs.items():
        # Statistics of vectors alone: of whole numbers it gives some as integers.
        if any(part in name for part in (".side", "still", "gaze")) or (
            name.startswith("stats/") and "action" not in name
        ):
            continue
        assert str(ours[name]).replace("element", "item") == str(kind).replace("element", "item"), name


EPISODES = "meta/episodes/chunk-000/file-000.parquet"


def test_pandas_would_find_the_instructions_as_the_index_of_the_tasks(written: Dataset) -> None:
    table = pq.read_table(written.folder / "meta/tasks.parquet")
    described = json.loads(table.schema.metadata[b"pandas"])
    assert described["index_columns"] == ["task"] and table["task_index"].to_pylist() == [0]
    assert table["task"].to_pylist() == ["push the red cube onto the green target"]


def test_statistics_are_those_of_all_rows_and_all_pixels(
    written: Dataset, replays: list[tuple[EpisodeSpec, ReplayedEpisode]]
) -> None:
    found = written.statistics
    assert found.keys() == written.features.keys()
    for name in ("action", "observation.state", "next.reward", "next.done"):
        rows = written.column(name).reshape(42, -1).astype(np.float64)
        assert np.allclose(found[name]["mean"], rows.mean(0)) and np.allclose(found[name]["std"], rows.std(0))
        assert np.allclose(found[name]["q99"], np.quantile(rows, 0.99, axis=0)) and found[name]["count"] == [42]
    pixels = np.concatenate([replay.frames["wrist"] for _, replay in replays]) / 255
    image = found["observation.images.wrist"]
    for key, value in {
        "min": pixels.min((0, 1, 2)),
        "max": pixels.max((0, 1, 2)),
        "std": pixels.std((0, 1, 2)),
    }.items():
        assert image[key].shape == (3, 1, 1) and np.allclose(image[key][:, 0, 0], value), key
    median = np.quantile(pixels, 0.5, axis=(0, 1, 2), method="inverted_cdf")
    assert np.allclose(image["q50"][:, 0, 0], median) and image["count"] == [42]


def test_small_limits_give_several_files_and_chunks_with_the_same_content(
    written: Dataset, info: TaskInfo, replays: list[tuple[EpisodeSpec, ReplayedEpisode]], tmp_path: Path
) -> None:
    split = write(tmp_path / "split", info, replays, FileSizes(data_mb=0.004, video_mb=0.002, files_per_chunk=2))
    for pattern in ("data/*/*.parquet", "videos/observation.images.front/*/*.mp4"):
        files = sorted(str(path.relative_to(split.folder)) for path in split.folder.glob(pattern))
        assert len(files) > 2 and any("chunk-001/file-000" in name for name in files), files
    order = np.random.default_rng(0).permutation(len(written))
    found, expected = split.batch(order, 4), written.batch(order, 4)
    assert found.proprio is not None and expected.proprio is not None
    assert np.array_equal(found.proprio, expected.proprio) and np.array_equal(found.actions, expected.actions)
    assert np.array_equal(found.padding, expected.padding) and found.instruction == expected.instruction
    for camera in info.cameras:
        assert np.abs(found.frames[camera].astype(int) - expected.frames[camera]).mean() < CODEC_ERROR
    assert split.statistics["action"]["mean"].tolist() == written.statistics["action"]["mean"].tolist()


# --- what is read


@pytest.mark.parametrize("video_mb", [200, 0.0005])
def test_any_frame_is_found_in_any_order(
    video_mb: float, info: TaskInfo, replays: list[tuple[EpisodeSpec, ReplayedEpisode]], tmp_path: Path
) -> None:
    """Every step has a grey of its own, so that a frame that is off by one shows."""
    greys = np.arange(42, dtype=np.uint8) * 5 + 20
    shown = np.broadcast_to(greys[:, None, None, None], (42, 32, 32, 3))
    begins = np.cumsum([0, *(replay.steps for _, replay in replays)])
    grey = [
        (spec, replace(replay, frames=dict.fromkeys(info.cameras, shown[begin : begin + replay.steps])))
        for begin, (spec, replay) in zip(begins, replays, strict=False)
    ]
    dataset = write(tmp_path / "grey", info, grey, FileSizes(video_mb=video_mb))
    assert len(list(dataset.folder.glob("videos/*.front/*/*.mp4"))) == (1 if video_mb == 200 else 4)
    rows = np.random.default_rng(1).integers(0, 42, 100)
    for chosen in (rows, np.arange(42), np.arange(42)[::-1], [41, 0, 41, 41]):
        means = dataset.frames("front", chosen).mean((1, 2, 3))
        assert np.abs(means - greys[chosen]).max() < 2


@pytest.mark.parametrize("chunk", [1, 5, 30])
def test_a_chunk_repeats_the_last_action_after_the_end_and_says_so(written: Dataset, chunk: int) -> None:
    batch = written.batch(range(len(written)), chunk, cameras=())
    actions = written.column("action")
    assert batch.frames == {} and batch.actions.shape == (42, chunk, 3)
    for episode in written.episodes:
        for row in range(episode.begin, episode.end):
            left = min(chunk, episode.end - row)
            assert batch.padding[row].tolist() == [False] * left + [True] * (chunk - left)
            assert np.array_equal(batch.actions[row, :left], actions[row : row + left])
            assert (batch.actions[row, left:] == actions[episode.end - 1]).all()


def test_a_batch_is_what_a_policy_takes(written: Dataset) -> None:
    inputs = written.batch([3, 17], cameras=["wrist"]).inputs()
    spec = policies.PolicySpec(3, 2, proprio_dim=10, cameras=("wrist",), image_size=32)
    policy = policies.build("flow", spec, 0, encoder="cnn")
    assert policy.act(inputs, None).chunk.shape == (2, 2, 3)
    assert inputs.frames["wrist"].dtype == torch.uint8 and len(inputs.instruction) == 2


def test_a_dataset_pickles_as_its_folder(written: Dataset) -> None:
    written.frames("front", [0])  # a file is open now
    again = pickle.loads(pickle.dumps(written))
    assert np.array_equal(again.frames("front", [5]), written.frames("front", [5]))


def test_datasets_that_lerobot_wrote_are_read() -> None:
    dataset = Dataset(FOREIGN)
    assert [episode.length for episode in dataset.episodes] == [4, 5, 6] and dataset.fps == 10
    assert len({tuple(e.row[f"data/{k}"] for k in ("chunk_index", "file_index")) for e in dataset.episodes}) == 3
    e = np.repeat([0, 1, 2], [4, 5, 6])
    t = np.concatenate([np.arange(n) for n in (4, 5, 6)])
    order = np.random.default_rng(0).permutation(15)
    batch = dataset.batch(order, chunk=2)
    assert batch.proprio is not None and batch.state is None
    assert np.array_equal(batch.proprio, np.stack([e, t, e + t], 1)[order])
    assert np.array_equal(batch.actions[:, 0], np.stack([10 * e + t, -t], 1)[order])
    assert batch.padding[:, 1].tolist() == (t == e + 3)[order].tolist()
    assert batch.instruction == tuple(f"task {number % 2}" for number in e[order])
    assert {camera: frames.shape[1:3] for camera, frames in batch.frames.items()} == {
        "top": (32, 48), "side": (32, 32), "observation.still": (8, 8)
    }  # fmt: skip
    for frames in batch.frames.values():
        assert np.abs(frames.mean((1, 2, 3)) - (40 * e + 7 * t)[order]).max() < 3
    assert dataset.column("gaze").shape == (15, 2, 3) and dataset.column("gaze")[2, 1, 0] == 3 + 10 * 2
    assert dataset.column("note")[5] == "step 1 of 1"
    assert dataset.task is None and dataset.provenance is None and dataset.episodes[0].spec is None


# --- what is refused


def test_another_version_is_refused_with_the_converter(written: Dataset, tmp_path: Path) -> None:
    folder = copied(written, tmp_path / "old")
    path = folder / "meta/info.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "codebase_version": "v2.1"}))
    with pytest.raises(DatasetError, match=r"version v2\.1.*convert_dataset_v21_to_v30"):
        Dataset(folder)
    path.write_text(json.dumps({**described, "codebase_version": "v3.1"}))
    assert len(Dataset(folder)) == 42


PARTS = [
    "meta/info.json",
    "meta/tasks.parquet",
    EPISODES,
    "data/chunk-000/file-000.parquet",
    "videos/observation.images.front/chunk-000/file-000.mp4",
]


@pytest.mark.parametrize("part", PARTS)
@pytest.mark.parametrize("harm", ["missing", "cut short"])
def test_a_missing_or_truncated_file_is_named(written: Dataset, part: str, harm: str, tmp_path: Path) -> None:
    path = copied(written, tmp_path / "harmed") / part
    if harm == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    named = path.parents[1] if (part, harm) == (EPISODES, "missing") else path
    with pytest.raises(DatasetError) as refused:
        Dataset(tmp_path / "harmed").batch([0, 41])
    assert str(named) in str(refused.value)


def test_data_of_another_recording_is_noticed(
    written: Dataset, info: TaskInfo, replays: list[tuple[EpisodeSpec, ReplayedEpisode]], tmp_path: Path
) -> None:
    folder = copied(written, tmp_path / "mixed")
    other = write(tmp_path / "other", info, replays[:2])
    for part in PARTS[3:]:
        shutil.copy(other.folder / part, folder / part)
    with pytest.raises(DatasetError, match="holds 21 rows and meta/episodes names 42"):
        Dataset(folder).column("action")
    with pytest.raises(DatasetError, match=r"file-000.mp4 has no frame at 2\.050 s"):
        Dataset(folder).frames("front", [41])


@pytest.mark.parametrize(("rows", "what"), [([42], "0 to 41"), ([-1], "0 to 41"), ([], "0 to 41"), ([[1]], "0 to 41")])
def test_rows_that_are_none_are_refused(written: Dataset, rows: list[int], what: str) -> None:
    with pytest.raises(DatasetError, match=what):
        written.batch(rows)


def test_unknown_names_list_the_known_ones(written: Dataset) -> None:
    with pytest.raises(DatasetError, match="no column 'reward'; it has: .*next.reward"):
        written.column("reward")
    with pytest.raises(DatasetError, match="no camera 'top'; it has: front, wrist"):
        written.frames("top", [0])


@pytest.mark.parametrize(
    ("change", "message"), [({"control_hz": 12.5}, "12.5 Hz"), ({"image_size": 33}, "even image size, got .* 33")]
)
def test_what_the_layout_cannot_hold_is_refused(
    info: TaskInfo, change: dict[str, float], message: str, tmp_path: Path
) -> None:
    if "image_size" in change:
        info = replace(info, spec=replace(info.spec, image_size=33))
    else:
        info = replace(info, control_hz=12.5)
    with pytest.raises(DatasetError, match=message):
        DatasetWriter(tmp_path, info, {})


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


def test_a_killed_recording_is_no_dataset_and_in_nobodys_way(out: Path) -> None:
    code = f"""
import os, pathlib
from embodied.demonstrations.writer import new_folder
from embodied.evaluation import EpisodeResult
from embodied.runtime.handles import InlineRuntime
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
def test_a_full_disk_is_a_message_and_leaves_nothing(
    room: int, info: TaskInfo, replays: list[tuple[EpisodeSpec, ReplayedEpisode]], out: Path
) -> None:
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
    config = config.model_copy(update={"farm": config.farm.model_copy(update={"stages": 1})})
    (tmp_path / "run").mkdir()
    save_config(config, tmp_path / "run/config.yaml")
    spec = policies.PolicySpec(3, config.policy.chunk, state_dim=16, image_size=config.env.image_size)
    policy = policies.build(config.policy.kind, spec, 123, **config.policy.options)
    optimizer = torch.optim.Adam(policy.parameters())
    checkpoint.write(tmp_path / "run/checkpoints", checkpoint.RunState(1, 0, 0.0, ()), policy, optimizer, {})
    env = config.env.model_copy(update={"cameras": ("side",), "image_size": 48, "max_episode_steps": 6})
    asked = config.model_copy(update={"env": env})
    record_run("run", asked, None, tmp_path / "demos", 2, False, tmp_path)
    batch = Dataset(tmp_path / "demos").batch(range(12))
    assert batch.frames["side"].shape == (12, 48, 48, 3)
    assert np.allclose(batch.actions, policy.act(batch.inputs(), None).chunk.numpy(), atol=1e-6)


def test_the_command_records_a_run_and_says_what_it_did(tmp_path: Path) -> None:
    config = tmp_path / "random.yaml"
    config.write_text(
        "env: {task: tabletop/reach, cameras: 1, image_size: 32, num_envs: 2, max_episode_steps: 8}\n"
        "policy: {kind: random}\nfarm: {stages: 1}\nruntime: {mode: inline}\n"
    )
    command = [str(COMMAND), "record", str(config), "--out", str(tmp_path / "demos"), "--episodes", "2"]
    command += ["--json", str(tmp_path / "r.json")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    assert done.returncode == 0, done.stdout + done.stderr
    result = json.loads((tmp_path / "r.json").read_text())
    assert result["episodes"] == 2 and result["env_steps"] == len(Dataset(tmp_path / "demos")) == 16
    assert result["cameras"] == ["front"] and result["not_reproduced"] == 0 and result["wall_s"] > 0
    again = subprocess.run(command, capture_output=True, text=True, timeout=240, env=os.environ)
    assert again.returncode == 2 and "exists already" in again.stderr and "Traceback" not in again.stderr


def test_a_run_without_a_checkpoint_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty/config.yaml").write_text("{}\n")
    with pytest.raises(UserError, match="has no checkpoint yet"):
        record_run("empty", load_config("reach"), None, tmp_path / "demos", 1, False, tmp_path)
