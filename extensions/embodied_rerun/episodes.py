"""Episodes to look at, of an evaluation or a dataset, as the columns and frames that a recording has."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from embodied.config.files import saved_config
from embodied.config.schema import indices_of, simulators_of
from embodied.demonstrations import Dataset, layout
from embodied.demonstrations.findings import names_of
from embodied.errors import UserError
from embodied.evaluation.evaluate import evaluated_task
from embodied.evaluation.films import SIZE, worth_seeing
from embodied.evaluation.folder import EPISODES, PROTOCOL, EvalFolder, read_folder
from embodied.hub import dataset_folder, is_repository
from embodied.reporting.live import tell
from embodied.rollout.evaluator import EpisodeOutcome
from embodied.run.saved_settings import CONFIG, find_run
from sim_farm.catalogue import exact_replay, has_cameras
from sim_farm.client.episode_replay import Replayer
from sim_farm.contract import TaskSpec

MOST = 10
"""Number of episodes that are recorded where none are named."""


@dataclass(frozen=True)
class Episode:
    """An episode of n env steps. Row i is what was seen before action i, that action, and what it brought."""

    source: str
    """Name of the evaluation or dataset."""
    number: int
    hz: float
    """Env steps per second."""
    columns: Mapping[str, npt.NDArray[Any]]
    """[n] or [n, *shape] numbers or texts, by LeRobot's names of features."""
    names: Mapping[str, Sequence[str]]
    """Names of the elements of a column, where they are known."""
    cameras: Mapping[str, Callable[[slice], npt.NDArray[np.uint8]]]
    """By feature, the function from a slice of the steps to their frames [k, H, W, 3]."""
    instructions: Sequence[str]
    """[n]"""
    facts: Mapping[str, str | int | float | bool]
    """Properties of the whole episode: task, success, seed, ..."""

    @property
    def steps(self) -> int:
        return len(self.instructions)


class Source(Protocol):
    """Episodes of one evaluation or dataset."""

    @property
    def folder(self) -> Path: ...

    def chosen(self, ranges: str | None) -> Sequence[int]:
        """Numbers of the episodes that `ranges` names; None: at most `MOST`. Raises `UserError` for a number that no
        episode has."""
        ...

    def episodes(self, numbers: Sequence[int]) -> Iterator[Episode]:
        """The episodes of these numbers, but for those whose replay has another outcome."""
        ...


def source_of(named: str, runs_dir: Path) -> Source:
    """The evaluation, run or dataset of this name. Raises `UserError` where it is none of them, or has no episode."""
    run_dir = find_run(named, runs_dir)
    if (Path(named) / PROTOCOL).is_file():
        return Evaluation(Path(named))
    if run_dir is not None:
        return Evaluation(_newest_evaluation(run_dir))
    if (Path(named) / layout.INFO).is_file() or is_repository(named):
        return Demonstrations(dataset_folder(named))
    raise UserError(
        f"{named!r} is neither an evaluation ({PROTOCOL}), nor a run ({CONFIG}) here or below {runs_dir}, nor a "
        f"dataset in LeRobot's layout ({layout.INFO})"
    )


def _newest_evaluation(run_dir: Path) -> Path:
    found = [path.parent for path in run_dir.glob(f"evals/*/{EPISODES}")]
    if not found:
        raise UserError(f"{run_dir} has no evaluated episodes: embodied eval {run_dir}")
    return max(found, key=lambda folder: (folder / EPISODES).stat().st_mtime)


def _numbered(ranges: str, known: Sequence[int], folder: Path) -> tuple[int, ...]:
    """The numbers that the ranges name. Raises `UserError` unless all are `known`."""
    try:
        numbers = indices_of(ranges)
    except ValueError as error:
        raise UserError(f"--episodes: {error}") from None
    if absent := sorted({*numbers} - {*known}):
        few = f"{', '.join(map(str, absent[:5]))}{' ...' if len(absent) > 5 else ''}"
        raise UserError(f"--episodes {ranges[:100]}: {folder} has no episode {few}; it has {_as_ranges(known)}")
    return numbers


def _as_ranges(numbers: Sequence[int]) -> str:
    """`0-4, 7`; at most five ranges."""
    runs = groupby(enumerate(sorted(numbers)), key=lambda pair: pair[1] - pair[0])
    ends = [(run[0][1], run[-1][1]) for run in ([*group] for _, group in runs)]
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ends]
    return ", ".join(shown[:5]) + (" ..." if len(shown) > 5 else "")


class Evaluation:
    """An evaluation's episodes. They are replayed in this process, with the frames that the policy saw. If
    it saw none and the task has a camera, the first camera's frames are shown."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._results: EvalFolder = read_folder(folder)
        self._protocol = self._results.identity.protocol
        if not self._results.outcomes:
            raise UserError(f"{folder} has no evaluated episodes")
        first, self._first = 0, dict[str, int]()
        for task in self._protocol.tasks:
            self._first[task] = first
            first += self._protocol.count(task)

    def chosen(self, ranges: str | None) -> Sequence[int]:
        if ranges is not None:
            return _numbered(ranges, sorted(self._outcomes), self.folder)
        return sorted(map(self._number, worth_seeing(self._results.in_order(), MOST)))

    def episodes(self, numbers: Sequence[int]) -> Iterator[Episode]:
        outcomes = [self._outcomes[number] for number in sorted(numbers)]
        for task, group in groupby(outcomes, key=lambda outcome: outcome.task):
            with closing(Replayer(self._simulated(task))) as replayer:
                for outcome in group:
                    episode = self._replayed(replayer, outcome)
                    if episode is not None:
                        yield episode

    @cached_property
    def _outcomes(self) -> dict[int, EpisodeOutcome]:
        return {self._number(outcome): outcome for outcome in self._results.outcomes.values()}

    def _number(self, outcome: EpisodeOutcome) -> int:
        return self._first[outcome.task] + outcome.trial

    def _simulated(self, task: str) -> TaskSpec:
        """Raises `UserError` for a task that cannot be replayed, and for one whose simulator is code that the folder
        names: it may come from others."""
        if code := [name for name in simulators_of(task) if ":" in name]:
            raise UserError(
                f"{self.folder / PROTOCOL} names a simulator by its code, {code[0]}, which is not run because a folder "
                "names it: install the simulator with an entry point (docs/extensions.md), and evaluate by that name"
            )
        if not exact_replay(task):
            raise UserError(f"{task} cannot be replayed: the simulator declares exact_replay=False")
        config = self._protocol.applied(saved_config(self.folder / CONFIG), task)
        spec = evaluated_task(config, self._protocol.perturbations.get(task, ()))
        if not spec.cameras and has_cameras(task):
            spec = replace(spec, cameras=1, image_size=SIZE, orientation="upright")
        return spec

    def _replayed(self, replayer: Replayer, outcome: EpisodeOutcome) -> Episode | None:
        """The episode; None where its replay has another outcome."""
        replay = replayer.replay(outcome.spec, self._results.actions(outcome))
        if (replay.steps, bool(replay.success.any())) != (outcome.length, bool(outcome.success)):
            return None
        columns = {
            layout.PROPRIO: replay.proprio,
            layout.STATE: replay.state,
            layout.ACTION: replay.actions,
            layout.REWARD: replay.reward,
            layout.SUCCESS: replay.success,
            layout.DONE: replay.done,
        }
        facts: dict[str, str | int | float | bool] = {
            "task": outcome.task,
            "instruction": replay.instruction,
            "trial": outcome.trial,
            "seed": outcome.spec.seed,
            "return": outcome.total_reward,
            "env_steps": outcome.length,
            "protocol": self._protocol.sha256,
        }
        if outcome.success is None:
            del columns[layout.SUCCESS]
        else:
            facts["success"] = outcome.success
        if (condition := self._protocol.condition(outcome.task, outcome.trial)) is not None:
            facts["condition"] = f"{condition.axis} {condition.level}"
        return Episode(
            self.folder.resolve().name,
            self._number(outcome),
            replayer.describe().control_hz,
            {name: values for name, values in columns.items() if values[0].size},
            {},
            {layout.IMAGES + camera: frames.__getitem__ for camera, frames in replay.frames.items()},
            [replay.instruction] * replay.steps,
            facts,
        )


class Demonstrations:
    """The episodes of a dataset: all its columns and RGB cameras."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._dataset = Dataset(folder)
        self._by_number = {episode.index: episode for episode in self._dataset.episodes}
        for note in self._dataset.notes:
            tell(f"Note: {note}")

    def chosen(self, ranges: str | None) -> Sequence[int]:
        known = sorted(self._by_number)
        return known[:MOST] if ranges is None else _numbered(ranges, known, self.folder)

    def episodes(self, numbers: Sequence[int]) -> Iterator[Episode]:
        for number in sorted(numbers):
            yield self._episode(number)

    def _episode(self, number: int) -> Episode:
        dataset, recorded = self._dataset, self._by_number[number]
        rows = slice(recorded.begin, recorded.end)
        features = [n for n, f in dataset.features.items() if not f.is_camera and n not in layout.BOOKKEEPING]
        columns = {name: dataset.column(name)[rows] for name in features}
        facts: dict[str, str | int | float | bool] = {
            "instruction": "; ".join(recorded.instructions),
            "env_steps": recorded.length,
        }
        if dataset.task is not None:
            facts["task"] = dataset.task.name
        if layout.REWARD in columns:
            facts["return"] = float(columns[layout.REWARD].sum(dtype=np.float64))
        if layout.SUCCESS in columns:
            facts["success"] = bool(columns[layout.SUCCESS].any())
        if recorded.spec is not None:
            facts["seed"] = recorded.spec.seed
        return Episode(
            self.folder.resolve().name,
            number,
            dataset.fps,
            columns,
            {
                name: names_of(dataset, name, values[0].size)
                for name, values in columns.items()
                if values.dtype != object
            },
            {layout.IMAGES + camera: partial(self._frames, camera, recorded.begin) for camera in dataset.cameras},
            dataset.instructions(np.arange(recorded.begin, recorded.end)),
            facts,
        )

    def _frames(self, camera: str, begin: int, steps: slice) -> npt.NDArray[np.uint8]:
        return self._dataset.frames(camera, range(begin + steps.start, begin + steps.stop))
