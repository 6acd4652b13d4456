"""Reads datasets in LeRobot's layout, version 3.x, ours or others', as batches for supervised learning."""

from __future__ import annotations

import io
import json
import math
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

from embodied.demonstrations import layout
from embodied.demonstrations.layout import DatasetError, Feature
from embodied.demonstrations.video import VideoReader
from policies.contract import Inputs
from sim_farm.contract import EpisodeSpec, TaskSpec

Rows = Sequence[int] | npt.NDArray[np.int64]

_OPEN_VIDEOS = 32
"""Video files held open; opening one means reading its table of frames."""
KEPT_BYTES = 2**30
"""Up to so many bytes of pictures a process keeps once they were decoded, of all its datasets."""


@dataclass(frozen=True)
class RecordedEpisode:
    """One episode: the rows `begin` to `end` of the dataset."""

    begin: int
    end: int
    instructions: tuple[str, ...]
    row: Mapping[str, Any]
    """Everything `meta/episodes` says of it but its statistics; ours: `seed`, `init_state` (or None), `success`."""

    @property
    def length(self) -> int:
        return self.end - self.begin

    @property
    def spec(self) -> EpisodeSpec | None:
        """With `Dataset.task` and the actions, all it takes to replay an episode of ours; None in other datasets."""
        return (
            EpisodeSpec(self.row["seed"], self.row["init_state"]) if {"seed", "init_state"} <= set(self.row) else None
        )


@dataclass(frozen=True)
class Batch:
    """B rows: what was seen, and the C actions that followed. Arrays are the caller's."""

    proprio: npt.NDArray[np.float32] | None
    """[B, P] `observation.state`; None where the dataset has none."""
    state: npt.NDArray[np.float32] | None
    """[B, S] `observation.environment_state`, the simulator's full state; None where the dataset has none."""
    frames: Mapping[str, npt.NDArray[np.uint8]]
    """[B, H, W, 3] for each camera asked for."""
    instruction: tuple[str, ...]
    actions: npt.NDArray[np.float32]
    """[B, C, A]; after an episode's end its last action again."""
    padding: npt.NDArray[np.bool_]
    """[B, C] True after the episode's end."""

    def inputs(self) -> Inputs:
        """The observations as a policy takes them; tensors share the batch's memory."""
        return Inputs(
            state=None if self.state is None else torch.from_numpy(self.state),
            proprio=None if self.proprio is None else torch.from_numpy(self.proprio),
            frames={camera: torch.from_numpy(frames) for camera, frames in self.frames.items()},
            instruction=self.instruction,
        )


class Dataset:
    """The dataset in `folder`. A row is an env step; `len()` counts them, and row i is the `index`-th of the data.

    Metadata is read at once, a column of numbers when it is first asked for (and kept), frames when they are
    asked for. Pickles as its folder's name; after a fork, make a new one before reading frames.
    Raises `DatasetError` that names the file if something is missing, cut short or of another version.
    """

    _promised: ClassVar[int] = 0
    """Bytes of pictures that the process's datasets keep, or will."""

    @staticmethod
    def _give_back(size: int) -> None:
        Dataset._promised -= size

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.info = self._json(layout.INFO)
        self._check_version()
        self.fps = float(self.info["fps"])
        self.features = {
            name: Feature(feature["dtype"], tuple(feature["shape"])) for name, feature in self.info["features"].items()
        }
        """Every column and camera that the dataset has, whatever its name."""
        self.cameras = {
            name.removeprefix(layout.IMAGES): name for name, feature in self.features.items() if feature.is_camera
        }
        """Cameras as policies call them, and the features of their frames."""
        self.tasks = self._tasks()
        self.episodes = self._episodes()
        self._begins = np.array([episode.begin for episode in self.episodes])
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._videos: dict[Path, VideoReader] = {}
        self._kept: dict[str, tuple[npt.NDArray[np.uint8], npt.NDArray[np.bool_]]] = {}
        """For each camera feature the pictures of all rows, and which of them were decoded."""

    def __len__(self) -> int:
        return self.episodes[-1].end if self.episodes else 0

    def __reduce__(self) -> tuple[type[Dataset], tuple[Path]]:
        return Dataset, (self.folder,)

    @cached_property
    def statistics(self) -> dict[str, dict[str, npt.NDArray[Any]]]:
        """`meta/stats.json`: for each feature its min, max, mean, std, count and quantiles."""
        found = self._json(layout.STATS)
        return {name: {key: np.array(value) for key, value in values.items()} for name, values in found.items()}

    @cached_property
    def provenance(self) -> dict[str, Any] | None:
        """`meta/embodied.json`: task and actor of a recording of ours; None in other datasets."""
        return self._json(layout.PROVENANCE) if (self.folder / layout.PROVENANCE).is_file() else None

    @property
    def task(self) -> TaskSpec | None:
        """The task that a recording of ours was made of, with its conventions; None in other datasets."""
        if self.provenance is None:
            return None
        found = self.provenance["task"]
        unknown = set(found) - {field.name for field in fields(TaskSpec)}
        if unknown:
            raise DatasetError(f"{self.folder} is of a later version than this program: what is {min(unknown)!r}?")
        return TaskSpec(**{**found, "cameras": tuple(found["cameras"])})

    def batch(self, indices: Rows, chunk: int = 1, cameras: Sequence[str] | None = None) -> Batch:
        """The rows `indices` with `chunk` actions each, and the frames of `cameras` (None: of all)."""
        rows = self._checked(indices)
        episodes = self.episode_of(rows)
        ends = np.array([episode.end for episode in self.episodes])[episodes]
        ahead = rows[:, None] + np.arange(chunk)
        names = self.cameras if cameras is None else cameras
        return Batch(
            proprio=self._vectors(layout.PROPRIO, rows) if layout.PROPRIO in self.features else None,
            state=self._vectors(layout.STATE, rows) if layout.STATE in self.features else None,
            frames={name: self.frames(name, rows) for name in names},
            instruction=tuple(self.tasks[index] for index in self.column("task_index")[rows].tolist()),
            actions=self._vectors(layout.ACTION, np.minimum(ahead, ends[:, None] - 1).ravel()).reshape(
                *ahead.shape, -1
            ),
            padding=ahead >= ends[:, None],
        )

    def column(self, name: str) -> npt.NDArray[Any]:
        """All rows of a feature that is no camera: [len] if its shape is (1,), [len, *shape] else. Not a copy."""
        if name not in self.features or self.features[name].is_camera:
            valid = ", ".join(key for key, feature in self.features.items() if not feature.is_camera)
            raise DatasetError(f"{self.folder} has no column {name!r}; it has: {valid}")
        if name not in self._columns:
            self._columns[name] = layout.to_numpy(self._raw(name), self.features[name])
        return self._columns[name]

    def frames(self, camera: str, indices: Rows) -> npt.NDArray[np.uint8]:
        """uint8 [B, H, W, 3]: the camera's pictures at these rows. What was decoded is kept where there is room for
        all the camera's pictures (`KEPT_BYTES`)."""
        if camera not in self.cameras:
            raise DatasetError(f"{self.folder} has no camera {camera!r}; it has: {', '.join(self.cameras) or 'none'}")
        rows, name = self._checked(indices), self.cameras[camera]
        if name not in self._kept:
            size = len(self) * math.prod(self.features[name].shape)
            if Dataset._promised + size > KEPT_BYTES:
                return self._decoded(name, rows)
            Dataset._promised += size  # pages are taken from the machine as they are written
            weakref.finalize(self, Dataset._give_back, size)
            shape = (len(self), *self._decoded(name, rows[:1]).shape[1:])
            self._kept[name] = np.empty(shape, np.uint8), np.zeros(len(self), np.bool_)
        frames, known = self._kept[name]
        missing = np.unique(rows[~known[rows]])
        if len(missing):
            frames[missing] = self._decoded(name, missing)
            known[missing] = True
        return frames[rows]

    def _decoded(self, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.uint8]:
        """uint8 [B, H, W, 3]: a camera feature's pictures at these rows, decoded now."""
        if self.features[name].dtype == "image":
            packed = self._raw(name).take(pa.array(rows)).to_pylist()
            return np.stack([np.asarray(Image.open(io.BytesIO(item["bytes"])).convert("RGB")) for item in packed])
        wanted: dict[Path, list[tuple[float, int]]] = defaultdict(list)
        for position, (row, number) in enumerate(zip(rows.tolist(), self.episode_of(rows).tolist(), strict=True)):
            path, begin_s = self._video_of(self.episodes[number], name)
            wanted[path].append((begin_s + (row - self.episodes[number].begin) / self.fps, position))
        found: list[npt.NDArray[np.uint8]] = [np.empty(0, np.uint8)] * len(rows)
        for path, places in wanted.items():
            places.sort()
            for (_, position), frame in zip(places, self._video(path).at([time for time, _ in places]), strict=True):
                found[position] = frame
        return np.stack(found)

    def episode_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """For each row, the position in `episodes` of its episode."""
        return np.searchsorted(self._begins, rows, side="right") - 1

    def _checked(self, indices: Rows) -> npt.NDArray[np.int64]:
        rows = np.asarray(indices, np.int64)
        if rows.ndim != 1 or not len(rows) or rows.min() < 0 or rows.max() >= len(self):
            raise DatasetError(f"rows are a list of 0 to {len(self) - 1}, got {indices!r:.100}")
        return rows

    def _vectors(self, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return self.column(name)[rows].reshape(len(rows), -1).astype(np.float32, copy=False)

    def _raw(self, name: str) -> pa.ChunkedArray:
        """A column of the data files, in the order of the dataset."""
        places = sorted({(e.row["data/chunk_index"], e.row["data/file_index"]) for e in self.episodes})
        parts = []
        for chunk, file in places:
            path = self.folder / self.info["data_path"].format(chunk_index=chunk, file_index=file)
            parts.append(_table(path, [name])[name])
        column = pa.chunked_array([piece for part in parts for piece in part.chunks], parts[0].type)
        if len(column) != len(self):
            raise DatasetError(
                f"{self.folder}/data holds {len(column)} rows and meta/episodes names {len(self)}: "
                "a file is missing or of another recording; copy or record the dataset again"
            )
        return column

    def _video_of(self, episode: RecordedEpisode, name: str) -> tuple[Path, float]:
        """The file that holds the episode's frames, and when in it they begin."""
        place = {key: episode.row[f"videos/{name}/{key}"] for key in ("chunk_index", "file_index")}
        path = self.folder / self.info["video_path"].format(video_key=name, **place)
        return path, episode.row[f"videos/{name}/from_timestamp"]

    def _video(self, path: Path) -> VideoReader:
        if path not in self._videos:
            if len(self._videos) >= _OPEN_VIDEOS:
                self._videos.pop(next(iter(self._videos))).close()
            self._videos[path] = VideoReader(path, self.fps)
        return self._videos[path]

    def _check_version(self) -> None:
        version = str(self.info.get("codebase_version"))
        if not version.startswith("v3."):
            raise DatasetError(
                f"{self.folder} is a LeRobot dataset of version {version}, and v3.x is read here; convert it with "
                "LeRobot: python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=OWNER/NAME "
                "(lerobot.datasets.v30.convert_dataset_v21_to_v30 in its releases 0.3 and 0.4)"
            )

    def _tasks(self) -> dict[int, str]:
        """Instructions by their index. Their column has no fixed name: it is pandas' index."""
        table = _table(self.folder / layout.TASKS)
        texts = next(name for name in table.column_names if name != "task_index")
        return dict(zip(table["task_index"].to_pylist(), table[texts].to_pylist(), strict=True))

    def _episodes(self) -> tuple[RecordedEpisode, ...]:
        paths = sorted((self.folder / "meta/episodes").glob("*/*.parquet"))
        if not paths:
            raise DatasetError(f"{self.folder}/meta/episodes holds no parquet file: the dataset is not complete")
        rows = []
        for path in paths:
            names = [n for n in _schema(path).names if not n.startswith("stats/")]
            rows += _table(path, names).to_pylist()
        rows.sort(key=lambda row: row["episode_index"])
        return tuple(
            RecordedEpisode(row["dataset_from_index"], row["dataset_to_index"], tuple(row["tasks"]), row)
            for row in rows
        )

    def _json(self, name: str) -> dict[str, Any]:
        path = self.folder / name
        try:
            return json.loads(path.read_text())
        except FileNotFoundError as error:
            raise DatasetError(f"{self.folder} is no complete LeRobot dataset: {path} is missing") from error
        except ValueError as error:
            raise DatasetError(f"{path} is not valid JSON ({error}); copy or record the dataset again") from error


def _table(path: Path, columns: list[str] | None = None) -> pa.Table:
    try:
        return pq.ParquetFile(path).read(columns)
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is missing: the dataset is not complete; copy or record it again") from error
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{path} is not a whole parquet file ({error}); copy or record the dataset again") from error


def _schema(path: Path) -> pa.Schema:
    try:
        return pq.read_schema(path)
    except (pa.ArrowException, OSError) as error:
        raise DatasetError(f"{path} is not a whole parquet file ({error}); copy or record the dataset again") from error
