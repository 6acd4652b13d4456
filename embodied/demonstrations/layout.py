"""LeRobot's dataset layout, version 3.0 (huggingface/lerobot, src/lerobot/datasets): what lies where, in which types.

    FOLDER/
      meta/info.json                                     version, fps, features, totals, path templates
      meta/stats.json                                    of every feature: min, max, mean, std, count, quantiles
      meta/tasks.parquet                                 task_index of each instruction
      meta/episodes/chunk-000/file-000.parquet           a row per episode: where its rows and frames are
      meta/embodied.json                                 ours: the task as it was simulated, and who acted
      data/chunk-000/file-000.parquet                    a row per env step; a row group per episode
      videos/observation.images.front/chunk-000/file-000.mp4

Row i of an episode holds what the policy saw before action i, that action, and what came of it (`next.*`).
Several episodes share a file until it has about the size that `info.json` states.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from embodied.errors import UserError
from sim_farm.contract import TaskInfo

CODEBASE_VERSION = "v3.0"
INFO, STATS, TASKS, PROVENANCE = "meta/info.json", "meta/stats.json", "meta/tasks.parquet", "meta/embodied.json"
_FILE = "chunk-{chunk_index:03d}/file-{file_index:03d}"
DATA_PATH = f"data/{_FILE}.parquet"
VIDEO_PATH = f"videos/{{video_key}}/{_FILE}.mp4"
EPISODES_PATH = f"meta/episodes/{_FILE}.parquet"

PROPRIO, STATE, ACTION = "observation.state", "observation.environment_state", "action"
REWARD, SUCCESS, DONE = "next.reward", "next.success", "next.done"
IMAGES = "observation.images."
"""Followed by the camera's name."""


class DatasetError(UserError):
    """A dataset is missing, damaged, of another version, or in the way of a new one."""


@dataclass(frozen=True)
class Feature:
    """What `info.json` says of a column of the data, or of a camera."""

    dtype: str
    """NumPy's name of the type; or `video` (frames in mp4 files), `image` (encoded in the data), `string`."""
    shape: tuple[int, ...]
    """Of one row. (1,) is a plain column of numbers, as LeRobot has it."""

    @property
    def is_camera(self) -> bool:
        return self.dtype in ("video", "image")


OWN = {
    "timestamp": Feature("float32", (1,)),
    "frame_index": Feature("int64", (1,)),
    "episode_index": Feature("int64", (1,)),
    "index": Feature("int64", (1,)),
    "task_index": Feature("int64", (1,)),
}
"""Columns that every dataset of the layout has, whatever it is of."""


def features_of(info: TaskInfo) -> dict[str, Feature]:
    """The features of a recording of this task, in the order of the data's columns, before the layout's own."""
    size = info.spec.image_size
    return {
        PROPRIO: Feature("float32", (info.proprio_dim,)),
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
    """An array [n] of a plain column, [n, *shape] of one of lists; of objects where it holds no numbers."""
    array = pa.concat_arrays(column.chunks) if column.num_chunks else pa.array([], column.type)
    if feature.shape == (1,) and not pa.types.is_nested(array.type):
        return array.to_numpy(zero_copy_only=False)
    rows = len(array)
    while pa.types.is_list(array.type) or pa.types.is_large_list(array.type) or pa.types.is_fixed_size_list(array.type):
        array = array.flatten()
    return array.to_numpy(zero_copy_only=False).reshape(rows, *feature.shape)


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
