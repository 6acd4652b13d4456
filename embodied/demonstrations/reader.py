"""Reads datasets in LeRobot's layout, version 3.x, 2.1 and 2.0, ours or others', as batches for supervised learning.

The data's own columns are believed: which rows make an episode, in which order, of which task. The metadata is compared
with them; what it lacks or has wrong is taken from the data and noted, and what cannot be resolved is refused by name.
"""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from PIL import Image, ImageOps

from embodied.demonstrations import layout, metadata
from embodied.demonstrations.data_files import DataFiles, Pictures, shown_if_long
from embodied.demonstrations.layout import DatasetError
from embodied.demonstrations.metadata import AGAIN, EpisodeEntry
from embodied.demonstrations.video import FrameTable, VideoReader, match_frames
from embodied.errors import shown
from policies.contract import Inputs
from sim_farm.contract import EpisodeSpec, TaskSpec

Rows = Sequence[int] | npt.NDArray[np.int64]

_OPEN_VIDEOS = 32
"""Video files held open; opening one anew takes a millisecond."""
READ_AND_DONE = (layout.PROPRIO, layout.STATE, layout.ACTION)
"""What a policy reads and does: columns of finite numbers."""
OURS = (layout.PROPRIO, layout.STATE, layout.ACTION, layout.REWARD, layout.SUCCESS, layout.DONE)
"""Features by which a recording of ours is known when `meta/embodied.json` is lost."""
LARGEST_PICTURE = 2**26
"""Pixels."""


@dataclass(frozen=True)
class RecordedEpisode:
    """One episode: the rows `begin` to `end` of the dataset."""

    begin: int
    end: int
    instructions: tuple[str, ...]
    """Of its rows' tasks, each once, in the order in which they begin."""
    row: Mapping[str, Any]
    """Everything the metadata says of it but its statistics, with the names of the dataset's own features; ours:
    `seed`, `init_state` (or None), `success`."""

    @property
    def index(self) -> int:
        """The number that the dataset gives it: its `episode_index`."""
        return int(self.row["episode_index"])

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
    """The dataset in `folder`. A row is an env step; `len()` counts them, in the order of episodes and their frames.

    Metadata and the columns that say what belongs together are read at once, a column of numbers when it is first asked
    for (and kept), frames when they are asked for. Threads may share it. Pickles as its folder's name; after a fork,
    make a new one before reading frames.

    `rename` maps the dataset's own features to the names that are read here: `{"image": "observation.images.front",
    "state": "observation.state", "actions": "action"}`. Raises `DatasetError` that names the file if something is
    missing, cut short, contradicts something else, or is of another version.
    """

    def __init__(self, folder: str | Path, *, rename: Mapping[str, str] = {}) -> None:
        self.folder, self._rename = Path(folder), dict(rename)
        path = self.folder / layout.INFO
        self.info = metadata.read_json(path)
        self._numbers = self._version()
        self._said = metadata.read_info(path, self.info)
        self.version = "v{}.{}".format(*self._numbers)
        """Of LeRobot's layout: `v2.0`, `v2.1` or `v3.x`."""
        self.fps = self._said.fps
        own, unusable = metadata.read_features(path, self._said.features)
        self._own = self._names((*own, *unusable))
        """What the features are called in the files."""
        self._unusable = {name: unusable[there] for name, there in self._own.items() if there in unusable}
        self.features = {name: own[there] for name, there in self._own.items() if there in own}
        """Every column and camera that the dataset has, whatever its name."""
        self._notes: list[str] = []
        self.tasks = metadata.read_tasks(self.folder, self._numbers)
        """Instructions by their `task_index`."""
        entries = metadata.read_episodes(self.folder, self._numbers)
        self._data = DataFiles(self.folder)
        self.episodes = self._episodes(entries)
        self._begins = np.array([episode.begin for episode in self.episodes], np.int64)
        self._ends = np.array([episode.end for episode in self.episodes], np.int64)
        self._lock = threading.RLock()
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._pictures: dict[str, Pictures] = {}
        self._videos = _Videos()
        self._files: dict[str, list[Path]] = {}
        """For each camera of video files, the file of each episode."""
        self._episodes_in: dict[str, dict[Path, list[int]]] = {}
        """For each camera of video files, the episodes in each file."""
        self._frame_of: dict[str, npt.NDArray[np.int64]] = {}
        """For each camera of video files, which frame of its file belongs to each row; -1: the file was not opened."""
        self.cameras = self._cameras()
        """RGB cameras as policies call them, and the features of their frames."""
        self._note_lost_conventions()

    def __len__(self) -> int:
        return len(self._data)

    def __reduce__(self) -> tuple[partial[Dataset], tuple[Path]]:
        return partial(Dataset, rename=self._rename), (self.folder,)

    @property
    def notes(self) -> tuple[str, ...]:
        """What was odd in the dataset and was resolved, in sentences; those about frames come when a file is opened."""
        return tuple(self._notes)

    @cached_property
    def statistics(self) -> dict[str, dict[str, npt.NDArray[Any]]]:
        """What the dataset itself says: for each feature its min, max, mean, std, count and perhaps quantiles, all of
        them finite. Version 2.1 says it of each episode, and it is put together here. Raises `DatasetError` where there
        is no such file."""
        if self._numbers == (2, 1) and not (self.folder / layout.STATS).exists():
            found = metadata.read_old_statistics(self.folder / layout.OLD_STATS)
        else:
            path = self.folder / layout.STATS
            found = metadata.read_statistics(path, metadata.read_json(path))
        here = {name_there: name for name, name_there in self._own.items()}
        return {here.get(name, name): values for name, values in found.items()}

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
        rows = self._checked(indices)
        ends = self._ends[self.episode_of(rows)]
        ahead = rows[:, None] + np.arange(chunk)
        names = self.cameras if cameras is None else cameras
        self._load([name for name in READ_AND_DONE if name in self.features])
        return Batch(
            proprio=self._vectors(layout.PROPRIO, rows) if layout.PROPRIO in self.features else None,
            state=self._vectors(layout.STATE, rows) if layout.STATE in self.features else None,
            frames={name: self.frames(name, rows) for name in names},
            instruction=tuple(self.tasks[index] for index in self._task_of[rows].tolist()),
            actions=self._vectors(layout.ACTION, np.minimum(ahead, ends[:, None] - 1).ravel()).reshape(
                *ahead.shape, -1
            ),
            padding=ahead >= ends[:, None],
        )

    def column(self, name: str) -> npt.NDArray[Any]:
        """All rows of a feature that is no camera: [len] if its shape is (1,), [len, *shape] else. Not a copy."""
        if name in self._unusable:
            raise DatasetError(self._unusable[name])
        if name not in self.features or self.features[name].is_camera:
            valid = ", ".join(key for key, feature in self.features.items() if not feature.is_camera)
            raise DatasetError(
                f"{self.folder} has no column {name!r}; it has: {valid or 'none'} (sft.features gives one of them "
                "another name)"
            )
        self._load([name])
        return self._columns[name]

    def frames(self, camera: str, indices: Rows) -> npt.NDArray[np.uint8]:
        """uint8 [B, H, W, 3]: the camera's pictures at these rows, decoded now."""
        rows, name = self._checked(indices), self._camera(camera)
        unique, places = np.unique(rows, return_inverse=True)
        if self.features[name].dtype == "image":
            encoded = self._pictures_of(name).at(unique)
            found = (self._picture(name, int(row), item) for row, item in zip(unique, encoded, strict=True))
        else:
            found = self._video_frames(name, unique)
        height, width, _ = self.features[name].picture
        frames = np.empty((len(unique), height, width, 3), np.uint8)
        for place, frame in enumerate(found):
            frames[place] = frame
        return frames[places] if len(unique) < len(rows) or (np.diff(places) != 1).any() else frames

    def check_frames(self, cameras: Sequence[str] | None = None) -> None:
        """Open every video file of these cameras (None: of all) and compare its frames with the rows that refer to it,
        which happens else when one of its frames is first asked for. Decodes nothing. Raises `DatasetError` that names
        file, episode and deviation."""
        names = [self._camera(camera) for camera in (self.cameras if cameras is None else cameras)]
        videos = [name for name in names if self.features[name].dtype == "video"]
        files = [(name, path) for name in videos for path in dict.fromkeys(self._files_of(name))]
        checks = (self._match(name, path) for name, path in files)
        for _ in shown_if_long(f"Checking the videos of {self.folder.name}", checks, len(files)):
            pass

    def episode_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """For each row, the position in `episodes` of its episode."""
        return np.searchsorted(self._begins, rows, side="right") - 1

    # --- opening

    def _version(self) -> tuple[int, int]:
        said = self.info.get("codebase_version")
        found = re.fullmatch(r"v?(\d{1,3})\.(\d{1,3})(\.\d+)*", said) if isinstance(said, str) else None
        version = (int(found[1]), int(found[2])) if found else (0, 0)
        if version[0] != 3 and version not in ((2, 0), (2, 1)):
            raise DatasetError(
                f"{self.folder / layout.INFO}: a LeRobot dataset of version {shown(said)}, and v3.x, v2.1 and v2.0 "
                "are read here; convert it with LeRobot: python -m lerobot.scripts.convert_dataset_v21_to_v30 "
                "--repo-id=OWNER/NAME, and what is older than 2.0 with lerobot.common.datasets.v2 of its release 0.1 "
                "first"
            )
        return version

    def _names(self, own: Sequence[str]) -> dict[str, str]:
        """What each feature is called here, and in the files."""
        listed = ", ".join(own)
        for old, new in self._rename.items():
            if old not in own or old in layout.BOOKKEEPING:
                raise DatasetError(
                    f"{self.folder} has no feature {old!r} that could be called {new!r}; it has: {listed}: mend "
                    "sft.features"
                )
        names = {self._rename.get(name, name): name for name in own}
        if len(names) < len(own):
            taken = next(name for name in own if names[self._rename.get(name, name)] != name)
            raise DatasetError(
                f"{self.folder}: two features would be called {self._rename.get(taken, taken)!r}; it has: {listed}: "
                "mend sft.features"
            )
        return names

    def _cameras(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for name, feature in self.features.items():
            if feature.is_camera and not self._depth(name):
                short = name.removeprefix(layout.IMAGES)
                if short in self.features and short != name and self.features[short].is_camera:
                    self._notes.append(f"{name!r} is no camera {short!r}, since another feature is called so")
                    short = name
                found[short] = name
        return found

    def _depth(self, name: str) -> str | None:
        """Why a camera is none of RGB; None if it is one."""
        feature = self.features[name]
        if feature.is_depth:
            return f"{layout.INFO} says that it is a depth map"
        if feature.dtype == "image" and feature.picture[2] == 1 and len(self):
            try:
                first = self._pictures_of(name).first()
                mode = Image.open(io.BytesIO(first)).mode if first is not None else "L"
            except Exception:  # whoever asks for its frames gets a message
                return None
            if mode in _DEEP:
                return f"its pictures have more than 8 bits of grey ({mode})"
        return None

    def _camera(self, camera: str) -> str:
        """The feature of a camera's frames."""
        if camera in self.cameras:
            return self.cameras[camera]
        for name in (layout.IMAGES + camera, camera):
            if name in self._unusable:
                raise DatasetError(self._unusable[name])
            if name in self.features and self.features[name].is_camera:
                raise DatasetError(
                    f"{self.folder}: {name!r} is no RGB camera: {self._depth(name)}; RGB cameras: "
                    f"{', '.join(self.cameras) or 'none'}"
                )
        raise DatasetError(f"{self.folder} has no camera {camera!r}; it has: {', '.join(self.cameras) or 'none'}")

    def _episodes(self, entries: Mapping[int, EpisodeEntry]) -> tuple[RecordedEpisode, ...]:
        """The episodes that the data hold, each with what the metadata says of it."""
        data = self._data
        numbers, begins, counts = np.unique(data.episode, return_index=True, return_counts=True)
        self._check_complete(entries, numbers.tolist())
        tasks = self._tasks_of_rows(entries)
        self._task_of = tasks
        found, odd = [], dict[str, list[int]]()
        for number, begin, count in zip(numbers.tolist(), begins.tolist(), counts.tolist(), strict=True):
            entry = entries[number]
            self._check_length(entry, count)
            rows = slice(begin, begin + count)
            texts = tuple(self.tasks[index] for index in dict.fromkeys(tasks[rows].tolist()))
            for what, is_odd in self._oddities(entry, rows, texts).items():
                if is_odd:
                    odd.setdefault(what, []).append(number)
            found.append(RecordedEpisode(begin, begin + count, texts, {**entry.row, "episode_index": number}))
        self._notes += [
            f"{self.folder}: {what} (episode {episodes[0]}"
            f"{f' and {len(episodes) - 1} others' if len(episodes) > 1 else ''})"
            for what, episodes in odd.items()
        ]
        totals = (("total_episodes", len(found)), ("total_frames", len(data)))
        for name, count in totals:
            said = metadata.whole_number(self.info.get(name))
            if said is not None and said != count:
                self._notes.append(f"{self.folder / layout.INFO} says {name} {said}, and the data have {count}")
        return tuple(found)

    def _check_complete(self, entries: Mapping[int, EpisodeEntry], held: Sequence[int]) -> None:
        """Raise `DatasetError` unless data and metadata know the same episodes."""
        if not held and not entries:
            raise DatasetError(f"{self.folder} has no episodes")
        missing = sorted(index for index, entry in entries.items() if entry.length != 0 and index not in set(held))
        if missing:
            entry = entries[missing[0]]
            path = self._data_path(entry)
            missed = f" ({path} is missing)" if path is not None and not path.is_file() else ""
            rows = sum(entry.length or 0 for entry in entries.values())
            named = "meta/episodes" if self._numbers >= (3, 0) else layout.OLD_EPISODES
            raise DatasetError(
                f"{self.folder}/data holds {len(self._data)} rows and {named} names {rows}: episode {missing[0]} has "
                f"none{missed}; a file is missing or of another recording; copy or record the dataset again"
            )
        unknown = sorted(set(held) - set(entries))
        if unknown:
            row = int(np.searchsorted(self._data.episode, unknown[0]))
            raise DatasetError(
                f"{self._data.where(row)} is of episode {unknown[0]}, which the metadata does not name "
                f"({len(unknown)} such episodes): it was deleted there or is of another recording; delete its rows, or "
                "copy the dataset again"
            )

    def _check_length(self, entry: EpisodeEntry, count: int) -> None:
        """Raise `DatasetError` if all that is said of an episode's length contradicts the data."""
        said = [entry.length] if entry.length is not None else []
        if entry.begin is not None and entry.end is not None:
            said.append(entry.end - entry.begin)
        if said and count not in said and metadata.whole_number(self.info.get("total_frames")) != len(self._data):
            raise DatasetError(
                f"{self.folder}/data holds {count} rows of episode {entry.index}, and the metadata names {said[0]}: a "
                "file is missing or of another recording; copy or record the dataset again"
            )

    def _oddities(self, entry: EpisodeEntry, rows: slice, texts: tuple[str, ...]) -> dict[str, bool]:
        """What of the metadata is not as the data are, and is not used."""
        data, count = self._data, rows.stop - rows.start
        index = np.arange(rows.start, rows.stop) if data.index is None else data.index[rows]
        frame = np.arange(count) if data.frame is None else data.frame[rows]
        path = self._data_path(entry)
        there = path is None or str(path) == data.where(rows.start).rpartition(", row ")[0]
        said = (entry.begin, entry.end)
        return {
            "its length in the metadata is another than that of the data, which is used": entry.length
            not in (None, count),
            "the metadata gives it other rows than the data's own `index`, which is used": (
                None not in said and said != (index[0], index[-1] + 1)
            ),
            "its rows lie in another file than the metadata says, or the metadata does not say": not there,
            "the metadata names other tasks than its rows have, whose are used": (
                entry.tasks is not None and set(entry.tasks) != set(texts)
            ),
            "its frames do not count from 0 without a gap": bool((frame != np.arange(count)).any()),
        }

    def _data_path(self, entry: EpisodeEntry) -> Path | None:
        """The file in which the metadata says that an episode's rows lie."""
        if self._numbers < (3, 0):
            template = self._said.data_path or layout.OLD_DATA_PATH
            place = {"episode_chunk": entry.index // self._said.chunks_size, "episode_index": entry.index}
        else:
            template = self._said.data_path or layout.DATA_PATH
            place = {key: entry.row.get(f"data/{key}") for key in ("chunk_index", "file_index")}
        if not all(isinstance(value, int) for value in place.values()):
            return None
        return metadata.path_of(self.folder, template, **place)

    def _tasks_of_rows(self, entries: Mapping[int, EpisodeEntry]) -> npt.NDArray[np.int64]:
        """[rows] the `task_index` of each; of one in `tasks`. Raises `DatasetError` for another."""
        found = self._data.task
        if found is None:
            found = self._tasks_by_episode(entries)
        unknown = ~np.isin(found, list(self.tasks))
        if unknown.any():
            row = int(unknown.argmax())
            path = layout.TASKS if self._numbers >= (3, 0) else layout.OLD_TASKS
            raise DatasetError(
                f"{self._data.where(row)}: task_index {found[row]} is none of {path}; {AGAIN}"
            )
        return found

    def _tasks_by_episode(self, entries: Mapping[int, EpisodeEntry]) -> npt.NDArray[np.int64]:
        """The task that each episode has in the metadata, for data without `task_index`."""
        by_text = {text: index for index, text in self.tasks.items()}
        chosen = {}
        for index, entry in entries.items():
            if entry.tasks is None or len(entry.tasks) != 1 or entry.tasks[0] not in by_text:
                raise DatasetError(
                    f"{self.folder}/data has no column 'task_index', and the metadata names no single task of episode "
                    f"{index}; {AGAIN}"
                )
            chosen[index] = by_text[entry.tasks[0]]
        self._notes.append(f"{self.folder}/data has no column 'task_index': each episode's task is the metadata's")
        return np.array([chosen[index] for index in self._data.episode.tolist()], np.int64)

    def _note_lost_conventions(self) -> None:
        if self._data.timestamp is not None and len(self):
            within = np.diff(self._data.episode) == 0
            with np.errstate(invalid="ignore"):
                gaps = np.diff(self._data.timestamp)[within]
            if len(gaps) and np.isfinite(gaps).all() and np.median(gaps) > 0:
                rate = 1 / float(np.median(gaps))
                if abs(rate - self.fps) > 0.02 * self.fps:
                    self._notes.append(
                        f"{self.folder / layout.INFO} says {self.fps:g} frames per second, and the rows' `timestamp` "
                        f"runs at {rate:.4g}"
                    )
        recorded = any({"seed", "init_state"} & set(episode.row) for episode in self.episodes)
        is_ours = recorded or all(name in self.features for name in OURS)
        if is_ours and not (self.folder / layout.PROVENANCE).exists():
            self._notes.append(
                f"{self.folder} is or was a recording of `embodied record`, and has lost {layout.PROVENANCE}: task, "
                "control mode, gripper, orientation and image size are not known and cannot be compared"
            )
        elif not is_ours and (self.folder / layout.PROVENANCE).exists():
            self._notes.append(
                f"{self.folder / layout.PROVENANCE} describes a recording of `embodied record`, and the data are "
                "none: it may be of another dataset"
            )
        elif any("seed" not in episode.row for episode in self.episodes) and is_ours:
            self._notes.append(f"{self.folder}: some episodes say no seed and cannot be replayed")

    # --- columns

    def _checked(self, indices: Rows) -> npt.NDArray[np.int64]:
        rows = np.asarray(indices, np.int64)
        if rows.ndim != 1 or not len(rows) or rows.min() < 0 or rows.max() >= len(self):
            raise DatasetError(f"rows are a list of 0 to {len(self) - 1}, got {indices!r:.100}")
        return rows

    def _vectors(self, name: str, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        return self.column(name)[rows].reshape(len(rows), -1).astype(np.float32, copy=False)

    def _load(self, names: Sequence[str]) -> None:
        """Read columns that were not read yet, all in one pass through the files."""
        with self._lock:
            wanted = {self._own[name]: self.features[name] for name in names if name not in self._columns}
            known = {
                "index": self._data.index,
                "episode_index": self._data.episode,
                "frame_index": self._data.frame,
                "task_index": self._data.task,
            }
            here = {name_there: name for name, name_there in self._own.items()}
            for name in [name for name in wanted if known.get(name) is not None]:
                self._columns[here[name]] = known[name]
                del wanted[name]
            if wanted:
                for name, values in self._data.columns(wanted).items():
                    self._check_numbers(here[name], values)
                    self._columns[here[name]] = values

    def _check_numbers(self, name: str, values: npt.NDArray[Any]) -> None:
        """Raise `DatasetError` unless a column is of numbers where `info.json` says so; what policies read and do is
        finite, also as float32."""
        feature = self.features[name]
        numeric = values.dtype.kind in "biuf"
        if len(values) and numeric == (feature.dtype == "string"):
            raise DatasetError(
                f"{self.folder}/data: {name!r} is of {values.dtype}, and {layout.INFO} says {shown(feature.dtype)}"
            )
        if name in READ_AND_DONE:
            if not numeric:
                raise DatasetError(f"{self.folder}/data: {name!r} is of {values.dtype}, and numbers are needed")
            with np.errstate(over="ignore"):
                finite = np.isfinite(values.astype(np.float32)).reshape(len(values), -1).all(1)
            if not finite.all():
                row = int(finite.argmin())
                raise DatasetError(
                    f"{self.folder}/data: {name!r} has numbers that are not finite, first in row {row} (episode "
                    f"{self._data.episode[row]}): leave the episode out, or record it again"
                )

    # --- frames

    def _pictures_of(self, name: str) -> Pictures:
        with self._lock:
            return self._pictures.setdefault(name, self._data.pictures(self._own[name]))

    def _picture(self, name: str, row: int, encoded: bytes) -> npt.NDArray[np.uint8]:
        """uint8 [H, W, 3] of an encoded picture, turned as its camera says."""
        where = f"{self._data.where(row)}: {name!r}"
        try:
            with Image.open(io.BytesIO(encoded)) as picture:
                if picture.width * picture.height > LARGEST_PICTURE:
                    raise DatasetError(f"{where} has a picture of {picture.height} x {picture.width}: too large")
                if picture.mode in _DEEP:
                    raise DatasetError(
                        f"{where} has a picture with more than 8 bits of grey ({picture.mode}): a depth map, not RGB"
                    )
                picture.load()
                upright = ImageOps.exif_transpose(picture)
                self._check_size(where, name, upright.height, upright.width)
                return np.asarray(upright.convert("RGB"))
        except DatasetError:
            raise
        except Exception as error:  # Pillow's decoders raise all kinds
            raise DatasetError(f"{where} has a picture that is none ({str(error)[:300]}); {AGAIN}") from error

    def _check_size(self, where: str, name: str, height: int, width: int) -> None:
        """Raise `DatasetError` unless a picture is as large as `info.json` says."""
        said = self.features[name].picture[:2]
        if (height, width) != said:
            raise DatasetError(
                f"{where} has pictures of {height} x {width}, and {layout.INFO} says {said[0]} x {said[1]}: mend the "
                "shape there if the pictures are right"
            )

    def _video_frames(self, name: str, rows: npt.NDArray[np.int64]) -> Iterator[npt.NDArray[np.uint8]]:
        """The frames of rows, which rise, one after the other."""
        files = self._files_of(name)
        paths = [files[episode] for episode in self.episode_of(rows).tolist()]
        begin = 0
        while begin < len(rows):
            path = paths[begin]
            end = next((n for n in range(begin, len(rows)) if paths[n] != path), len(rows))
            self._match(name, path)
            numbers = self._frame_of[name][rows[begin:end]]
            order = np.argsort(numbers, kind="stable")
            with self._video(name, path) as video:
                frames: list[Any] = [None] * (end - begin)
                for place, frame in zip(order.tolist(), video.frames(numbers[order].tolist()), strict=True):
                    frames[place] = frame
            yield from frames
            begin = end

    @contextmanager
    def _video(self, name: str, path: Path) -> Iterator[VideoReader]:
        with self._videos.reader(path) as video:
            self._check_size(str(path), name, video.height, video.width)
            yield video

    def _match(self, name: str, path: Path) -> None:
        """Find the frame of each row that refers to a file, if that was not done."""
        self._files_of(name)
        with self._lock:
            frame_of = self._frame_of.setdefault(name, np.full(len(self), -1, np.int64))
            episodes = self._episodes_in[name][path]
            if frame_of[self.episodes[episodes[0]].begin] >= 0:
                return
        with self._video(name, path) as video:
            table = video.table
        begins = {number: self._begin_s(self.episodes[number], self._own[name]) for number in episodes}
        episodes = sorted(episodes, key=begins.__getitem__)
        rows = [np.arange(self.episodes[n].begin, self.episodes[n].end) for n in episodes]
        seconds = [begins[n] + self._times(part) for n, part in zip(episodes, rows, strict=True)]
        numbers = self._data.episode[np.concatenate(rows)]
        match = match_frames(table, np.concatenate(seconds), numbers, self.fps)
        with self._lock:
            frame_of[np.concatenate(rows)] = match.numbers
            if match.note is not None and match.note not in self._notes:
                self._notes.append(match.note)

    def _times(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        """Seconds since the episode's begin, as the rows say; where they say nothing, by count."""
        if self._data.timestamp is not None:
            return self._data.timestamp[rows]
        return np.arange(len(rows)) / self.fps

    def _begin_s(self, episode: RecordedEpisode, own: str) -> float:
        """When in its video file an episode begins."""
        if self._numbers < (3, 0):
            return 0.0
        found = episode.row.get(f"videos/{own}/from_timestamp")
        return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else float("nan")

    def _files_of(self, name: str) -> list[Path]:
        """For each episode the video file that holds its frames."""
        with self._lock:
            if name not in self._files:
                self._files[name] = [self._video_path(episode, self._own[name]) for episode in self.episodes]
                held: dict[Path, list[int]] = {}
                for number, path in enumerate(self._files[name]):
                    held.setdefault(path, []).append(number)
                self._episodes_in[name] = held
            return self._files[name]

    def _video_path(self, episode: RecordedEpisode, own: str) -> Path:
        if self._numbers < (3, 0):
            template = self._said.video_path or layout.OLD_VIDEO_PATH
            place: dict[str, Any] = {
                "episode_chunk": episode.index // self._said.chunks_size, "episode_index": episode.index
            }  # fmt: skip
        else:
            template = self._said.video_path or layout.VIDEO_PATH
            place = {
                key: metadata.whole_number(episode.row.get(f"videos/{own}/{key}"))
                for key in ("chunk_index", "file_index")
            }
            if None in place.values():
                raise DatasetError(
                    f"{self.folder}/meta/episodes does not say in which file the frames of {own!r} of episode "
                    f"{episode.index} are (videos/{own}/chunk_index and file_index); {AGAIN}"
                )
        return metadata.path_of(self.folder, template, video_key=own, **place)


_DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
"""Pillow's modes of pictures with more than 8 bits of grey."""


class _Videos:
    """Video files that are open, for several threads: each has a reader to itself while it decodes."""

    def __init__(self) -> None:
        self._free: list[tuple[Path, VideoReader]] = []
        self._tables: dict[Path, FrameTable] = {}
        self._lock = threading.Lock()

    @contextmanager
    def reader(self, path: Path) -> Iterator[VideoReader]:
        with self._lock:
            place = next((n for n, (held, _) in enumerate(self._free) if held == path), None)
            video = self._free.pop(place)[1] if place is not None else None
            table = self._tables.get(path)
        if video is None:
            video = VideoReader(path, table)
        try:
            yield video
        except BaseException:
            video.close()
            raise
        with self._lock:
            self._tables[path] = video.table
            self._free.append((path, video))
            old = self._free.pop(0)[1] if len(self._free) > _OPEN_VIDEOS else None
        if old is not None:
            old.close()
