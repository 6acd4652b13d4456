"""Results of the functions of `embodied`, as typed data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Figures:
    """Success and return of a policy in one task, or in all tasks of an evaluation together."""

    task: str
    """Name of the task; `all tasks` where there are several."""
    episodes: int
    success_rate: float | None
    """Share of the episodes that were solved; None: the task knows no success."""
    success_interval: tuple[float, float] | None
    """95% interval of the rate (Wilson)."""
    mean_return: float | None
    """Mean over the episodes of the sum of their rewards; None where one was not finite."""
    mean_length: float
    """Mean number of env steps."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> Figures:
        """Figures of a row of an evaluation's `eval.json`."""
        rate = row.get("success_rate")
        return cls(
            task=row["task"],
            episodes=row["episodes"],
            success_rate=rate,
            success_interval=None if rate is None else (row["success_low"], row["success_high"]),
            mean_return=row.get("return"),
            mean_length=row["episode_len"],
        )


@dataclass(frozen=True)
class EvaluationResult(Figures):
    """An evaluation; its own figures are those of all tasks together."""

    tasks: tuple[Figures, ...] = ()
    """Figures of each task."""
    folder: Path = Path()
    """The evaluation's folder, with every episode."""
    protocol_sha256: str = ""
    """Hash of the protocol: results of one hash are of the same episodes. That of another `seed` differs."""
    data: Mapping[str, Any] | None = None
    """All of `eval.json`."""

    @classmethod
    def of(cls, row: Mapping[str, Any]) -> EvaluationResult:
        """The evaluation that `eval.json` holds."""
        return cls(
            **vars(Figures.of(row)),
            tasks=tuple(map(Figures.of, row["tasks"])),
            folder=Path(row["folder"]),
            protocol_sha256=row["protocol"]["sha256"],
            data=row,
        )


@dataclass(frozen=True)
class TrainingResult:
    """A finished training run, with the evaluation of its final policy."""

    run: Path
    """Folder of the run."""
    iterations: int
    env_steps: int
    wall_s: float
    """Seconds of training, without start and evaluation."""
    evaluation: EvaluationResult
    report: Path | None
    """The run's page; None where it could not be made."""
    data: Mapping[str, Any]
    """All of the result, as `embodied train --json` writes it."""

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> TrainingResult:
        """The result that `embodied train` has as plain data."""
        return cls(
            run=Path(result["run"]),
            iterations=result["iterations"],
            env_steps=result["env_steps"],
            wall_s=result["wall_s"],
            evaluation=EvaluationResult.of(result),
            report=Path(result["report"]) if "report" in result else None,
            data=result,
        )

    def metrics(self) -> list[dict[str, Any]]:
        """The run's metrics, a row for each iteration."""
        from embodied.reporting.metrics import read

        return read(self.run)


@dataclass(frozen=True)
class RecordingResult:
    """A recorded dataset."""

    dataset: Path
    """Folder in LeRobot's layout."""
    episodes: int
    """Episodes in the dataset."""
    env_steps: int
    episodes_run: int
    """Episodes that were run; some may have been left out."""
    solved: int
    """Episodes of those that were solved."""

    @classmethod
    def of(cls, result: Mapping[str, Any]) -> RecordingResult:
        """The result that `embodied record` has as plain data."""
        names = ("episodes", "env_steps", "episodes_run", "solved")
        return cls(Path(result["dataset"]), **{name: result[name] for name in names})
