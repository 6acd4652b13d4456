"""Reads datasets in LeRobot's layout, version 3.x, 2.1 and 2.0, ours or others', as batches for supervised learning.

The data's own columns define the rows of an episode, their order and the task. The metadata is compared with them. What
is missing or wrong in the metadata is taken from the data and noted; what cannot be resolved is refused by name.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from embodied.demonstrations import layout, metadata
from embodied.demonstrations.data_files import DataFiles, join, shown_if_long
from embodied.demonstrations.frames import PictureFrames, VideoFrames
from embodied.demonstrations.layout import DatasetError
from embodied.errors import shown
from policies.contract import Inputs
from sim_farm.contract import TaskSpec

Rows = Sequence[int] | npt.NDArray[np.int64]
READ_AND_DONE = (layout.PROPRIO, layout.STATE, layout.ACTION)
"""Columns that a policy reads, and actions: finite numbers."""


@dataclass(frozen=True)
class History:
    """Observations and actions of earlier rows that are read with a row; rows are env steps of its episode."""

    observations: int = 1
    """K: observations, the row's own among them. The first row of an episode stands for those before it."""
    distance: int = 1
    """Rows from each of the K observations to the next."""
    actions: int = 0
    """Number of actions before the row's own with which the actions begin."""

    def read(
        self, rows: npt.NDArray[np.int64], begins: npt.NDArray[np.int64]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64] | slice]:
        """Rows to read, each once, for the observations of `rows` [B] in episodes that begin at `begins` [B], and their
        places [B, K] among what was read; for one observation the rows as they are."""
        if self.observations == 1:
            return rows, slice(None)
        back = self.distance * np.arange(self.observations - 1, -1, -1)
        seen = np.maximum(rows[:, None] - back, begins[:, None])
        read, places = np.unique(seen, return_inverse=True)
        return read, places.reshape(seen.shape)


ALONE = History()
"""A row without those before it."""


@dataclass(frozen=True)
class Batch:
    """B rows: what was seen, and the C actions that followed. Arrays are the caller's.

    For K > 1 observations (`History.observations`) proprioception, state and frames have an axis K behind the batch's.
    """

    proprio: npt.NDArray[np.float32] | None
    """[B, P] `observation.state`; None where the dataset has none."""
    state: npt.NDArray[np.float32] | None
    """[B, S] `observation.environment_state`, the simulator's full state; None where the dataset has none."""
    frames: Mapping[str, npt.NDArray[np.uint8]]
    """[B, H, W, 3] for each requested camera."""
    instruction: tuple[str, ...]
    actions: npt.NDArray[np.float32]
    """[B, C, A]; after an episode's end its last action again, before its beginning the first."""
    padding: npt.NDArray[np.bool_]
    """[B, C] True outside of the episode."""

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

    Metadata and the columns of indices are read at once, a column of numbers when it is first needed (and kept), frames
    when they are requested. Threads may share it. Pickles as its folder's name; after a fork,
    make a new one before reading frames.

    `rename` maps the dataset's own features to the names that are read here: `{"image": "observation.images.front",
    "state": "observation.state", "actions": "action"}`. Raises `DatasetError` that names the file if something is
    missing, cut short, contradicts something else, or is of another version.
    """

    def __init__(self, folder: str | Path, *, rename: Mapping[str, str] = {}) -> None:
        self.folder, self._rename = Path(folder), dict(rename)
        meta = metadata.read_metadata(self.folder)
        self.info: Mapping[str, Any] = meta.raw
        """`meta/info.json`."""
        self.version = "v{}.{}".format(*meta.version)
        """Version of LeRobot's layout: `v2.0`, `v2.1` or `v3.x`."""
        self.fps = meta.info.fps
        self.tasks = meta.tasks
        """Instructions by their `task_index`."""
        own, unusable = metadata.read_features(self.folder / layout.INFO, meta.info.features)
        self._own = self._names((*own, *unusable))
        """Names of the features in the files."""
        self._unusable = {name: unusable[there] for name, there in self._own.items() if there in unusable}
        self.features = {name: own[there] for name, there in self._own.items() if there in own}
        """Every column and camera that the dataset has, whatever its name."""
        self._data = DataFiles(self.folder)
        joined = join(meta, self._data)
        self.episodes, self._task_of = joined.episodes, joined.tasks
        self._begins = np.array([episode.begin for episode in self.episodes], np.int64)
        self._ends = np.array([episode.end for episode in self.episodes], np.int64)
        self._columns: dict[str, npt.NDArray[Any]] = {}
        self._not_finite: dict[str, npt.NDArray[np.bool_]] = {}
        """For each column that policies read or do and that is not finite in some rows, these rows."""
        self._lock = threading.Lock()
        self._frames: dict[str, PictureFrames | VideoFrames] = {
            name: PictureFrames(self._data, self._own[name], feature)
            if feature.dtype == "image"
            else VideoFrames(meta, self._data, self.episodes, self._own[name], feature)
            for name, feature in self.features.items()
            if feature.is_camera
        }
        """The frames of all cameras, depth maps among them, by feature."""
        self._depth_maps = self._find_depth_maps()
        """Features of cameras that are not RGB, and why."""
        self.cameras = self._name_cameras()
        """RGB cameras as policies call them, and the features of their frames."""
        self._notes = [
            *joined.notes,
            *(f"{self.folder}: {name!r} is not among the RGB cameras: {why}" for name, why in self._depth_maps.items()),
            *self._lost_conventions(),
        ]

    def __len__(self) -> int:
        return len(self._data)

    def __reduce__(self) -> tuple[partial[Dataset], tuple[Path]]:
        return partial(Dataset, rename=self._rename), (self.folder,)

    @property
    def notes(self) -> tuple[str, ...]:
        """Oddities of the dataset that were resolved, in sentences; those about frames come when a file is opened."""
        about_files = [
            f"{path}: {odd} ({extent}{f'; {len(files) - 1} other files too' if len(files) > 1 else ''})"
            for camera in self._frames.values()
            if isinstance(camera, VideoFrames)
            for odd, files in camera.odd.items()
            for path, extent in [next(iter(files.items()))]
        ]
        return (*self._notes, *about_files)

    @cached_property
    def provenance(self) -> dict[str, Any] | None:
        """`meta/embodied.json`: task and actor of a recording of ours; None in other datasets."""
        path = self.folder / layout.PROVENANCE
        return metadata.read_json(path) if path.exists() else None

    @cached_property
    def conventions(self) -> Mapping[str, str]:
        """Conventions of a dataset that was converted without a replay, by settings of `env` and
        features, from `meta/import.json`; empty for other datasets."""
        path = self.folder / layout.IMPORT
        found = metadata.read_json(path).get("conventions") if path.exists() else None
        return {key: text for key, text in found.items() if isinstance(text, str)} if isinstance(found, dict) else {}

    @property
    def task(self) -> TaskSpec | None:
        """The task that a recording of ours was made of, with its conventions; None in other datasets."""
        if self.provenance is None:
            return None
        return metadata.read_task(self.folder / layout.PROVENANCE, self.provenance)

    def batch(
        self,
        indices: Rows,
        chunk: int = 1,
        cameras: Sequence[str] | None = None,
        history: History = ALONE,
    ) -> Batch:
        """The rows `indices` with `chunk` actions each from their own on, and the frames of `cameras` (None: of all);
        `history` says what of earlier rows is read with each."""
        rows = self._checked(indices)
        episodes = self.episode_of(rows)
        begins, ends = self._begins[episodes], self._ends[episodes]
        ahead = rows[:, None] + np.arange(-history.actions, chunk)
        acted = np.clip(ahead, begins[:, None], ends[:, None] - 1).ravel()
        read, places = history.read(rows, begins)
        names = self.cameras if cameras is None else cameras
        self.check_finite(np.concatenate([read, acted]))
        return Batch(
            proprio=self._vectors(layout.PROPRIO, read)[places] if layout.PROPRIO in self.features else None,
            state=self._vectors(layout.STATE, read)[places] if layout.STATE in self.features else None,
            frames={name: self.frames(name, read)[places] for name in names},
            instruction=self.instructions(rows),
            actions=self._vectors(layout.ACTION, acted).reshape(*ahead.shape, -1),
            padding=(ahead < begins[:, None]) | (ahead >= ends[:, None]),
        )

    def instructions(self, rows: npt.NDArray[np.int64]) -> tuple[str, ...]:
        """The instruction at each of the rows."""
        return tuple(self.tasks[index] for index in self._task_of[rows].tolist())

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
        order = np.argsort(rows, kind="stable")
        height, width, _ = self.features[name].picture
        frames = np.empty((len(rows), height, width, 3), np.uint8)
        for place, frame in zip(order.tolist(), self._frames[name].at(rows[order]), strict=True):
            frames[place] = frame
        return frames

    def check_frames(self, cameras: Sequence[str] | None = None) -> None:
        """Open every video file of these cameras (None: of all) and compare its frames with the rows that refer to it,
        instead of when one of its frames is first read. Decodes nothing. Raises `DatasetError` with the file, episode
        and deviation."""
        chosen = [self._frames[self._camera(camera)] for camera in (self.cameras if cameras is None else cameras)]
        files = [(camera, path) for camera in chosen if isinstance(camera, VideoFrames) for path in camera.files]
        for camera, path in shown_if_long(f"Checking the videos of {self.folder.name}", files, len(files)):
            camera.compare(path)

    def episode_of(self, rows: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """For each row, the position in `episodes` of its episode."""
        return np.searchsorted(self._begins, rows, side="right") - 1

    # --- opening

    def _names(self, own: Sequence[str]) -> dict[str, str]:
        """Name of each feature here, and in the files."""
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

    def _find_depth_maps(self) -> dict[str, str]:
        found = {}
        for name, camera in self._frames.items():
            feature = self.features[name]
            why = f"{layout.INFO} says that it is a depth map" if feature.is_depth else None
            if why is None and isinstance(camera, PictureFrames) and feature.picture[2] == 1:
                why = camera.depth()
            if why is not None:
                found[name] = why
        return found

    def _name_cameras(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for name in self._frames:
            if name not in self._depth_maps:
                short = name.removeprefix(layout.IMAGES)
                found[name if short != name and short in self._frames else short] = name
        return found

    def _camera(self, camera: str) -> str:
        """The feature of a camera's frames. Raises `DatasetError` for none, and for a depth map."""
        if camera in self.cameras:
            return self.cameras[camera]
        for name in (layout.IMAGES + camera, camera):
            if name in self._unusable:
                raise DatasetError(self._unusable[name])
            if name in self._depth_maps:
                raise DatasetError(
                    f"{self.folder}: {name!r} is no RGB camera: {self._depth_maps[name]}; RGB cameras: "
                    f"{', '.join(self.cameras) or 'none'}"
                )
        raise DatasetError(f"{self.folder} has no camera {camera!r}; it has: {', '.join(self.cameras) or 'none'}")

    def _lost_conventions(self) -> list[str]:
        """Notes on conventions that the dataset has lost or states wrongly."""
        notes = []
        rates = self._rates()
        if rates and min(abs(rate - self.fps) for rate in rates) > 0.02 * self.fps:
            notes.append(
                f"{self.folder / layout.INFO} says {self.fps:g} frames per second, and the rows' `timestamp` runs at "
                f"{rates[0]:.4g}"
            )
        path = self.folder / layout.PROVENANCE
        seeds = ["seed" in episode.row for episode in self.episodes]
        is_ours = any(seeds) or all(name in self.features for name in layout.FEATURES)
        if is_ours and not path.exists():
            notes.append(
                f"{self.folder} is or was a recording of `embodied record`, and has lost {layout.PROVENANCE}: task, "
                "control mode, gripper, orientation and image size are not known and cannot be compared"
            )
        elif path.exists() and not is_ours:
            notes.append(
                f"{path} describes a recording of `embodied record`, and the data are none: it may be of another "
                "dataset"
            )
        elif is_ours and not all(seeds):
            notes.append(f"{self.folder}: some episodes say no seed and cannot be replayed")
        return notes

    def _rates(self) -> tuple[float, ...]:
        """Rows per second by their timestamps: at the median step, and at the mean one."""
        if self._data.timestamp is None or len(self) < 2:
            return ()
        steps = np.diff(self._data.timestamp)[np.diff(self._data.episode) == 0]
        if not len(steps) or not np.isfinite(steps).all() or min(np.median(steps), steps.mean()) <= 0:
            return ()
        return 1 / float(np.median(steps)), 1 / float(steps.mean())

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
            data = self._data
            whole = {
                "index": data.index, "episode_index": data.episode, "frame_index": data.frame, "task_index": data.task
            }  # fmt: skip
            for name, numbers in whole.items():
                if name in wanted and numbers is not None:
                    self._columns[name] = numbers
                    del wanted[name]
            here = {there: name for name, there in self._own.items()}
            if wanted:
                for name, values in data.columns(wanted).items():
                    self._check_numbers(here[name], values)
                    self._columns[here[name]] = values

    def _check_numbers(self, name: str, values: npt.NDArray[Any]) -> None:
        """Raise `DatasetError` unless a column is of numbers where `info.json` says so. Rows in which what policies
        read and do is not finite are kept for `check_finite`."""
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
                self._not_finite[name] = np.asarray(~finite, np.bool_)

    def check_finite(self, rows: npt.NDArray[np.int64]) -> None:
        """Raise `DatasetError` where what a policy reads or does in one of the rows is no finite number, also as
        float32. Rows of episodes that are not used may have such numbers."""
        self._load([name for name in READ_AND_DONE if name in self.features])
        for name, wrong in self._not_finite.items():
            found = rows[wrong[rows]]
            if len(found):
                row = int(found.min())
                raise DatasetError(
                    f"{self.folder}/data: {name!r} has numbers that are not finite, first in row {row} (episode "
                    f"{self._data.episode[row]}): leave the episode out (sft.episodes), or record it again"
                )
