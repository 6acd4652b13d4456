"""The parquet files of a dataset: which row lies where, columns of all rows, and the episodes that they make.

The rows' own columns are the truth about their order: `episode_index` and `frame_index`, or `index` where there is no
`frame_index`. Files may hold them in any order, in any number of row groups. Episodes and tasks are the data's too;
metadata is compared with them.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from embodied.demonstrations import layout, metadata
from embodied.demonstrations.layout import DatasetError, Feature
from embodied.demonstrations.metadata import AGAIN, EpisodeEntry, Metadata
from embodied.reporting.live import steps
from sim_farm.contract import EpisodeSpec

T = TypeVar("T")
Index = npt.NDArray[np.int64]

LONG_S = 2.0
"""Work that takes longer shows a progress bar."""
BUFFER = 2**20
"""Bytes of a file that are read at once."""


@dataclass(frozen=True)
class DataFile:
    path: Path
    group_ends: Index
    """Rows up to the end of each row group."""

    @property
    def rows(self) -> int:
        return int(self.group_ends[-1]) if len(self.group_ends) else 0


@dataclass(frozen=True)
class _Opened:
    file: DataFile
    columns: dict[str, npt.NDArray[Any]]


class DataFiles:
    """All rows below `folder`/data, in the order of episodes and frames. `index`, `episode`, `frame`, `task` and
    `timestamp` are columns [rows] in that order (None where the files have none). Raises `DatasetError`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        paths = metadata.files_below(folder / "data", ".parquet")
        opened = [
            each
            for each in shown_if_long(f"Opening {folder.name}", read_ahead(_open, paths, depth=8), len(paths))
            if each.file.rows
        ]
        self.files = tuple(each.file for each in opened)
        self.ends = np.cumsum([file.rows for file in self.files], dtype=np.int64)
        found = {name: self._joined(opened, name) for name in layout.BOOKKEEPING}
        episode = found["episode_index"]
        assert episode is not None
        frame, index = found["frame_index"], found["index"]
        within = frame if frame is not None else index
        order = np.lexsort((within, episode)) if within is not None else np.argsort(episode, kind="stable")
        self.is_in_order = bool((np.diff(order) == 1).all())
        self.places: Index = order
        """[rows] where the row lies: its number, counted through the files."""
        self.episode: Index = episode[order]
        self.index, self.frame, self.task, self.timestamp = (
            None if column is None else column[order]
            for column in (index, frame, found["task_index"], found["timestamp"])
        )
        self._check_order()

    def __len__(self) -> int:
        return len(self.places)

    def path_of(self, row: int) -> Path:
        """The file that holds a row."""
        return self.files[int(np.searchsorted(self.ends, self.places[row], side="right"))].path

    def where(self, row: int) -> str:
        """The file that holds a row, and its number there, for messages."""
        number = int(np.searchsorted(self.ends, self.places[row], side="right"))
        begin = int(self.ends[number]) - self.files[number].rows
        return f"{self.files[number].path}, row {int(self.places[row]) - begin}"

    def columns(self, features: dict[str, Feature]) -> dict[str, npt.NDArray[Any]]:
        """All rows of some features, by their names in the files. Raises `DatasetError` that names file and row."""

        def read(file: DataFile) -> dict[str, npt.NDArray[Any]]:
            table = metadata.read_table(file.path, list(features))
            check_rows(file.path, table.num_rows, file.rows)
            return {name: self._converted(file.path, table[name], name, features[name]) for name in features}

        title = f"Reading {', '.join(features)}"
        parts = list(shown_if_long(title, read_ahead(read, self.files, depth=8), len(self.files)))
        found = {}
        for name in features:
            kinds = {part[name].dtype.kind in "biuf" for part in parts}
            if len(kinds) > 1:
                raise DatasetError(f"{self.folder}/data: {name!r} is of numbers in some files only; {AGAIN}")
            joined = np.concatenate([part[name] for part in parts])
            found[name] = joined if self.is_in_order else joined[self.places]
        return found

    def _converted(self, path: Path, column: pa.ChunkedArray, name: str, feature: Feature) -> npt.NDArray[Any]:
        try:
            return layout.to_numpy(column, feature)
        except (ValueError, TypeError, pa.ArrowException, NotImplementedError, OverflowError) as error:
            raise DatasetError(
                f"{path}: {name!r} is not of shape {list(feature.shape)}, as {layout.INFO} says: {str(error)[:300]}"
            ) from error

    def _joined(self, opened: Sequence[_Opened], name: str) -> npt.NDArray[Any] | None:
        """A column of all files; None where no file has it."""
        parts = [each.columns.get(name) for each in opened]
        missing = [each.file.path for each, part in zip(opened, parts, strict=True) if part is None]
        if missing and (len(missing) < len(parts) or name == "episode_index"):
            raise DatasetError(f"{missing[0]} has no column {name!r}, and it is needed; {AGAIN}")
        if not parts:
            return np.empty(0, np.float64 if name == "timestamp" else np.int64)
        return None if missing else np.concatenate([part for part in parts if part is not None])

    def _check_order(self) -> None:
        """Raise `DatasetError` where two rows claim one place, or the columns contradict each other."""
        if len(self) < 2:
            return
        same = np.diff(self.episode) == 0
        for name, numbers in (("frame_index", self.frame), ("index", self.index)):
            if numbers is None:
                continue
            wrong = same & (np.diff(numbers) <= 0)
            if wrong.any():
                row = int(wrong.argmax())
                what = (
                    f"both have {name} {numbers[row]} of episode {self.episode[row]}"
                    if numbers[row] == numbers[row + 1]
                    else f"have frame_index and {name} in opposite orders (episode {self.episode[row]})"
                )
                raise DatasetError(
                    f"{self.where(row)} and {self.where(row + 1)} {what}: files of two datasets may lie together; "
                    f"{AGAIN}"
                )


def _open(path: Path) -> _Opened:
    """Row groups and bookkeeping columns of a file."""
    with metadata.parquet_errors(path), pq.ParquetFile(path) as file:
        sizes = [file.metadata.row_group(group).num_rows for group in range(file.metadata.num_row_groups)]
        names = [name for name in layout.BOOKKEEPING if file.schema_arrow.names.count(name)]
        table = file.read(names)
    check_rows(path, table.num_rows if names else sum(sizes), sum(sizes))
    columns: dict[str, npt.NDArray[Any]] = {
        name: metadata.whole_column(path, table, name) for name in names if name != "timestamp"
    }
    if "timestamp" in names:
        columns["timestamp"] = _timestamps(path, table)
    return _Opened(DataFile(path, np.cumsum(sizes, dtype=np.int64)), columns)


def check_rows(path: Path, found: int, expected: int) -> None:
    if found != expected:
        raise DatasetError(f"{path} is not a whole parquet file ({found} of {expected} rows can be read); {AGAIN}")


def _timestamps(path: Path, table: pa.Table) -> npt.NDArray[np.float64]:
    """float64 [n] seconds; NaN where there is none, which matters where frames of a video are read."""
    try:
        return layout.to_numpy(table["timestamp"], Feature("float32", (1,))).astype(np.float64)
    except (ValueError, TypeError, pa.ArrowException, KeyError):
        return np.full(table.num_rows, np.nan)


def shown_if_long(title: str, items: Iterable[T], total: int) -> Iterator[T]:
    """The items; with a progress bar from the moment on when working on them has taken `LONG_S`."""
    began_s, bar = time.monotonic(), None
    with ExitStack() as stack:
        for done, item in enumerate(items, 1):
            yield item
            if bar is not None:
                bar.advance()
            elif time.monotonic() - began_s > LONG_S:
                bar = stack.enter_context(steps(title, total))
                bar.advance(done)


_INCOMPLETE = "a file is missing or of another recording; copy or record the dataset again"


@dataclass(frozen=True)
class RecordedEpisode:
    """One episode: the rows `begin` to `end` of the dataset."""

    begin: int
    end: int
    instructions: tuple[str, ...]
    """The tasks of its rows, each once, in the order in which they begin."""
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
        """With `Dataset.task` and the actions, all it takes to replay an episode of ours; None in other datasets, and
        where the episode begins from a recorded state."""
        if self.row.get("seed") is None or "init_state" not in self.row:
            return None
        return EpisodeSpec(self.row["seed"], self.row["init_state"])


@dataclass(frozen=True)
class Joined:
    """The data and their metadata, put together."""

    episodes: tuple[RecordedEpisode, ...]
    tasks: npt.NDArray[np.int64]
    """[rows] the task of each row, one of the metadata's."""
    notes: tuple[str, ...]
    """Sentences about metadata that the data contradict, and that are not used."""


def join(meta: Metadata, data: DataFiles) -> Joined:
    """The episodes that the data hold, each with what the metadata says of it. Raises `DatasetError` where rows,
    episodes or tasks are missing on one side."""
    numbers, begins = np.unique(data.episode, return_index=True)
    ends = [*begins[1:].tolist(), len(data)]
    _check_complete(meta, data, numbers.tolist())
    notes: list[str] = []
    tasks = _tasks_of_rows(meta, data, notes)
    found, odd = [], dict[str, list[int]]()
    for number, begin, end in zip(numbers.tolist(), begins.tolist(), ends, strict=True):
        entry = meta.episodes[number]
        _check_length(meta, data, entry, end - begin)
        texts = tuple(meta.tasks[index] for index in dict.fromkeys(tasks[begin:end].tolist()))
        for what in _oddities(meta, data, entry, slice(begin, end), texts):
            odd.setdefault(what, []).append(number)
        found.append(RecordedEpisode(begin, end, texts, {**entry.row, "episode_index": number}))
    for what, episodes in odd.items():
        others = f" and {len(episodes) - 1} others" if len(episodes) > 1 else ""
        notes.append(f"{meta.folder}: {what} (episode {episodes[0]}{others})")
    if not meta.is_old and list(meta.tasks) != list(range(len(meta.tasks))):
        notes.append(
            f"{meta.folder / layout.TASKS} is not in the order of its `task_index`, which is used; LeRobot's own "
            "loader takes the row with that number instead"
        )
    for name, count in (("total_episodes", len(found)), ("total_frames", len(data))):
        if meta.total(name) not in (None, count):
            notes.append(f"{meta.folder / layout.INFO} says {name} {meta.total(name)}, and the data have {count}")
    return Joined(tuple(found), tasks, tuple(notes))


def _check_complete(meta: Metadata, data: DataFiles, held: list[int]) -> None:
    """Raise `DatasetError` unless data and metadata know the same episodes."""
    if not held and not meta.episodes:
        raise DatasetError(f"{meta.folder} has no episodes")
    missing = sorted({index for index, entry in meta.episodes.items() if entry.length != 0} - set(held))
    if missing:
        path = meta.data_path(meta.episodes[missing[0]])
        missed = f" ({path} is missing)" if path is not None and not path.is_file() else ""
        rows = sum(entry.length or 0 for entry in meta.episodes.values())
        named = layout.OLD_EPISODES if meta.is_old else "meta/episodes"
        raise DatasetError(
            f"{meta.folder}/data holds {len(data)} rows and {named} names {rows}: episode {missing[0]} has "
            f"none{missed}; {_INCOMPLETE}"
        )
    unknown = sorted(set(held) - set(meta.episodes))
    if unknown:
        row = int(np.searchsorted(data.episode, unknown[0]))
        raise DatasetError(
            f"{data.where(row)} is of episode {unknown[0]}, which the metadata does not name ({len(unknown)} such "
            "episodes): it was deleted there or is of another recording; delete its rows, or copy the dataset again"
        )


def _check_length(meta: Metadata, data: DataFiles, entry: EpisodeEntry, count: int) -> None:
    """Raise `DatasetError` if every length that the metadata gives for an episode contradicts the data."""
    lengths = [entry.length] if entry.length is not None else []
    if entry.begin is not None and entry.end is not None:
        lengths.append(entry.end - entry.begin)
    if lengths and count not in lengths and meta.total("total_frames") != len(data):
        raise DatasetError(
            f"{meta.folder}/data holds {count} rows of episode {entry.index}, and the metadata names {lengths[0]}: "
            f"{_INCOMPLETE}"
        )


def _oddities(meta: Metadata, data: DataFiles, entry: EpisodeEntry, rows: slice, texts: tuple[str, ...]) -> list[str]:
    """Differences between the metadata of an episode and its data, in sentences."""
    count = rows.stop - rows.start
    index = None if data.index is None else data.index[rows]
    frame = None if data.frame is None else data.frame[rows]
    path = meta.data_path(entry)
    oddities = {
        "its length in the metadata is another than that of the data, which is used": (
            entry.length not in (None, count)
        ),
        "the metadata gives it other rows than the data's own `index`, which is used": (
            index is not None
            and entry.begin is not None
            and entry.end is not None
            and (entry.begin, entry.end) != (index[0], index[-1] + 1)
        ),
        "its rows lie in another file than the metadata says": path not in (None, data.path_of(rows.start)),
        "the metadata names other tasks than its rows have, whose are used": (
            entry.tasks is not None and set(entry.tasks) != set(texts)
        ),
        "its frames do not count from 0 without a gap": (frame is not None and bool((frame != np.arange(count)).any())),
    }
    return [what for what, is_odd in oddities.items() if is_odd]


def _tasks_of_rows(meta: Metadata, data: DataFiles, notes: list[str]) -> npt.NDArray[np.int64]:
    """[rows] the `task_index` of each; for data without that column, the task that the metadata names of the
    episode."""
    tasks = data.task
    if tasks is None:
        by_text = {text: index for index, text in meta.tasks.items()}
        chosen = {}
        for index, entry in meta.episodes.items():
            if entry.tasks is None or len(entry.tasks) != 1 or entry.tasks[0] not in by_text:
                raise DatasetError(
                    f"{meta.folder}/data has no column 'task_index', and the metadata names no single task of episode "
                    f"{index}; {AGAIN}"
                )
            chosen[index] = by_text[entry.tasks[0]]
        notes.append(f"{meta.folder}/data has no column 'task_index': each episode's task is the metadata's")
        return np.array([chosen[index] for index in data.episode.tolist()], np.int64)
    unknown = ~np.isin(tasks, list(meta.tasks))
    if unknown.any():
        row = int(unknown.argmax())
        path = layout.OLD_TASKS if meta.is_old else layout.TASKS
        raise DatasetError(f"{data.where(row)}: task_index {tasks[row]} is none of {path}; {AGAIN}")
    return tasks


Key = TypeVar("Key")
Result = TypeVar("Result")


def read_ahead(
    read: Callable[[Key], Result], keys: Iterable[Key], *, workers: int = 2, depth: int = 4
) -> Generator[Result, None, None]:
    """`read(key)` of each key, in the order of the keys.

    `workers` threads run at most `depth` keys ahead of the caller, so that at most `depth` results wait at once. Keys
    are taken in the caller's thread. An exception of `read` is raised in the place of its result, and ends the
    iteration.
    Closing the iterator, or dropping it, starts no further key and waits for those that are being read.
    """
    if workers < 1 or depth < 1:
        raise ValueError(f"reading ahead takes at least one worker and one key, got {workers} and {depth}")
    pool = ThreadPoolExecutor(workers, thread_name_prefix="read_ahead")
    waiting: deque[Future[Result]] = deque()
    try:
        for key in keys:
            waiting.append(pool.submit(read, key))
            if len(waiting) >= depth:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
