"""Metadata of a dataset, checked before use: its files may be damaged or of a stranger.

A path template is a stranger's text: it takes two numbers and a camera's name, and never leads out of the dataset's
folder.
"""

from __future__ import annotations

import json
import math
import re
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import BaseModel, Field, TypeAdapter, ValidationError

from embodied.demonstrations import layout
from embodied.demonstrations.layout import DatasetError, Feature
from embodied.errors import shown
from embodied.files import is_plain
from sim_farm.contract import TaskSpec

LARGEST_JSON = 2**26
"""Bytes of a file of metadata that is one JSON value."""
LARGEST_LINES = 2**30
"""Bytes of a file of metadata with a JSON value in each line; so many episodes have statistics."""
AGAIN = "copy or record the dataset again"
WHOLE = (
    *("episode_index", "length", "dataset_from_index", "dataset_to_index", "data/chunk_index", "data/file_index"),
    *("seed", "init_state"),
)
"""Columns of `meta/episodes` that hold whole numbers, or none."""
Size = Annotated[int, Field(ge=0, le=2**20, strict=True)]


class FeatureEntry(BaseModel):
    """An entry of `features` in `info.json`."""

    dtype: str
    shape: Annotated[tuple[Size, ...], Field(max_length=8)]


class Info(BaseModel):
    """`info.json`, as far as it is read."""

    codebase_version: str
    fps: Annotated[float, Field(gt=0, le=1e5, allow_inf_nan=False)]
    features: dict[str, Any]
    data_path: str | None = None
    video_path: str | None = None
    chunks_size: Annotated[int, Field(ge=1)] = layout.CHUNK_SIZE


@dataclass(frozen=True)
class EpisodeEntry:
    """Metadata of one episode. Where it differs from the data, the data count."""

    index: int
    length: int | None
    begin: int | None
    """`dataset_from_index` and `dataset_to_index`."""
    end: int | None
    tasks: tuple[str, ...] | None
    row: Mapping[str, Any]
    """All that it says but statistics."""


_TASK = TypeAdapter(TaskSpec)


@dataclass(frozen=True)
class Metadata:
    """Metadata of a dataset: the files below `meta`, of any version that is read."""

    folder: Path
    raw: Mapping[str, Any]
    """`info.json`."""
    version: tuple[int, int]
    info: Info
    tasks: dict[int, str]
    """Instructions by their `task_index`."""
    episodes: dict[int, EpisodeEntry]
    """By their `episode_index`."""

    @property
    def is_old(self) -> bool:
        """True for version 2.x, which has a file per episode."""
        return self.version < (3, 0)

    def total(self, name: str) -> int | None:
        """A count of `info.json`: `total_frames`, for example."""
        return whole_number(self.raw.get(name))

    def data_path(self, episode: EpisodeEntry) -> Path | None:
        """The file of an episode's rows by the metadata; None where they name none. Reads nothing."""
        place: dict[str, Any] = {key: episode.row.get(f"data/{key}") for key in ("chunk_index", "file_index")}
        if self.is_old:
            place = self._old_place(episode.index)
        if None in place.values():
            return None
        try:
            default = layout.OLD_DATA_PATH if self.is_old else layout.DATA_PATH
            return path_of(self.folder, self.info.data_path or default, **place)
        except DatasetError:
            return None

    def video_path(self, index: int, camera: str) -> Path:
        """The file of an episode's frames. Raises `DatasetError` where the metadata name none."""
        if self.is_old:
            template = self.info.video_path or layout.OLD_VIDEO_PATH
            return path_of(self.folder, template, video_key=camera, **self._old_place(index))
        row = self.episodes[index].row
        place = {key: whole_number(row.get(f"videos/{camera}/{key}")) for key in ("chunk_index", "file_index")}
        numbers = {key: value for key, value in place.items() if value is not None and value >= 0}
        if len(numbers) < 2:
            raise DatasetError(
                f"{self.folder}/meta/episodes does not say in which file the frames of {camera!r} of episode {index} "
                f"are (videos/{camera}/chunk_index and file_index); {AGAIN}"
            )
        return path_of(self.folder, self.info.video_path or layout.VIDEO_PATH, video_key=camera, **numbers)

    def begin_s(self, index: int, camera: str) -> float:
        """Start of an episode in its video file, in seconds; NaN where the metadata does not say."""
        if self.is_old:
            return 0.0
        found = self.episodes[index].row.get(f"videos/{camera}/from_timestamp")
        return float(found) if isinstance(found, (int, float)) and not isinstance(found, bool) else math.nan

    def _old_place(self, index: int) -> dict[str, int]:
        return {"episode_chunk": index // self.info.chunks_size, "episode_index": index}


def read_metadata(folder: Path) -> Metadata:
    """Read all but statistics and provenance. Raises `DatasetError`."""
    path = folder / layout.INFO
    raw = read_json(path)
    version = _version(path, raw.get("codebase_version"))
    info = _read_info(path, raw)
    return Metadata(folder, raw, version, info, _read_tasks(folder, version), _read_episodes(folder, version))


def _version(path: Path, text: Any) -> tuple[int, int]:
    found = re.fullmatch(r"v?(\d{1,3})\.(\d{1,3})(\.\d+)*", text) if isinstance(text, str) else None
    version = (int(found[1]), int(found[2])) if found else (0, 0)
    if version[0] != 3 and version not in ((2, 0), (2, 1)):
        raise DatasetError(
            f"{path}: a LeRobot dataset of version {shown(text)}, and v3.x, v2.1 and v2.0 are read here; convert it "
            "with LeRobot: python -m lerobot.scripts.convert_dataset_v21_to_v30 --repo-id=OWNER/NAME, and what is "
            "older than 2.0 with lerobot.common.datasets.v2 of its release 0.1 first"
        )
    return version


def read_json(path: Path) -> dict[str, Any]:
    """The object in the file. Raises `DatasetError`."""
    try:
        if path.stat().st_size > LARGEST_JSON:
            raise DatasetError(f"{path} is larger than the {LARGEST_JSON} bytes that are read")
        found = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise _missing(path) from error
    except RecursionError:
        raise DatasetError(f"{path} is not valid JSON: it is nested too deeply; {AGAIN}") from None
    except (NotADirectoryError, PermissionError) as error:
        raise DatasetError(
            f"{path.parents[1]} cannot be opened as a dataset ({error.strerror}): name the folder that holds meta/ and "
            "data/"
        ) from error
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} is not valid JSON ({error}); {way_on(path)}") from error
    if not isinstance(found, dict):
        raise DatasetError(f"{path} holds {shown(found)} in place of keys and values; {AGAIN}")
    return found


def _missing(path: Path) -> DatasetError:
    """The error for a missing file of the metadata, with the kind of folder that it may be instead."""
    folder = path.parents[1]
    problem = f"{folder} is no complete LeRobot dataset: {path} is missing"
    if path.name != Path(layout.INFO).name:
        return DatasetError(f"{problem}; {AGAIN}")
    inside = sorted(found.parents[1].name for found in folder.glob(f"*/{layout.INFO}"))
    if inside:
        return DatasetError(f"{problem}; there are datasets in it: {_listed(inside)}")
    if any(found.suffix in (".h5", ".hdf5") or ".tfrecord" in found.name for found in folder.glob("*")):
        return DatasetError(f"{problem}; recordings in HDF5 or RLDS are converted first (docs/demonstrations.md)")
    return DatasetError(f"{problem}; name the folder that holds meta/ and data/")


def way_on(path: Path) -> str:
    """Remedy for a file that cannot be read."""
    try:
        with path.open("rb") as file:
            is_pointer = file.read(24) == b"version https://git-lfs."
    except OSError:
        is_pointer = False
    return "it is a pointer of Git LFS: fetch the file itself with `git lfs pull`" if is_pointer else AGAIN


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The objects in a file with one in each line. Raises `DatasetError`."""
    try:
        if path.stat().st_size > LARGEST_LINES:
            raise DatasetError(f"{path} is larger than the {LARGEST_LINES} bytes that are read")
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, 1):
                if not line.strip():
                    continue
                found = json.loads(line)
                if not isinstance(found, dict):
                    raise DatasetError(f"{path}, line {number} holds {shown(found)}, not keys and values; {AGAIN}")
                yield found
    except FileNotFoundError as error:
        raise _missing(path) from error
    except RecursionError:
        raise DatasetError(f"{path} is not valid JSON: it is nested too deeply; {AGAIN}") from None
    except (OSError, ValueError) as error:
        raise DatasetError(f"{path} is not valid JSON, a value in each line ({error}); {AGAIN}") from error


def _read_info(path: Path, found: Mapping[str, Any]) -> Info:
    """The content of `info.json`, checked. Raises `DatasetError`."""
    try:
        return Info.model_validate(found)
    except ValidationError as error:
        raise DatasetError(f"{path}: {_first(error)}") from None


def read_features(path: Path, entries: Mapping[str, Any]) -> tuple[dict[str, Feature], dict[str, str]]:
    """The features that can be read, and the errors of the others, which matter where these are read."""
    features, unusable = dict[str, Feature](), dict[str, str]()
    for name, given in entries.items():
        try:
            entry = FeatureEntry.model_validate(given)
        except ValidationError as error:
            unusable[name] = f"{path}: features.{name[:100]}.{_first(error)}"
            continue
        names = given.get("names")
        if isinstance(names, dict):
            names = list(names.values()) if len(names) > 1 else next(iter(names.values()), None)
        if not isinstance(names, list) or len(names) != len(entry.shape) or not all(isinstance(n, str) for n in names):
            names = []
        feature = Feature(entry.dtype, entry.shape, tuple(names), _is_depth(given))
        if feature.is_camera and len(entry.shape) == 2:  # grey pictures
            feature = Feature(entry.dtype, (*entry.shape, 1), (), feature.is_depth)
        if feature.is_camera and len(feature.shape) != 3:
            unusable[name] = (
                f"{path}: the pictures {shown(name)} have the shape {list(entry.shape)}, and height, width and "
                "channels are needed"
            )
            continue
        features[name] = feature
    return features, unusable


def _is_depth(entry: Mapping[str, Any]) -> bool:
    """True where the feature is a depth map, by any of the flags of LeRobot's versions."""
    entries = [entry, *(entry[key] for key in ("info", "video_info") if isinstance(entry.get(key), dict))]
    pixels = [each.get("video.pix_fmt") for each in entries]
    return any(each.get(key) for each in entries for key in ("is_depth_map", "video.is_depth_map")) or any(
        isinstance(kind, str) and re.match(r"gray\d\d", kind) is not None for kind in pixels
    )


def _read_tasks(folder: Path, version: tuple[int, int]) -> dict[int, str]:
    """Instructions by their index. Raises `DatasetError`."""
    if version < (3, 0):
        path = folder / layout.OLD_TASKS
        rows = list(read_lines(path))
        indices, texts = ([row.get(key) for row in rows] for key in ("task_index", "task"))
        column = "task"
    else:
        path = folder / layout.TASKS
        table = read_table(path)
        column = _text_column(path, table)
        indices = whole_column(path, table, "task_index").tolist()
        with parquet_errors(path):
            texts = _python(table[column])
    found: dict[int, str] = {}
    for number, (index, text) in enumerate(zip(indices, texts, strict=True)):
        index = whole_number(index)
        if index is None or not isinstance(text, str) or not is_plain(text):
            raise DatasetError(
                f"{path}: row {number} is to be a task_index and a text in {column!r}, and is {shown(indices[number])} "
                f"and {shown(text)}; {AGAIN}"
            )
        if found.setdefault(index, text) != text:
            raise DatasetError(f"{path}: task_index {index} is both {shown(found[index])} and {shown(text)}; {AGAIN}")
    return found


def _text_column(path: Path, table: pa.Table) -> str:
    """The column of `meta/tasks.parquet` that holds the instructions: pandas' index, or the one called `task`."""
    names = table.column_names
    if "task_index" not in names:
        raise DatasetError(f"{path} has no column 'task_index', only {_listed(names)}; {AGAIN}")
    try:
        described = json.loads((table.schema.metadata or {}).get(b"pandas", b"{}"))
        indices = described.get("index_columns") if isinstance(described, dict) else None
    except (ValueError, RecursionError):
        indices = None
    candidates = [name for name in indices or () if isinstance(name, str)] if isinstance(indices, list) else []
    for name in (*candidates, "task", "__index_level_0__"):
        if names.count(name) == 1 and _is_text(table.schema.field(name).type):
            return name
    raise DatasetError(
        f"{path} says no instructions: they are the index that pandas wrote, or a column 'task', and it has the "
        f"columns {_listed(names)}; {AGAIN}"
    )


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    return pa.types.is_string(kind) or pa.types.is_large_string(kind) or pa.types.is_string_view(kind)


def _read_episodes(folder: Path, version: tuple[int, int]) -> dict[int, EpisodeEntry]:
    """Metadata of each episode, by its `episode_index`. Raises `DatasetError`."""
    found: dict[int, EpisodeEntry] = {}
    for path, row in _old_rows(folder) if version < (3, 0) else _rows(folder):
        entry = _entry(path, row, len(found))
        if entry.index in found:
            raise DatasetError(f"{path} has two rows of episode {entry.index}; {AGAIN}")
        found[entry.index] = entry
    return found


def _old_rows(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    path = folder / layout.OLD_EPISODES
    return ((path, row) for row in read_lines(path))


def _rows(folder: Path) -> Iterator[tuple[Path, dict[str, Any]]]:
    paths = files_below(folder / "meta/episodes", ".parquet")
    if not paths:
        raise DatasetError(f"{folder}/meta/episodes holds no parquet file: the dataset is not complete")
    for path in paths:
        names = [name for name in names_in(path) if not name.startswith("stats/")]
        table = read_table(path, [name for name in names if names.count(name) == 1])
        columns = {}
        for name in table.column_names:
            try:
                columns[name] = _python(table[name])
            except (pa.ArrowException, ValueError, OverflowError, TypeError):  # dates beyond Python's, for example
                continue
        for number in range(table.num_rows):
            yield path, {name: values[number] for name, values in columns.items()}


def _entry(path: Path, row: dict[str, Any], position: int) -> EpisodeEntry:
    """The row with its numbers as they were before a tool made floats of them."""
    index = whole_number(row.get("episode_index", position))
    if index is None or index < 0:
        raise DatasetError(f"{path}: row {position} has the episode_index {shown(row['episode_index'])}; {AGAIN}")
    for name in [name for name in row if name in WHOLE]:
        if row[name] is None or (isinstance(row[name], float) and math.isnan(row[name])):
            row[name] = None
        elif isinstance(row[name], (int, float, list)):
            whole = whole_number(row[name])
            if whole is None or whole < 0:
                raise DatasetError(
                    f"{path}: {name!r} of episode {index} is {shown(row[name])}, and a whole number is needed; {AGAIN}"
                )
            row[name] = whole
    if row.get("seed", 0) is None:  # an episode of others, merged with ours
        del row["seed"]
    if not isinstance(row.get("init_state"), (int, type(None))) or not isinstance(row.get("seed", 0), int):
        raise DatasetError(
            f"{path}: episode {index} has the seed {shown(row.get('seed'))} and the initial state "
            f"{shown(row.get('init_state'))}, which are to be whole numbers; {AGAIN}"
        )
    if "success" in row:
        success = row.pop("success")
        if success in (0, 1):
            row["success"] = bool(success)
        elif success is not None and not (isinstance(success, float) and math.isnan(success)):
            raise DatasetError(f"{path}: 'success' of episode {index} is {shown(success)}, not true or false; {AGAIN}")
    tasks = row.get("tasks")
    if isinstance(tasks, str):
        tasks = [tasks]
    instructions = tuple(tasks) if isinstance(tasks, list) and all(isinstance(text, str) for text in tasks) else None
    numbers = [row.get(name) for name in ("length", "dataset_from_index", "dataset_to_index")]
    length, begin, end = (number if isinstance(number, int) else None for number in numbers)
    return EpisodeEntry(index, length, begin, end, instructions, row)


def whole_number(value: Any) -> int | None:
    """The whole number that a value is, whatever type a tool has given it; None if it is none."""
    if isinstance(value, list) and len(value) == 1:
        value = value[0]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    if isinstance(value, float) and not float(value).is_integer():
        return None
    return int(value) if abs(value) <= 2**62 else None


def read_task(path: Path, provenance: Mapping[str, Any]) -> TaskSpec:
    """The task of a recording of ours. Raises `DatasetError`."""
    found = provenance.get("task")
    if not isinstance(found, dict):
        raise DatasetError(f"{path} has no task; {AGAIN}")
    found = dict(found)
    if (tokenizer := found.pop("tokenizer", None)) is not None:  # as recordings had it before a task had options
        found["options"] = {"tokenizer": tokenizer}
    unknown = set(found) - {field.name for field in fields(TaskSpec)}
    if unknown:
        raise DatasetError(f"{path} is of a later version than this program: what is {shown(min(unknown))}?")
    try:
        return _TASK.validate_python(found)
    except ValidationError as error:
        raise DatasetError(f"{path}: task: {_first(error)}") from None


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


def files_below(folder: Path, suffix: str) -> list[Path]:
    """The files of a kind in a folder and the folders in it, sorted; not those that file managers hide."""
    # Unlike the second, the first goes into folders that are links, as LeRobot does.
    return sorted(
        path
        for path in {*folder.glob(f"*/*{suffix}"), *folder.rglob(f"*{suffix}")}
        if path.is_file() and not any(part.startswith(".") for part in path.relative_to(folder).parts)
    )


@contextmanager
def parquet_errors(path: Path) -> Iterator[None]:
    """Raise `DatasetError` for what goes wrong in a parquet file."""
    try:
        yield
    except FileNotFoundError as error:
        raise DatasetError(f"{path} is missing: the dataset is not complete; copy or record it again") from error
    # Some of Arrow's errors are Python's own as well, and a name in the file may be no text.
    except (pa.ArrowException, OSError, ValueError, LookupError, TypeError, NotImplementedError, MemoryError) as error:
        raise DatasetError(f"{path} is not a whole parquet file ({str(error)[:300]}); {way_on(path)}") from error


def read_table(path: Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Read a parquet file, or the named columns of it. Raises `DatasetError`, also for a missing column."""
    with parquet_errors(path):
        table = pq.ParquetFile(path).read(None if columns is None else list(columns))
    for name in columns or ():
        if table.column_names.count(name) != 1:
            raise DatasetError(
                f"{path} has {table.column_names.count(name)} columns {shown(name)}, and one is needed; {AGAIN}"
            )
    return table if columns is None else table.select(list(columns))


def names_in(path: Path) -> list[str]:
    """Names of the columns of a parquet file, with repetitions. Raises `DatasetError`."""
    with parquet_errors(path):
        return list(pq.read_schema(path).names)


def whole_column(path: Path, table: pa.Table, name: str) -> npt.NDArray[np.int64]:
    """int64 [n] of a table's column of whole numbers, none below 0. Raises `DatasetError` that names the row."""
    if table.column_names.count(name) != 1:
        raise DatasetError(f"{path} has {table.column_names.count(name)} columns {name!r}, and one is needed; {AGAIN}")
    with_errors = (ValueError, TypeError, pa.ArrowException)
    try:
        found = layout.whole_numbers(table[name])
    except with_errors as error:
        raise DatasetError(f"{path}: {name!r}: {str(error)[:300]}; {AGAIN}") from error
    if len(found) and found.min() < 0:
        row = int(found.argmin())
        raise DatasetError(f"{path}: {name!r}: row {row} has {found[row]}, which is below 0; {AGAIN}")
    return found


def _python(column: pa.ChunkedArray) -> list[Any]:
    return [value for chunk in column.chunks for value in layout.plain(chunk).to_pylist()]


def _listed(names: Sequence[str]) -> str:
    return shown(", ".join(names), 300)


def _first(error: ValidationError) -> str:
    found = error.errors(include_url=False)[0]
    where = ".".join(str(part) for part in found["loc"])
    return f"{where[:100]}: {found['msg'][:300]} (got {shown(found['input'])}); {AGAIN}"
