"""The folder of an evaluation, and how an interrupted one is continued.

    FOLDER/
      protocol.json           the protocol with its hash, and the policy: what the episodes are of
      config.yaml             the policy's configuration
      episodes.jsonl          a line for each episode that has ended; once all have, in the protocol's order
      actions/TASK/17.npy     [length, A] float32, as executed in trial 17
      eval.json eval.md       the result, once every episode is there
      videos/evaluation.mp4
      lock                    locked while a process evaluates into the folder

An episode's actions are written before its line, and a line is written in one piece, so that an interruption loses only
the episodes that had begun. A line without its end is ignored.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from embodied.config.files import save_config
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.evaluation.protocol import Protocol, as_data, from_data
from embodied.files import Lines, read_json, read_lines, write_whole
from embodied.rollout.evaluator import EpisodeOutcome, EpisodeResult
from embodied.rollout.executed_chunks import Delayed
from sim_farm.contract import EpisodeSpec, Float32
from sim_farm.conventions import MAX_SEED

PROTOCOL, EPISODES, LOCK = "protocol.json", "episodes.jsonl", "lock"


@dataclass(frozen=True)
class Identity:
    """Identity of a folder's episodes: equal identities mean results of the same policy, protocol and code."""

    protocol: Protocol
    policy: Mapping[str, Any]
    """Plain JSON: kind, options, what it reads, chunk, the sha256 of its checkpoint's manifest, and the digests of the
    files that its options name."""

    def as_data(self) -> dict[str, Any]:
        return {"protocol": as_data(self.protocol), "policy": dict(self.policy)}


@dataclass
class EvalFolder:
    """A folder that this process alone writes to."""

    path: Path
    identity: Identity
    outcomes: dict[tuple[str, int], EpisodeOutcome] = field(default_factory=dict)
    """The episodes that have ended, by (task, trial)."""
    _lines: Lines | None = None

    def left(self, task: str) -> list[int]:
        """The task's trials that are still to be run."""
        return [trial for trial in range(self.identity.protocol.count(task)) if (task, trial) not in self.outcomes]

    def add(self, result: EpisodeResult) -> None:
        """Keep an episode for good. Each (task, trial) once."""
        key = result.task, result.trial
        assert key not in self.outcomes, f"{key} has been evaluated before"
        path = self._actions(result)
        path.parent.mkdir(parents=True, exist_ok=True)
        np.save(path, result.actions)
        if self._lines is None:
            self._lines = Lines(self.path / EPISODES)
        line = _to_line(result, self.identity.protocol)
        self._lines.append(json.dumps(line))
        self.outcomes[key] = _Line.model_validate(line).outcome()

    def actions(self, outcome: EpisodeOutcome) -> Float32:
        """[length, A] as executed. Raises `UserError` where the file is not what was written."""
        path = self._actions(outcome)
        try:
            found = np.load(path, mmap_mode="r", allow_pickle=False)  # a header may claim more than there is
        except Exception as error:  # NumPy lets through whatever Python's parser says of a header
            raise UserError(f"{path} cannot be read ({str(error)[:200]}): {_AGAIN}") from error
        if not isinstance(found, np.ndarray) or found.dtype != np.float32 or found.shape[:-1] != (outcome.length,):
            raise UserError(f"{path} does not hold the {outcome.length} actions of its episode: {_AGAIN}")
        return np.array(found)

    def in_order(self) -> list[EpisodeOutcome]:
        """By task, as the protocol lists them, and trial."""
        tasks = {task: number for number, task in enumerate(self.identity.protocol.tasks)}
        return sorted(self.outcomes.values(), key=lambda outcome: (tasks[outcome.task], outcome.trial))

    def put_in_order(self) -> None:
        """Write the episodes' lines by task and trial, in place of the order in which the episodes happened to end: two
        folders of the same episodes have the same file."""
        self.close()
        self._lines = None
        lines = [json.dumps(_to_line(outcome, self.identity.protocol)) for outcome in self.in_order()]
        write_whole(self.path / EPISODES, "".join(f"{line}\n" for line in lines))

    def close(self) -> None:
        if self._lines is not None:
            self._lines.close()

    def _actions(self, outcome: EpisodeOutcome) -> Path:
        return self.path / "actions" / outcome.task / f"{outcome.trial}.npy"


_AGAIN = f"delete the episode's line in {EPISODES} to evaluate it again"


@contextmanager
def open_folder(path: Path, identity: Identity, config: Config, resume: bool) -> Iterator[EvalFolder]:
    """The folder for an evaluation, new or, with `resume`, as an earlier session left it.

    Raises `UserError`, and changes nothing, if another process evaluates into it, if it holds something else, or if
    it holds an evaluation and `resume` is False. A folder that was not there, or was empty, and is left without an
    episode is removed.
    """
    made = _make(path) or not any(path.iterdir())
    with _locked(path):
        try:
            if not (path / PROTOCOL).is_file():
                _begin(path, identity, config)
            elif not resume:
                there = len(_read_outcomes(path, read_identity(path).protocol))
                raise UserError(
                    f"{path} holds an evaluation of {there} episodes: go on with it with --resume auto, or evaluate "
                    "into another --folder"
                )
            _refuse_another(path, identity)
            folder = EvalFolder(path, identity, _read_outcomes(path, identity.protocol))
            try:
                yield folder
            finally:
                folder.close()
        finally:
            if made and not (path / EPISODES).exists():
                shutil.rmtree(path, ignore_errors=True)


def read_folder(path: Path) -> EvalFolder:
    """A folder's results, to look at; another process may be adding to it. Raises `UserError`."""
    identity = read_identity(path)
    return EvalFolder(path, identity, _read_outcomes(path, identity.protocol))


def read_identity(path: Path) -> Identity:
    """Identity of the folder's episodes. Raises `UserError`."""
    try:
        data = read_json(path / PROTOCOL)
        return Identity(from_data(data["protocol"]), dict(data["policy"]))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = str(error)[:200]
        raise UserError(f"{path / PROTOCOL} cannot be read ({reason}): evaluate into another --folder") from error
    except UserError as error:
        raise UserError(f"{path / PROTOCOL}: {error}; evaluate into another --folder") from error


def newest_of(home: Path, identity: Identity) -> Path | None:
    """The newest evaluation below `home` of the same protocol and policy."""
    found = []
    for candidate in home.glob(f"*/{PROTOCOL}"):
        try:
            same = read_identity(candidate.parent) == identity
        except UserError:  # damaged, and so none that could be gone on with
            continue
        if same:
            found.append(candidate)
    return max(found, key=lambda candidate: candidate.stat().st_mtime).parent if found else None


def _make(path: Path) -> bool:
    """Make the folder; False if it already existed."""
    try:
        if path.is_dir() and any(path.iterdir()) and not (path / PROTOCOL).is_file() and not (path / LOCK).is_file():
            raise UserError(f"{path} is not empty and holds no evaluation: name another --folder")
        path.mkdir(parents=True)
        return True
    except FileExistsError as error:
        if path.is_dir():
            return False
        raise UserError(f"{path} is a file: name another --folder") from error
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): name another place with --folder") from error


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold the folder's lock. The system lets go of it when the process ends, however it ends."""
    try:
        lock = (path / LOCK).open("a")
    except OSError as error:
        raise UserError(f"{path} cannot be written ({error.strerror}): name another place with --folder") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another process evaluates into {path} now: wait until it has ended, or name another --folder"
            ) from None
        yield


def _begin(path: Path, identity: Identity, config: Config) -> None:
    save_config(config, path / "config.yaml")
    write_whole(path / PROTOCOL, json.dumps(identity.as_data(), indent=1) + "\n")


def _refuse_another(path: Path, identity: Identity) -> None:
    found = read_identity(path)
    there, here = _flat(found), _flat(identity)
    differ = [key for key in sorted(there.keys() | here.keys()) if there.get(key) != here.get(key)]
    if differ:
        differences = "; ".join(f"{key} is {there.get(key)}, asked for is {here.get(key)}" for key in differ)
        raise UserError(
            f"{path} holds another evaluation: {differences}. Evaluate into another --folder, or ask for the same again"
        )


def _flat(identity: Identity) -> dict[str, Any]:
    """`protocol.trials`: without the hash, which differs whenever anything does."""
    flat = {f"{part}.{key}": value for part, values in identity.as_data().items() for key, value in values.items()}
    flat.pop("protocol.sha256")
    return flat


def _to_line(outcome: EpisodeOutcome, protocol: Protocol) -> dict[str, Any]:
    """The line's data. It includes the perturbation or the delay, for readers of the file alone."""
    other = protocol.condition(outcome.task, outcome.trial)
    perturbed: dict[str, Any] = {}
    if isinstance(other, Delayed):
        perturbed = {"method": other.method, "delay": other.delay, "interval": other.interval}
    elif other is not None:
        perturbed = {
            "perturbation": outcome.spec.perturbation,
            "axis": other.axis,
            "level": other.level,
            "from_step": other.from_step,
            "perturbation_sha256": other.digest,
            **({} if other.source is None else {"source": other.source}),
        }
    return {
        "task": outcome.task,
        "trial": outcome.trial,
        "seed": outcome.spec.seed,
        "init_state": outcome.spec.init_state,
        "resets": outcome.spec.resets,
        "unseeded_resets": outcome.spec.unseeded_resets,
        **perturbed,
        "success_once": outcome.success,
        "success_at_end": outcome.success_at_end,
        "length": outcome.length,
        "return": outcome.total_reward,
        "max_episode_steps": outcome.limit,
        **({"beginning": outcome.beginning} if outcome.beginning else {}),
    }


class _Line(BaseModel):
    """A line of the episodes' file, as `_to_line` writes it."""

    model_config = ConfigDict(strict=True, frozen=True)

    task: str
    trial: int
    seed: int = Field(ge=0, le=MAX_SEED)
    init_state: int | None = Field(ge=0, lt=2**31)
    resets: int = Field(ge=0, lt=2**31)
    unseeded_resets: int = Field(ge=0, lt=2**31)
    perturbation: int | None = Field(default=None, ge=0, lt=2**31)
    success_once: bool | None
    success_at_end: bool | None
    length: int = Field(ge=0, lt=2**31)
    total_reward: float = Field(alias="return")
    limit: int = Field(alias="max_episode_steps", ge=0, lt=2**31)
    beginning: str = Field(default="", max_length=64)

    def outcome(self) -> EpisodeOutcome:
        spec = EpisodeSpec(self.seed, self.init_state, self.resets, self.unseeded_resets, self.perturbation)
        return EpisodeOutcome(
            self.task,
            self.trial,
            spec,
            self.success_once,
            self.success_at_end,
            self.total_reward,
            self.length,
            self.limit,
            beginning=self.beginning,
        )


def _message(error: Exception) -> str:
    if isinstance(error, ValidationError):
        first = error.errors(include_url=False)[0]
        return f"{'.'.join(map(str, first['loc'])) or 'the line'}: {first['msg']}"[:200]
    return str(error)[:200]


def _read_outcomes(path: Path, protocol: Protocol) -> dict[tuple[str, int], EpisodeOutcome]:
    """The episodes of the folder. An unfinished last line is ignored, and removed when another line is written."""
    file = path / EPISODES
    if not file.is_file():
        return {}
    outcomes: dict[tuple[str, int], EpisodeOutcome] = {}
    for number, line in enumerate(read_lines(file), start=1):
        try:
            outcome = _Line.model_validate(json.loads(line)).outcome()
        except (ValueError, RecursionError) as error:
            raise UserError(
                f"line {number} of {file} is no episode ({_message(error)}): delete the line to evaluate it again"
            ) from error
        if outcome.task not in protocol.limits or not 0 <= outcome.trial < protocol.count(outcome.task):
            raise UserError(f"line {number} of {file} is an episode that the protocol does not have: delete the line")
        if (outcome.task, outcome.trial) in outcomes:
            raise UserError(f"line {number} of {file} is an episode that was there before: delete the line")
        outcomes[outcome.task, outcome.trial] = outcome
    return outcomes
