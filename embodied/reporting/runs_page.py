"""Several runs on one page: the settings that differ, a table, and curves with bands over seeds.

Runs that differ in nothing but seed and name are one curve: the mean, and the 95% interval of the mean over seeds. It
is drawn as far as all of them went.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from embodied.reporting import charts, report
from embodied.reporting.conditions import in_curves
from embodied.reporting.live import duration
from embodied.reporting.report import setting_text, write_page
from embodied.reporting.run_record import RETURN, SUCCESS, Measure, ReportError, RunFolder, flat, read_run
from embodied.reporting.tables import WITHOUT_DELAY
from embodied.run.continued import LEARNING
from embodied.statistics import mean_interval, seeds_interval

POINTS = 400
"""Largest number of places in a chart: the ends of the runs' iterations, or `POINTS` evenly spaced places if the ends
are more."""
SINGLE = 5
"""Runs of a curve that are also drawn one by one, if they are no more."""
DASHES = (None, (3.0, 2.0), (1.5, 3.0), (0.5, 1.5))
"""Dash patterns that distinguish a curve from others with the same colour or the same course."""
RECENT = 100
"""Training episodes over which the metric of the last ones is a mean."""
INTERVAL = "Student's t over seeds, but for success never narrower than Wilson's of all their episodes together"
"""The 95% interval of a mean over seeds, in words: `embodied.statistics.seeds_interval`."""
NAMED = 4
"""Number of equal curves that are listed by name; the rest are only counted."""
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
    def names(self) -> str:
        return ", ".join(run.path.resolve().name for run in self.runs)

    @property
    def title(self) -> str:
        """Label and names of the runs."""
        return self.names if self.label == self.names else f"{self.label} ({self.names})"

    @property
    def seeds(self) -> list[Any]:
        return [run.config.get("seed") for run in self.runs]

    @property
    def measure(self) -> Measure:
        """`RETURN` where the tasks of one of them have no success."""
        return RETURN if any(run.measure is RETURN for run in self.runs) else SUCCESS

    def evaluated(self) -> list[tuple[float, int]]:
        """The measure over all its tasks, and the number of its episodes, of each run that was evaluated as the first
        one was."""
        protocols = [protocol_of(run) for run in self.runs]
        first = next((protocol for protocol in protocols if protocol is not None), None)
        pairs = zip(self.runs, protocols, strict=True)
        return [run.evaluated() for run, protocol in pairs if protocol is not None and protocol == first]

    def interval(self) -> tuple[float, float] | None:
        """The 95% interval of the mean of what was evaluated; None where nothing says how much that varies: of one
        return, and of equal ones."""
        found = self.evaluated()
        if not found:
            return None
        values, episodes = zip(*found, strict=True)
        if self.measure is SUCCESS:
            return seeds_interval(values, episodes)[1:]
        return None if min(values) == max(values) else mean_interval(values)[1:]

    def perturbed(self) -> dict[tuple[str, int], list[tuple[float, int]]]:
        """Success and number of episodes of each run that was evaluated as the first one was, by curve and level of the
        perturbation; level 0 of each curve is the unperturbed episodes'."""
        protocols = [_compared(run.perturbed) if run.conditions else None for run in self.runs]
        first = next((protocol for protocol in protocols if protocol is not None), None)
        found: dict[tuple[str, int], list[tuple[float, int]]] = {}
        for run, protocol in zip(self.runs, protocols, strict=True):
            if protocol is None or protocol != first:
                continue
            begin, curves = in_curves(run.conditions)
            for curve, members in curves.items():
                found.setdefault((curve, 0), []).append((begin.success[0], begin.episodes))
                for one in members:
                    found.setdefault((one.curve, one.level), []).append((one.success[0], one.episodes))
        return found

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
    body = "\n".join((_header(groups), _differences(groups), _table(groups), _perturbed(groups), _curves(groups)))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_page(out, "Runs compared", body)
    return {"report": str(out), "groups": [_data(group) for group in groups]}


def alike(runs: Sequence[RunFolder]) -> list[Alike]:
    """The runs in groups, in the order of each group's first."""
    found: list[tuple[dict[str, Any], list[RunFolder]]] = []
    for run in runs:
        settings = {key: value for key, value in flat(run.config).items() if key not in OF_A_RUN} | _before(run)
        for known, members in found:
            if known == settings:
                members.append(run)
                break
        else:
            found.append((settings, [run]))
    differing = _differing([settings for settings, _ in found])
    return [Alike(_label(settings, differing, members), tuple(members), settings) for settings, members in found]


def _before(run: RunFolder) -> dict[str, Any]:
    """Settings of what is learned that the run had until an iteration, `optim.policy_lr until iteration 40`."""
    changed = ((part.iteration, one) for part in run.parts for one in part.changes)
    return {f"{one.key} until {n}": one.before for n, one in changed if one.key.partition(".")[0] in LEARNING}


def protocol_of(run: RunFolder) -> dict[str, Any] | None:
    """The protocol of its evaluation, but for the seed; None where there was none."""
    return _compared(run.evals[0].protocol) if run.evals else None


def _compared(protocol: Mapping[str, Any]) -> dict[str, Any]:
    """The protocol's entries that must be equal before results of two evaluations are averaged."""
    left_out = ("seed", "sha256", "hardware", "simulators")
    return {key: value for key, value in protocol.items() if key not in left_out}


def _data(group: Alike) -> dict[str, Any]:
    values, name = [value for value, _ in group.evaluated()], group.measure.name
    low, high = group.interval() or (None, None)
    rate, rates = ("success_rate", "success_rates") if group.measure is SUCCESS else ("return", "returns")
    return {
        "label": group.label,
        "runs": [str(run.path) for run in group.runs],
        "seeds": group.seeds,
        rates: values,
        rate: statistics.fmean(values) if values else None,
        f"{name}_low": low,
        f"{name}_high": high,
        "env_steps": [run.rows[-1]["env_steps"] for run in group.runs],
        "time_to_target_s": group.times(),
    }


def _header(groups: Sequence[Alike]) -> str:
    count = sum(len(group.runs) for group in groups)
    settings = "different settings" if len(groups) > 1 else "setting"
    facts = f"{count} runs, {len(groups)} {settings}; written {datetime.now():%Y-%m-%d %H:%M} by embodied report"
    if len(groups) == 1 and count > 1:
        seeds = zip(groups[0].runs, groups[0].seeds, strict=True)
        alone = ", ".join(f"{run.path.resolve().name} {setting_text(seed)}" for run, seed in seeds)
        facts += f". The runs differ in seed and name alone; seeds: {escape(alone)}"
    return f'<header><h1>Runs compared</h1><p class="facts"><span>{facts}.</span></p></header>'


def _curves(groups: Sequence[Alike]) -> str:
    longest = max(max(run.column("wall_s")[-1] or 0.0 for run in group.runs) for group in groups)
    scale, unit = report.time_unit(longest)
    figures = []
    for measure in dict.fromkeys(group.measure for group in groups):
        recent = any(_ends(group, measure.recent, "env_steps") for group in groups)
        key = measure.recent if recent else measure.each
        title = f"{measure.name.capitalize()} of {'the last 100 training' if recent else 'each iteration’s'} episodes"
        figures += [
            _figure(groups, measure, f"{title}, by env steps", key, "env_steps", 1.0, "env steps"),
            _figure(groups, measure, "The same, by wall-clock", key, "wall_s", scale, f"wall-clock, {unit}"),
        ]
    figures.append(_figure(groups, RETURN, "Return, by env steps", RETURN.each, "env_steps", 1.0, "env steps"))
    lead = f"A thick curve is the mean over seeds, its band the 95% interval of that mean: {INTERVAL}. One seed has no "
    lead += "band. "
    lead += "Thin curves are single runs. Between the ends of its iterations a run's value is interpolated."
    return report.section("Learning", report.grid("two", figures), lead)


def _figure(
    groups: Sequence[Alike], measure: Measure, title: str, key: str, over: str, scale: float, label: str
) -> str:
    places = sorted({float(x) for group in groups for run in group.runs for x in _known(run, key, over)[0]})
    if len(places) > POINTS:
        places = np.linspace(places[0], places[-1], POINTS).tolist()
    x = np.array(places)
    means, single = [], []
    for number, group in enumerate(groups):
        colour, several = _colour(number), len(group.runs) > 1
        y, band = _mean_curve(group, measure, key, over, x)
        end = f"mean of {len(group.runs)}" if several and len(groups) == 1 else group.label if several else group.names
        dashes = DASHES[number // len(charts.COLOURS) % len(DASHES)]
        curve = charts.Line(group.title, y, colour=colour, band=band if several else (), dashes=dashes, end=end)
        means.append(curve)
        if 1 < len(group.runs) <= SINGLE:
            single += [_single(run, measure, key, over, x, colour) for run in group.runs]
    curves = [*single, *means]
    notes = [*_equal(curves), *_empty(groups, measure, key, over)]
    note = f'<p class="note">{"<br>".join(map(escape, notes))}</p>' if notes else ""
    if not places:
        return report.card(title, note)
    ended = _iterations(groups, over)
    heads = [f"{f'{at:,.0f}' if at == round(at) else f'{at:,.6g}'} {label}" for at in x / scale]
    heads = [head + ended.get(place, "") for head, place in zip(heads, places, strict=True)]
    drawn = charts.lines(
        (x / scale).tolist(),
        _told_apart(curves),
        label,
        heads,
        width=420,
        height=230,
        show=measure.show,
        y_range=measure.y_range,
    )
    legend = "".join(report.legend({escape(group.label): _colour(number)}) for number, group in enumerate(groups))
    return report.card(title, drawn + note, legend)


def _iterations(groups: Sequence[Alike], over: str) -> dict[float, str]:
    """Text that the pointer shows at the places where iterations ended."""
    found: dict[float, dict[int, None]] = {}
    for run in (run for group in groups for run in group.runs):
        for row, place in zip(run.rows, run.column(over), strict=True):
            if place is not None:
                found.setdefault(place, {})[row["iteration"]] = None
    return {place: f", iteration {' or '.join(map(str, numbers))}" for place, numbers in found.items()}


def _single(run: RunFolder, measure: Measure, key: str, over: str, x: np.ndarray, colour: str) -> charts.Line:
    """One of a curve's runs."""
    name, alone = run.path.resolve().name, Alike("", (run,), {})
    return charts.Line(name, _mean_curve(alone, measure, key, over, x)[0], faint=True, colour=colour, end=name)


def _same(curves: Sequence[charts.Line]) -> list[list[int]]:
    """The numbers of the curves in lists of equal ones; a curve without values equals none."""
    found: dict[tuple[float | None, ...], list[int]] = {}
    for number, curve in enumerate(curves):
        if any(value is not None for value in curve.y):
            found.setdefault(tuple(curve.y), []).append(number)
    return list(found.values())


def _equal(curves: Sequence[charts.Line]) -> list[str]:
    """A sentence for each set of curves that cover each other."""
    sets = [[curves[number].end for number in numbers] for numbers in _same(curves) if len(numbers) > 1]
    left = [f"{len(names) - NAMED} more" if len(names) > NAMED + 1 else names[-1] for names in sets]
    return [
        f"{', '.join(names[: min(NAMED, len(names) - 1)])} and {last} are equal."
        for names, last in zip(sets, left, strict=True)
    ]


def _told_apart(curves: Sequence[charts.Line]) -> list[charts.Line]:
    """The curves, dashed where they cover others."""
    covering = {n: place for numbers in _same(curves) for place, n in enumerate(numbers) if place}
    dashed = {n: 1 + (place - 1) % (len(DASHES) - 1) for n, place in covering.items()}
    return [replace(c, dashes=DASHES[dashed[n]]) if n in dashed else c for n, c in enumerate(curves)]


def _empty(groups: Sequence[Alike], measure: Measure, key: str, over: str) -> list[str]:
    """A sentence for each run that has no values, with the reason where it is known."""
    found = []
    for run in (run for group in groups for run in group.runs):
        if len(_known(run, key, over)[0]):
            continue
        ended = sum(value for value in run.column("env/episodes") if value is not None)
        few = f"the mean is over 100 training episodes, and {ended:.0f} have ended"
        recorded = "no values were recorded"
        found.append(f"{run.path.resolve().name}: {few if key == measure.recent and ended < 100 else recorded}.")
    return found


def _ends(group: Alike, key: str, over: str) -> list[float]:
    """Last `over` of each run that has values."""
    known = [_known(run, key, over)[0] for run in group.runs]
    return [float(xs[-1]) for xs in known if len(xs)]


def _known(run: RunFolder, key: str, over: str) -> tuple[np.ndarray, np.ndarray]:
    """Positions at which the metric is known, and its values at these positions."""
    pairs = zip(run.column(over), run.column(key), strict=True)
    found = [(x, y) for x, y in pairs if x is not None and y is not None]
    xs, ys = zip(*found, strict=True) if found else ((), ())
    return np.array(xs, float), np.array(ys, float)


def _mean_curve(
    group: Alike, measure: Measure, key: str, over: str, x: np.ndarray
) -> tuple[list[float | None], list[tuple[float, float] | None]]:
    """The mean over the group's runs at each place that all of them reached, and its interval."""
    curves = [known for run in group.runs if len((known := _known(run, key, over))[0])]
    counts = [_episodes(run, measure, key, over) for run in group.runs if len(_known(run, key, over)[0])]
    mean: list[float | None] = []
    band: list[tuple[float, float] | None] = []
    for place in x:
        if not curves or any(not xs[0] <= place <= xs[-1] for xs, _ in curves):
            mean.append(None)
            band.append(None)
            continue
        values = [float(np.interp(place, xs, ys)) for xs, ys in curves]
        middle, low, high = mean_interval(values)
        if measure is SUCCESS and all(0 <= value <= 1 for value in values):
            middle, low, high = seeds_interval(values, [count(place) for count in counts])
        mean.append(middle)
        band.append((low, high))
    return mean, band


def _episodes(run: RunFolder, measure: Measure, key: str, over: str) -> Callable[[float], int]:
    """The number of episodes, one or more, that a run's success at a place is a mean of."""
    if key == measure.recent:
        return lambda place: RECENT
    xs, ys = _known(run, "env/episodes", over)
    return lambda place: max(1, round(float(np.interp(place, xs, ys)))) if len(xs) else 1


def _table(groups: Sequence[Alike]) -> str:
    measures = " or ".join(dict.fromkeys(group.measure.name for group in groups))
    names = (
        "settings",
        "seeds",
        f"{measures} in evaluation",
        "each seed",
        "env steps",
        "wall time",
        "time to target",
    )
    lead = (
        f"{measures.capitalize()}: the mean over seeds with its 95% interval, {INTERVAL}. Time to target: the median."
    )
    left_out = sum(sum(bool(run.evals) for run in group.runs) - len(group.evaluated()) for group in groups)
    if left_out:
        lead += f" {left_out} evaluations by another protocol than the first of their settings are left out."
    found = [protocol_of(run) for group in groups for run in group.runs]
    protocols = {json.dumps(protocol, sort_keys=True): protocol for protocol in found}
    lead += "".join(f"<br>Evaluated: {escape(_protocol_line(one))}." for one in protocols.values() if one)
    return report.section("Results", report.table(names, map(_cells, groups)), lead)


def _perturbed(groups: Sequence[Alike]) -> str:
    """Success under perturbations or delays: a chart for each axis with a curve for each setting, and a table; empty
    where no run's evaluation has them."""
    found = [group.perturbed() for group in groups]
    delay = any(one.delay for group in groups for run in group.runs for one in run.conditions)
    without = WITHOUT_DELAY if delay else "unperturbed"
    keys = list(dict.fromkeys(key for one in found for key in one))
    if not keys:
        return ""
    figures = []
    for curve in dict.fromkeys(curve for curve, _ in keys):
        levels = sorted(level for one, level in keys if one == curve)
        drawn = []
        for number, (group, values) in enumerate(zip(groups, found, strict=True)):
            several = [values.get((curve, level), []) for level in levels]
            found_at = [seeds_interval(*zip(*rates, strict=True)) if rates else None for rates in several]
            bands = [
                None if one is None or len(rates) < 2 else one[1:] for one, rates in zip(found_at, several, strict=True)
            ]
            means = [None if one is None else one[0] for one in found_at]
            drawn.append(charts.Line(group.title, means, colour=_colour(number), band=bands, end=group.names))
        heads = [without if level == 0 else f"{curve} {level}" for level in levels]
        chart = charts.lines(
            [*map(float, levels)],
            drawn,
            "delay in env steps" if delay else "level",
            heads,
            show=charts.percent,
            y_range=(0.0, 1.0),
        )
        figures.append(report.card(curve, chart))
    rows = [
        (
            escape(without if level == 0 else f"{curve} {level}"),
            *(_rates(one.get((curve, level))) for one in found),
        )
        for curve, level in sorted(keys, key=lambda key: (key[1] > 0, keys.index(key)))
        if level or (curve, level) == keys[0]
    ]
    shown = report.table(("delay" if delay else "perturbed by", *(group.title for group in groups)), rows)
    by = "method and delay in env steps" if delay else "axis and level"
    lead = f"Success by {by}: the mean over seeds, of the same episodes, with its 95% interval, {INTERVAL}."
    return report.section("Under delays" if delay else "Under perturbations", report.grid("two", figures) + shown, lead)


def _rates(rates: Sequence[tuple[float, int]] | None) -> str:
    if not rates:
        return "–"
    mean, low, high = seeds_interval(*zip(*rates, strict=True))
    return f"{charts.percent(mean)} <small>{report.interval(low, high)}</small>"


def _protocol_line(protocol: Mapping[str, Any]) -> str:
    """The protocol of an evaluation in a line."""
    limits = protocol.get("limits")
    tasks = ", ".join(limits) if isinstance(limits, Mapping) else limits
    parts = {"tasks": tasks, "instruction": protocol.get("instruction")}
    parts |= {name: protocol.get(name) for name in ("name", "trials", "greedy")}
    parts["delay"] = late.get("delay") if isinstance(late := protocol.get("trained_delay"), Mapping) else None
    return "; ".join(f"{name} {value}" for name, value in parts.items() if value not in (None, ""))


def _cells(group: Alike) -> tuple[str, ...]:
    data, values, measure = _data(group), [value for value, _ in group.evaluated()], group.measure
    counts = ", ".join(dict.fromkeys(str(episodes) for _, episodes in group.evaluated()))
    measured = "–"
    if values:
        between = group.interval()
        small = "" if between is None else f" <small>{report.interval(*between, measure.show)}</small>"
        measured = measure.show(statistics.fmean(values)) + small
    times = [time for time in group.times() if time is not None]
    reached = f" ({len(times)} of {len(group.runs)})" if len(times) < len(group.runs) else ""
    walls = [run.column("wall_s")[-1] or 0.0 for run in group.runs]
    return (
        escape(group.title),
        escape(", ".join(map(str, group.seeds))),
        measured,
        f"{', '.join(map(measure.show, values))} <small>of {counts} episodes</small>" if values else "–",
        charts.compact(statistics.median(data["env_steps"])),
        duration(statistics.median(walls)),
        duration(statistics.median(times)) + reached if times else "not reached",
    )


def _differences(groups: Sequence[Alike]) -> str:
    differing = _differing([group.settings for group in groups])
    if not differing:
        return ""
    head = ("setting", *(group.label for group in groups))
    rows = [[", ".join(map(setting_text, group.seeds)) for group in groups]]
    rows += [[setting_text(group.settings.get(key)) for group in groups] for key in differing]
    cells = [
        (f'<span style="white-space: nowrap">{escape(key)}</span>', *map(escape, values))
        for key, values in zip(("seed", *differing), rows, strict=True)
    ]
    return report.section("What differed", report.table(head, cells), "Settings that are not the same in all runs.")


def _differing(settings: Sequence[Mapping[str, Any]]) -> list[str]:
    """Keys whose values differ between the configurations."""
    keys = dict.fromkeys(key for one in settings for key in one)
    return [key for key in keys if any(one.get(key) != settings[0].get(key) for one in settings)]


def _label(settings: Mapping[str, Any], differing: Sequence[str], members: Sequence[RunFolder]) -> str:
    """Shortest text that distinguishes a group from the others."""
    if not differing:
        return members[0].path.name if len(members) == 1 else str(members[0].config.get("workflow", "runs"))
    if len(differing) > 3:
        return ", ".join(run.path.name for run in members)
    return ", ".join(f"{key.rpartition('.')[2]} {setting_text(settings.get(key))}" for key in differing)


def _colour(number: int) -> str:
    return charts.COLOURS[number % len(charts.COLOURS)]
