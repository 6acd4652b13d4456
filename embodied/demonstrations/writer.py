"""Writes a dataset episode by episode. It is complete or absent: until it is closed it lies in `.NAME.partial`."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from embodied.demonstrations import layout, statistics
from embodied.demonstrations.layout import DatasetError
from embodied.demonstrations.video import VideoWriter
from sim_farm.contract import EpisodeSpec, TaskInfo
from sim_farm.replay import ReplayedEpisode

_ROWS_AT_ONCE = 100
"""Episodes whose rows of `meta/episodes` are written together; each row has some hundred columns."""


@dataclass(frozen=True)
class FileSizes:
    """When a new file is begun, as LeRobot's defaults have it. A file never ends within an episode."""

    data_mb: float = 100
    """Of a parquet file, about."""
    video_mb: float = 200
    """Of an mp4 file, about."""
    files_per_chunk: int = 1000


@contextmanager
def new_folder(folder: Path) -> Iterator[Path]:
    """A folder to write into, which is called `folder` when the block ends, and is gone if the block fails.

    What a killed process leaves is called `.NAME.partial`, and is removed by the next one. Raises `DatasetError`
    if `folder` exists or cannot be made.
    """
    if folder.exists():
        raise DatasetError(f"{folder} exists already: name another folder with --out, or delete this one")
    aside = folder.with_name(f".{folder.name}.partial")
    shutil.rmtree(aside, ignore_errors=True)
    try:
        aside.mkdir(parents=True)
    except OSError as error:
        raise DatasetError(f"{folder} cannot be written ({error.strerror}): name another folder with --out") from error
    try:
        yield aside
        aside.rename(folder)
    finally:
        shutil.rmtree(aside, ignore_errors=True)


class DatasetWriter:
    """Writes episodes of one task into an empty folder. Only one episode is in memory at a time.

    `provenance` is JSON-able and goes into `meta/embodied.json`. `info.json` is written last, by `close`: a folder
    without it is no dataset. Raises `DatasetError` for a task that the layout cannot hold, or a full disk.
    """

    def __init__(self, folder: Path, info: TaskInfo, provenance: Mapping[str, Any], sizes: FileSizes | None = None):
        if not float(info.control_hz).is_integer():
            raise DatasetError(
                f"{info.spec.name} runs at {info.control_hz} Hz, and LeRobot's layout has whole frames per second: "
                "choose a control mode with a whole rate"
            )
        if info.cameras and info.spec.image_size % 2:
            raise DatasetError(f"H.264 needs an even image size, got env.image_size {info.spec.image_size}: add 1")
        self._folder, self._provenance, self._sizes = folder, provenance, sizes or FileSizes()
        self._fps = int(info.control_hz)
        self._features = layout.features_of(info)
        self._data = _DataFiles(folder, layout.data_schema(self._features), self._sizes)
        self._videos = {
            name: _VideoFiles(folder, name, feature, self._fps, self._sizes)
            for name, feature in self._features.items()
            if feature.is_camera
        }
        self._instructions: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self._rows_writer: pq.ParquetWriter | None = None
        self.episodes = self.frames = 0

    def add(self, spec: EpisodeSpec | None, replay: ReplayedEpisode) -> None:
        """Append the episode: its steps, its frames, and the row that says where they are and how to replay it.

        `spec` is None where the episode begins from a state that neither a seed nor an initial state leads to.
        """
        columns = self._columns(replay)
        try:
            row = {
                "episode_index": self.episodes,
                "tasks": [replay.instruction],
                "length": replay.steps,
                "dataset_from_index": self.frames,
                "dataset_to_index": self.frames + replay.steps,
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
                "seed": None if spec is None else spec.seed,
                "init_state": None if spec is None else spec.init_state,
                "success": bool(replay.success.any()),
                **self._data.add(columns, replay.steps),
            }
            found = {name: statistics.of_rows(values) for name, values in columns.items()}
            for name, files in self._videos.items():
                frames = replay.frames[name.removeprefix(layout.IMAGES)]
                row |= files.add(frames)
                counts = statistics.pixel_counts(frames)
                files.pixels += counts
                found[name] = statistics.of_pixels(counts, len(frames))
            for name, values in found.items():
                row |= {f"stats/{name}/{key}": value for key, value in statistics.as_lists(values).items()}
            self._rows.append(row)
            if len(self._rows) == _ROWS_AT_ONCE:
                self._write_rows()
        except OSError as error:
            raise self._full(error) from error
        self.episodes += 1
        self.frames += replay.steps

    def close(self) -> None:
        """Complete every file. Raises `DatasetError` if there was no episode."""
        if not self.episodes:
            raise DatasetError("no episode was recorded: a dataset needs at least one")
        try:
            self._write_rows()
            if self._rows_writer is not None:
                self._rows_writer.close()
            self._data.close()
            for files in self._videos.values():
                files.close()
            pq.write_table(layout.tasks_table(self._instructions), self._folder / layout.TASKS)
            self._write_json(layout.PROVENANCE, self._provenance)
            self._write_json(layout.STATS, self._statistics())
            self._write_json(layout.INFO, self._info())
        except OSError as error:
            raise self._full(error) from error

    def _columns(self, replay: ReplayedEpisode) -> dict[str, np.ndarray]:
        steps = np.arange(replay.steps)
        if replay.instruction not in self._instructions:
            self._instructions.append(replay.instruction)
        return {
            layout.PROPRIO: replay.proprio,
            layout.STATE: replay.state,
            layout.ACTION: replay.actions,
            layout.REWARD: replay.reward,
            layout.SUCCESS: replay.success,
            layout.DONE: replay.done,
            "timestamp": (steps / self._fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(replay.steps, self.episodes),
            "index": self.frames + steps,
            "task_index": np.full(replay.steps, self._instructions.index(replay.instruction)),
        }

    def _write_rows(self) -> None:
        """Write the rows of `meta/episodes` that are waiting."""
        if not self._rows:
            return
        if self._rows_writer is None:
            inferred = pa.Table.from_pylist(self._rows).schema
            for name in ("seed", "init_state"):  # a column of None has no type of its own
                inferred = inferred.set(inferred.get_field_index(name), pa.field(name, pa.int64()))
            self._rows_schema = inferred
            path = self._folder / layout.EPISODES_PATH.format(chunk_index=0, file_index=0)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._rows_writer = pq.ParquetWriter(path, self._rows_schema)
        self._rows_writer.write_table(pa.Table.from_pylist(self._rows, self._rows_schema))
        self._rows.clear()

    def _statistics(self) -> dict[str, Any]:
        """Of the whole dataset; columns are read back one at a time, so that none need be kept meanwhile."""
        found = {}
        for name, feature in self._features.items():
            if name in self._videos:
                found[name] = statistics.of_pixels(self._videos[name].pixels, self.frames)
            else:
                parts = [pq.read_table(path, columns=[name])[name] for path in self._data.paths]
                found[name] = statistics.of_rows(np.concatenate([layout.to_numpy(part, feature) for part in parts]))
        return {name: statistics.as_lists(values) for name, values in found.items()}

    def _info(self) -> dict[str, Any]:
        return {
            "codebase_version": layout.CODEBASE_VERSION,
            "robot_type": None,
            "total_episodes": self.episodes,
            "total_frames": self.frames,
            "total_tasks": len(self._instructions),
            "chunks_size": self._sizes.files_per_chunk,
            "data_files_size_in_mb": self._sizes.data_mb,
            "video_files_size_in_mb": self._sizes.video_mb,
            "fps": self._fps,
            "splits": {"train": f"0:{self.episodes}"},
            "data_path": layout.DATA_PATH,
            "video_path": layout.VIDEO_PATH if self._videos else None,
            "features": {name: layout.feature_json(feature, self._fps) for name, feature in self._features.items()},
        }

    def _write_json(self, name: str, data: Mapping[str, Any]) -> None:
        (self._folder / name).write_text(json.dumps(data, indent=1) + "\n")

    def _full(self, error: OSError) -> DatasetError:
        return DatasetError(
            f"cannot write {self._folder} ({error.strerror or error}): make room, or name another --out"
        )


class _DataFiles:
    """The parquet files of the data, one after the other; a row group per episode, so that each can be read alone."""

    def __init__(self, folder: Path, schema: pa.Schema, sizes: FileSizes) -> None:
        self._folder, self._schema, self._sizes = folder, schema, sizes
        self.paths: list[Path] = []
        self._writer: pq.ParquetWriter | None = None
        self._sink: Any = None
        self._rows = 0

    def add(self, columns: Mapping[str, np.ndarray], steps: int) -> dict[str, Any]:
        """Append rows; the columns of the episode's own row that say where they are."""
        if self._writer is None or _overflows(self._sink.tell(), self._rows, steps, self._sizes.data_mb):
            self.close()
            self.paths.append(self._folder / layout.DATA_PATH.format(**_place(len(self.paths), self._sizes)))
            self.paths[-1].parent.mkdir(parents=True, exist_ok=True)
            self._sink = self.paths[-1].open("wb")
            self._writer, self._rows = pq.ParquetWriter(self._sink, self._schema), 0
        arrays = [layout.to_arrow(columns[field.name], field) for field in self._schema]
        self._writer.write_table(pa.Table.from_arrays(arrays, schema=self._schema))
        self._rows += steps
        return {f"data/{key}": value for key, value in _place(len(self.paths) - 1, self._sizes).items()}

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._sink.close()
            self._writer = None


class _VideoFiles:
    """The mp4 files of one camera, one after the other."""

    def __init__(self, folder: Path, name: str, feature: layout.Feature, fps: int, sizes: FileSizes) -> None:
        self._folder, self._name, self._feature, self._fps, self._sizes = folder, name, feature, fps, sizes
        self._writer: VideoWriter | None = None
        self._files = 0
        self.pixels = np.zeros((3, 256), np.int64)
        """`statistics.pixel_counts` of everything written."""

    def add(self, frames: np.ndarray) -> dict[str, Any]:
        """Append an episode's frames; the columns of its row that say where they are."""
        video = self._writer
        if video is None or _overflows(video.bytes, video.frames, len(frames), self._sizes.video_mb):
            self.close()
            place = _place(self._files, self._sizes)
            path = self._folder / layout.VIDEO_PATH.format(video_key=self._name, **place)
            height, width, _ = self._feature.shape
            self._writer = video = VideoWriter(path, self._fps, height, width)
            self._files += 1
        begin = video.frames
        video.write(frames)
        times = {"from_timestamp": begin / self._fps, "to_timestamp": video.frames / self._fps}
        return {f"videos/{self._name}/{k}": v for k, v in (_place(self._files - 1, self._sizes) | times).items()}

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()
            self._writer = None


def _place(number: int, sizes: FileSizes) -> dict[str, int]:
    """Chunk and file of the `number`-th file."""
    chunk, file = divmod(number, sizes.files_per_chunk)
    return {"chunk_index": chunk, "file_index": file}


def _overflows(size: int, held: int, more: int, limit_mb: float) -> bool:
    """Whether `more` rows, as large as those `held` in `size` bytes, would make the file too large."""
    return held > 0 and size * (1 + more / held) >= limit_mb * 2**20
