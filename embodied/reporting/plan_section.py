"""The report's section on the plan: why it was chosen, and predicted beside measured times."""

from __future__ import annotations

import statistics
from html import escape
from pathlib import Path
from typing import Any

from embodied.files import read_json
from embodied.reporting.run_record import LARGEST, RunFolder
from embodied.run.trace import natural_order


def plan_section(run: RunFolder) -> str:
    """Nothing where nothing was planned; a plan that cannot be read costs only its own paragraph.

    A run has one plan; of several tasks, earlier versions wrote one for each.
    """
    paths = [path for path in run.path.glob("plan*.json") if path.is_file()]
    paths.sort(key=lambda path: (path.stem != "plan", natural_order(path.stem)))  # the first task's has no number
    parts = [_plan(path) for path in paths]
    parts += [line for line in (_kept(run, paths), _wire(run)) if line]
    return f"<section><h2>Plan</h2>{''.join(parts)}</section>" if parts else ""


def _plan(path: Path) -> str:
    data = _read(path)
    if data is None:
        return f'<p class="notice">{escape(path.name)} cannot be read.</p>'
    why = data.get("why")
    if not isinstance(why, list) or not why:
        why = [f"{data.get('mode', 'a plan')}, edited by hand or without reasons."]
    return f"<p><b>{escape(path.name)}</b><br>{'<br>'.join(escape(str(sentence)) for sentence in why)}</p>"


def _kept(run: RunFolder, paths: list[Path]) -> str:
    """Predicted beside measured. Where every task had a plan, tasks followed one another: the predictions add up."""
    predictions = [value for value in map(_predicted, map(_read, paths)) if value is not None]
    times = [value for value in run.column("time/iteration_s") if value]
    if not paths or not times or len(predictions) < len(paths):
        return ""
    predicted, measured = sum(predictions), statistics.median(times)
    return (
        f"<p>Predicted {predicted:.3g} s per iteration, measured {measured:.3g} s (median of {len(times)}): "
        f"{predicted / measured - 1:+.0%}.</p>"
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
