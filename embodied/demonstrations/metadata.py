"""What a dataset's files say, checked before it is used: they may be damaged, and may be somebody else's.

A path template is somebody's text: it is filled in by two numbers and a camera's name, and leads nowhere out of the
dataset's folder.
"""

from __future__ import annotations

import json
import re
import string
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from embodied.demonstrations.layout import DatasetError
from embodied.errors import shown
from embodied.yaml_files import is_plain
from sim_farm.contract import TaskSpec

LARGEST_JSON = 2**26
"""Bytes of a file of metadata."""
AGAIN = "copy or record the dataset again"
Kind = Literal["whole number", "number", "text", "list of texts", "truth"]
LARGEST: Mapping[Kind, float] = {"whole number": 2**63 - 1, "number": 10**9}
"""Numbers are seconds."""
Size = Annotated[int, Field(ge=0, le=2**20, strict=True)]


class FeatureEntry(BaseModel):
    """Of `info.json`."""

    dtype: str
    shape: Annotated[tuple[Size, ...], Field(max_length=8)]


class Info(BaseModel):
    """`info.json`, as far as it is read."""

    fps: Annotated[float, Field(gt=0, le=1e5, allow_inf_nan=False)]
    features: dict[str, FeatureEntry]
    data_path: str
    video_path: str | None = None


_TASK = TypeAdapter(TaskSpec)


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file. Raises `DatasetError`."""
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise DatasetError(f"{path} is larger than the {LARGEST_JSON} bytes that are read")
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DatasetError(f"{path.parents[1]} is no complete LeRobot dataset: {path} is missing") from error
    except RecursionError:
        raise DatasetError(f"{path} is not valid JSON: it is nested too deeply; {AGAIN}") from None
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} is not valid JSON ({error}); {AGAIN}") from error
    if not isinstance(found, dict):
        raise DatasetError(f"{path} holds {shown(found)} in place of keys and values; {AGAIN}")
    return found


def read_info(path: Path, found: Mapping[str, Any]) -> Info:
    """What `info.json` says. Raises `DatasetError`."""
    try:
        info = Info.model_validate(found)
    except ValidationError as error:
        raise DatasetError(f"{path}: {_first(error)}") from None
    for name, feature in info.features.items():
        if feature.dtype in ("video", "image") and len(feature.shape) != 3:
            raise DatasetError(
                f"{path}: the pictures {shown(name)} have the shape {list(feature.shape)}, not of three numbers"
            )
        if feature.dtype == "video" and info.video_path is None:
            raise DatasetError(f"{path} has the camera {shown(name)}, and no video_path")
    return info


def read_task(path: Path, provenance: Mapping[str, Any]) -> TaskSpec:
    """The task of a recording of ours. Raises `DatasetError`."""
    found = provenance.get("task")
    if not isinstance(found, dict):
        raise DatasetError(f"{path} has no task; {AGAIN}")
    unknown = set(found) - {field.name for field in fields(TaskSpec)}
    if unknown:
        raise DatasetError(f"{path} is of a later version than this program: what is {shown(min(unknown))}?")
    try:
        return _TASK.validate_python(found)
    except ValidationError as error:
        raise DatasetError(f"{path}: task: {_first(error)}") from None


def read_statistics(path: Path, found: Mapping[str, Any]) -> dict[str, dict[str, npt.NDArray[Any]]]:
    """Of each feature, arrays of finite numbers. Raises `DatasetError`, which names those that are something else."""
    result: dict[str, dict[str, npt.NDArray[Any]]] = {}
    for name, values in found.items():
        if not isinstance(values, dict):
            raise DatasetError(f"{path}: the statistics of {shown(name)} are {shown(values)}; {AGAIN}")
        result[name] = {key: _finite(path, f"{name}.{key}", value) for key, value in values.items()}
    return result


def _finite(path: Path, name: str, value: Any) -> npt.NDArray[Any]:
    try:
        array = np.array(value)
        if array.dtype.kind in "iuf" and np.isfinite(array).all():
            return array
    except (ValueError, OverflowError):  # lists of different lengths
        pass
    raise DatasetError(f"{path}: {shown(name)} is not of finite numbers: {shown(value)}; {AGAIN}")


def path_of(folder: Path, template: str, **place: int | str) -> Path:
    """The file that a template of `info.json` means. Raises `DatasetError` where that is none below the folder."""
    try:
        for _, name, form, conversion in string.Formatter().parse(template):
            if name is not None and (name not in place or conversion or not re.fullmatch(r"(0?[0-9]d)?", form or "")):
                raise ValueError(f"it may name {', '.join(place)}, as in {{chunk_index:03d}}")
        relative = Path(template.format(**place))
        if relative.is_absolute() or ".." in relative.parts or not is_plain(str(relative)):
            raise ValueError("it leads out of the dataset's folder")
    except (ValueError, KeyError, IndexError) as error:
        raise DatasetError(f"{folder}: the path {shown(template)} of {shown(place)} is none: {error}") from None
    return folder / relative


def read_table(path: Path, columns: list[str] | None = None) -> pa.Table:
    """A parquet file, or columns of it, of which all must be there. Raises `DatasetError`."""
    try:
        table = pq.ParquetFile(path).read(columns)
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is missing: the dataset is not complete; copy or record it again") from error
    # Some of Arrow's errors are Python's own as well, and a name in the file may be no text.
    except (pa.ArrowException, OSError, ValueError, KeyError, NotImplementedError, MemoryError) as error:
        raise DatasetError(f"{path} is not a whole parquet file ({str(error)[:300]}); {AGAIN}") from error
    for name in columns or ():
        if table.column_names.count(name) != 1:
            raise DatasetError(f"{path} has not one column {name!r}, which meta/info.json names; {AGAIN}")
    return table


def names_in(path: Path) -> list[str]:
    """The columns of a parquet file, as often as they are there. Raises `DatasetError`."""
    try:
        return list(pq.read_schema(path).names)
    except (pa.ArrowException, OSError, ValueError, KeyError, NotImplementedError, MemoryError) as error:
        raise DatasetError(f"{path} is not a whole parquet file ({str(error)[:300]}); {AGAIN}") from error


def check_column(path: Path, table: pa.Table, name: str, kind: Kind, optional: bool = False) -> None:
    """Raise `DatasetError` unless the table's column is of that kind, with a value in every row, none of them below 0.

    `optional`: a row may have none.
    """
    if table.column_names.count(name) != 1:
        raise DatasetError(f"{path} has {table.column_names.count(name)} columns {name!r}, and one is needed; {AGAIN}")
    column = table[name]
    if optional and pa.types.is_null(column.type):
        return
    if not _is(column.type, kind):
        raise DatasetError(f"{path}: {name!r} is of {column.type}, and a {kind} is needed; {AGAIN}")
    if column.null_count and not optional:
        raise DatasetError(f"{path}: {name!r} lacks a {kind} in {column.null_count} rows; {AGAIN}")
    if kind == "list of texts" and pc.list_flatten(column).null_count:
        raise DatasetError(f"{path}: {name!r} has lists that lack a text; {AGAIN}")
    if kind in LARGEST and len(column) > column.null_count:
        values = column.drop_null().to_numpy()
        if not (np.isfinite(values).all() and 0 <= values.min() <= values.max() <= LARGEST[kind]):
            raise DatasetError(f"{path}: {name!r} has numbers that are not of 0 to {LARGEST[kind]}; {AGAIN}")


def _is(found: pa.DataType, kind: Kind) -> bool:
    if kind == "list of texts":
        return bool(pa.types.is_list(found) or pa.types.is_large_list(found)) and _is(found.value_type, "text")
    return {
        "whole number": pa.types.is_integer(found),
        "number": pa.types.is_integer(found) or pa.types.is_float32(found) or pa.types.is_float64(found),
        "text": pa.types.is_string(found) or pa.types.is_large_string(found),
        "truth": pa.types.is_boolean(found),
    }[kind]


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in found["loc"])
    return f"{where[:100]}: {found['msg'][:300]} (got {shown(found['input'])}); {AGAIN}"
