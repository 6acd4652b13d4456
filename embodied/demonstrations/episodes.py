"""Episodes and tasks as the data have them, compared with what the metadata says of them.

The data's own columns are believed. What the metadata lacks or has wrong is noted; what cannot be resolved, since rows
or their names are missing on one side, is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from embodied.demonstrations import layout
from embodied.demonstrations.data_files import DataFiles
from embodied.demonstrations.layout import DatasetError
from embodied.demonstrations.metadata import AGAIN, EpisodeEntry, Metadata
from sim_farm.contract import EpisodeSpec

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


def join(said: Metadata, data: DataFiles) -> Joined:
    """The episodes that the data hold, each with what the metadata says of it. Raises `DatasetError` where rows,
    episodes or tasks are missing on one side."""
    numbers, begins = np.unique(data.episode, return_index=True)
    ends = [*begins[1:].tolist(), len(data)]
    _check_complete(said, data, numbers.tolist())
    notes: list[str] = []
    tasks = _tasks_of_rows(said, data, notes)
    found, odd = [], dict[str, list[int]]()
    for number, begin, end in zip(numbers.tolist(), begins.tolist(), ends, strict=True):
        entry = said.episodes[number]
        _check_length(said, data, entry, end - begin)
        texts = tuple(said.tasks[index] for index in dict.fromkeys(tasks[begin:end].tolist()))
        for what in _oddities(said, data, entry, slice(begin, end), texts):
            odd.setdefault(what, []).append(number)
        found.append(RecordedEpisode(begin, end, texts, {**entry.row, "episode_index": number}))
    for what, episodes in odd.items():
        others = f" and {len(episodes) - 1} others" if len(episodes) > 1 else ""
        notes.append(f"{said.folder}: {what} (episode {episodes[0]}{others})")
    if not said.is_old and list(said.tasks) != list(range(len(said.tasks))):
        notes.append(
            f"{said.folder / layout.TASKS} is not in the order of its `task_index`, which is used; LeRobot's own "
            "loader takes the row with that number instead"
        )
    for name, count in (("total_episodes", len(found)), ("total_frames", len(data))):
        if said.total(name) not in (None, count):
            notes.append(f"{said.folder / layout.INFO} says {name} {said.total(name)}, and the data have {count}")
    return Joined(tuple(found), tasks, tuple(notes))


def _check_complete(said: Metadata, data: DataFiles, held: list[int]) -> None:
    """Raise `DatasetError` unless data and metadata know the same episodes."""
    if not held and not said.episodes:
        raise DatasetError(f"{said.folder} has no episodes")
    missing = sorted({index for index, entry in said.episodes.items() if entry.length != 0} - set(held))
    if missing:
        path = said.data_path(said.episodes[missing[0]])
        missed = f" ({path} is missing)" if path is not None and not path.is_file() else ""
        rows = sum(entry.length or 0 for entry in said.episodes.values())
        named = layout.OLD_EPISODES if said.is_old else "meta/episodes"
        raise DatasetError(
            f"{said.folder}/data holds {len(data)} rows and {named} names {rows}: episode {missing[0]} has "
            f"none{missed}; {_INCOMPLETE}"
        )
    unknown = sorted(set(held) - set(said.episodes))
    if unknown:
        row = int(np.searchsorted(data.episode, unknown[0]))
        raise DatasetError(
            f"{data.where(row)} is of episode {unknown[0]}, which the metadata does not name ({len(unknown)} such "
            "episodes): it was deleted there or is of another recording; delete its rows, or copy the dataset again"
        )


def _check_length(said: Metadata, data: DataFiles, entry: EpisodeEntry, count: int) -> None:
    """Raise `DatasetError` if all that is said of an episode's length contradicts the data."""
    lengths = [entry.length] if entry.length is not None else []
    if entry.begin is not None and entry.end is not None:
        lengths.append(entry.end - entry.begin)
    if lengths and count not in lengths and said.total("total_frames") != len(data):
        raise DatasetError(
            f"{said.folder}/data holds {count} rows of episode {entry.index}, and the metadata names {lengths[0]}: "
            f"{_INCOMPLETE}"
        )


def _oddities(
    said: Metadata, data: DataFiles, entry: EpisodeEntry, rows: slice, texts: tuple[str, ...]
) -> list[str]:
    """What the metadata says of an episode and the data say otherwise."""
    count = rows.stop - rows.start
    index = None if data.index is None else data.index[rows]
    frame = None if data.frame is None else data.frame[rows]
    path = said.data_path(entry)
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
        "its frames do not count from 0 without a gap": (
            frame is not None and bool((frame != np.arange(count)).any())
        ),
    }
    return [what for what, is_odd in oddities.items() if is_odd]


def _tasks_of_rows(said: Metadata, data: DataFiles, notes: list[str]) -> npt.NDArray[np.int64]:
    """[rows] the `task_index` of each; for data without that column, the task that the metadata names of the
    episode."""
    tasks = data.task
    if tasks is None:
        by_text = {text: index for index, text in said.tasks.items()}
        chosen = {}
        for index, entry in said.episodes.items():
            if entry.tasks is None or len(entry.tasks) != 1 or entry.tasks[0] not in by_text:
                raise DatasetError(
                    f"{said.folder}/data has no column 'task_index', and the metadata names no single task of episode "
                    f"{index}; {AGAIN}"
                )
            chosen[index] = by_text[entry.tasks[0]]
        notes.append(f"{said.folder}/data has no column 'task_index': each episode's task is the metadata's")
        return np.array([chosen[index] for index in data.episode.tolist()], np.int64)
    unknown = ~np.isin(tasks, list(said.tasks))
    if unknown.any():
        row = int(unknown.argmax())
        path = layout.OLD_TASKS if said.is_old else layout.TASKS
        raise DatasetError(f"{data.where(row)}: task_index {tasks[row]} is none of {path}; {AGAIN}")
    return tasks
