"""Reads datasets in LeRobot's layout, version 3.x, ours or others', as batches for supervised learning."""

from __future__ import annotations

import io
import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch
from PIL import Image

from embodied.demonstrations import layout, metadata
from embodied.demonstrations.layout import DatasetError, Feature
from embodied.demonstrations.metadata import AGAIN
from embodied.demonstrations.video import VideoReader
from policies.contract import Inputs
from sim_farm.contract import EpisodeSpec, TaskSpec

Rows = Sequence[int] | npt.NDArray[np.int64]

_OPEN_VIDEOS = 32
"""Video files held open; opening one means reading its table of frames."""
READ_AND_DONE = (layout.PROPRIO, layout.STATE, layout.ACTION)
"""What a policy reads and does: columns of finite numbers."""
EPISODE_COLUMNS: Mapping[str, metadata.Kind] = {
    **dict.fromkeys(
        ("episode_index", "dataset_from_index", "dataset_to_index", "data/chunk_index", "data/file_index"),
        "whole number",
    ),
    "tasks": "list of texts",
}
OUR_COLUMNS: Mapping[str, metadata.Kind] = {"seed": "whole number", "init_state": "whole number", "success": "truth"}
"""Further ones, in recordings of ours."""
CHANNELS = (1, 3, 4)
"""Of a picture, and so the last number of its shape, or the first."""
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

    def __init__(self, folder: str | Path, *, rename: Mapping[str, str] = {}) -> None:
        self.folder = Path(folder)
        self._rename = dict(rename)
        self._lock = threading.RLock()
        self._theirs = {ours: key for key, ours in rename.items()}
        self.info = metadata.read_json(self.folder / layout.INFO)
        self._check_version()
        self._said = metadata.read_info(self.folder / layout.INFO, self.info)
        self.fps = self._said.fps
        self.features = {
            self._rename.get(name, name): Feature(entry.dtype, entry.shape)
            for name, entry in self._said.features.items()
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
        """`meta/stats.json`: for each feature its min, max, mean, std, count and quantiles, all of them finite."""
        path = self.folder / layout.STATS
        return metadata.read_statistics(path, metadata.read_json(path))

    @cached_property
    def provenance(self) -> dict[str, Any] | None:
        """`meta/embodied.json`: task and actor of a recording of ours; None in other datasets."""
        path = self.folder / layout.PROVENANCE
        return metadata.read_json(path) if path.exists() else None

    @property
    def task(self) -> TaskSpec | None:
        """The task that a recording of ours was made of, with its conventions; None in other datasets."""
        if self.provenance is None:
            return None
        return metadata.read_task(self.folder / layout.PROVENANCE, self.provenance)

    def batch(self, indices: Rows, chunk: int = 1, cameras: Sequence[str] | None = None) -> Batch:
        """The rows `indices` with `chunk` actions each, and the frames of `cameras` (None: of all)."""
        with self._lock:
            return self._batch(self._checked(indices), chunk, cameras)

    def _batch(self, rows: npt.NDArray[np.int64], chunk: int, cameras: Sequence[str] | None) -> Batch:
        episodes = self.episode_of(rows)
        ends = np.array([episode.end for episode in self.episodes])[episodes]
        ahead = rows[:, None] + np.arange(chunk)
        names = self.cameras if cameras is None else cameras
        return Batch(
            proprio=self._vectors(layout.PROPRIO, rows) if layout.PROPRIO in self.features else None,
            state=self._vectors(layout.STATE, rows) if layout.STATE in self.features else None,
            frames={name: self.frames(name, rows) for name in names},
            instruction=tuple(self._instruction(index) for index in self.column("task_index")[rows].tolist()),
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
            self._columns[name] = self._numbers(name)
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
            return np.stack([self._picture(name, item) for item in packed])
        wanted: dict[Path, list[tuple[float, int]]] = defaultdict(list)
        for position, (row, number) in enumerate(zip(rows.tolist(), self.episode_of(rows).tolist(), strict=True)):
            path, begin_s = self._video_of(self.episodes[number], name)
            wanted[path].append((begin_s + (row - self.episodes[number].begin) / self.fps, position))
        found: list[npt.NDArray[np.uint8]] = [np.empty(0, np.uint8)] * len(rows)
        for path, places in wanted.items():
            places.sort()
            for (_, position), frame in zip(
                places, self._video(name, path).at([time for time, _ in places]), strict=True
            ):
                found[position] = frame
        return np.stack(found)

    def _picture(self, name: str, item: Any) -> npt.NDArray[np.uint8]:
        """uint8 [H, W, 3] of an encoded picture."""
        try:
            picture = Image.open(io.BytesIO(item["bytes"]))
            self._check_size(name, picture.height, picture.width)
            return np.asarray(picture.convert("RGB"))
        except DatasetError:
            raise
        except Exception as error:  # Pillow's decoders raise all kinds
            raise DatasetError(f"{self.folder}/data: {name!r} has a picture that is none ({error}); {AGAIN}") from error

    def _check_size(self, name: str, height: int, width: int) -> None:
        """Raise `DatasetError` unless a picture is as large as `info.json` says, channels first or last."""
        shape = self.features[name].shape
        if (height, width) != (shape[:2] if shape[2] in CHANNELS else shape[1:]):
            raise DatasetError(
                f"{self.folder}: {name!r} has pictures of {height} x {width}, and {layout.INFO} says {list(shape)}; "
                f"{AGAIN}"
            )

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

    def _instruction(self, index: int) -> str:
        if index not in self.tasks:
            raise DatasetError(f"{self.folder}/data: task_index {index} is none of {layout.TASKS}; {AGAIN}")
        return self.tasks[index]

    def _numbers(self, name: str) -> npt.NDArray[Any]:
        """A column as `info.json` describes it: of its shape, of numbers where it says so. What policies read and do is
        finite, also as float32."""
        feature, raw = self.features[name], self._raw(name)
        try:
            found = layout.to_numpy(raw, feature)
        except (ValueError, TypeError, pa.ArrowException) as error:
            raise DatasetError(
                f"{self.folder}/data: {name!r} is not of shape {list(feature.shape)}: {error}"
            ) from error
        numeric = found.dtype.kind in "biuf"
        if numeric != (feature.dtype != "string") or (found.dtype.kind == "f" and name.endswith("_index")):
            raise DatasetError(f"{self.folder}/data: {name!r} is of {raw.type}, and {layout.INFO} says {feature.dtype}")
        if name in READ_AND_DONE:
            with np.errstate(over="ignore"):
                finite = np.isfinite(found.astype(np.float32)).reshape(len(found), -1).all(1)
            if not finite.all():
                row = int(finite.argmin())
                episode = int(self.episode_of(np.array([row]))[0])
                raise DatasetError(
                    f"{self.folder}/data: {name!r} has numbers that are not finite, first in row {row} (episode "
                    f"{episode}): a policy cannot learn from them; record that episode again, or leave it out"
                )
        return found

    def _raw(self, name: str) -> pa.ChunkedArray:
        """A column of the data files, in the order of the dataset."""
        places = sorted({(e.row["data/chunk_index"], e.row["data/file_index"]) for e in self.episodes})
        parts: list[pa.ChunkedArray] = []
        for chunk, file in places:
            path = metadata.path_of(self.folder, self._said.data_path, chunk_index=chunk, file_index=file)
            parts.append(metadata.read_table(path, [self._theirs.get(name, name)])[self._theirs.get(name, name)])
            if parts[-1].type != parts[0].type:
                raise DatasetError(f"{path}: {name!r} is of {parts[-1].type}, and of {parts[0].type} in the first file")
        if not parts:
            raise DatasetError(f"{self.folder} has no episodes")
        column = pa.chunked_array([piece for part in parts for piece in part.chunks], parts[0].type)
        if len(column) != len(self):
            raise DatasetError(
                f"{self.folder}/data holds {len(column)} rows and meta/episodes names {len(self)}: "
                "a file is missing or of another recording; copy or record the dataset again"
            )
        return column

    def _video_of(self, episode: RecordedEpisode, name: str) -> tuple[Path, float]:
        """The file that holds the episode's frames, and when in it they begin."""
        name = self._theirs.get(name, name)
        place = {key: episode.row[f"videos/{name}/{key}"] for key in ("chunk_index", "file_index")}
        path = metadata.path_of(self.folder, self._said.video_path or "", video_key=name, **place)
        return path, episode.row[f"videos/{name}/from_timestamp"]

    def _video(self, name: str, path: Path) -> VideoReader:
        if path not in self._videos:
            if len(self._videos) >= _OPEN_VIDEOS:
                self._videos.pop(next(iter(self._videos))).close()
            video = VideoReader(path, self.fps)
            self._check_size(name, video.height, video.width)
            self._videos[path] = video
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
        path = self.folder / layout.TASKS
        table = metadata.read_table(path)
        texts = next((name for name in table.column_names if name != "task_index"), "task")
        metadata.check_column(path, table, "task_index", "whole number")
        metadata.check_column(path, table, texts, "text")
        return dict(zip(table["task_index"].to_pylist(), table[texts].to_pylist(), strict=True))

    def _episodes(self) -> tuple[RecordedEpisode, ...]:
        paths = sorted((self.folder / "meta/episodes").glob("*/*.parquet"))
        if not paths:
            raise DatasetError(f"{self.folder}/meta/episodes holds no parquet file: the dataset is not complete")
        rows: list[dict[str, Any]] = []
        for path in paths:
            table = metadata.read_table(path, [n for n in metadata.names_in(path) if not n.startswith("stats/")])
            for name, kind in self._episode_columns().items():
                metadata.check_column(path, table, name, kind)
            for name, kind in OUR_COLUMNS.items():
                if name in table.column_names:
                    metadata.check_column(path, table, name, kind, optional=name == "init_state")
            rows += table.to_pylist()
        rows.sort(key=lambda row: row["episode_index"])
        found = tuple(
            RecordedEpisode(row["dataset_from_index"], row["dataset_to_index"], tuple(row["tasks"]), row)
            for row in rows
        )
        for before, episode in zip((None, *found), found, strict=False):
            if episode.begin != (before.end if before else 0) or episode.length < 1:
                raise DatasetError(
                    f"{self.folder}/meta/episodes: episode {episode.row['episode_index']} has the rows "
                    f"{episode.begin} to {episode.end}, which do not follow those before it; {AGAIN}"
                )
        return found

    def _episode_columns(self) -> dict[str, metadata.Kind]:
        """Columns that `meta/episodes` has in every dataset, and what they are of."""
        videos = [self._theirs.get(name, name) for name, f in self.features.items() if f.dtype == "video"]
        places = [f"videos/{name}/{key}" for name in videos for key in ("chunk_index", "file_index")]
        return {
            **EPISODE_COLUMNS,
            **dict.fromkeys(places, "whole number"),
            **{f"videos/{name}/from_timestamp": "number" for name in videos},
        }
