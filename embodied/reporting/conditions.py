"""Results under perturbations or delays on the page: success by level, a curve for each axis, and a table.

A delay has the method in place of an axis, and its env steps in place of a level.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from embodied.config.schema import delay_of
from embodied.reporting import charts
from embodied.reporting.tables import WITHOUT_DELAY

LONGEST_NAME = 40
MOST_CONDITIONS = 1000
MOST_LEVEL = 1000
"""Largest level that a page shows of a result; the result may come from other programs."""

Rate = tuple[float, float, float]
"""A number with the ends of its interval."""


@dataclass(frozen=True)
class ConditionResult:
    """Result of the episodes of one axis and level; level 0 of every axis is the unperturbed ones', or those without a
    delay. The first result of an evaluation is that of the episodes which the others repeat."""

    axis: str
    level: int
    from_step: int
    """Env steps before the change; 0: the episodes begin with it."""
    episodes: int
    success: Rate
    difference: Rate | None = None
    """From the unperturbed episodes."""
    p_value: float | None = None
    delay: bool = False
    """True if episodes are repeated under delays."""

    @property
    def name(self) -> str:
        """The condition for people."""
        if self.delay:
            return f"{self.curve}, {_steps(self.level)}" if self.level else WITHOUT_DELAY
        if self.level == 0 and self.difference is None:
            return "unperturbed"
        return f"{self.curve}, level {self.level}"

    @property
    def curve(self) -> str:
        return self.axis + (f" from step {self.from_step}" if self.from_step else "")


def read_conditions(result: Mapping[str, Any]) -> list[ConditionResult]:
    """The conditions of an evaluation's result whose tasks have success, first that of the episodes which the others
    repeat: unperturbed, or under the delay of the training. Empty where nothing was perturbed. Raises `ValueError`,
    `KeyError` or `TypeError` for other data."""
    rows = result.get("conditions") or ()
    if not isinstance(rows, Sequence) or len(rows) > MOST_CONDITIONS:
        raise ValueError("its conditions are no list, or too many")
    if not rows or "success_rate" not in result:
        return []
    begin = {"axis": "unperturbed", "level": 0, "from_step": 0, "kind": rows[0].get("kind")}
    if begin["kind"] == "delay" and (trained := result["protocol"].get("trained_delay")):
        method, delay = str(trained["method"]), str(trained["delay"])
        drawn = delay_of(delay)
        begin |= {"axis": method if len(drawn) == 1 else f"{method} {delay}", "level": drawn[-1][0]}
    return [_condition({**result, **begin}), *map(_condition, rows)]


def _condition(row: Mapping[str, Any]) -> ConditionResult:
    level, step, episodes = int(row["level"]), int(row["from_step"]), int(row["episodes"])
    success = float(row["success_rate"]), float(row["success_low"]), float(row["success_high"])
    if not all(0 <= rate <= 1 for rate in success) or not 0 <= level <= MOST_LEVEL or not 0 <= step <= 10**6:
        raise ValueError(f"a condition of level {level} from step {step} with success {success}")
    difference = None
    if "difference" in row:
        difference = float(row["difference"]), float(row["difference_low"]), float(row["difference_high"])
        if not all(-1 <= number <= 1 for number in difference):
            raise ValueError(f"a difference of {difference}")
    p_value = float(row["p_value"]) if "p_value" in row else None
    axis, delay = str(row["axis"])[:LONGEST_NAME], row.get("kind") == "delay"
    return ConditionResult(axis, level, step, episodes, success, difference, p_value, delay)


def in_curves(
    results: Sequence[ConditionResult],
) -> tuple[ConditionResult, dict[str, list[ConditionResult]]]:
    """The result with which every curve begins, of the unperturbed episodes or of those without a delay, and the other
    ones by curve."""
    begin = next((one for one in results if one.delay and not one.level), results[0])
    curves: dict[str, list[ConditionResult]] = {}
    for one in results:
        if one is not begin:
            curves.setdefault(one.curve, []).append(one)
    return begin, curves


def _steps(count: int) -> str:
    return f"{count} env step{'s' if count > 1 else ''}"


def success_by_level(results: Sequence[ConditionResult], width: int = 420, height: int = 230) -> str:
    """SVG of success by level or delay, a curve for each axis from the episodes without on; the bands are 95%
    intervals."""
    begin, others = in_curves(results)
    levels = sorted({0, *(one.level for one in results)})
    curves = []
    for number, (name, members) in enumerate(others.items()):
        known = {0: begin.success, **{one.level: one.success for one in members}}
        found = [known.get(level) for level in levels]
        curves.append(
            charts.Line(
                name,
                [None if rate is None else rate[0] for rate in found],
                colour=charts.COLOURS[number % len(charts.COLOURS)],
                band=[None if rate is None else rate[1:] for rate in found],
                end=name,
            )
        )
    heads = [begin.name if level == 0 else _steps(level) if begin.delay else f"level {level}" for level in levels]
    return charts.lines(
        [float(level) for level in levels],
        curves,
        "delay in env steps" if begin.delay else "level of the perturbation",
        heads,
        width=width,
        height=height,
        show=charts.percent,
        y_range=(0.0, 1.0),
    )


def condition_cells(one: ConditionResult) -> tuple[str, ...]:
    """Cells of a table on the page: condition, success, difference, p-value, episodes."""
    what = one.name
    rate, low, high = one.success
    success = f"{charts.percent(rate)} <small>{charts.percent(low)} to {charts.percent(high)}</small>"
    if one.difference is None or one.p_value is None:
        return escape(what), success, "–", "–", str(one.episodes)
    away, least, most = (f"{100 * number:+.1f}" for number in one.difference)
    return escape(what), success, f"{away} <small>{least} to {most}</small>", f"{one.p_value:.2g}", str(one.episodes)
