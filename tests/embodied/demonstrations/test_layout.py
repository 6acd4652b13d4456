"""The layout of recorded episodes is the one that LeRobot reads."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embodied.demonstrations import Dataset, FileSizes
from sim_farm.contract import TaskInfo
from tests.embodied.demonstrations.examples import CODEC_ERROR, EPISODES, FOREIGN, Replays, write

KEYS_OF_INFO = {
    *("codebase_version", "robot_type", "total_episodes", "total_frames", "total_tasks", "chunks_size"),
    *("data_files_size_in_mb", "video_files_size_in_mb", "fps", "splits", "data_path", "video_path", "features"),
}


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
        "observation.environment_state": pa.list_(pa.float32(), info.state_dim),
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


def test_pandas_would_find_the_instructions_as_the_index_of_the_tasks(written: Dataset) -> None:
    table = pq.read_table(written.folder / "meta/tasks.parquet")
    described = json.loads(table.schema.metadata[b"pandas"])
    assert described["index_columns"] == ["task"] and table["task_index"].to_pylist() == [0]
    assert table["task"].to_pylist() == ["push the red cube onto the green target"]


def statistics_of(dataset: Dataset) -> dict[str, dict[str, np.ndarray]]:
    found = json.loads((dataset.folder / "meta/stats.json").read_text())
    return {name: {key: np.array(value) for key, value in values.items()} for name, values in found.items()}


def test_statistics_are_those_of_all_rows_and_all_pixels(written: Dataset, replays: Replays) -> None:
    found = statistics_of(written)
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
    written: Dataset, info: TaskInfo, replays: Replays, tmp_path: Path
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
    assert statistics_of(split)["action"]["mean"].tolist() == statistics_of(written)["action"]["mean"].tolist()
