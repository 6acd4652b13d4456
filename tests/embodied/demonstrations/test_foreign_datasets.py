"""Datasets as people have them are read as their authors meant them, or refused by name."""

from __future__ import annotations

import gc
import io
import json
import pickle
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from PIL import Image

from embodied.demonstrations import Dataset, DatasetError, data_files
from embodied.demonstrations import frames as camera_frames
from embodied.demonstrations.data_files import read_ahead
from embodied.demonstrations.frames import PictureFrames
from tests.embodied.demonstrations.examples import FOREIGN
from tests.embodied.demonstrations.foreign import (
    LEROBOT,
    Change,
    change_info,
    change_tables,
    copy,
    grey,
    with_column,
    with_pictures,
    without,
)

INTEGERS = ("index", "episode_index", "frame_index", "task_index")


def assert_same(found: Dataset, expected: Dataset, cameras: bool = True) -> None:
    """All rows are equal, in the same order."""
    assert len(found) == len(expected)
    assert [(e.begin, e.end, e.instructions) for e in found.episodes] == [
        (e.begin, e.end, e.instructions) for e in expected.episodes
    ]
    ours, theirs = (each.batch(range(len(each)), 3, None if cameras else ()) for each in (found, expected))
    assert ours.instruction == theirs.instruction and np.array_equal(ours.padding, theirs.padding)
    assert ours.proprio is not None and theirs.proprio is not None and np.array_equal(ours.proprio, theirs.proprio)
    assert np.array_equal(ours.actions, theirs.actions)
    assert ours.frames.keys() == theirs.frames.keys()
    for camera, frames in ours.frames.items():
        assert np.array_equal(frames, theirs.frames[camera]), camera


def refusal(folder: Path, **arguments: Any) -> str:
    with pytest.raises(DatasetError) as refused:
        Dataset(folder, **arguments).batch([0])
    return str(refused.value)


# --- the metadata is compared with the data, and not believed


def last_points_to_the_file_before(table: pa.Table) -> pa.Table:
    for key in ("data/chunk_index", "data/file_index"):
        table = with_column(key, lambda values: [*values[:-1], values[-2]])(table)
    return table


METADATA: dict[str, tuple[Change, str]] = {
    "no tasks": (without("tasks"), ""),
    "no file index": (without("data/chunk_index", "data/file_index"), ""),
    "no rows": (without("dataset_from_index", "dataset_to_index", "length"), ""),
    "stale file index": (last_points_to_the_file_before, r"another file than the metadata says \(episode 2\)"),
    "stale rows": (with_column("dataset_from_index", lambda v: [7, *v[1:]]), r"other rows than .*index.*\(episode 0\)"),
    "other tasks": (with_column("tasks", lambda v: [["x"], *v[1:]]), r"other tasks than its rows have.*\(episode 0\)"),
    "wrong length": (with_column("length", lambda v: [n + 1 for n in v]), r"its length.*\(episode 0 and 2 others\)"),
    "floats": (lambda t: _as(t, pa.float64(), *(n for n in t.column_names if n.endswith(("_index", "length")))), ""),
    "out of order": (lambda t: t.take([2, 0, 1]), ""),
    "one task as a text": (with_column("tasks", lambda v: [tasks[0] for tasks in v]), ""),
    "columns of strange types": (
        lambda t: t.append_column("x", pa.array([{"a": [1, None]}] * 3)).append_column(
            "when", pa.array([2**60] * 3, pa.timestamp("us"))
        ),
        "",
    ),
}


def _as(table: pa.Table, kind: pa.DataType, *names: str) -> pa.Table:
    for name in names:
        table = table.set_column(table.column_names.index(name), name, table[name].cast(kind))
    return table


@pytest.mark.parametrize("case", METADATA)
def test_what_the_metadata_lacks_or_has_wrong_is_taken_from_the_data(case: str, tmp_path: Path) -> None:
    change, note = METADATA[case]
    folder = copy(tmp_path / "data")
    change_tables(folder / "meta/episodes", change)
    dataset = Dataset(folder)
    assert_same(dataset, Dataset(FOREIGN))
    assert len(dataset.notes) == bool(note)
    assert not note or re.search(note, dataset.notes[0])


@pytest.mark.parametrize("total", [14, None])
def test_totals_that_are_wrong_are_noted(total: int | None, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_info(folder, lambda info: info.update(total_frames=total))
    assert [note.rpartition("/")[2] for note in Dataset(folder).notes] == (
        ["info.json says total_frames 14, and the data have 15"] if total else []
    )


# --- rows by their own columns


def reversed_rows(table: pa.Table) -> pa.Table:
    return table.take(list(range(len(table) - 1, -1, -1)))


def in_one_list(table: pa.Table, *names: str) -> pa.Table:
    for name in names:
        table = with_column(name, lambda values: [[value] for value in values])(table)
    return table


def dictionary(table: pa.Table) -> pa.Table:
    return table.set_column(table.column_names.index("note"), "note", table["note"].dictionary_encode())


ROWS: dict[str, Change] = {
    "out of order": reversed_rows,
    "floats": lambda t: _as(t, pa.float64(), *INTEGERS),
    "int32": lambda t: _as(t, pa.int32(), *INTEGERS),
    "uint8": lambda t: _as(t, pa.uint8(), *INTEGERS),
    "lists of one": lambda t: in_one_list(t, *INTEGERS, "timestamp"),
    "double vectors": lambda t: _as(t, pa.list_(pa.float64()), "action", "observation.state"),
    "large lists": lambda t: _as(t, pa.large_list(pa.float32()), "action", "observation.state"),
    "dictionaries": dictionary,
    "no frame_index": without("frame_index"),
    "no index": without("index"),
    "columns that info.json does not name": lambda t: t.append_column("extra", pa.array([{"a": [[1], None]}] * len(t))),
    "no gaze": without("gaze", "note"),
    "index from 100": lambda t: with_column("index", lambda values: [100 + 2 * value for value in values])(t),
    "index from 0 in each episode": lambda t: t.set_column(t.column_names.index("index"), "index", t["frame_index"]),
}


@pytest.mark.parametrize("case", ROWS)
def test_rows_are_ordered_by_their_columns_whatever_types_a_tool_gave_them(case: str, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_tables(folder / "data", ROWS[case])
    dataset = Dataset(folder)
    assert_same(dataset, Dataset(FOREIGN))
    if case not in ("no gaze", "dictionaries"):
        assert np.array_equal(dataset.column("gaze"), Dataset(FOREIGN).column("gaze"))
    if case == "dictionaries":
        assert dataset.column("note").tolist() == Dataset(FOREIGN).column("note").tolist()
    if case == "floats":
        assert dataset.column("episode_index").dtype == np.int64


def test_one_file_holds_all_rows_shuffled(tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    paths = sorted((folder / "data").rglob("*.parquet"))
    rows = pa.concat_tables(pq.ParquetFile(path).read() for path in paths)
    for path in paths:
        path.unlink()
    pq.write_table(rows.take(np.random.default_rng(0).permutation(15)), folder / "data/train.parquet", row_group_size=4)
    (folder / "data/._train.parquet").write_text("what a file manager leaves")
    dataset = Dataset(folder)
    assert_same(dataset, Dataset(FOREIGN))
    assert "another file" in dataset.notes[0]


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("bad", [1.5, float("nan"), -1.0, 1e30, None])
def test_what_is_no_whole_number_is_refused_by_row(name: str, bad: float | None, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    path = folder / "data/chunk-000/file-001.parquet"
    change_tables(path, with_column(name, lambda v: pa.array([0.0, 1.0, bad, 3.0, 4.0], pa.float64())))
    assert re.search(rf"file-001.parquet: '{name}': row 2 has ", refusal(folder))


def test_episodes_keep_their_numbers_where_some_were_deleted(tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_tables(folder / "meta/episodes", lambda table: table.take([0, 2]))
    (folder / "data/chunk-000/file-001.parquet").unlink()
    change_info(folder, lambda info: info.update(total_episodes=2, total_frames=10))
    dataset = Dataset(folder)
    assert [(e.index, e.begin, e.end) for e in dataset.episodes] == [(0, 0, 4), (2, 4, 10)]
    expected = Dataset(FOREIGN)
    rows = [0, 1, 2, 3, *range(9, 15)]
    assert np.array_equal(dataset.frames("side", range(10)), expected.frames("side", rows))
    # The video file holds the deleted episode's frames, too.
    assert len(dataset.notes) == 1 and "frames to which no row refers are not used" in dataset.notes[0]


def test_an_episode_has_several_tasks(tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_tables(folder / "data/chunk-000/file-001.parquet", with_column("task_index", lambda v: [0, 0, 1, 1, 0]))
    dataset = Dataset(folder)
    assert dataset.episodes[1].instructions == ("task 0", "task 1")
    assert dataset.batch(range(4, 9), cameras=()).instruction == ("task 0", "task 0", "task 1", "task 1", "task 0")


def rows_left(count: int) -> Change:
    return lambda table: table.slice(0, count)


def test_an_episode_that_was_cut_is_read_where_info_json_agrees(tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_tables(folder / "data/chunk-000/file-001.parquet", rows_left(3))
    assert "holds 3 rows of episode 1, and the metadata names 5" in refusal(folder)
    change_info(folder, lambda info: info.update(total_frames=13))
    dataset = Dataset(folder)
    assert [e.length for e in dataset.episodes] == [4, 3, 6] and "its length in the metadata" in dataset.notes[0]
    assert np.array_equal(dataset.frames("top", [12]), Dataset(FOREIGN).frames("top", [14]))


# --- what is refused


def duplicated(folder: Path) -> None:
    shutil.copy(folder / "data/chunk-000/file-000.parquet", folder / "data/chunk-000/file-007.parquet")


def without_an_episode_in_the_metadata(folder: Path) -> None:
    change_tables(folder / "meta/episodes", lambda table: table.take([0, 1]))


def with_an_unknown_task(folder: Path) -> None:
    change_tables(folder / "data/chunk-000/file-001.parquet", with_column("task_index", lambda v: [0, 0, 7, 0, 0]))


def with_frames_and_index_apart(folder: Path) -> None:
    change_tables(folder / "data/chunk-000/file-001.parquet", with_column("index", lambda v: v[::-1]))


def with_episode_twice(folder: Path) -> None:
    change_tables(folder / "meta/episodes", lambda table: table.take([0, 1, 1, 2]))


def without_episode_index(folder: Path) -> None:
    change_tables(folder / "data", without("episode_index"))


def of_old_version(folder: Path) -> None:
    change_info(folder, lambda info: info.update(codebase_version="v1.6"))


REFUSED: dict[Callable[[Path], None], str] = {
    duplicated: r"file-000.parquet, row 0 and .*file-007.parquet, row 0 both have frame_index 0 of episode 0",
    without_an_episode_in_the_metadata: r"file-000.parquet, row 0 is of episode 2, which the metadata does not name",
    with_an_unknown_task: r"file-001.parquet, row 2: task_index 7 is none of meta/tasks.parquet",
    with_frames_and_index_apart: r"have frame_index and index in opposite orders \(episode 1\)",
    with_episode_twice: r"file-000.parquet has two rows of episode 1",
    without_episode_index: r"file-000.parquet has no column 'episode_index'",
    of_old_version: r"info.json: a LeRobot dataset of version 'v1.6', and v3.x, v2.1 and v2.0 are read.*convert",
}


@pytest.mark.parametrize("harm", REFUSED)
def test_what_cannot_be_resolved_is_refused_by_name(harm: Callable[[Path], None], tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    harm(folder)
    assert re.search(REFUSED[harm], refusal(folder))


@pytest.mark.parametrize("part", ["data/chunk-000/file-001.parquet", "meta/info.json",
                                  "videos/observation.images.top/chunk-000/file-000.mp4"])  # fmt: skip
def test_a_pointer_of_git_lfs_is_reported(part: str, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    (folder / part).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 10\n")
    assert re.search(rf"{Path(part).name} .*pointer of Git LFS.*`git lfs pull`", refusal(folder))


def test_a_folder_that_is_no_dataset_says_what_it_may_be(tmp_path: Path) -> None:
    assert "name the folder that holds meta/ and data/" in refusal(tmp_path)
    (tmp_path / "trajectory.h5").write_bytes(b"")
    assert "recordings in HDF5 or RLDS are converted first (docs/demonstrations.md)" in refusal(tmp_path)
    copy(tmp_path / "inside")
    assert "there are datasets in it: 'inside'" in refusal(tmp_path)


def test_folders_of_files_may_be_links_and_files_may_be_empty(tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    (folder / "data/chunk-001").rename(tmp_path / "elsewhere")
    (folder / "data/chunk-001").symlink_to(tmp_path / "elsewhere")
    first = folder / "data/chunk-000/file-000.parquet"
    pq.write_table(pq.ParquetFile(first).read().slice(0, 0), first.with_name("file-002.parquet"))
    assert_same(Dataset(folder), Dataset(FOREIGN))


def test_a_template_of_the_data_is_not_needed(tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_info(folder, lambda info: info.update(data_path="../{x}"))
    assert_same(Dataset(folder), Dataset(FOREIGN))

    def without_templates(info: dict[str, Any]) -> None:
        for key in ("data_path", "video_path", "chunks_size"):
            del info[key]

    change_info(folder, without_templates)
    assert_same(Dataset(folder), Dataset(FOREIGN))


# --- instructions


def pandas_index(table: pa.Table, name: Any) -> pa.Table:
    return table.replace_schema_metadata({"pandas": json.dumps({"index_columns": [name]})})


def renamed(table: pa.Table, name: str) -> pa.Table:
    return table.rename_columns(["task_index" if n == "task_index" else name for n in table.column_names])


TASKS: dict[str, Change] = {
    "another text before it": lambda t: t.add_column(0, "category", pa.array(["easy"] * len(t))),
    "a column": lambda t: pandas_index(renamed(t, "task"), {"kind": "range", "start": 0, "stop": 2, "step": 1}),
    "no pandas": lambda t: renamed(t, "task").replace_schema_metadata(None),
    "an index without a name": lambda t: pandas_index(renamed(t, "__index_level_0__"), "__index_level_0__"),
    "an index of another name": lambda t: pandas_index(renamed(t, "language"), "language"),
    "other order": lambda t: t.take([1, 0]),
    "floats": lambda t: _as(t, pa.float64(), "task_index"),
    "large strings": lambda t: _as(t, pa.large_string(), next(n for n in t.column_names if n != "task_index")),
}


@pytest.mark.parametrize("case", TASKS)
def test_the_instruction_is_the_tasks_however_the_file_was_written(case: str, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_tables(folder / "meta/tasks.parquet", TASKS[case])
    assert Dataset(folder).tasks == {0: "task 0", 1: "task 1"}


def test_tasks_in_another_order_are_noted(tmp_path: Path) -> None:
    """LeRobot's loader takes the text in the row whose number is the task's, whatever `task_index` says there."""
    folder = copy(tmp_path / "data")
    change_tables(folder / "meta/tasks.parquet", lambda table: table.take([1, 0]))
    dataset = Dataset(folder)
    assert_same(dataset, Dataset(FOREIGN))
    assert len(dataset.notes) == 1 and "tasks.parquet is not in the order of its `task_index`" in dataset.notes[0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: renamed(t, "other").replace_schema_metadata(None), "tasks.parquet says no instructions"),
        (lambda t: pa.concat_tables([t, with_column("task_index", lambda v: [0, 5])(t)]), "Task|task_index"),
        (with_column("task_index", lambda v: [0, 0]), "task_index 0 is both 'task 0' and 'task 1'"),
    ],
)  # fmt: skip
def test_tasks_that_are_ambiguous_are_refused(change: Change, message: str, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_tables(folder / "meta/tasks.parquet", change)
    if message.startswith("Task"):  # the same text twice is no contradiction
        assert Dataset(folder).tasks == {0: "task 0", 1: "task 1", 5: "task 1"}
    else:
        assert re.search(message, refusal(folder))


# --- features that nobody asked for


def test_strange_features_and_missing_columns_matter_only_where_they_are_read(tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    strange = {"dtype": "language", "shape": None}
    change_info(folder, lambda info: info["features"].update(odd=strange, gone={"dtype": "float32", "shape": [4]}))
    (folder / "meta/stats.json").unlink()
    dataset = Dataset(folder)
    assert_same(dataset, Dataset(FOREIGN))
    for name, message in (
        ("odd", r"info.json: features.odd.shape"),
        ("gone", r"file-000.parquet has 0 columns 'gone'"),
    ):
        with pytest.raises(DatasetError, match=message):
            dataset.column(name)


@pytest.mark.parametrize("name", ["action", "observation.state"])
def test_a_dataset_without_actions_or_state_opens(name: str, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_tables(folder / "data", without(name))
    change_info(folder, lambda info: info["features"].pop(name))
    dataset = Dataset(folder)
    assert dataset.frames("top", [3]).shape == (1, 32, 48, 3)
    with pytest.raises(DatasetError, match=f"no column '{name}'; it has: "):
        dataset.column(name)
    if name == "action":
        assert "no column 'action'" in refusal(folder)
    else:
        assert dataset.batch([0]).proprio is None


def test_vectors_of_another_length_are_refused_by_row(tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_tables(
        folder / "data/chunk-000/file-001.parquet",
        with_column("action", lambda v: pa.array([*v[:3], [1.0], [1.0, 2.0, 3.0]], pa.list_(pa.float32()))),
    )
    assert re.search(
        r"file-001.parquet: 'action' is not of shape \[2\].*row 3 has 1 elements, where 2 are meant", refusal(folder)
    )


# --- names


def test_features_take_other_names(tmp_path: Path) -> None:
    rename = {"observation.images.top": "observation.images.front", "observation.still": "observation.images.wrist",
              "gaze": "look"}  # fmt: skip
    dataset, expected = Dataset(FOREIGN, rename=rename), Dataset(FOREIGN)
    assert list(dataset.cameras) == ["front", "side", "wrist"] and "gaze" not in dataset.features
    assert np.array_equal(dataset.column("look"), expected.column("gaze"))
    assert np.array_equal(dataset.frames("wrist", [3, 9]), expected.frames("observation.still", [3, 9]))
    assert np.array_equal(dataset.frames("front", [3, 9]), expected.frames("top", [3, 9]))
    swapped = Dataset(FOREIGN, rename={"action": "observation.state", "observation.state": "action"})
    assert np.array_equal(swapped.column("action"), expected.column("observation.state"))


def test_a_renamed_dataset_pickles_with_its_names() -> None:
    again = pickle.loads(pickle.dumps(Dataset(FOREIGN, rename={"gaze": "look"})))
    assert "look" in again.features


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        ({"image": "observation.images.front"}, r"no feature 'image' .*it has: .*observation.images.top"),
        ({"gaze": "action"}, r"two features would be called 'action'; it has: "),
        ({"gaze": "x", "note": "x"}, r"two features would be called 'x'"),
        ({"index": "x"}, r"no feature 'index' that could be called 'x'"),
    ],
)
def test_names_that_do_not_fit_are_refused_with_those_that_are_there(rename: dict[str, str], message: str) -> None:
    assert re.search(message, refusal(FOREIGN, rename=rename))


# --- encoded pictures

SHADES = range(20, 20 + 15 * 10, 10)
MODES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "grey": lambda picture: picture,
    "palette": lambda picture: picture.convert("RGB").quantize(4),
    "with transparency": lambda picture: picture.convert("RGBA"),
    "jpeg": lambda picture: picture.convert("RGB"),
}


@pytest.mark.parametrize("case", MODES)
def test_pictures_of_any_mode_become_rgb(case: str, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    pictures = (MODES[case](grey(value)) for value in SHADES)
    change_tables(folder / "data", with_pictures(pictures, "JPEG" if case == "jpeg" else "PNG"))
    frames = Dataset(folder).frames("observation.still", [14, 0, 7, 0])
    assert frames.shape == (4, 8, 8, 3)
    assert np.abs(frames - np.array([SHADES[n] for n in (14, 0, 7, 0)])[:, None, None, None].astype(int)).max() <= 2


def stored(make: Callable[[list[bytes]], pa.Array]) -> Change:
    """The still camera's column is what is made of its pictures."""
    return with_column("observation.still", lambda cells: make([cell["bytes"] for cell in cells]))


STORED: dict[str, Change] = {
    "bytes": stored(lambda pictures: pa.array(pictures, pa.binary())),
    "large": stored(lambda p: pa.array([{"bytes": each} for each in p], pa.struct({"bytes": pa.large_binary()}))),
    "path first": stored(
        lambda pictures: pa.array(
            [{"path": "x.png", "bytes": p} for p in pictures], pa.struct({"path": pa.string(), "bytes": pa.binary()})
        )
    ),
}


@pytest.mark.parametrize("case", STORED)
def test_pictures_are_found_however_they_are_stored(case: str, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_tables(folder / "data", STORED[case])
    assert_same(Dataset(folder), Dataset(FOREIGN))


def test_pictures_in_files_of_their_own_lie_in_the_datasets_folder(tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")

    def moved(cells: list[Any]) -> pa.Array:
        found = []
        for cell in cells:
            path = folder / "images" / f"{len(list(folder.glob('images/*')))}.png"
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(cell["bytes"])
            found.append({"bytes": None, "path": str(path.relative_to(folder))})
        return pa.array(found, pa.struct({"bytes": pa.binary(), "path": pa.string()}))

    change_tables(folder / "data", with_column("observation.still", moved))
    assert_same(Dataset(folder), Dataset(FOREIGN))
    (folder / "images/3.png").unlink()
    assert re.search(r"'images/3.png', which cannot be read", refusal(folder))


@pytest.mark.parametrize("path", ["/etc/passwd", "../data/meta/info.json", "images/../../x"])
def test_pictures_outside_of_the_datasets_folder_are_refused(path: str, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_tables(folder / "data", stored(lambda pictures: pa.array([{"bytes": None, "path": path}] * len(pictures))))
    assert "which leads out of the dataset's folder" in refusal(folder)


def deep(mode: type[np.generic]) -> list[Image.Image]:
    return [Image.fromarray((np.arange(64).reshape(8, 8) * 50).astype(mode)) for _ in range(15)]


@pytest.mark.parametrize(
    "key", ["info.is_depth_map", "info.video.is_depth_map", "video_info.video.is_depth_map", "is_depth_map"]
)
def test_a_depth_map_is_no_camera_however_it_is_marked(key: str, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    part, _, rest = key.partition(".")
    entry = {part: {rest: True}} if rest else {part: True}
    change_info(folder, lambda info: info["features"]["observation.images.side"].update(entry))
    dataset = Dataset(folder)
    assert list(dataset.cameras) == ["top", "observation.still"]
    assert list(dataset.batch([0]).frames) == ["top", "observation.still"]
    assert "'observation.images.side' is not among the RGB cameras" in dataset.notes[0]
    with pytest.raises(DatasetError, match=r"images.side' is no RGB camera: .*info.json says that it is a depth map"):
        dataset.frames("side", [0])


@pytest.mark.parametrize(("mode", "kind"), [(np.uint16, "PNG"), (np.int32, "TIFF"), (np.float32, "TIFF")])
@pytest.mark.parametrize("channels", [1, 3])
def test_pictures_of_more_than_8_bits_are_never_cut(
    mode: type[np.generic], kind: str, channels: int, tmp_path: Path
) -> None:
    folder = copy(tmp_path / "data")
    change_tables(folder / "data", with_pictures(deep(mode), kind))
    change_info(folder, lambda info: info["features"]["observation.still"].update(shape=[8, 8, channels]))
    dataset = Dataset(folder)
    assert ("observation.still" in dataset.cameras) == (channels == 3)
    with pytest.raises(DatasetError, match=r"more than 8 bits of grey"):
        dataset.frames("observation.still", [0])


@pytest.mark.parametrize(
    ("shape", "names"),
    [
        ([3, 6, 10], None),
        ([6, 10], None),
        ([3, 6, 10], ["channels", "height", "width"]),
        ([10, 6, 3], ["width", "height", "channel"]),
        ([6, 10, 3], ["height", "width", "rgb"]),
        ([6, 10, 3], {"axes": ["height", "width", "channels"]}),
    ],
)
def test_shapes_of_pictures_are_read_in_any_order(shape: list[int], names: Any, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_tables(folder / "data", with_pictures(grey(value, (6, 10)) for value in SHADES))
    change_info(folder, lambda info: info["features"]["observation.still"].update(shape=shape, names=names))
    assert Dataset(folder).frames("observation.still", [3]).shape == (1, 6, 10, 3)


def test_a_picture_that_is_turned_by_its_camera_is_upright(tmp_path: Path) -> None:
    picture = Image.fromarray(np.arange(60, dtype=np.uint8).reshape(10, 6))
    marks = Image.Exif()
    marks[0x0112] = 6
    sink = io.BytesIO()
    picture.save(sink, "PNG", exif=marks)
    folder = copy(tmp_path / "data")
    change_tables(
        folder / "data", with_column("observation.still", lambda v: [{"bytes": sink.getvalue(), "path": "x"}] * len(v))
    )
    change_info(folder, lambda info: info["features"]["observation.still"].update(shape=[6, 10, 3]))
    upright = np.rot90(np.asarray(picture), -1)
    assert np.array_equal(Dataset(folder).frames("observation.still", [0])[0, ..., 0], upright)


def test_pictures_of_another_size_and_none_at_all_are_refused_by_row(tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    path = folder / "data/chunk-000/file-001.parquet"
    change_tables(path, with_pictures(grey(0, (8, 8) if n != 2 else (4, 8)) for n in range(5)))
    dataset = Dataset(folder)
    assert dataset.frames("observation.still", [4, 5, 7]).shape == (3, 8, 8, 3)
    with pytest.raises(
        DatasetError, match=r"file-001.parquet, row 2: 'observation.still' has pictures of 4 x 8, and .* says 8 x 8"
    ):
        dataset.frames("observation.still", [6])
    change_tables(path, with_column("observation.still", lambda cells: [*cells[:2], None, *cells[3:]]))
    with pytest.raises(DatasetError, match=r"file-001.parquet, row 2: 'observation.still' has no picture"):
        Dataset(folder).frames("observation.still", [4, 6])


# --- size


@pytest.mark.parametrize("kept_bytes", [0, 700, 2**30])
def test_a_minibatch_unpacks_the_row_groups_that_it_needs(
    kept_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, into memory as far as it may hold them, and a file beyond."""
    monkeypatch.setattr(camera_frames, "KEPT_BYTES", kept_bytes)
    monkeypatch.setattr(camera_frames.Pictures, "_kept", 0)
    folder = copy(tmp_path / "data")
    for path in (folder / "data").rglob("*.parquet"):
        pq.write_table(pq.ParquetFile(path).read(), path, row_group_size=2)
    dataset, expected = Dataset(folder), Dataset(FOREIGN)
    still = dataset._frames["observation.still"]
    assert isinstance(still, PictureFrames)
    pictures = still._pictures
    dataset.frames("observation.still", [5, 4])
    assert pictures._done == {(1, 0)}
    for rows in ([4, 10], range(15), [14, 3, 3]):
        frames = dataset.frames("observation.still", rows)
        assert np.array_equal(frames, expected.frames("observation.still", rows))
    assert len(pictures._done) == 8 and camera_frames.Pictures._kept <= kept_bytes + 4096
    assert (pictures._file is None) == (kept_bytes == 2**30)


def test_what_pictures_take_in_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    gc.collect()  # datasets of other tests give back what they kept
    monkeypatch.setattr(camera_frames.Pictures, "_kept", 0)
    dataset = Dataset(FOREIGN)
    dataset.frames("observation.still", range(15))
    assert camera_frames.Pictures._kept > 0
    del dataset
    gc.collect()
    assert camera_frames.Pictures._kept == 0


@pytest.mark.parametrize("source", [FOREIGN, LEROBOT / "v21"])
def test_threads_read_one_dataset_at_once(source: Path) -> None:
    dataset, alone = Dataset(source), Dataset(source)
    rng = np.random.default_rng(0)
    keys = [rng.integers(0, len(alone), 6) for _ in range(40)]
    together = read_ahead(lambda rows: dataset.batch(rows, 2), keys, workers=4, depth=8)
    for rows, batch in zip(keys, together, strict=True):
        expected = alone.batch(rows, 2)
        assert np.array_equal(batch.actions, expected.actions) and batch.instruction == expected.instruction
        for camera, frames in batch.frames.items():
            assert np.array_equal(frames, expected.frames[camera])
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("read_ahead")]


def test_opening_that_takes_long_shows_its_progress(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Dataset(FOREIGN).check_frames()
    assert capsys.readouterr().out == ""
    monkeypatch.setattr(data_files, "LONG_S", 0.0)
    Dataset(FOREIGN).check_frames()
    output = capsys.readouterr().out
    assert "Opening lerobot_dataset: 3 done" in output and "Checking the videos of lerobot_dataset: 3 done" in output


# --- what a recording of ours has lost


@pytest.mark.parametrize("lost", ["numbers", "columns"])
def test_lost_conventions_are_reported(written: Dataset, lost: str, tmp_path: Path) -> None:
    """LeRobot's merge makes floats of whole numbers, its delete leaves out what it does not know, and both lose
    `meta/embodied.json`."""
    folder = copy(tmp_path / "data", written.folder)
    assert Dataset(folder).notes == ()
    (folder / "meta/embodied.json").unlink()
    if lost == "columns":
        change_tables(folder / "meta/episodes", without("seed", "init_state", "success"))
    else:
        as_floats = with_column("init_state", lambda v: pa.array([float("nan")] * len(v), pa.float64()))
        change_tables(folder / "meta/episodes", lambda table: as_floats(_as(table, pa.float64(), "seed")))
    dataset = Dataset(folder)
    assert len(dataset.notes) == 1 and "has lost meta/embodied.json: task, control mode" in dataset.notes[0]
    specs = [episode.spec for episode in dataset.episodes]
    assert specs == ([None] * 4 if lost == "columns" else [episode.spec for episode in written.episodes])


def test_a_seed_that_is_no_whole_number_is_refused_by_episode(written: Dataset, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data", written.folder)
    change_tables(folder / "meta/episodes", with_column("seed", lambda v: [*map(float, v[:2]), 2.5, 3.0]))
    assert re.search(r"file-000.parquet: 'seed' of episode 2 is 2.5, and a whole number is needed", refusal(folder))


def test_episodes_of_others_merged_with_ours_have_no_seed(written: Dataset, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data", written.folder)
    change_tables(
        folder / "meta/episodes",
        lambda table: with_column("success", lambda v: [*v[:3], None])(
            with_column("seed", lambda v: [*map(float, v[:3]), float("nan")])(table)
        ),
    )
    dataset = Dataset(folder)
    assert [episode.spec is None for episode in dataset.episodes] == [False, False, False, True]
    assert "success" not in dataset.episodes[3].row and "some episodes say no seed" in dataset.notes[0]


def test_meta_embodied_of_another_dataset_is_reported(written: Dataset, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    shutil.copy(written.folder / "meta/embodied.json", folder / "meta")
    assert "describes a recording of `embodied record`, and the data are none" in Dataset(folder).notes[0]
