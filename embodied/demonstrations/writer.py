"""The statistics of each feature in `stats.json` and in the episodes' rows, for normalisation.

Exact, of all rows and all pixels: LeRobot samples the pixels, and averages the episodes' quantiles.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from embodied.demonstrations import layout
from embodied.demonstrations.layout import DatasetError
from embodied.demonstrations.video import VideoWriter
from sim_farm.client.episode_replay import ReplayedEpisode
from sim_farm.contract import EpisodeSpec, TaskInfo

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
Statistics = dict[str, npt.NDArray[Any]]


def of_rows(rows: npt.NDArray[Any]) -> Statistics:
    """Statistics of an array [n] or [n, d], element by element: float64 [1] or [d] each; `count` is int64 [1]."""
    rows = rows.reshape(len(rows), -1).astype(np.float64)
    found = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    found["count"] = np.array([len(rows)])
    return found | dict(zip(QUANTILES, np.quantile(rows, list(QUANTILES.values()), axis=0), strict=True))


def pixel_counts(frames: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """[3, 256] how often each value occurs in each channel of the frames [n, H, W, 3]. Counts of episodes add up."""
    return sum(
        (np.stack([np.bincount(frame[..., c].ravel(), minlength=256) for c in range(3)]) for frame in frames),
        np.zeros((3, 256), np.int64),
    )


def of_pixels(counts: npt.NDArray[np.int64], frames: int) -> Statistics:
    """Per channel, of values in [0, 1]: float64 [3, 1, 1] each; `count` is the number of frames."""
    values = np.arange(256) / 255
    total = counts.sum(1, keepdims=True)
    seen = counts > 0
    mean = (counts * values).sum(1, keepdims=True) / total
    found = {
        "min": values[seen.argmax(1)],
        "max": values[255 - seen[:, ::-1].argmax(1)],
        "mean": mean,
        "std": np.sqrt((counts * (values - mean) ** 2).sum(1, keepdims=True) / total),
    }
    below = counts.cumsum(1)
    found |= {name: values[(below >= q * total).argmax(1)] for name, q in QUANTILES.items()}
    return {name: value.reshape(3, 1, 1) for name, value in found.items()} | {"count": np.array([frames])}


def as_lists(statistics: Statistics) -> dict[str, Any]:
    return {name: value.tolist() for name, value in statistics.items()}


# --- Writes a dataset episode by episode. It is complete or absent: until it is closed it lies in `.NAME.partial`.


_ROWS_AT_ONCE = 100
"""Episodes whose rows of `meta/episodes` are written together; each row has some hundred columns."""


@dataclass(frozen=True)
class FileSizes:
    """Sizes at which a new file begins; the defaults are LeRobot's. A file never ends within an episode."""

    data_mb: float = 100
    """Approximate size of a parquet file."""
    video_mb: float = 200
    """Approximate size of an mp4 file."""
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


@dataclass(frozen=True)
class Episode:
    """One episode to write: n steps, each with what was seen, the action that followed, and what that brought."""

    columns: Mapping[str, npt.NDArray[Any]]
    """[n] or [n, *shape] for every feature that is neither a camera nor one of the layout's own."""
    pictures: Mapping[str, npt.NDArray[np.uint8] | Sequence[bytes]]
    """For every camera: frames uint8 [n, H, W, 3] where its feature is a video, n encoded pictures where it is an
    image: their bytes are kept."""
    instructions: Sequence[str]
    """[n] the instruction at each step."""
    row: Mapping[str, Any]
    """Further entries of the episode's row in `meta/episodes`; every episode has the same."""


class EpisodesWriter:
    """Writes episodes of any features into an empty folder. Only one episode is in memory at a time.

    `features` are without the layout's own, `fps` is the rate of steps. `info.json` is written last, by `close`: a
    folder without it is no dataset. Raises `DatasetError` for what the layout cannot hold, or a full disk.
    """

    def __init__(self, folder: Path, features: Mapping[str, layout.Feature], fps: int, sizes: FileSizes | None = None):
        for name, feature in features.items():
            if feature.dtype == "video" and (feature.shape[0] % 2 or feature.shape[1] % 2):
                raise DatasetError(f"H.264 needs an even image size, got {list(feature.shape)} for {name}")
        self.features = {**features, **layout.OWN}
        self.records: dict[str, Mapping[str, Any]] = {}
        """JSON that `close` writes beside the layout's own, by the file's path within the folder."""
        self.splits: dict[str, str] = {}
        """Ranges of episodes by name (`train: 0:8`); empty: all are `train`."""
        self.episodes = self.frames = 0
        self._folder, self._fps, self._sizes = folder, fps, sizes or FileSizes()
        self._data = _DataFiles(folder, layout.data_schema(self.features), self._sizes)
        self._videos = {
            name: _VideoFiles(folder, name, feature, self._fps, self._sizes)
            for name, feature in self.features.items()
            if feature.dtype == "video"
        }
        self._pixels = {name: np.zeros((3, 256), np.int64) for name, f in self.features.items() if f.is_camera}
        """`statistics.pixel_counts` of everything written."""
        self._instructions: list[str] = []
        self._rows: list[dict[str, Any]] = []
        self._rows_writer: pq.ParquetWriter | None = None

    def append(self, episode: Episode) -> None:
        """Append the episode: its steps, its pictures, and the row that says where they are."""
        steps = len(episode.instructions)
        tasks = list(dict.fromkeys(episode.instructions))
        self._instructions += [task for task in tasks if task not in self._instructions]
        columns = {**episode.columns, **self._own(episode.instructions)}
        images = {name: self._images(name, files) for name, files in episode.pictures.items()
                  if name not in self._videos}  # fmt: skip
        try:
            row = {
                "episode_index": self.episodes,
                "tasks": tasks,
                "length": steps,
                "dataset_from_index": self.frames,
                "dataset_to_index": self.frames + steps,
                "meta/episodes/chunk_index": 0,
                "meta/episodes/file_index": 0,
                **episode.row,
                **self._data.add({**columns, **{name: cells for name, (cells, _) in images.items()}}, steps),
            }
            found = {name: of_rows(v) for name, v in columns.items() if self.features[name].dtype != "string"}
            counts = {name: pixels for name, (_, pixels) in images.items()}
            for name, files in self._videos.items():
                frames = np.asarray(episode.pictures[name], np.uint8)
                row |= files.add(frames)
                counts[name] = pixel_counts(frames)
            for name, pixels in counts.items():
                self._pixels[name] += pixels
                found[name] = of_pixels(pixels, steps)
            for name, values in found.items():
                row |= {f"stats/{name}/{key}": value for key, value in as_lists(values).items()}
            self._rows.append(row)
            if len(self._rows) == _ROWS_AT_ONCE:
                self._write_rows()
        except OSError as error:
            raise self._full(error) from error
        self.episodes += 1
        self.frames += steps

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
            for name, record in self.records.items():
                self._write_json(name, record)
            self._write_json(layout.STATS, self._statistics())
            self._write_json(layout.INFO, self._info())
        except OSError as error:
            raise self._full(error) from error

    def _own(self, instructions: Sequence[str]) -> dict[str, npt.NDArray[Any]]:
        steps = np.arange(len(instructions))
        return {
            "timestamp": (steps / self._fps).astype(np.float32),
            "frame_index": steps,
            "episode_index": np.full(len(steps), self.episodes),
            "index": self.frames + steps,
            "task_index": np.array([self._instructions.index(text) for text in instructions]),
        }

    def _images(self, name: str, files: npt.NDArray[np.uint8] | Sequence[bytes]) -> tuple[pa.Array, npt.NDArray[Any]]:
        """The column of encoded pictures, and `statistics.pixel_counts` of what is in them."""
        cells, pixels = [], np.zeros((3, 256), np.int64)
        shape = self.features[name].shape
        with ThreadPoolExecutor() as pool:  # Pillow and NumPy let other threads run meanwhile
            for number, looking in enumerate([pool.submit(_looked_at, bytes(data), shape) for data in files]):
                try:
                    suffix, counts = looking.result()
                except DatasetError as error:
                    raise DatasetError(f"{name}, step {number}: {error}") from error
                cells.append({"bytes": bytes(files[number]), "path": f"frame-{number:06d}.{suffix}"})
                pixels += counts
        return pa.array(cells, layout.data_schema({name: self.features[name]}).field(0).type), pixels

    def _write_rows(self) -> None:
        """Write the rows of `meta/episodes` that are waiting."""
        if not self._rows:
            return
        if self._rows_writer is None:
            inferred = pa.Table.from_pylist(self._rows).schema
            for name in {"seed", "init_state"} & set(inferred.names):  # a column of None has no type of its own
                inferred = inferred.set(inferred.get_field_index(name), pa.field(name, pa.int64()))
            self._rows_schema = inferred
            path = self._folder / layout.EPISODES_PATH.format(chunk_index=0, file_index=0)
            path.parent.mkdir(parents=True, exist_ok=True)
            self._rows_writer = pq.ParquetWriter(path, self._rows_schema)
        self._rows_writer.write_table(pa.Table.from_pylist(self._rows, self._rows_schema))
        self._rows.clear()

    def _statistics(self) -> dict[str, Any]:
        """Statistics of the whole dataset; columns are read back one at a time, so that memory holds one."""
        found = {}
        for name, feature in self.features.items():
            if feature.is_camera:
                found[name] = of_pixels(self._pixels[name], self.frames)
            elif feature.dtype != "string":
                parts = [pq.read_table(path, columns=[name])[name] for path in self._data.paths]
                found[name] = of_rows(np.concatenate([layout.to_numpy(part, feature) for part in parts]))
        return {name: as_lists(values) for name, values in found.items()}

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
            "splits": self.splits or {"train": f"0:{self.episodes}"},
            "data_path": layout.DATA_PATH,
            "video_path": layout.VIDEO_PATH if self._videos else None,
            "features": {name: layout.feature_json(feature, self._fps) for name, feature in self.features.items()},
        }

    def _write_json(self, name: str, data: Mapping[str, Any]) -> None:
        (self._folder / name).write_text(json.dumps(data, indent=1) + "\n")

    def _full(self, error: OSError) -> DatasetError:
        return DatasetError(
            f"cannot write {self._folder} ({error.strerror or error}): make room, or name another --out"
        )


class DatasetWriter(EpisodesWriter):
    """Writes episodes of one task of the farm into an empty folder.

    `provenance` is JSON-able and goes into `meta/embodied.json`. Raises `DatasetError` for a task that the layout
    cannot hold.
    """

    def __init__(self, folder: Path, info: TaskInfo, provenance: Mapping[str, Any], sizes: FileSizes | None = None):
        if not float(info.control_hz).is_integer():
            raise DatasetError(
                f"{info.spec.name} runs at {info.control_hz} Hz, and LeRobot's layout has whole frames per second: "
                "choose a control mode with a whole rate"
            )
        if info.cameras and info.spec.image_size % 2:
            raise DatasetError(f"H.264 needs an even image size, got env.image_size {info.spec.image_size}: add 1")
        super().__init__(folder, layout.features_of(info), int(info.control_hz), sizes)
        self.records[layout.PROVENANCE] = provenance

    def add(self, spec: EpisodeSpec | None, replay: ReplayedEpisode) -> None:
        """Append the episode as it was replayed, with the row's entries by which it can be replayed again.

        `spec` is None where the episode begins from a state that neither a seed nor an initial state leads to.
        """
        columns = {
            layout.PROPRIO: replay.proprio,
            layout.STATE: replay.state,
            layout.ACTION: replay.actions,
            layout.REWARD: replay.reward,
            layout.SUCCESS: replay.success,
            layout.DONE: replay.done,
        }
        columns = {name: values for name, values in columns.items() if name in self.features}
        frames = {layout.IMAGES + camera: shown for camera, shown in replay.frames.items()}
        begun = {"seed": None if spec is None else spec.seed, "init_state": None if spec is None else spec.init_state}
        row = {**begun, "success": bool(replay.success.any())}
        self.append(Episode(columns, frames, [replay.instruction] * replay.steps, row))


class _DataFiles:
    """The parquet files of the data, one after the other; a row group per episode, so that each can be read alone."""

    def __init__(self, folder: Path, schema: pa.Schema, sizes: FileSizes) -> None:
        self._folder, self._schema, self._sizes = folder, schema, sizes
        self.paths: list[Path] = []
        self._writer: pq.ParquetWriter | None = None
        self._sink: Any = None
        self._rows = 0

    def add(self, columns: Mapping[str, npt.NDArray[Any] | pa.Array], steps: int) -> dict[str, Any]:
        """Append rows; the columns of the episode's own row that say where they are."""
        if self._writer is None or _overflows(self._sink.tell(), self._rows, steps, self._sizes.data_mb):
            self.close()
            self.paths.append(self._folder / layout.DATA_PATH.format(**_place(len(self.paths), self._sizes)))
            self.paths[-1].parent.mkdir(parents=True, exist_ok=True)
            self._sink = self.paths[-1].open("wb")
            self._writer, self._rows = pq.ParquetWriter(self._sink, self._schema), 0
        arrays = [
            column if isinstance(column := columns[field.name], pa.Array) else layout.to_arrow(column, field)
            for field in self._schema
        ]
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


def _looked_at(data: bytes, shape: tuple[int, ...]) -> tuple[str, npt.NDArray[np.int64]]:
    """The suffix of an encoded picture's kind, and its `statistics.pixel_counts`. Raises `DatasetError` unless it is
    whole, of 8 bits a channel, and of the shape (height, width, 3)."""
    try:
        picture = Image.open(io.BytesIO(data), formats=("JPEG", "PNG"))
        size, mode = (picture.height, picture.width), picture.mode
        if (*size, mode) != (*shape[:2], "RGB"):
            raise DatasetError(f"it is {mode} {size[0]} x {size[1]}, and {list(shape)} RGB is what the dataset says")
        return str(picture.format).lower(), pixel_counts(np.asarray(picture)[None])
    except DatasetError:
        raise
    except Exception as error:  # Pillow's decoders raise all kinds
        raise DatasetError(f"it is no whole JPEG or PNG ({str(error)[:200]})") from error


def _place(number: int, sizes: FileSizes) -> dict[str, int]:
    """Chunk and file of the `number`-th file."""
    chunk, file = divmod(number, sizes.files_per_chunk)
    return {"chunk_index": chunk, "file_index": file}


def _overflows(size: int, present: int, more: int, limit_mb: float) -> bool:
    """True if `more` rows, as large as those `present` in `size` bytes, would make the file too large."""
    return present > 0 and size * (1 + more / present) >= limit_mb * 2**20
