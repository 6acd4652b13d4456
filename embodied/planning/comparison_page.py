"""A comparison of modes: a table for people and papers, and a page with bars and timelines."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from string import Template
from typing import Any

import schedulers
from embodied.execution.iteration import Iteration
from embodied.reporting.plan_picture import bars_of, bars_of_spans, draw_bars, draw_timelines
from embodied.reporting.report import PAGE
from embodied.reporting.tables import table
from schedulers import Plan, Profile, Workflow

HEAD = ("workload", "mode", "predicted s", "measured s", "95% interval", "error", "env steps/s", "placement")


def comparison_table(results: Sequence[Mapping[str, Any]]) -> str:
    """All modes of all workloads, and under it mean error and regrets. Chosen plans are marked with a star."""
    rows = [_cells(row) for result in results for row in result["modes"]]
    return "\n".join([*table(HEAD, rows), "", *_findings(results)]) + "\n"


def _findings(results: Sequence[Mapping[str, Any]]) -> list[str]:
    errors = [abs(row["error"]) for result in results for row in result["modes"]]
    return [f"Mean absolute prediction error: {100 * sum(errors) / len(errors):.1f}%."] + [
        f"{result['workload']}: {result['chosen']} is chosen (*); it takes {100 * result['regret']:.1f}% longer than "
        "the fastest mode measured."
        for result in results
    ]


def write_comparison(
    out: Path,
    result: Mapping[str, Any],
    runs: Mapping[str, tuple[Plan, Iteration]],
    workflow: Workflow,
    profile: Profile,
) -> Path:
    """Write `compare.png`, `timelines.png` and the self-contained `compare.html`; the page's path."""
    draw_bars(out / "compare.png", result["modes"])
    timelines = {}
    for mode, (plan, iteration) in runs.items():
        timelines[f"{mode}, predicted"] = bars_of(schedulers.simulate(plan, workflow, profile))
        timelines[f"{mode}, measured"] = bars_of_spans(iteration.spans, iteration.begin_ns)
    draw_timelines(out / "timelines.png", timelines)
    why = "".join(
        f"<h3>{escape(mode)}</h3><p>{'<br>'.join(escape(sentence) for sentence in plan.why)}</p>"
        for mode, (plan, _) in runs.items()
        if plan.why
    )
    body = (
        f"<header><h1>Modes compared: {escape(str(result['workload']))}</h1>"
        f"<p class='facts'><span>{escape(result['hardware'])}, {result['date']}</span></p></header>"
        f"<section>{_html_table(result)}<p>{'<br>'.join(escape(line) for line in _findings([result]))}</p></section>"
        f"<section><h2>Predicted and measured</h2>{_image(out / 'compare.png')}</section>"
        f"<section><h2>Timelines of one iteration</h2>{_image(out / 'timelines.png', 'scroll wide')}</section>"
        + (f"<section><h2>Why</h2>{why}</section>" if why else "")
    )
    template = Template(PAGE.read_text())
    page = out / "compare.html"
    page.write_text(template.substitute(title=escape(f"compare {result['workload']}"), body=body))
    return page


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        row["workload"],
        row["mode"] + (" *" if row["chosen"] else ""),
        f"{row['predicted_s']:.3f}",
        f"{row['measured_s']:.3f}",
        f"{row['measured_low_s']:.3f} to {row['measured_high_s']:.3f}",
        f"{100 * row['error']:+.1f}%",
        f"{row['env_steps_per_s']:.0f}",
        f"{row['placement']}; {_groups(row['groups'])}",
    )


def _html_table(result: Mapping[str, Any]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in HEAD)
    rows = "".join(f"<tr>{''.join(f'<td>{escape(cell)}</td>' for cell in _cells(row))}</tr>" for row in result["modes"])
    return f'<div class="card scroll"><table><tr>{head}</tr>{rows}</table></div>'


def _image(path: Path, css: str = "") -> str:
    """The picture on white, as it was drawn; `css` says how it fits a narrow page."""
    data = base64.b64encode(path.read_bytes()).decode()
    image = f'<img alt="{escape(path.stem)}" src="data:image/png;base64,{data}">'
    return f'<figure class="card picture"><div class="{css}">{image}</div></figure>'


def _groups(of_tasks: Sequence[int]) -> str:
    """Groups of environments of each task."""
    return f"{' and '.join(map(str, of_tasks))} group{'s' if max(of_tasks) > 1 or len(of_tasks) > 1 else ''}"
