"""A run on one page: `report.html`, which needs no network and no other file.

The page is made from the files of the run's folder. Where a file is missing or damaged, its section has one line
instead, which names the command that makes it. All text from files is escaped.
"""

from __future__ import annotations

import base64
import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from html import escape
from pathlib import Path
from string import Template
from typing import Any
from urllib.parse import quote

from embodied.config.schema import Config
from embodied.files import read_json, write_whole
from embodied.other_programs import in_words
from embodied.reporting import charts
from embodied.reporting.charts import compact, ticks
from embodied.reporting.conditions import condition_cells, success_by_level
from embodied.reporting.live import duration
from embodied.reporting.run_record import (
    LARGEST,
    RETURN,
    Evaluation,
    Measure,
    ReportError,
    RunFolder,
    find,
    flat,
    named,
    read_run,
)
from embodied.run.trace import COMPONENTS, ITERATIONS, Span, track_order
from embodied.statistics import wilson

SMOOTHING = 5
"""Iterations over which the smoothed success is averaged, and over which a target must last."""
EVALUATED = "evaluated during training"
LONG_HEAD = 24
"""Characters of a column's name from which on it may be in several lines."""
VIDEO_BYTES = 20_000_000
"""Videos are embedded up to this sum of sizes; further ones are linked."""

__all__ = ["ReportError", "write_report"]

_LEARNER = (
    "approx_kl",
    "clip_fraction",
    "entropy",
    "explained_variance",
    "policy_loss",
    "value_loss",
    "grad_norm",
)

_CRITIC = ("learner/explained_variance", "learner/value_loss")

PAGE = Path(__file__).with_name("page.html")
"""The frame of every page: styles and content policy."""


def write_report(run_dir: str | os.PathLike[str]) -> Path:
    """Write `report.html` into a run's folder and return its path. Raises `ReportError` for other folders."""
    run = read_run(Path(run_dir))
    target = run.path / "report.html"
    write_page(target, run.path.resolve().name, report_of(run))
    return target


def report_of(run: RunFolder) -> str:
    """The report's sections as HTML."""
    results = {_evaluation: bool(run.evals), _videos: bool(run.videos)}
    first, later = ([made for made, there in results.items() if there is wanted] for wanted in (True, False))
    learning = (_measure, _imitation, _data, _learner, _time, plan_section, _timeline)
    sections = (_header, figures_of, *first, *learning, *later, _config, _protocol)
    return "\n".join(made(run) for made in sections)


def write_page(path: Path, title: str, body: str) -> None:
    """Write a self-contained page. `title` is plain text, `body` HTML."""
    write_whole(path, page(title, body))


def page(title: str, body: str, script: str = "") -> str:
    """A page. `title` is plain text, `body` HTML. With a `script` it may ask the server that it came from for more;
    without, it asks for nothing. Half a character, which no file holds, becomes its number."""
    connect = "; connect-src 'self'" if script else ""
    text = Template(PAGE.read_text()).substitute(title=escape(title), body=body, connect=connect, script=script)
    return text.encode("utf-8", "backslashreplace").decode()


# --- the sections, from top to bottom


def _header(run: RunFolder) -> str:
    hardware = next((item.protocol["hardware"] for item in run.evals if "hardware" in item.protocol), None)
    newest = max(file.stat().st_mtime for file in run.path.iterdir() if file.is_file())
    facts = {
        "task": named(find(run.config, "task") or next((item.task for item in run.evals), None)),
        "policy": named(find(run.config, "policy")),
        "hardware": named(hardware or find(run.config, "hardware")),
        "last change": datetime.fromtimestamp(newest).strftime("%Y-%m-%d %H:%M"),
    }
    spans = "".join(f"<span>{name} <b>{escape(text)}</b></span>" for name, text in facts.items())
    return f'<header><h1>{escape(run.path.resolve().name)}</h1><p class="facts">{spans}</p></header>'


def figures_of(run: RunFolder) -> str:
    """The run's main figures on cards."""
    figures = [_measured_figure(run)]
    if run.rows:
        last = run.rows[-1]
        wall_s = max((value for value in run.column("wall_s") if value is not None), default=None)
        iterations = f"{last['iteration']} {'steps of the optimiser' if _imitates(run) else 'iterations'}"
        figures.append(("Env steps", charts.compact(last["env_steps"]), iterations, ""))
        if wall_s:
            figures.append(("Wall time", duration(wall_s), "all sessions of the run", ""))
            speeds = [value for value in run.column("farm/env_steps_per_s") if value is not None]
            median = f"median of iterations {charts.compact(statistics.median(speeds))}" if speeds else ""
            if not _imitates(run):
                figures.append(("Env steps per second", charts.compact(last["env_steps"] / wall_s), median, ""))
                figures += _target_figures(run)
    return f'<div class="figures">{"".join(_figure(*figure) for figure in figures)}</div>'


def _measured_figure(run: RunFolder) -> tuple[str, str, str, str]:
    """The run's measure: in its evaluation, or else in training."""
    measure = run.measure
    title = measure.name.capitalize()
    if run.evals:
        value, episodes = run.evaluated()
        between = wilson(round(value * episodes), episodes) if measure is not RETURN else None
        if len(run.evals) == 1:
            between = run.evals[0].between(measure)
        note = f"{interval(*between, measure.show)}, {episodes} episodes" if between else f"{episodes} episodes"
        return f"{title} in evaluation", measure.show(value), note, ""
    values = [value for value in run.column(measure.each) if value is not None][-SMOOTHING:]
    if not values:
        return title, "–", "not measured yet", ""
    mean, note = statistics.fmean(values), f"mean of the last {len(values)} iterations"
    counts = [value for value in run.column("env/episodes")[-SMOOTHING:] if value is not None]
    if counts and measure is not RETURN:
        episodes = max(round(sum(counts)), 0)
        solved = min(max(round(mean * episodes), 0), episodes)
        note = f"{interval(*wilson(solved, episodes))}, {note}"
    return f"{title} in training", measure.show(mean), note, ""


def _target_figures(run: RunFolder) -> list[tuple[str, str, str, str]]:
    """Time at which the last training episodes first reached the target, if there is one."""
    measure, target = run.measure, run.target
    if target is None:
        return []
    title = f"Time to {measure.name} {target:g}"
    reached = run.reached_target()
    if reached is not None:
        return [(title, duration(reached["wall_s"]), f"{charts.compact(reached['env_steps'])} env steps", "good")]
    recent = _values(run, measure.recent)
    note = f"best mean of 100 episodes {measure.show(max(recent))}" if recent else "100 episodes have not ended yet"
    return [(title, "not reached", note, "")]


def _measure(run: RunFolder) -> str:
    """Success, or return where the tasks have no success, over the run."""
    measure, target = run.measure, run.target
    title = measure.name.capitalize()
    if not run.rows:
        return section(title, _notice(run, "metrics.jsonl"))
    if _imitates(run):
        return ""
    walls = run.column("wall_s")
    timed = [i for i, wall_s in enumerate(walls) if wall_s is not None]
    scale, unit = time_unit(max((walls[i] or 0.0 for i in timed), default=0.0))
    raw = run.column(measure.each)
    mean = charts.trailing_mean(raw, SMOOTHING)
    heads, steps = _heads(run), [float(row["env_steps"]) for row in run.rows]
    evaluated = run.selected(measure.evaluated)
    ends = zip(*map(run.selected, measure.bounds()), strict=True)
    between = [None if low is None or high is None else (low, high) for low, high in ends]

    def chart(x: Sequence[float], keep: Sequence[int], label: str) -> str:
        curves = [
            charts.Line("this iteration", [raw[i] for i in keep], faint=True),
            charts.Line(f"mean of {SMOOTHING}", [mean[i] for i in keep]),
        ]
        if run.selection:
            values, intervals = [evaluated[i] for i in keep], [between[i] for i in keep]
            curves.append(charts.Line(EVALUATED, values, colour=charts.COLOURS[1], bars=intervals))
        own = [heads[i] for i in keep]
        return charts.lines(x, curves, label, own, show=measure.show, y_range=measure.y_range, mark_y=target)

    by_steps = chart(steps, range(len(steps)), "env steps")
    by_time = chart([(walls[i] or 0.0) / scale for i in timed], timed, f"wall-clock, {unit}")
    colours = {} if target is None else {f"target {target:g}": "var(--good)"}
    if run.selection:
        colours[EVALUATED] = charts.COLOURS[1]
    key = legend(colours)
    others = [name for name in ("env/return", "env/episode_len", *_of_tasks(run)) if name != measure.each]
    figures = [
        card(f"{title} against env steps", by_steps, key),
        card(f"{title} against wall-clock", by_time, key),
        *_curves(run, others, 420, 180),
    ]
    lead = f"Thin: each iteration. Thick: the mean of the last {SMOOTHING}."
    return section(title, grid("two", figures) + _without_curve(run, others), lead)


def _of_tasks(run: RunFolder) -> list[str]:
    """The metrics of single tasks' success, in the order in which the run has the tasks."""
    return list(dict.fromkeys(key for row in run.rows for key in row if key.startswith("env/success_once/")))


def _imitates(run: RunFolder) -> bool:
    """True if the run has learned from demonstrations, and not from rollouts."""
    return any("sft/loss" in row for row in run.rows)


def _imitation(run: RunFolder) -> str:
    keys = ("sft/loss", "sft/held_out_loss", "sft/held_out_distance")
    figures = _curves(run, keys, 360, 180)
    lead = (
        "Env steps are those of the demonstrations that were learned from, repetitions counted. The distance is the "
        "mean over action elements of |the policy's mode - what was demonstrated|, in the environment's units."
    )
    content = grid("three", figures) + _without_curve(run, [key for key in keys if _values(run, key)])
    return section("Learning from demonstrations", content, lead) if _imitates(run) else ""


def _data(run: RunFolder) -> str:
    """Inspection of the demonstrations, where the run has learned from some."""
    path = run.path / "data.json"
    if not path.is_file():
        return ""
    try:
        text = read_json(path)["text"]
    except (OSError, ValueError, KeyError, TypeError):
        return section("Demonstrations", "data.json is damaged: `embodied inspect` makes the table anew")
    return section("Demonstrations", f'<div class="card"><pre>{escape(str(text))}</pre></div>')


def _learner(run: RunFolder) -> str:
    if not run.rows:
        return ""
    known = [f"learner/{name}" for name in _LEARNER]
    other = {key for row in run.rows for key in row if key.startswith(("learner/", "lag/"))} - set(known)
    keys = [*known, *sorted(other)]
    if not any(_values(run, key) for key in keys):
        return ""
    return section("Learner", grid("three", _curves(run, keys, 360, 180)) + _without_curve(run, keys))


def _time(run: RunFolder) -> str:
    rows = [row for row in run.rows if any(row.get(f"time/{name}") is not None for name in COMPONENTS)]
    if not rows:
        return ""
    shares = [{name: row.get(f"time/{name}") or 0.0 for name in COMPONENTS} for row in rows]
    means = {name: statistics.fmean(share[name] for share in shares) for name in COMPONENTS}
    key = legend({f"{name} {means[name]:.0%}": css for name, css in COMPONENTS.items()})
    bars = charts.stacked_bars(shares, [float(row["iteration"]) for row in rows], COMPONENTS, "iteration")
    speed = _curves(run, ["farm/env_steps_per_s"], 420, 210)
    figures = grid("two", [card("Share of each iteration", bars, key), *speed])
    figures += _without_curve(run, ["farm/env_steps_per_s"])
    return section("Where the time goes", figures, "The legend gives means over the run.")


def _timeline(run: RunFolder) -> str:
    title = "One iteration"
    if _imitates(run):
        return ""
    if not run.spans:
        run.missing.setdefault("trace.json", "trace.json has no spans yet.")
        return section(title, _notice(run, "trace.json"))
    iteration, spans = last_iteration(run.spans)
    if not spans:
        return section(title, f'<p class="notice">{escape(iteration.name)} has no spans in trace.json.</p>')
    whole = draw(spans, iteration.start_ns, iteration.end_ns)
    caption = f"{iteration.name.capitalize()}, {_milliseconds(iteration.end_ns - iteration.start_ns)}"
    figures = [card(caption, whole, legend(COMPONENTS), "scroll")]
    if (part := close_up(spans)) is not None:
        caption = f"{_milliseconds(part[1] - part[0])} of it, with arrows from observation to action"
        figures.append(card(caption, draw(spans, *part), "", "scroll"))
    lead = "A row per worker. The whole trace, trace.json, opens in ui.perfetto.dev."
    return section(title, grid("", figures), lead)


def _evaluation(run: RunFolder) -> str:
    if not run.evals:
        return section("Evaluation", _notice(run, "eval.json"))
    success = ("success once", "0 to 100%", "success at end") if run.measure is not RETURN else ()
    names = ("task", *success, "starts trained on", "episodes", "length", "return", "wall time")
    shown = table(names, [_evaluation_cells(item, run.measure) for item in run.evals])
    notes = dict.fromkeys(note for item in run.evals for note in item.notes)
    good = {item.notes[0] for item in run.evals if item.notes} if _untouched(run) else set()
    lines = (f'<p class="{"note" if note in good else "notice"}">{escape(note)}.</p>' for note in notes)
    return section("Evaluation", shown + "".join(lines)) + _perturbed(run)


def _untouched(run: RunFolder) -> bool:
    """True if no start of the evaluations was trained on, which their first note says: no reason to warn."""
    return all((item.trained_on or "").startswith("0 of ") for item in run.evals)


def _perturbed(run: RunFolder) -> str:
    """Success by axis and level, or by method and delay; empty where no episode was perturbed or delayed."""
    if not run.conditions:
        return ""
    delay = run.conditions[0].delay
    names = ("delay" if delay else "perturbed by", "success once", "difference, points", "p", "episodes")
    rows = table(names, map(condition_cells, run.conditions))
    lead = "Each perturbation repeats the unperturbed episodes; differences are paired. Bands are 95% intervals."
    if delay:
        what = "Each delay repeats the episodes without one"
        if run.conditions[0].level:
            what = "The episodes under the delay of the training are repeated without one"
        lead = f"{what}; differences are paired. Bands are 95% intervals."
    title = "Success by delay" if delay else "Success by level"
    chart = grid("two", [card(title, success_by_level(run.conditions))])
    return section("Under delays" if delay else "Under perturbations", chart + rows, lead)


def _evaluation_cells(item: Evaluation, measure: Measure) -> tuple[object, ...]:
    wall = "–" if item.wall_s is None else duration(item.wall_s)
    total = _number(item.mean_return)
    if measure is RETURN and item.return_between is not None:
        total += f" <small>{interval(*item.return_between, measure.show)}</small>"
    success = _success_cells(item) if measure is not RETURN else ()
    numbers = item.episodes, _number(item.episode_len), total
    return (escape(item.task), *success, escape(item.trained_on or "–"), *numbers, wall)


def _success_cells(item: Evaluation) -> tuple[str, str, str]:
    """Success once, the same as a bar, and success at the end."""
    if item.success is None:
        return "–", "", "–"
    rate, low, high = item.success
    bar = (
        f'<div class="range"><i style="left:{low:.2%};width:{high - low:.2%}"></i><b style="left:{rate:.2%}"></b></div>'
    )
    end = "–"
    if item.at_end is not None:
        end = f"{charts.percent(item.at_end[0])} <small>{interval(*item.at_end[1:])}</small>"
    return f"{charts.percent(rate)} <small>{interval(low, high)}</small>", bar, end


def _videos(run: RunFolder) -> str:
    if not run.videos:
        return section("Videos", _notice(run, "videos"))
    figures, embedded = [], 0
    for file in run.videos:
        size = file.stat().st_size
        source = f"videos/{quote(file.name)}"
        if embedded + size <= VIDEO_BYTES:
            embedded += size
            source = "data:video/mp4;base64," + base64.b64encode(file.read_bytes()).decode()
        video = f'<video controls loop muted playsinline preload="metadata" src="{source}"></video>'
        figures.append(card(file.stem, video, ""))
    return section("Videos", grid("two" if len(figures) > 1 else "", figures))


def _config(run: RunFolder) -> str:
    if not run.config_text:
        return section("Configuration", _notice(run, "config.yaml"))
    note = _notice(run, "config.yaml") if "config.yaml" in run.missing else ""
    text = f"<summary>config.yaml</summary><pre>{escape(run.config_text)}</pre>"
    return section("Configuration", f'{note}{_changes(run)}{_settings(run)}<details class="card">{text}</details>')


def _changes(run: RunFolder) -> str:
    """The settings that changed while the run trained, with the iterations that were done before; empty without any."""
    rows = [
        (str(part.iteration), _code(one.key), escape(setting_text(one.before)), escape(setting_text(one.now)))
        for part in run.parts
        for one in part.changes
    ]
    if not rows:
        return ""
    lead = '<p class="notice">The run went on with other settings than it began with.</p>'
    return lead + table(
        (f"after {'step' if _imitates(run) else 'iteration'}", "setting", "before", "since"), rows, "settings"
    )


def _settings(run: RunFolder) -> str:
    """The settings that are not the defaults in a table, and the others in a folded one."""
    settings, defaults = flat(run.config), flat(Config().model_dump(mode="json"))
    rows = [(key, setting_text(value), key in defaults and defaults[key] == value) for key, value in settings.items()]
    own = [(_code(key), escape(text), _default(key, defaults)) for key, text, default in rows if not default]
    usual = [(_code(key), escape(text), "default") for key, text, default in rows if default]
    shown = table(("setting", "value", "default"), own, "settings") if own else ""
    if not usual:
        return shown
    count = f"{len(usual)} setting{'s' if len(usual) > 1 else ''} with the default value"
    folded = table(("setting", "value", ""), usual, "settings")
    return f'{shown}<details class="card"><summary>{count}</summary>{folded}</details>'


def _default(key: str, defaults: Mapping[str, Any]) -> str:
    return escape(setting_text(defaults[key])) if key in defaults else "–"


def _code(text: str) -> str:
    return f"<code>{escape(text)}</code>"


def _protocol(run: RunFolder) -> str:
    measures = {
        "training success": "share of the episodes ended in an iteration that solved the task at least once,"
        " actions sampled as training does",
    }
    if run.measure is RETURN:
        measures = {"training return": "mean of the episodes ended in an iteration, actions sampled as training does"}
    training = measures | {"smoothed": f"mean of the last {SMOOTHING} iterations"}
    if run.target is not None:
        training["time to target"] = f"wall-clock when that mean first reached {run.target:g}"
    intervals = {"intervals": "as the evaluation recorded them, else 95% Wilson score intervals"}
    entries = intervals if _imitates(run) else training | intervals
    protocols = list({json.dumps(item.protocol): item.protocol for item in run.evals}.values())
    for number, protocol in enumerate(protocols, 1):
        prefix = f"evaluation {number}, " if len(protocols) > 1 else "evaluation, "
        for key, value in protocol.items():
            entries[prefix + str(key).replace("_", " ")] = named(value)
    items = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in entries.items())
    footer = f"<footer>Written {datetime.now():%Y-%m-%d %H:%M} by <code>embodied report</code>.</footer>"
    return section("Protocol", f'<dl class="card">{items}</dl>{footer}')


# --- the pieces of a section


def _notice(run: RunFolder, name: str) -> str:
    parts = escape(run.missing[name]).split("`")
    text = "".join(f"<code>{part}</code>" if i % 2 else part for i, part in enumerate(parts))
    return f'<p class="notice">{text}</p>'


def _figure(title: str, value: str, note: str, css: str) -> str:
    return (
        f'<div class="card figure"><span>{escape(title)}</span>'
        f'<strong class="{css}">{escape(value)}</strong><span>{escape(note)}</span></div>'
    )


def _curves(run: RunFolder, keys: Iterable[str], width: int, height: int) -> list[str]:
    """A chart over env steps of each metric whose value changes."""
    steps, heads = [float(row["env_steps"]) for row in run.rows], _heads(run)
    figures = []
    for key in keys:
        values = run.column(key)
        if _values(run, key) and not _constant(run, key):
            curve = [charts.Line(key, values)]
            chart = charts.lines(steps, curve, "env steps", heads, width=width, height=height)
            figures.append(card(key, chart))
    return figures


def _values(run: RunFolder, key: str) -> list[float]:
    return [value for value in run.column(key) if value is not None]


def _constant(run: RunFolder, key: str) -> bool:
    """True if the metric has several values, and all are the same."""
    values = _values(run, key)
    return len(values) > 1 and min(values) == max(values)


def _without_curve(run: RunFolder, keys: Sequence[str]) -> str:
    """Text for the metrics that `_curves` does not draw: constants, folded, and metrics without a value."""
    constant = [key for key in keys if _constant(run, key)]
    parts = []
    if constant:
        lines = "".join(f"<li>constant: {_code(key)} = {charts.exact(_values(run, key)[0])}</li>" for key in constant)
        count = f"{len(constant)} metric{'s' if len(constant) > 1 else ''} that never changed"
        parts.append(f'<details class="card"><summary>{count}</summary><ul>{lines}</ul></details>')
    reasons: dict[str, list[str]] = {}
    for key in keys:
        if not _values(run, key):
            reasons.setdefault(_reason(run, key), []).append(_code(key))
    parts += [f'<p class="note">{", ".join(names)}: {reason}.</p>' for reason, names in reasons.items()]
    return "".join(parts)


def _reason(run: RunFolder, key: str) -> str:
    """Why a metric has no values."""
    critic = any(any(_values(run, name)) for name in _CRITIC)  # without one its loss is 0, or not recorded
    if key in _CRITIC and _values(run, "learner/policy_loss") and not critic:
        return "no values: this workflow has no critic"
    return "no values were recorded"


def _heads(run: RunFolder) -> list[str]:
    """Heading of each row under the pointer."""
    heads = []
    for row, wall_s in zip(run.rows, run.column("wall_s"), strict=True):
        time = f", {duration(wall_s)}" if wall_s is not None else ""
        heads.append(f"{run.path.resolve().name}, iteration {row['iteration']}, {row['env_steps']:,} env steps{time}")
    return heads


def _number(value: float | None) -> str:
    return "–" if value is None else charts.compact(value)


def _milliseconds(length_ns: int) -> str:
    return f"{length_ns / 1e9:.3g} s" if length_ns >= 1e9 else f"{length_ns / 1e6:.3g} ms"


# --- What the pages of runs are put together from: sections, cards and what is written on them. All return HTML.


def section(title: str, content: str, lead: str = "") -> str:
    """A heading, a sentence below it and the content; all three are HTML."""
    lead = f'<p class="lead">{lead}</p>' if lead else ""
    return f"<section><h2>{title}</h2>{lead}{content}</section>"


def grid(css: str, figures: Iterable[str]) -> str:
    """Cards beside each other; `css` names how many: `two`, `three`, or nothing for one."""
    return f'<div class="grid {css}">{"".join(figures)}</div>'


def card(title: str, content: str, legend: str = "", css: str = "") -> str:
    """A drawing with its title, which is plain text."""
    caption = f"<figcaption>{escape(title)}{legend}</figcaption>"
    return f'<figure class="card">{caption}<div class="{css}">{content}</div></figure>'


def setting_text(value: Any) -> str:
    """A setting's value as it is shown, at most 200 characters of it."""
    whole = json.dumps(value, default=str, ensure_ascii=False) if isinstance(value, (dict, list)) else str(value)
    text = "none" if value is None else whole
    return text if len(text) <= 200 else text[:199] + "…"


def table(head: Sequence[str], rows: Iterable[Sequence[object]], css: str = "") -> str:
    """A table on a card. `head` is plain text, cells are HTML; `css` names a kind of table that the page knows."""
    names = "".join(f"<th{' class=long' * (len(name) > LONG_HEAD)}>{escape(name)}</th>" for name in head)
    lines = "".join(f"<tr>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>" for cells in rows)
    return f'<div class="card scroll {css}"><table><tr>{names}</tr>{lines}</table></div>'


def picture(path: Path, css: str = "") -> str:
    """A PNG on white, as it was drawn, within the page; `css` says how it fits a narrow page."""
    data = base64.b64encode(path.read_bytes()).decode()
    image = f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{data}">'
    return f'<figure class="card picture"><div class="{css}">{image}</div></figure>'


def legend(colours: Mapping[str, str]) -> str:
    """Legend: a name for each colour; the names are HTML."""
    return "".join(
        f'<span class="legend"><i style="background:{css}"></i>{name}</span>' for name, css in colours.items()
    )


def time_unit(longest_s: float) -> tuple[float, str]:
    """Seconds in the unit in which times up to `longest_s` are best read, and the unit's name."""
    if longest_s >= 2 * 3600:
        return 3600.0, "h"
    return (60.0, "min") if longest_s >= 2 * 60 else (1.0, "s")


def interval(low: float, high: float, show: Callable[[float], str] = charts.percent) -> str:
    """Two rates as `45.6% to 59.3%`, or other numbers as they are shown."""
    return f"{show(low)} to {show(high)}"


# --- The report's section on the plan: why it was chosen, and predicted beside measured times.


def plan_section(run: RunFolder) -> str:
    """The reasons of the run's plan, and its prediction beside the measurement; empty where nothing was planned. A
    plan that cannot be read costs only its own paragraph."""
    path = run.path / "plan.json"
    parts = [_plan(path)] if path.is_file() else []
    parts += [line for line in (_predicted_and_measured(run, path), _wire(run)) if line]
    return f"<section><h2>Plan</h2>{''.join(parts)}</section>" if parts else ""


def _plan(path: Path) -> str:
    data = _read(path)
    if data is None:
        return f'<p class="notice">{escape(path.name)} cannot be read.</p>'
    why = data.get("why")
    if not isinstance(why, list) or not why:
        why = [f"{data.get('mode', 'a plan')}, edited by hand or without reasons."]
    return f"<p><b>{escape(path.name)}</b><br>{'<br>'.join(escape(str(sentence)) for sentence in why)}</p>"


def _predicted_and_measured(run: RunFolder, path: Path) -> str:
    predicted = _predicted(_read(path))
    times = [value for value in run.column("time/iteration_s") if value]
    if predicted is None or not times:
        return ""
    measured = statistics.median(times)
    others = [value for value in run.column("time/other_programs") if value is not None]
    busy = in_words(statistics.fmean(others) if others else None)
    return (
        f"<p>Predicted {predicted:.3g} s per iteration, measured {measured:.3g} s (median of {len(times)}): "
        f"{predicted / measured - 1:+.0%}. {busy}</p>"
    )


def _predicted(data: dict[str, Any] | None) -> float | None:
    prediction = (data or {}).get("prediction")
    value = prediction.get("iteration_s") if isinstance(prediction, dict) else None
    return float(value) if isinstance(value, (int, float)) and 0 <= value < LARGEST else None


def _wire(run: RunFolder) -> str:
    sent = [value for value in run.column("farm/wire_bytes_per_env_step") if value]
    if not sent:
        return ""
    mean = statistics.fmean(sent)
    return f"<p>Between machines: {mean:,.0f} bytes per env step, scene states and actions; no frames.</p>"


def _read(path: Path) -> dict[str, Any] | None:
    try:
        data = read_json(path)
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


# --- One iteration as a picture: a row per track, a bar per span coloured by component, arrows if they fit.


_LEFT, _RIGHT, _ROW, _AXIS = 104, 12, 22, 30
_MAX_ARROWS = 60
_CLOSE_UP_ARROWS = 24

_ToPixel = Callable[[int], float]


def last_iteration(spans: Sequence[Span]) -> tuple[Span, list[Span]]:
    """The last complete iteration as one span, and the spans within it; the last there is, if none is
    complete; everything, if there are no iterations."""
    iterations = [span for span in spans if span.track == ITERATIONS]
    if not iterations:
        ends = (min(span.start_ns for span in spans), max(span.end_ns for span in spans))
        return Span(ITERATIONS, "the whole trace", *ends), list(spans)
    chosen = max(iterations, key=lambda span: (bool(span.args.get("complete")), span.start_ns))
    inside = [
        span
        for span in spans
        if span.track != ITERATIONS and span.start_ns < chosen.end_ns and span.end_ns > chosen.start_ns
    ]
    return chosen, inside


def close_up(spans: Sequence[Span]) -> tuple[int, int] | None:
    """A stretch in the middle of what the arrows connect, short enough for single arrows to be seen; None
    where the whole already is."""
    flows = _flows(spans)
    if len(flows) <= _CLOSE_UP_ARROWS:
        return None
    middle = (len(flows) - _CLOSE_UP_ARROWS) // 2
    stretch = flows[middle : middle + _CLOSE_UP_ARROWS]
    return min(a.start_ns for a, _ in stretch), max(b.end_ns for _, b in stretch)


def draw(spans: Sequence[Span], start_ns: int, end_ns: int, width: int = 1136) -> str:
    """The stretch from `start_ns` to `end_ns`. The page shows a bar's name and duration under the pointer."""
    visible = [span for span in spans if span.start_ns < end_ns and span.end_ns > start_ns]
    tracks = sorted({span.track for span in visible}, key=track_order)
    height = _ROW * len(tracks) + _AXIS
    scale = (width - _LEFT - _RIGHT) / max(end_ns - start_ns, 1)
    tops = {track: _ROW * row for row, track in enumerate(tracks)}

    def x(at_ns: int) -> float:
        return _LEFT + (min(max(at_ns, start_ns), end_ns) - start_ns) * scale

    parts = [_axis(start_ns, end_ns, x, width, height - _AXIS)]
    for track in tracks:
        name = track if len(track) <= 15 else track[:14] + "…"
        y = tops[track] + _ROW / 2 + 4
        parts.append(f'<text x="{_LEFT - 8}" y="{y}" text-anchor="end">{escape(name)}</text>')
        parts += _bars([span for span in visible if span.track == track], tops[track] + 3, x)
    arrows = [(a, b) for a, b in _flows(visible) if start_ns <= a.end_ns and b.start_ns <= end_ns]
    if len(arrows) <= _MAX_ARROWS:
        for a, b in arrows:
            parts.append(_arrow(x(a.end_ns), tops[a.track], x(b.start_ns), tops[b.track]))
    return f'<svg class="timeline" viewBox="0 0 {width} {height}">{"".join(parts)}</svg>'


def _flows(spans: Sequence[Span]) -> list[tuple[Span, Span]]:
    """The spans that each arrow connects, in the order in which the arrows leave."""
    starts = {flow: span for span in spans for flow in span.flow_to}
    pairs = [(starts[flow], span) for span in spans for flow in span.flow_from if flow in starts]
    return sorted(pairs, key=lambda pair: pair[0].end_ns)


def _axis(start_ns: int, end_ns: int, x: _ToPixel, width: int, bottom: int) -> str:
    length_ms = (end_ns - start_ns) / 1e6
    scale, unit = (1e3, "s") if length_ms >= 2000 else (1.0, "ms")
    parts = []
    for tick in ticks(0.0, length_ms / scale, about=10):
        at = x(start_ns + round(tick * scale * 1e6))
        parts.append(f'<line class="grid" x1="{at:.1f}" x2="{at:.1f}" y1="0" y2="{bottom}"/>')
        label = f"{compact(tick)} {unit}"
        parts.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{label}</text>')
    return "".join(parts)


def _bars(spans: Sequence[Span], top: float, x: _ToPixel) -> list[str]:
    """A row's bars. Neighbours of one component that no eye could tell apart are drawn as one."""
    runs: list[list[Span]] = []
    for span in sorted(spans, key=lambda span: (span.start_ns, -span.end_ns)):
        run = runs[-1] if runs else [span]
        same = span.component == run[-1].component and x(span.start_ns) - x(run[-1].end_ns) < 0.5
        if runs and same and x(span.end_ns) - x(run[0].start_ns) < 2.0:
            run.append(span)
        else:
            runs.append([span])
    return [_bar(run, top, x) for run in runs]


def _bar(run: Sequence[Span], top: float, x: _ToPixel) -> str:
    first = run[0]
    left, right = x(first.start_ns), max(x(span.end_ns) for span in run)
    name = first.name if len(run) == 1 else f"{len(run)} spans, the first {first.name}"
    busy_ms = sum(span.end_ns - span.start_ns for span in run) / 1e6
    colour = COMPONENTS.get(first.component, "var(--muted)")
    tip = escape(f"{first.track}|{name}|{compact(busy_ms)} ms")
    size = f'width="{max(right - left, 0.4):.2f}" height="{_ROW - 6}"'
    return f'<rect x="{left:.2f}" y="{top}" {size} rx="1.5" fill="{colour}" data-tip="{tip}"/>'


def _arrow(x1: float, top1: float, x2: float, top2: float) -> str:
    """From the end of one bar to the start of another, leaving and arriving horizontally."""
    y1, y2 = top1 + _ROW / 2, top2 + _ROW / 2
    bend = max(10.0, (x2 - x1) / 2)
    curve = f"M{x1:.1f},{y1} C{x1 + bend:.1f},{y1} {x2 - bend:.1f},{y2} {x2:.1f},{y2}"
    return f'<path class="flow" d="{curve}"/><circle class="flow-end" cx="{x2:.1f}" cy="{y2}" r="2"/>'
