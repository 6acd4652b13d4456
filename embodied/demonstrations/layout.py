"""LeRobot's dataset layout, version 3.0 (huggingface/lerobot, src/lerobot/datasets): what lies where, in which types.

    FOLDER/
      meta/info.json                                     version, fps, features, totals, path templates
      meta/stats.json                                    of every feature: min, max, mean, std, count, quantiles
      meta/tasks.parquet                                 task_index of each instruction
      meta/episodes/chunk-000/file-000.parquet           a row per episode: where its rows and frames are
      meta/embodied.json                                 ours: the task as it was simulated, and the policy that acted
      data/chunk-000/file-000.parquet                    a row per env step; a row group per episode
      videos/observation.images.front/chunk-000/file-000.mp4

Row i of an episode holds what the policy saw before action i, that action, and what came of it (`next.*`).
Several episodes share a file until it has about the size that `info.json` states.

Versions 2.0 and 2.1, which are read and not written, have a file per episode:

    FOLDER/
      meta/info.json                                     as above, with chunks_size: episodes per chunk
      meta/tasks.jsonl                                   {"task_index": 0, "task": "..."}
      meta/episodes.jsonl                                {"episode_index": 0, "tasks": ["..."], "length": 120}
      meta/stats.json (2.0), episodes_stats.jsonl (2.1)  of every feature; of every feature of every episode
      data/chunk-000/episode_000000.parquet
      videos/chunk-000/observation.images.front/episode_000000.mp4
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from embodied.errors import UserError
from sim_farm.contract import TaskInfo

CODEBASE_VERSION = "v3.0"
INFO, STATS, TASKS, PROVENANCE = "meta/info.json", "meta/stats.json", "meta/tasks.parquet", "meta/embodied.json"
IMPORT = "meta/import.json"
"""Provenance of a dataset that was converted without a replay: source, options, conventions."""
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA_PATH = f"data/{_FILE}.parquet"
VIDEO_PATH = f"videos/{{video_key}}/{_FILE}.mp4"
EPISODES_PATH = f"meta/episodes/{_FILE}.parquet"

PROPRIO, STATE, ACTION = "observation.state", "observation.environment_state", "action"
REWARD, SUCCESS, DONE = "next.reward", "next.success", "next.done"
FEATURES = (PROPRIO, STATE, ACTION, REWARD, SUCCESS, DONE)
"""Features of a recording by `embodied record`, beside cameras."""
IMAGES = "observation.images."
"""Followed by the camera's name."""
BOOKKEEPING = ("index", "episode_index", "frame_index", "task_index", "timestamp")
"""Columns that say what belongs together."""

OLD_TASKS, OLD_EPISODES, OLD_STATS = "meta/tasks.jsonl", "meta/episodes.jsonl", "meta/episodes_stats.jsonl"
OLD_DATA_PATH = "data/chunk-{episode_chunk:03d}/episode_{episode_index:06d}.parquet"
OLD_VIDEO_PATH = "videos/chunk-{episode_chunk:03d}/{video_key}/episode_{episode_index:06d}.mp4"
CHUNK_SIZE = 1000
"""Episodes per chunk where `info.json` of version 2.x does not say."""

CHANNELS = (1, 3, 4)
"""Possible channel counts of a picture: the last number of its shape, or the first."""
_AXES = {"h": 0, "height": 0, "w": 1, "width": 1, "c": 2, "channel": 2, "channels": 2, "rgb": 2}


class DatasetError(UserError):
    """A dataset is missing, damaged, of another version, or where a new one is to be written."""


@dataclass(frozen=True)
class Feature:
    """Entry of `info.json` for a column of the data, or for a camera."""

    dtype: str
    """NumPy's name of the type; or `video` (frames in mp4 files), `image` (encoded in the data), `string`."""
    shape: tuple[int, ...]
    """Shape of one row; (1,) is a plain column of numbers, as in LeRobot."""
    names: tuple[str, ...] = ()
    """Names of a camera's axes, where they are given."""
    is_depth: bool = False

    @property
    def is_camera(self) -> bool:
        """True for a feature of pictures, depth maps among them."""
        return self.dtype in ("video", "image")

    @property
    def picture(self) -> tuple[int, int, int]:
        """Height, width and channels of a camera's pictures, in whatever order the shape has them."""
        axes = [_AXES.get(name.lower()) for name in self.names]
        if sorted(axis for axis in axes if axis is not None) == [0, 1, 2]:
            height, width, channels = (self.shape[axes.index(axis)] for axis in range(3))
            return height, width, channels
        if self.shape[2] not in CHANNELS and self.shape[0] in CHANNELS:
            return self.shape[1], self.shape[2], self.shape[0]
        return self.shape[0], self.shape[1], self.shape[2]


OWN = {
    "timestamp": Feature("float32", (1,)),
    "frame_index": Feature("int64", (1,)),
    "episode_index": Feature("int64", (1,)),
    "index": Feature("int64", (1,)),
    "task_index": Feature("int64", (1,)),
}
"""Columns that every dataset of the layout has, whatever it is of."""


def features_of(info: TaskInfo) -> dict[str, Feature]:
    """The features of a recording of this task, in the order of the data's columns, before the layout's own. A robot
    that feels nothing has no proprioception."""
    size = info.spec.image_size
    felt = {PROPRIO: Feature("float32", (info.proprio_dim,))} if info.proprio_dim else {}
    return {
        **felt,
        STATE: Feature("float32", (info.state_dim,)),
        **{IMAGES + camera: Feature("video", (size, size, 3)) for camera in info.cameras},
        ACTION: Feature("float32", (info.action_dim,)),
        REWARD: Feature("float32", (1,)),
        SUCCESS: Feature("bool", (1,)),
        DONE: Feature("bool", (1,)),
    }


def feature_json(feature: Feature, fps: int) -> dict[str, Any]:
    """The feature's entry in `info.json`."""
    if feature.dtype != "video":
        names = ["height", "width", "channels"] if feature.is_camera else None
        return {"dtype": feature.dtype, "shape": list(feature.shape), "names": names}
    height, width, channels = feature.shape
    video = {"height": height, "width": width, "codec": "h264", "pix_fmt": "yuv420p", "is_depth_map": False}
    return {
        "dtype": "video",
        "shape": list(feature.shape),
        "names": ["height", "width", "channels"],
        "info": {f"video.{key}": value for key, value in (video | {"fps": fps, "channels": channels}).items()}
        | {"has_audio": False},
    }


def data_schema(features: Mapping[str, Feature]) -> pa.Schema:
    """Columns of the data files: scalars for shape (1,), lists of fixed size for other shapes, encoded pictures; no
    video."""
    return pa.schema([pa.field(name, _type(feature)) for name, feature in features.items() if feature.dtype != "video"])


def _type(feature: Feature) -> pa.DataType:
    if feature.dtype == "image":
        return pa.struct({"bytes": pa.binary(), "path": pa.string()})
    found = pa.string() if feature.dtype == "string" else pa.from_numpy_dtype(np.dtype(feature.dtype))
    for size in () if feature.shape == (1,) else reversed(feature.shape):
        found = pa.list_(found, size)
    return found


def to_arrow(values: npt.NDArray[Any], field: pa.Field) -> pa.Array:
    """A column from an array [n] or [n, *shape]."""
    sizes, kind = [], field.type
    while pa.types.is_fixed_size_list(kind):
        sizes.append(kind.list_size)
        kind = kind.value_type
    found = pa.array(values.reshape(-1), kind)
    for size in reversed(sizes):
        found = pa.FixedSizeListArray.from_arrays(found, size)
    return found


def to_numpy(column: pa.ChunkedArray, feature: Feature) -> npt.NDArray[Any]:
    """An array [n] of a plain column, [n, *shape] of one of lists; of objects where it holds no numbers.

    Lists may be of any kind (fixed, large, nested, flat, of one number where a plain number is meant). Raises
    `ValueError` that names the row if one has another number of elements than the feature's shape.
    """
    array = pa.concat_arrays([plain(chunk) for chunk in column.chunks] or [plain(pa.array([], column.type))])
    rows, left = len(array), list(feature.shape) or [1]
    per_row = 1
    while _is_list(array.type):
        if not left:
            raise ValueError(f"row 0 has lists in lists, deeper than {list(feature.shape)}")
        # The last level may hold all that is left, flat.
        wanted = left.pop(0) if _is_list(array.type.value_type) else math.prod(left)
        if not _is_list(array.type.value_type):
            left = []
        lengths = pc.fill_null(pc.list_value_length(array), 0).to_numpy(zero_copy_only=False)
        if (lengths != wanted).any():
            place = int((lengths != wanted).argmax())
            raise ValueError(f"row {place // per_row} has {lengths[place]} elements, where {wanted} are meant")
        per_row *= wanted
        array = plain(array.flatten())
    if math.prod(left) != 1:
        raise ValueError("a row has one element")
    values = array.to_numpy(zero_copy_only=False)
    return values.reshape(rows) if feature.shape in ((), (1,)) else values.reshape(rows, *feature.shape)


def plain(array: pa.Array) -> pa.Array:
    """The array without extension types (those of `datasets` among them) and dictionaries."""
    while isinstance(array.type, pa.BaseExtensionType) or pa.types.is_dictionary(array.type):
        array = array.dictionary_decode() if pa.types.is_dictionary(array.type) else array.storage
    return array


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def whole_numbers(column: pa.ChunkedArray) -> npt.NDArray[np.int64]:
    """int64 [n] of a column of whole numbers of any type, floats that are whole and lists of one among them. Raises
    `ValueError` that names the first row that has none."""
    found = to_numpy(column, Feature("int64", (1,)))
    if found.dtype.kind not in "iuf":
        raise ValueError(f"it is of {column.type}, and whole numbers are needed")
    with np.errstate(invalid="ignore"):
        whole = found.astype(np.int64)
    wrong = (whole != found) | (np.abs(found.astype(np.float64)) > 2**62)
    if wrong.any():
        row = int(wrong.argmax())
        raise ValueError(f"row {row} has {found[row]}, which is no whole number")
    return whole


def tasks_table(instructions: list[str]) -> pa.Table:
    """The instructions with their indices; pandas, with which LeRobot reads the file, finds the text as the index."""

    def described(name: str, kind: str, numpy: str) -> dict[str, Any]:
        return {"name": name, "field_name": name, "pandas_type": kind, "numpy_type": numpy, "metadata": None}

    index = {
        "index_columns": ["task"],
        "column_indexes": [described("", "unicode", "object") | {"name": None, "field_name": None}],
        "columns": [described("task_index", "int64", "int64"), described("task", "unicode", "object")],
        "creator": {"library": "pyarrow", "version": pa.__version__},
        "pandas_version": "2.0.0",
    }
    table = pa.table({"task_index": pa.array(range(len(instructions)), pa.int64()), "task": pa.array(instructions)})
    return table.replace_schema_metadata({"pandas": json.dumps(index)})
