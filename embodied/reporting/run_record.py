"""The record of a run: the files of its folder that exist and can be read."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from embodied.errors import UserError
from embodied.files import read_json, read_yaml
from embodied.reporting import charts
from embodied.reporting.conditions import ConditionResult, read_conditions
from embodied.reporting.metrics import SELECTION
from embodied.reporting.metrics import read as read_metrics
from embodied.reporting.tables import trained_on
from embodied.run.continued import Part, parts
from embodied.run.trace import Span, TraceError, load, natural_order
from embodied.statistics import wilson

_T = TypeVar("_T")
LARGEST = 1e100
"""Largest value that is drawn: no curve needs more, and differences of twice as much are still finite."""
MOST_EPISODES = 10**9
LONGEST_NOTE = 2000
"""Characters of a note that are shown."""
PERTURBED = "perturbed.json"
"""The newest later evaluation of perturbed episodes."""
_FILES = ("config.yaml", "metrics.jsonl", "eval.json")


@dataclass(frozen=True)
class Measure:
    """The metric that runs are judged by, and how it is shown."""

    name: str
    """`success` or `return`; metrics have its name in theirs."""
    each: str
    """The metric of an iteration's episodes."""
    evaluated: str
    """The metric of an evaluation during training."""
    usual_target: float | None
    show: Callable[[float], str]
    y_range: tuple[float, float] | None

    @property
    def recent(self) -> str:
        """The metric of the last 100 training episodes."""
        return f"env/{self.name}_recent"

    def bounds(self) -> tuple[str, str]:
        """The metrics of the ends of an evaluation's interval."""
        return f"eval/{self.name}_low", f"eval/{self.name}_high"


SUCCESS = Measure("success", "env/success_once", "eval/success_rate", 0.9, charts.percent, (0.0, 1.0))
RETURN = Measure("return", "env/return", "eval/return", None, charts.compact, None)
"""The measure of tasks that know no success."""


class ReportError(Exception):
    """A folder that is not a run's, with a message that says what was expected."""


@dataclass(frozen=True)
class Evaluation:
    """Result of one task in `eval.json`."""

    task: str
    episodes: int
    success: tuple[float, float, float] | None
    """Success with its interval; None where the task has none."""
    at_end: tuple[float, float, float] | None
    """Success at the end with its interval; None in results that do not say it."""
    trained_on: str | None
    """Number of evaluated starts that were trained on, in words; None in results without it."""
    notes: tuple[str, ...]
    """Sentences about the whole evaluation."""
    episode_len: float | None
    mean_return: float | None
    return_between: tuple[float, float] | None
    """The return's interval; None in results that do not say it."""
    wall_s: float | None
    protocol: Mapping[str, Any]

    def measured(self, measure: Measure) -> float:
        """The task's success, or return."""
        return (self.mean_return or 0.0) if self.success is None or measure is RETURN else self.success[0]

    def between(self, measure: Measure) -> tuple[float, float] | None:
        """The interval of what is measured, where it is known."""
        return self.return_between if self.success is None or measure is RETURN else self.success[1:]


@dataclass
class RunFolder:
    """Content of a run's folder; `missing` maps an absent or damaged file to the sentence about it."""

    path: Path
    config_text: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    rows: list[dict[str, Any]] = field(default_factory=list)
    selection: dict[int, dict[str, Any]] = field(default_factory=dict)
    """Rows of the evaluations during training, by their iterations."""
    spans: list[Span] = field(default_factory=list)
    evals: list[Evaluation] = field(default_factory=list)
    conditions: list[ConditionResult] = field(default_factory=list)
    """Results of perturbed episodes, the unperturbed ones' first; empty where none was perturbed: of the evaluation, or
    of a later one that has them."""
    perturbed: Mapping[str, Any] = field(default_factory=dict)
    """The protocol of these episodes."""
    videos: list[Path] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    """Parts of the run: iterations after which it continued with changed settings."""
    missing: dict[str, str] = field(default_factory=dict)

    def column(self, key: str) -> list[float | None]:
        """A metric's value in each row; None where there is none, or none that can be drawn."""
        return [_drawable(row.get(key)) for row in self.rows]

    def selected(self, key: str) -> list[float | None]:
        """In each row, the metric of the evaluation after its iteration; None where there was none."""
        return [_drawable(self.selection.get(row["iteration"], {}).get(key)) for row in self.rows]

    @property
    def measure(self) -> Measure:
        """`RETURN` where its rows or evaluations show that the tasks have no success."""
        of_success = {SUCCESS.each, SUCCESS.recent}
        without = any(RETURN.each in row and not of_success & row.keys() for row in self.rows)
        return RETURN if without or any(item.success is None for item in self.evals) else SUCCESS

    def evaluated(self) -> tuple[float, int]:
        """The measure over all evaluated tasks' episodes, and how many these are; 0 of 0 without any."""
        episodes, measure = sum(item.episodes for item in self.evals), self.measure
        return sum(item.measured(measure) * item.episodes for item in self.evals) / max(episodes, 1), episodes

    def reached_target(self) -> dict[str, Any] | None:
        """The first row of metrics with a time in which the last 100 episodes were at least at the target; or None."""
        pairs, target = zip(self.rows, self.column(self.measure.recent), strict=True), self.target
        rows = (row for row, value in pairs if value is not None and target is not None and value >= target)
        return next((row for row in rows if row.get("wall_s") is not None), None)

    @property
    def target(self) -> float | None:
        """Target of the measure: the configuration's, or the usual one."""
        measure = self.measure
        value, (least, most) = find(self.config, "stop_at"), measure.y_range or (-LARGEST, LARGEST)
        value = find(self.config, f"stop_at_{measure.name}") if value is None else value  # of an earlier version
        known = isinstance(value, (int, float)) and least <= value <= most
        return float(value) if known else measure.usual_target


def read_run(path: Path) -> RunFolder:
    if not path.is_dir():
        raise ReportError(f"{path} is not a folder. `embodied train CONFIG` makes a run's folder, runs/NAME.")
    if not any((path / name).is_file() for name in _FILES):
        raise ReportError(
            f"{path} is not a run's folder: it holds none of {', '.join(_FILES)}."
            " `embodied train CONFIG` makes one, runs/NAME."
        )
    run = RunFolder(path)
    train, evaluate = "embodied train CONFIG", f"embodied eval runs/{path.resolve().name}"
    run.config_text = _load(run, "config.yaml", train, lambda file: file.read_text(), "")
    run.config = _load(run, "config.yaml", train, _yaml_mapping, {})
    with suppress(UserError):  # of a damaged configuration, which the line above has said
        run.parts = parts(path)
    run.rows = _load(run, "metrics.jsonl", train, lambda file: read_metrics(file.parent), [])
    if not run.rows:
        run.missing.setdefault("metrics.jsonl", "metrics.jsonl has no rows yet: no iteration has ended.")
    run.selection = _load(run, SELECTION, train, _by_iteration, {})
    run.spans = _load(run, "trace.json", train, load, [])
    run.evals = _load(run, "eval.json", evaluate, _evals, [])
    if not run.evals:
        run.missing.setdefault("eval.json", f"eval.json has no task: `{evaluate}` writes a new one.")
    if run.evals:
        run.perturbed = run.evals[0].protocol
        run.conditions = _load(run, "eval.json", evaluate, _conditions, [])
    if (path / PERTURBED).is_file():
        run.conditions = _load(run, PERTURBED, evaluate, _conditions, [])
        run.perturbed = next((one.protocol for one in _load(run, PERTURBED, evaluate, _evals, [])), {})
    files = (file for file in (path / "videos").glob("*.mp4") if file.is_file())
    run.videos = [file for file in files if not file.name.startswith(".")]
    run.videos.sort(key=lambda file: ("fail" not in file.name.lower(), natural_order(file.name)))
    if not run.videos:
        run.missing["videos"] = f"There are no videos yet: `{evaluate}` makes them."
    return run


def _load(run: RunFolder, name: str, command: str, read: Callable[[Path], _T], otherwise: _T) -> _T:
    """The file as `read` returns it, or `otherwise` and a sentence in `run.missing`."""
    try:
        return read(run.path / name)
    except FileNotFoundError:
        run.missing[name] = f"{name} is missing: `{command}` writes it."
    except (OSError, ValueError, UserError, TraceError) as error:
        run.missing[name] = f"{name} cannot be read ({str(error)[:500]}): `{command}` writes a new one."
    return otherwise


def _drawable(value: Any) -> float | None:
    return float(value) if isinstance(value, (int, float)) and abs(value) < LARGEST else None


def _by_iteration(path: Path) -> dict[int, dict[str, Any]]:
    return {row["iteration"]: row for row in read_metrics(path.parent, path.name)}


def _yaml_mapping(path: Path) -> Mapping[str, Any]:
    """A saved configuration."""
    path.stat()  # of a file that is not there the page says something else than of one that cannot be read
    value = read_yaml(path)
    if not isinstance(value, Mapping):
        raise ValueError("it is not a mapping")
    return value


def _evals(path: Path) -> list[Evaluation]:
    value = read_json(path)
    try:
        return [_evaluation(row) for item in (value if isinstance(value, list) else [value]) for row in _rows(item)]
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"not the result of an evaluation: {error!r}") from error


def read_evaluation(path: Path) -> Evaluation:
    """All tasks of an `eval.json` together. Raises `OSError`, and `ValueError` for other content."""
    try:
        return _evaluation(read_json(path))
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"not the result of an evaluation: {error!r}") from error


def _conditions(path: Path) -> list[ConditionResult]:
    value = read_json(path)
    try:
        return [] if isinstance(value, list) else read_conditions(value)
    except (AttributeError, KeyError, TypeError, OverflowError) as error:
        raise ValueError(f"not the result of perturbed episodes: {error!r}") from error


def _rows(item: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """A row per task; the protocol and the notes of all of them are each one's."""
    tasks = item.get("tasks", ())
    if len(tasks) <= 1:
        return [item]
    return [{**row, "protocol": item["protocol"], "notes": item.get("notes")} for row in tasks]


def _evaluation(item: Mapping[str, Any]) -> Evaluation:
    episodes = int(item["episodes"])
    if not 0 <= episodes <= MOST_EPISODES:
        raise ValueError(f"of {episodes:.3g} episodes")
    bounds = _optional(item, "return_low"), _optional(item, "return_high")
    return Evaluation(
        task=named(item.get("task")),
        episodes=episodes,
        success=_success(item, episodes),
        at_end=_at_end(item),
        trained_on=None if item.get("trained_on") is None else trained_on(item["trained_on"]),
        notes=tuple(named(note)[:LONGEST_NOTE] for note in item.get("notes") or ()),
        episode_len=_optional(item, "episode_len"),
        mean_return=_optional(item, "return"),
        return_between=None if bounds[0] is None or bounds[1] is None else (bounds[0], bounds[1]),
        wall_s=_optional(item, "wall_s"),
        protocol=item["protocol"] if isinstance(item.get("protocol"), Mapping) else {},
    )


def _success(item: Mapping[str, Any], episodes: int) -> tuple[float, float, float] | None:
    if "success_rate" not in item and "return" in item:
        return None
    rate = _rate(item["success_rate"])
    low, high = wilson(round(rate * episodes), episodes)
    return rate, _rate(item.get("success_low", low)), _rate(item.get("success_high", high))


def _at_end(item: Mapping[str, Any]) -> tuple[float, float, float] | None:
    if item.get("success_at_end") is None:
        return None
    rate, low, high = (_rate(item[f"success_at_end{end}"]) for end in ("", "_low", "_high"))
    return rate, low, high


def _optional(item: Mapping[str, Any], key: str) -> float | None:
    if item.get(key) is None:
        return None
    value = float(item[key])
    if not abs(value) < LARGEST:
        raise ValueError(f"{key} {value}")
    return value


def _rate(value: Any) -> float:
    if not 0 <= (rate := float(value)) <= 1:
        raise ValueError(f"a success rate of {rate}")
    return rate


def named(value: Any) -> str:
    """A short text for a setting: its own, or the name or kind within it."""
    if isinstance(value, Mapping):
        value = value.get("name") or value.get("kind") or dict(value)
    if value is None:
        return "not recorded"
    return value if isinstance(value, str) else json.dumps(value, default=str, ensure_ascii=False)


def flat(config: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """The settings by their keys, `loss.clip`; options are one value."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, Mapping) and key != "options":
            found |= flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def find(config: Any, key: str) -> Any:
    """The value of `key`, wherever in the nested configuration it stands first; None if nowhere."""
    level = [config]
    while level:
        mappings = [item for item in level if isinstance(item, Mapping)]
        for mapping in mappings:
            if mapping.get(key) is not None:
                return mapping[key]
        level = [value for mapping in mappings for value in mapping.values()]
    return None
