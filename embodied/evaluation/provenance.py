"""Origin of the policy that is evaluated: the files it is made of, the statistics that give its actions their unit, and
the starts of the episodes that it was trained on, back through the runs that it began from.

A recorded initial state was trained on where a run drew its episodes from it, or where a demonstration that was learned
from begins with it, and a problem of a file where it stands in a file that a run drew its problems from. Training
episodes draw their seeds from streams that no evaluation draws from; where episodes of different seeds
may begin alike, that says nothing of their beginnings, and nothing is claimed: where evaluated ones do, and where a
generator states problems in words.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import TypeAdapter

from embodied.config.schema import Config, PolicyConfig
from embodied.errors import UserError
from embodied.files import read_json
from embodied.run import checkpoint
from embodied.run.saved_settings import CONFIG, recorded_settings, run_of_checkpoint
from embodied.workflows.run_spec import tasks_of
from policies.registry import policy_kind
from sim_farm.catalogue import CATALOGUE, distinct_seeds, problem_file
from sim_farm.contract import EpisodeSpec, FarmError
from sim_farm.episodes import start_seed

MOST_START_SEEDS = 10_000
"""Seeds of env.init_states that are compared; each takes some microseconds to draw."""
WHOLE = 2**22
"""Bytes up to which a file is hashed whole."""
BLOCKS, BLOCK = 1024, 4096
"""Number and size in bytes of the blocks that are hashed of a larger file."""
RANDOM_WEIGHTS = "random_weights"
"""Entry of a checkpoint's config.json: nothing was learned, the weights are drawn."""


# --- the files that a policy is made of


def outside_files(policy: PolicyConfig) -> dict[str, dict[str, str]]:
    """Path and digest of each file or folder that the policy's options name, by option."""
    found = {name: Path(value) for name, value in _texts(policy.architecture) if value and _exists(value)}
    return {name: {"path": str(path), "sha256": digest_of(path)} for name, path in found.items()}


def digest_of(path: Path) -> str:
    """sha256 over a file, or over the names and contents of a folder's files, but for hidden ones and Markdown.

    A file of more than 4 MiB enters by its size and 1,024 blocks of 4 KiB, evenly spaced from its first byte to its
    last: one every 5 MB of 5 GB of weights, which would take minutes to hash whole. Raises `UserError`.
    """
    whole = hashlib.sha256()
    try:
        files = [path] if path.is_file() else [file for file in path.rglob("*") if file.is_file()]
        for name, file in sorted((file.relative_to(path).as_posix(), file) for file in files):
            if file.suffix != ".md" and not any(part.startswith(".") for part in Path(name).parts):
                whole.update(f"{name}\n".encode())
                _add(whole, file)
    except OSError as error:
        raise UserError(f"{error.filename or path}, of which the policy is made, cannot be read: {error}") from error
    return whole.hexdigest()


def _add(whole: Any, path: Path) -> None:
    size = path.stat().st_size
    whole.update(f"{size}\n".encode())
    with path.open("rb") as file:
        if size <= WHOLE:
            whole.update(file.read())
            return
        for number in range(BLOCKS):
            file.seek((size - BLOCK) * number // (BLOCKS - 1))
            whole.update(file.read(BLOCK))


def _texts(value: Any, name: str = "") -> Iterator[tuple[str, str]]:
    """The texts in nested options, with their keys."""
    if isinstance(value, str):
        yield name, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(item, f"{name}.{key}" if name else str(key))
    elif isinstance(value, (list, tuple)):
        for number, item in enumerate(value):
            yield from _texts(item, f"{name}.{number}")


def _exists(text: str) -> bool:
    try:
        return Path(text).exists()
    except (OSError, ValueError):  # no text that could be a path
        return False


# --- the statistics


def statistics_note(name: str, suites: Iterable[str]) -> str | None:
    """The sentence about statistics called `name` that are not those of the evaluated suites; None where they are."""
    foreign = [suite for suite in suites if not _belongs(name.lower(), suite)]
    if not foreign:
        return None
    return f"actions are un-normalised by the statistics of {name}, and {', '.join(foreign)} is evaluated"


def _belongs(name: str, suite: str) -> bool:
    """True if the name contains the suite, or its simulator and no other suite of it."""
    simulator, _, own = suite.partition("/")
    tasks = CATALOGUE[simulator].tasks if simulator in CATALOGUE else None
    known = {task.rpartition("/")[0] for task in tasks or ()} - {""}
    named = {other for other in known if re.search(rf"(?<![a-z0-9]){re.escape(other)}(?![a-z0-9])", name)}
    return own in named if named else simulator in name


# --- the starts that were trained on


@dataclass(frozen=True)
class RecordedStarts:
    """Starts of the episodes of a dataset."""

    task: str
    init_states: frozenset[int]
    seeds: frozenset[int]
    """Seeds of the episodes that begin from no recorded state."""


@dataclass(frozen=True)
class _Starts:
    """A dataset's entry in `data.json` of a run that has learned from it."""

    folder: str
    task: str | None
    init_states: frozenset[int]
    seeds: frozenset[int]


_STARTS = TypeAdapter(list[_Starts])


@dataclass(frozen=True)
class TrainedStarts:
    """Evaluated starts, and how many of them were trained on."""

    kind: str
    """`initial states`, `problems` or `seeds`."""
    trained: int
    evaluated: int
    known: bool
    """True if everything that the policy was trained on is recorded, and tells the evaluated starts apart."""
    alike: int | None = None
    """Number of different starts of the evaluated episodes, if smaller than the number of their seeds; else None."""

    def as_data(self) -> dict[str, Any]:
        return {"kind": self.kind, "trained": self.trained, "evaluated": self.evaluated, "known": self.known}


@dataclass(frozen=True)
class Lineage:
    """The trainings that made a policy."""

    reinforced: tuple[Config, ...] = ()
    """Configurations of the runs in simulation."""
    recordings: tuple[RecordedStarts, ...] = ()
    """Starts of the demonstrations that were learned from."""
    unknown: tuple[str, ...] = ()
    """Checkpoints and datasets whose starts were not recorded."""

    def __add__(self, other: Lineage) -> Lineage:
        return Lineage(
            self.reinforced + other.reinforced,
            self.recordings + other.recordings,
            tuple(dict.fromkeys(self.unknown + other.unknown)),
        )

    def starts(self, task: str, episodes: Sequence[EpisodeSpec], ways: int | None = None) -> TrainedStarts:
        """The starts of the task's evaluated episodes, beside those of its training episodes. `ways` counts their
        different first observations; None: not known."""
        known = not self.unknown
        if problems := _problems(task):
            asked = {problems[spec.seed % len(problems)] for spec in episodes}
            told, read = self._told()
            return TrainedStarts("problems", len(asked & told), len(asked), known and read)
        states, seeds = self._trained(task)
        begins = {spec.init_state for spec in episodes} - {None}
        if begins:
            return TrainedStarts("initial states", len(begins & states), len(begins), known)
        drawn = {spec.seed for spec in episodes}
        trained = [one.env for config in self.reinforced for one in tasks_of(config) if one.env.task == task]
        learned = bool(trained) or any(recording.task == task for recording in self.recordings)
        alike = ways if ways is not None and ways < len(drawn) and learned else None
        distinct = not trained or distinct_seeds(task)
        return TrainedStarts("seeds", len(drawn & seeds), len(drawn), known and alike is None and distinct, alike)

    def _told(self) -> tuple[set[str], bool]:
        """The problems of all files that episodes of the trainings were drawn from, and whether all these files can be
        read."""
        told: set[str] = set()
        drawn = [one for config in self.reinforced for one in tasks_of(config)]
        tasks = [(one.env.task, [start_seed(k) for k in range(one.env.start_seeds)]) for one in drawn]
        tasks += [(recording.task, list(recording.seeds)) for recording in self.recordings]
        try:
            for task, seeds in tasks:
                problems = _problems(task)
                told.update((problems[seed % len(problems)] for seed in seeds) if seeds and problems else problems)
        except FarmError:
            return told, False
        return told, True

    def _trained(self, task: str) -> tuple[set[int], set[int]]:
        """The recorded initial states and the seeds that were trained on."""
        states: set[int] = set()
        seeds: set[int] = set()
        for config in self.reinforced:
            for one in tasks_of(config):
                if one.env.task == task:
                    states.update(one.env.recorded_starts)
                    seeds.update(map(start_seed, range(min(one.env.start_seeds, MOST_START_SEEDS))))
        for recording in self.recordings:
            if recording.task == task:
                states |= recording.init_states
                seeds |= recording.seeds
        return states, seeds


def _problems(task: str) -> tuple[str, ...]:
    """The problems of a task that a file of them defines, in the order of seeds; empty for another task. Raises
    `FarmError`."""
    found = problem_file(task)
    return () if found is None else found.instructions


def lineage(folder: Path | None, policy: PolicyConfig) -> Lineage:
    """The trainings behind the checkpoint `folder`, or behind what a policy without one is built from."""
    found, seen, kind = Lineage(), set(), policy.kind
    begun = policy.init if folder is None else folder
    while begun is not None and begun.resolve() not in seen:
        seen.add(begun.resolve())
        run_dir, whole = _run_and_checkpoint(begun)
        if run_dir is None or whole is None:
            return found + Lineage(unknown=(str(begun),))
        try:
            config, stage = recorded_settings(run_dir), checkpoint.read_state(whole).stage
        except UserError:
            return found + Lineage(unknown=(str(begun),))
        found += _imitated(run_dir, config.sft.data) if stage == "sft" else Lineage(reinforced=(config,))
        policy, begun = config.policy, config.policy.init
    return found + _base(policy, kind)


def _run_and_checkpoint(named: Path) -> tuple[Path | None, Path | None]:
    """The run's folder and its checkpoint, where `named` is one of the two; None for the missing one."""
    if (named / checkpoint.MANIFEST).is_file():
        return run_of_checkpoint(named), named
    root = named / "checkpoints"
    found = (checkpoint.best(root) or checkpoint.latest(root)) if (named / CONFIG).is_file() else None
    return (named if found is not None else None), found


def _base(policy: PolicyConfig, kind: str) -> Lineage:
    """The base that the policy is built from where no training of this project has written it. Its `kind` is that of
    the policy that began from it: one that a folder records may name code."""
    if not policy_kind(kind).pretrained:
        return Lineage()
    files = outside_files(policy)
    learned = [one["path"] for one in files.values() if not _is_drawn(Path(one["path"]))]
    return Lineage(unknown=tuple(learned if files else [kind]))


def _is_drawn(folder: Path) -> bool:
    try:
        found = read_json(folder / "config.json")
    except (OSError, ValueError):
        return False
    return isinstance(found, dict) and RANDOM_WEIGHTS in found


def _imitated(run_dir: Path, folders: Sequence[Path]) -> Lineage:
    """Starts that a run adds which has learned from the datasets: those of the episodes that it used as it recorded
    them, or else those of all episodes of the datasets."""
    try:
        recorded = _STARTS.validate_python(read_json(run_dir / "data.json")["starts"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        found = {str(folder): recorded_starts(folder) for folder in folders}
    else:
        found = {
            one.folder: None if one.task is None else RecordedStarts(one.task, one.init_states, one.seeds)
            for one in recorded
        }
    recordings = tuple(starts for starts in found.values() if starts is not None)
    return Lineage(recordings=recordings, unknown=tuple(name for name, starts in found.items() if starts is None))


def recorded_starts(folder: Path) -> RecordedStarts | None:
    """The starts that a recording of this project's says; None where nothing does, or it cannot be read."""
    try:
        task = json.loads((folder / "meta" / "embodied.json").read_text())["task"]["name"]
        files = sorted((folder / "meta" / "episodes").glob("*/*.parquet"))
        rows = [row for file in files for row in pq.read_table(file, columns=["seed", "init_state"]).to_pylist()]
        # Tools that go through pandas leave whole numbers as floats, and none as NaN.
        recorded = [row["init_state"] == row["init_state"] and row["init_state"] is not None for row in rows]
        states = (int(row["init_state"]) for row, one in zip(rows, recorded, strict=True) if one)
        seeds = (int(row["seed"]) for row, one in zip(rows, recorded, strict=True) if not one)
        return RecordedStarts(str(task), frozenset(states), frozenset(seeds))
    except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError, pa.ArrowException):
        return None


def together(every: Sequence[TrainedStarts]) -> TrainedStarts:
    """The starts of several tasks, one or more."""
    trained, evaluated = sum(one.trained for one in every), sum(one.evaluated for one in every)
    alike = None
    if any(one.alike is not None for one in every):
        alike = sum(one.evaluated if one.alike is None else one.alike for one in every)
    return TrainedStarts(every[0].kind, trained, evaluated, all(one.known for one in every), alike)


def trained_sentence(starts: TrainedStarts, unknown: Sequence[str]) -> str:
    """Sentence on the number of evaluated starts that were trained on."""
    sentence = f"{starts.trained} of {starts.evaluated} {starts.kind} were trained on"
    if starts.known or starts.trained == starts.evaluated:
        return sentence
    gap = f"nothing is recorded of the starts that {' and '.join(unknown)} was trained on"
    if not unknown:
        gap = "a file of problems that it was trained on cannot be read"
        if starts.kind == "seeds":
            gap = "training episodes of other seeds may have stated the same problems"
    if starts.alike is not None:
        gap = (
            f"the {starts.evaluated} episodes begin in {starts.alike} different ways, and training episodes of other "
            "seeds may have begun alike"
        )
    if starts.trained:
        return f"at least {sentence}: {gap}"
    return f"it is not known how many of {starts.evaluated} {starts.kind} were trained on: {gap}"
