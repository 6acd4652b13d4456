"""What is read back is what was recorded, by us or by LeRobot, and what is damaged is refused by name."""

from __future__ import annotations

import json
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

import policies
from embodied.demonstrations import Dataset, DatasetError, DatasetWriter, FileSizes
from sim_farm.contract import TaskInfo
from tests.embodied.demonstrations.examples import EPISODES, FOREIGN, Replays, write


def copied(dataset: Dataset, folder: Path) -> Path:
    shutil.copytree(dataset.folder, folder)
    return folder


# --- what is read


@pytest.mark.parametrize("video_mb", [200, 0.0005])
def test_any_frame_is_found_in_any_order(video_mb: float, info: TaskInfo, replays: Replays, tmp_path: Path) -> None:
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


@pytest.mark.parametrize("version", ["v1.6", "v2.2", "v4.0", "new", None, 3.0])
def test_another_version_is_refused_with_the_converter(written: Dataset, version: object, tmp_path: Path) -> None:
    folder = copied(written, tmp_path / "old")
    path = folder / "meta/info.json"
    described = json.loads(path.read_text())
    path.write_text(json.dumps({**described, "codebase_version": version}))
    with pytest.raises(DatasetError, match=r"info.json: a LeRobot dataset of version .*convert_dataset_v21_to_v30"):
        Dataset(folder)
    path.write_text(json.dumps({**described, "codebase_version": "v3.1"}))
    dataset = Dataset(folder)
    assert len(dataset) == 42 and dataset.version == "v3.1"


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
    written: Dataset, info: TaskInfo, replays: Replays, tmp_path: Path
) -> None:
    folder = copied(written, tmp_path / "mixed")
    other = write(tmp_path / "other", info, replays[:2])
    for part in PARTS[3:]:
        shutil.copy(other.folder / part, folder / part)
    with pytest.raises(DatasetError, match="holds 21 rows and meta/episodes names 42: episode 2 has none"):
        Dataset(folder)
    shutil.copy(written.folder / PARTS[3], folder / PARTS[3])
    with pytest.raises(DatasetError, match=r"file-000.mp4: .*the file has 21 frames, and 42 rows refer to it"):
        Dataset(folder).frames("front", [0])


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
