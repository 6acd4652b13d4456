"""What LeRobot wrote, converted, cut and merged is read as LeRobot's own loader reads it; and LeRobot reads ours."""

from __future__ import annotations

import json
import shutil
import subprocess
import venv
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embodied.demonstrations import Dataset, DatasetError

FOLDER = Path(__file__).parent / "lerobot"
"""Datasets that make.py there made with LeRobot, and beside each its rows as LeRobot's loader returns them."""
WRITTEN = json.loads((FOLDER / "written.json").read_text())
LOADED = [name for name in WRITTEN if (FOLDER / f"{name}.npz").exists()]
"""All but those that LeRobot itself cannot read."""
LEROBOT = (
    "torch==2.9.1 torchvision==0.24.1",
    "--no-deps lerobot==0.4.4",
    # Of what it demands all that datasets need; the rest is for robots and training.
    "datasets>=4,<5 huggingface-hub>=0.34.2,<0.36 av>=15,<16 packaging>=24.2,<26 jsonlines draccus==0.10.0 einops",
    "deepdiff<9 termcolor opencv-python-headless<4.13 gymnasium accelerate",
)
"""What pip installs for make.py, in order; torch is a build for CUDA, of several GB."""
Rows = dict[str, npt.NDArray[np.generic]]


def expected(name: str, folder: Path = FOLDER) -> Rows:
    with np.load(folder / f"{name}.npz") as rows:
        return {key: rows[key] for key in rows.files}


def columns(rows: Rows, kind: str) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
    return ((key.removeprefix(f"{kind}/"), values) for key, values in rows.items() if key.startswith(f"{kind}/"))


def check_rows(dataset: Dataset, rows: Rows) -> None:
    """All rows of both are equal, and so are the frames, bit for bit: both sides decode with PyAV."""
    assert len(dataset) == len(rows["task"])
    for key, values in columns(rows, "column"):
        assert np.array_equal(dataset.column(key), values), key
    numbers = rows["column/episode_index"]
    assert np.array_equal(dataset.episode_of(np.arange(len(dataset))), numbers)
    for number, episode in enumerate(dataset.episodes):
        assert np.flatnonzero(numbers == number).tolist() == list(range(episode.begin, episode.end))
        assert set(episode.instructions) == set(rows["task"][numbers == number].tolist())
    order = np.random.default_rng(0).permutation(len(dataset))
    if "column/action" in rows:
        batch = dataset.batch(order, chunk=3, cameras=())
        ends = np.array([episode.end for episode in dataset.episodes])[numbers.astype(np.int64)]
        ahead = np.minimum(order[:, None] + np.arange(3), ends[order][:, None] - 1)
        assert np.array_equal(batch.actions, rows["column/action"][ahead])
        assert batch.instruction == tuple(rows["task"][order].tolist())
    names = {feature: camera for camera, feature in dataset.cameras.items()}
    assert set(names) == {feature for feature, _ in columns(rows, "frames")}
    for feature, frames in columns(rows, "frames"):
        found = dataset.frames(names[feature], order)
        assert found.dtype == np.uint8 and np.array_equal(found, frames[order]), feature


@pytest.mark.parametrize("name", LOADED)
def test_rows_are_those_of_lerobots_own_loader(name: str) -> None:
    check_rows(Dataset(FOLDER / name), expected(name))


# --- what LeRobot does without: its loaders (0.4.4; 0.3.3 for version 2.1) were seen to give the same rows

Change = Callable[[Path], None]


def in_tables(part: str, change: Callable[[pa.Table], pa.Table]) -> Change:
    def apply(folder: Path) -> None:
        for path in sorted(folder.glob(part)):
            pq.write_table(change(pq.ParquetFile(path).read()), path)

    return apply


def without(part: str, *names: str) -> Change:
    return in_tables(part, lambda table: table.drop_columns([n for n in table.column_names if n.startswith(names)]))


def replaced(table: pa.Table, name: str, values: Iterable[Any], kind: pa.DataType | None = None) -> pa.Table:
    return table.set_column(table.column_names.index(name), name, pa.array(values, kind))


def retyped(part: str, kind: pa.DataType, *names: str) -> Change:
    def change(table: pa.Table) -> pa.Table:
        for name in names:
            table = replaced(table, name, table[name].to_pylist(), kind)
        return table

    return in_tables(part, change)


def without_keys(*keys: str) -> Change:
    def change(folder: Path) -> None:
        path = folder / "meta/info.json"
        info = json.loads(path.read_text())
        path.write_text(json.dumps({key: value for key, value in info.items() if key not in keys}))

    return change


def in_lines(name: str, change: Callable[[list[dict[str, Any]]], list[dict[str, Any]]]) -> Change:
    def apply(folder: Path) -> None:
        path = folder / f"meta/{name}.jsonl"
        lines = change([json.loads(line) for line in path.read_text().splitlines()])
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    return apply


def tasks_with_gaps(folder: Path) -> None:
    in_lines("tasks", lambda lines: [line | {"task_index": 5 * line["task_index"]} for line in lines])(folder)
    five = in_tables(DATA, lambda t: replaced(t, "task_index", [5 * number for number in t["task_index"].to_pylist()]))
    five(folder)


def newer(folder: Path) -> None:
    path = folder / "meta/info.json"
    path.write_text(path.read_text().replace('"v3.0"', '"v3.1"'))


EPISODES, DATA = "meta/episodes/*/*.parquet", "data/*/*.parquet"
INDICES = ("episode_index", "index", "task_index", "frame_index")
SPARED_V30: dict[str, Change] = {
    "no tasks": without(EPISODES, "tasks"),
    "no length": without(EPISODES, "length"),
    "no places of data": without(EPISODES, "data/"),
    "no ranges of rows": without(EPISODES, "dataset_"),
    "no places of episodes": without(EPISODES, "meta/"),
    "no ends of videos": without(EPISODES, "videos/observation.images.front/to_"),
    "no statistics of episodes": without(EPISODES, "stats/"),
    "least of episodes": without(EPISODES, "tasks", "length", "data/", "dataset_", "meta/", "stats/"),
    "no statistics": lambda folder: (folder / "meta/stats.json").unlink(),
    "no frame_index": without(DATA, "frame_index"),
    "no reward": without(DATA, "next.reward"),
    "int32": retyped(DATA, pa.int32(), *INDICES),
    "double": retyped(DATA, pa.float64(), *INDICES, "timestamp"),
    "lists of doubles": retyped(DATA, pa.list_(pa.float64()), "action", "observation.state"),
    "columns in another order": in_tables(DATA, lambda table: table.select(table.column_names[::-1])),
    "least of info": without_keys(
        "chunks_size", "robot_type", "splits", "total_tasks", "data_files_size_in_mb", "video_files_size_in_mb"
    ),
    "no data_path": without_keys("data_path"),
    "version 3.1": newer,
}


SPARED_V21: dict[str, Change] = {
    "no tasks": in_lines("episodes", lambda lines: [{k: v for k, v in line.items() if k != "tasks"} for line in lines]),
    "episodes in another order": in_lines("episodes", lambda lines: lines[::-1]),
    "tasks in another order": in_lines("tasks", lambda lines: lines[::-1]),
    "tasks with gaps": tasks_with_gaps,
    "no frame_index": without(DATA, "frame_index"),
    "no reward": without(DATA, "next.reward"),
    "a column more": in_tables(DATA, lambda table: table.append_column("more", pa.array(["x"] * len(table)))),
    "index anew in each episode": in_tables(DATA, lambda table: replaced(table, "index", range(len(table)))),
    "no index": without(DATA, "index"),
    "least of info": without_keys(
        "total_videos", "total_chunks", "total_tasks", "total_frames", "splits", "robot_type"
    ),
}
OTHER = {
    "no frame_index": "frame_index",
    "no reward": "next.reward",
    "no index": "index",
    "index anew in each episode": "index",
    "tasks with gaps": "task_index",
}
"""The column that is gone then, or has other numbers."""


@pytest.mark.parametrize(("version", "spared"), [("v30", n) for n in SPARED_V30] + [("v21", n) for n in SPARED_V21])
def test_what_lerobot_does_without_is_not_needed(version: str, spared: str, tmp_path: Path) -> None:
    folder, rows = tmp_path / "spared", expected(version)
    shutil.copytree(FOLDER / version, folder)
    {"v30": SPARED_V30, "v21": SPARED_V21}[version][spared](folder)
    rows.pop(f"column/{OTHER.get(spared)}", None)
    check_rows(Dataset(folder), rows)


# --- particular ones


def test_a_task_is_that_of_the_row_and_not_of_the_episode() -> None:
    dataset = Dataset(FOLDER / "v21")
    assert dataset.batch([5, 7, 8, 11], cameras=()).instruction == (
        "open the drawer", "open the drawer", "push the plate", "push the plate"
    )  # fmt: skip


def test_depth_maps_and_annotations_are_left_alone() -> None:
    """Both are features of the dataset, and neither is one of its RGB cameras or stops the rest from being read."""
    dataset = Dataset(FOLDER / "newest")
    assert list(dataset.cameras) == ["front"]
    assert any("observation.images.depth" in note for note in dataset.notes)
    assert any("observation.images.near" in note for note in dataset.notes)


def test_a_video_of_which_a_part_cannot_be_decoded_is_refused_and_not_guessed() -> None:
    """LeRobot's merge appends packets: an H.264 video with AV1 behind it. LeRobot's loader fails on the second part."""
    dataset = Dataset(FOLDER / "ours_and_cut")
    for row in (22, 30, len(dataset) - 1):
        with pytest.raises(DatasetError, match=r"observation\.images\.front/chunk-000/file-000\.mp4"):
            dataset.frames("front", [row])


# --- recordings of ours that went through LeRobot


@pytest.mark.parametrize("name", ["ours_deleted", "ours_split", "ours_merged", "ours_beside_cut"])
def test_lost_conventions_are_reported(name: str) -> None:
    dataset = Dataset(FOLDER / name)
    assert dataset.task is None
    assert any("meta/embodied.json" in note for note in dataset.notes), dataset.notes


def test_seeds_that_a_merge_left_as_floats_are_whole_numbers_again() -> None:
    """Episodes of `ours_deleted` have none: LeRobot's delete drops the column."""
    episodes = Dataset(FOLDER / "ours_beside_cut").episodes
    seeds = [episode.spec and episode.spec.seed for episode in episodes]
    whole = [episode.spec and episode.spec.seed for episode in Dataset(FOLDER / "ours_merged").episodes]
    assert seeds == whole[:4] + [None] * 3 and all(isinstance(seed, int) for seed in whole)


@pytest.mark.slow
def test_a_recording_goes_through_a_new_lerobot_and_back(tmp_path: Path) -> None:
    """LeRobot is installed anew and reads, cuts and merges a recording made now."""
    environment, made = tmp_path / "venv", tmp_path / "made"
    venv.create(environment, with_pip=True)
    for packages in LEROBOT:
        command = [str(environment / "bin/python"), "-m", "pip", "install", "--quiet", *packages.split()]
        ran = subprocess.run(command, capture_output=True, text=True)
        if ran.returncode:
            pytest.fail(f"pip cannot install {packages}: is there an index? {ran.stderr[-2000:]}")
    names = ["ours", "ours_deleted", "ours_split", "ours_merged", "ours_beside_cut"]
    command = [str(environment / "bin/python"), str(FOLDER / "make.py"), str(made), *names]
    ran = subprocess.run(command, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]
    for name in names:
        check_rows(Dataset(made / name), expected(name, made))
    recorded, rows = Dataset(made / "ours"), np.r_[0:5, 10:22]  # without the second episode
    cut = Dataset(made / "ours_deleted")
    for key in ("action", "observation.state", "observation.environment_state", "next.reward", "next.success"):
        assert np.array_equal(cut.column(key), recorded.column(key)[rows])
    shutil.rmtree(environment)
