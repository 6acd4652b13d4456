"""Damaged datasets: refused by name, or read to the last frame without an error or a hang."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from embodied.demonstrations import Dataset, DatasetError, metadata
from embodied.demonstrations.video import VideoReader
from tests.embodied.demonstrations.examples import FOREIGN, PUSH
from tests.embodied.demonstrations.foreign import LEROBOT
from tests.fuzzing import mutation
from tests.fuzzing.folders import Damaged
from tests.fuzzing.law import few_or_many, holds


def as_parquet(rng: Random, original: bytes) -> bytes:
    """A whole parquet file with other rows, columns or types."""
    table = pq.read_table(io.BytesIO(original))
    statistics = [name for name in table.column_names if name.startswith("stats/")]
    rows = table.drop_columns(statistics).to_pylist()
    try:
        changed = pa.Table.from_pylist(mutation.data(rng, rows))
    except (pa.ArrowException, TypeError, AttributeError, OverflowError, ValueError, UnicodeError, KeyError):
        changed = table.drop_columns([rng.choice(table.column_names)])  # what no parquet file can say
    sink = io.BytesIO()
    try:
        pq.write_table(changed, sink)
    except (pa.ArrowException, OSError):
        return original[: len(original) // 2]
    return sink.getvalue()


def as_lines(rng: Random, original: bytes) -> bytes:
    """A file with a JSON value in each line, of which one is another, or of which some are missing or twice."""
    lines = original.splitlines()
    place = rng.randrange(len(lines))
    way = rng.random()
    if way < 0.7:
        lines[place] = mutation.as_json(rng, json.loads(lines[place])).replace(b"\n", b" ")
    elif way < 0.85:
        del lines[place]
    else:
        lines.insert(place, rng.choice(lines))
    return b"\n".join(lines)


def read_all(folder: Path, rename: Mapping[str, str] = {}) -> Any:
    """All that learning, recording and evaluating ask a dataset for."""
    dataset = Dataset(folder, rename=rename)
    assert all(isinstance(note, str) for note in dataset.notes)
    assert dataset.provenance is None or dataset.task
    assert all(episode.length and (episode.spec is None or episode.spec.seed >= 0) for episode in dataset.episodes)
    for name, feature in dataset.features.items():
        if not feature.is_camera:
            dataset.column(name)
    dataset.check_frames()
    if len(dataset):
        dataset.batch(range(len(dataset)), 3).inputs()


@few_or_many(15)
def test_damaged_datasets_of_others(cases: range, tmp_path: Path) -> None:
    damaged = Damaged(FOREIGN, tmp_path / "data", {".parquet": as_parquet})
    holds(cases, damaged, read_all, (DatasetError,))


@few_or_many(6)
@pytest.mark.parametrize("name", ["v21", "v20", "openpi_libero_v20", "merged"])
def test_damaged_datasets_of_lerobots_other_versions_and_tools(name: str, cases: range, tmp_path: Path) -> None:
    damaged = Damaged(LEROBOT / name, tmp_path / "data", {".parquet": as_parquet, ".jsonl": as_lines})
    rename = {"actions": "action"} if name.startswith("openpi") else {}
    holds(cases, damaged, partial(read_all, rename=rename), (DatasetError,))


@few_or_many(15)
def test_damaged_datasets_of_ours(cases: range, written: Dataset, tmp_path: Path) -> None:
    whole = shutil.copytree(written.folder, tmp_path / "whole")
    (whole / "meta/embodied.json").write_text(json.dumps({"task": asdict(PUSH), "policy": "random"}))
    damaged = Damaged(whole, tmp_path / "data", {".parquet": as_parquet})
    holds(cases, damaged, read_all, (DatasetError,))


TEMPLATES = (
    "/etc/{chunk_index}", "../{file_index}.mp4", "{chunk_index:099999d}", "{0}", "{x}", "{chunk_index.__class__}",
    "{chunk_index!r}", "{", "a\0b", "{file_index:{chunk_index}}",
)  # fmt: skip


@pytest.mark.parametrize("template", TEMPLATES)
def test_paths_lead_nowhere_else(template: str, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=str(tmp_path)):
        metadata.path_of(tmp_path, template, chunk_index=1, file_index=2)


def test_a_video_is_never_a_list_of_other_files(tmp_path: Path) -> None:
    """FFmpeg would open what it names, were it left to guess."""
    shutil.copy(FOREIGN / "videos/observation.images.side/chunk-000/file-000.mp4", tmp_path / "other.mp4")
    VideoReader(tmp_path / "other.mp4").close()
    (tmp_path / "list.mp4").write_text("ffconcat version 1.0\nfile other.mp4\n")
    with pytest.raises(DatasetError, match="list.mp4 is not a whole video"):
        VideoReader(tmp_path / "list.mp4")


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e39])
def test_numbers_that_are_not_finite_are_refused_by_name(bad: float, tmp_path: Path) -> None:
    shutil.copytree(FOREIGN, tmp_path / "data")
    file = tmp_path / "data/data/chunk-000/file-001.parquet"
    table = pq.read_table(file)
    rows = table.to_pylist()
    rows[2]["action"][1] = bad
    wide = table.schema.set(1, pa.field("action", pa.list_(pa.float64(), 2)))
    for path in file.parent.parent.rglob("*.parquet"):
        written = rows if path == file else pq.read_table(path).to_pylist()
        pq.write_table(pa.Table.from_pylist(written, wide), path)
    dataset = Dataset(tmp_path / "data")
    with pytest.raises(
        DatasetError, match=r"data/data: 'action' has numbers that are not finite, first in row 6 \(episode 1\)"
    ):
        dataset.batch([6], cameras=())
    assert len(dataset.batch([0], cameras=()).actions) == 1, "other episodes are read"
