"""Several runs on one page: curves with bands over seeds, a table, and the settings that differ.

Runs that differ in nothing but seed and name are one curve: the mean, and the 95% interval of the mean over seeds. It
is drawn as far as all of them went.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from embodied.reporting import charts, report
from embodied.reporting.live import duration
from embodied.reporting.report import write_page
from embodied.reporting.run_record import RETURN, SUCCESS, Measure, ReportError, RunFolder, read_run
from embodied.statistics import mean_interval

POINTS = 200
"""Points of a curve: runs end their iterations at different numbers of env steps."""
OF_A_RUN = ("seed", "name")
"""Settings in which the runs of one curve may differ."""


@dataclass(frozen=True)
class Alike:
    """Runs that differ in nothing but seed and name."""

    label: str
    runs: tuple[RunFolder, ...]
    settings: Mapping[str, Any]
    """By their keys, `loss.clip`; without seed and name."""

    @property
    def seeds(self) -> list[Any]:
        return [run.config.get("seed") for run in self.runs]

    @property
    def measure(self) -> Measure:
        """`RETURN` where the tasks of one of them have no success."""
        return RETURN if any(run.measure is RETURN for run in self.runs) else SUCCESS

    def evaluated(self) -> list[float]:
        """The measure over all its tasks of each run that was evaluated as the first one was."""
        protocols = [protocol_of(run) for run in self.runs]
        first = next((protocol for protocol in protocols if protocol is not None), None)
        pairs = zip(self.runs, protocols, strict=True)
        return [run.evaluated()[0] for run, protocol in pairs if protocol is not None and protocol == first]

    def times(self) -> list[float | None]:
        """Seconds until each run's training episodes first reached its target; None where it did not."""
        reached = [run.reached_target() for run in self.runs]
        return [None if row is None else float(row["wall_s"]) for row in reached]


def write_runs_page(folders: Sequence[Path], out: Path) -> dict[str, Any]:
    """Write the page of the runs to `out`. Returns what its table says as plain data.

    Raises `ReportError` for a folder that is no run's, or has no iteration.
    """
    runs = [read_run(folder) for folder in folders]
    for run in runs:
        if not run.rows:
            raise ReportError(f"{run.path}: {run.missing.get('metrics.jsonl', 'no iteration has ended')}")
    groups = alike(runs)
    body = "\n".join((_header(groups), _curves(groups), _table(groups), _differences(groups)))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(out, "Runs compared", body)
    return {"report": str(out), "groups": [_data(group) for group in groups]}


def alike(runs: Sequence[RunFolder]) -> list[Alike]:
    """The runs in groups, in the order of each group's first."""
    found: list[tuple[dict[str, Any], list[RunFolder]]] = []
    for run in runs:
        settings = {key: value for key, value in _flat(run.config).items() if key not in OF_A_RUN}
        for known, members in found:
            if known == settings:
                members.append(run)
                break
        else:
            found.append((settings, [run]))
    differing = _differing([settings for settings, _ in found])
    return [Alike(_label(settings, differing, members), tuple(members), settings) for settings, members in found]


def protocol_of(run: RunFolder) -> dict[str, Any] | None:
    """The protocol of its evaluation, but for the seed; None where there was none."""
    protocols = [item.protocol for item in run.evals]
    left_out = ("seed", "sha256", "hardware", "simulators")
    return {key: value for key, value in protocols[0].items() if key not in left_out} if protocols else None


def _data(group: Alike) -> dict[str, Any]:
    values, name = group.evaluated(), group.measure.name
    mean, low, high = mean_interval(values) if values else (math.nan,) * 3
    least, most = group.measure.y_range or (-math.inf, math.inf)
    rate, rates = ("success_rate", "success_rates") if group.measure is SUCCESS else ("return", "returns")
    return {
        "label": group.label,
        "runs": [str(run.path) for run in group.runs],
        "seeds": group.seeds,
        rates: values,
        rate: mean if values else None,
        f"{name}_low": max(low, least) if values else None,
        f"{name}_high": min(high, most) if values else None,
        "env_steps": [run.rows[-1]["env_steps"] for run in group.runs],
        "time_to_target_s": group.times(),
    }


def _header(groups: Sequence[Alike]) -> str:
    count = sum(len(group.runs) for group in groups)
    facts = f"{count} runs, {len(groups)} settings; written {datetime.now():%Y-%m-%d %H:%M} by embodied report"
    return f'<header><h1>Runs compared</h1><p class="facts"><span>{facts}</span></p></header>'


def _curves(groups: Sequence[Alike]) -> str:
    longest = max(max(run.column("wall_s")[-1] or 0.0 for run in group.runs) for group in groups)
    scale, unit = report.time_unit(longest)
    figures = []
    for measure in dict.fromkeys(group.measure for group in groups):
        title = f"{measure.name.capitalize()} of the last 100 training episodes, by env steps"
        figures += [
            _figure(groups, measure, title, measure.recent, "env_steps", 1.0, "env steps"),
            _figure(groups, measure, "The same, by wall-clock", measure.recent, "wall_s", scale, f"wall-clock, {unit}"),
        ]
    figures.append(_figure(groups, RETURN, "Return, by env steps", RETURN.each, "env_steps", 1.0, "env steps"))
    lead = "A curve is the mean over seeds, its band the 95% interval of that mean; one seed has no band."
    return report.section("Learning", report.grid("two", figures), lead)


def _figure(
    groups: Sequence[Alike], measure: Measure, title: str, key: str, over: str, scale: float, label: str
) -> str:
    ends = [min(_ends(group, key, over)) / scale for group in groups if _ends(group, key, over)]
    x = np.linspace(0, max(ends, default=1.0), POINTS)
    curves = []
    for number, group in enumerate(groups):
        y, band = _mean_curve(group, key, over, x * scale)
        curves.append(charts.Line(group.label, y, colour=_colour(number), band=band if len(group.runs) > 1 else ()))
    heads = [f"{charts.compact(float(place))} {label}" for place in x]
    drawn = charts.lines(
        x.tolist(), curves, label, heads, width=560, height=300, show=measure.show, y_range=measure.y_range
    )
    legend = report.legend({escape(group.label): _colour(number) for number, group in enumerate(groups)})
    return report.card(title, drawn, legend)


def _ends(group: Alike, key: str, over: str) -> list[float]:
    """Last `over` of each run that has values."""
    known = [_known(run, key, over)[0] for run in group.runs]
    return [float(xs[-1]) for xs in known if len(xs)]


def _known(run: RunFolder, key: str, over: str) -> tuple[np.ndarray, np.ndarray]:
    """Positions at which the metric is known, and its values there."""
    pairs = zip(run.column(over), run.column(key), strict=True)
    found = [(x, y) for x, y in pairs if x is not None and y is not None]
    xs, ys = zip(*found, strict=True) if found else ((), ())
    return np.array(xs, float), np.array(ys, float)


def _mean_curve(
    group: Alike, key: str, over: str, x: np.ndarray
) -> tuple[list[float | None], list[tuple[float, float] | None]]:
    """The mean over the group's runs at each place that all of them reached, and its interval."""
    curves = [known for run in group.runs if len((known := _known(run, key, over))[0])]
    mean: list[float | None] = []
    band: list[tuple[float, float] | None] = []
    for place in x:
        if not curves or any(not xs[0] <= place <= xs[-1] for xs, _ in curves):
            mean.append(None)
            band.append(None)
            continue
        middle, low, high = mean_interval([float(np.interp(place, xs, ys)) for xs, ys in curves])
        mean.append(middle)
        band.append((low, high))
    return mean, band


def _table(groups: Sequence[Alike]) -> str:
    measures = " or ".join(dict.fromkeys(group.measure.name for group in groups))
    names = ("settings", "seeds", f"{measures} in evaluation", "each seed", "env steps", "wall time", "time to target")
    lead = f"{measures.capitalize()}: the mean over seeds with its 95% interval (Student's t); time to target: the "
    lead += "median."
    left_out = sum(sum(bool(run.evals) for run in group.runs) - len(group.evaluated()) for group in groups)
    if left_out:
        lead += f" {left_out} evaluations by another protocol than the first of their settings are left out."
    found = [protocol_of(run) for group in groups for run in group.runs]
    protocols = {json.dumps(protocol, sort_keys=True): protocol for protocol in found}
    lead += "".join(f"<br>Evaluated: {escape(_protocol_line(one))}." for one in protocols.values() if one)
    return report.section("Results", report.table(names, map(_cells, groups)), lead)


def _protocol_line(protocol: Mapping[str, Any]) -> str:
    """The protocol of an evaluation in a line."""
    limits = protocol.get("limits")
    tasks = ", ".join(limits) if isinstance(limits, Mapping) else limits
    parts = {"tasks": tasks, "instruction": protocol.get("instruction")}
    parts |= {name: protocol.get(name) for name in ("name", "trials", "greedy")}
    return "; ".join(f"{name} {value}" for name, value in parts.items() if value not in (None, ""))


def _cells(group: Alike) -> tuple[str, ...]:
    data, values, measure = _data(group), group.evaluated(), group.measure
    measured = "–"
    if values:
        between = report.interval(data[f"{measure.name}_low"], data[f"{measure.name}_high"], measure.show)
        mean = measure.show(statistics.fmean(values))
        measured = mean + (f" <small>{between}</small>" if len(values) > 1 else "")
    times = [time for time in group.times() if time is not None]
    reached = f" ({len(times)} of {len(group.runs)})" if len(times) < len(group.runs) else ""
    walls = [run.column("wall_s")[-1] or 0.0 for run in group.runs]
    return (
        escape(group.label),
        escape(", ".join(map(str, group.seeds))),
        measured,
        ", ".join(map(measure.show, values)) or "–",
        charts.compact(statistics.median(data["env_steps"])),
        duration(statistics.median(walls)),
        duration(statistics.median(times)) + reached if times else "not reached",
    )


def _differences(groups: Sequence[Alike]) -> str:
    differing = _differing([group.settings for group in groups])
    if not differing:
        return ""
    head = ("setting", *(group.label for group in groups))
    rows = [
        (
            f'<span style="white-space: nowrap">{escape(key)}</span>',
            *(escape(_text(group.settings.get(key))) for group in groups),
        )
        for key in differing
    ]
    return report.section("What differed", report.table(head, rows))


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys that have not the same value everywhere."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings)]


def _label(settings: Mapping[str, Any], differing: Sequence[str], members: Sequence[RunFolder]) -> str:
    """Shortest text that distinguishes a group from the others."""
    if not differing:
        return members[0].path.name if len(members) == 1 else str(members[0].config.get("workflow", "runs"))
    if len(differing) > 3:
        return ", ".join(run.path.name for run in members)
    return ", ".join(f"{key.rpartition('.')[2]} {_text(settings.get(key))}" for key in differing)


def _flat(config: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in config.items():
        if isinstance(value, dict) and key != "options":
            found |= _flat(value, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    return found


def _text(value: Any) -> str:
    return "none" if value is None else str(value)


def _colour(number: int) -> str:
    return charts.COLOURS[number % len(charts.COLOURS)]
