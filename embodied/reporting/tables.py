"""An evaluation's result as a Markdown table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

_SUCCESS = ("success once %", "95% interval", "at end %", "95% interval")
_COUNTS = ("trained on", "episodes", "length")
WAIT = "wait"
"""Name of the condition in which the simulator waits for the policy."""
WITHOUT_DELAY = "no delay (wait)"
"""That condition in tables and charts."""


def evaluation_table(result: Mapping[str, Any]) -> str:
    """A row per task, per suite of several tasks and for all, with protocol, policy and notes under it; ends in a
    newline. Where no task has a success, the return takes its place. `trained on` counts the episodes' starts that the
    policy was trained on.

    `result` is the data of `eval.json`. Columns are padded, so that it also reads well where it is not rendered.
    """
    by_success = "success_once" in result
    head = ("task", *_SUCCESS, *_COUNTS, "return") if by_success else ("task", "return", "95% interval", *_COUNTS)
    rows = [_row(item["task"], item, by_success) for item in result["tasks"]]
    if len(result["tasks"]) > 1:
        rows += [_row(f"**{item['suite']}**", item, by_success) for item in result["suites"]]
    if len(result["suites"]) > 1:
        rows.append(_row("**all**", result, by_success))
    lines = table(head, rows)
    if passes := [name for name in result if name.startswith("pass@") and f"{name}_low" in result]:
        cells = [(item["task"], *(cell for name in passes for cell in _rate(item, name))) for item in result["tasks"]]
        lines += ["", *table(("task", *(cell for name in passes for cell in (f"{name} %", "95% interval"))), cells)]
    intervals = "Wilson" if by_success else "Student's t"
    lines += ["", f"Protocol {result['protocol_line']}; intervals: {intervals}."]
    lines += ["", f"Policy: {result['policy_line']}."]
    for note in result["notes"]:
        lines += ["", f"Note: {note}."]
    if "conditions" in result:
        lines += ["", *_conditions(result["conditions"])]
    if "comparison" in result:
        lines += ["", *_comparison(result["comparison"])]
    return "\n".join(lines) + "\n"


def _row(name: str, item: Mapping[str, Any], by_success: bool) -> tuple[str, ...]:
    counts = (trained_on(item["trained_on"]), str(item["episodes"]), f"{item['episode_len']:.1f}")
    if not by_success:
        return name, f"{item['return']:.3f}", f"{item['return_low']:.3f} to {item['return_high']:.3f}", *counts
    return name, *_rate(item, "success_once"), *_rate(item, "success_at_end"), *counts, f"{item['return']:.3f}"


def _rate(item: Mapping[str, Any], key: str) -> tuple[str, str]:
    if key not in item:
        return "–", "–"
    low, high = item[f"{key}_low"], item[f"{key}_high"]
    return f"{100 * item[key]:.1f}", f"{100 * low:.1f} to {100 * high:.1f}"


def trained_on(starts: Mapping[str, Any]) -> str:
    """Number of an evaluation's starts that its policy was trained on, for a cell of a table: `50 of 50`."""
    trained, evaluated = int(starts["trained"]), int(starts["evaluated"])
    if starts["known"] or trained == evaluated:
        return f"{trained} of {evaluated}"
    return f"at least {trained} of {evaluated}" if trained else "not known"


def _conditions(conditions: Sequence[Mapping[str, Any]]) -> list[str]:
    """A row for each axis and level, or method and delay; the rows above are of the episodes without."""
    delay = conditions[0].get("kind") == "delay"
    by = "delay, env steps" if delay else "perturbed by"
    if "difference" not in conditions[0]:
        rows = [
            (_named(row), f"{row['return']:.3f}", f"{row['return_low']:.3f} to {row['return_high']:.3f}")
            for row in conditions
        ]
        return table((by, "return", "95% interval"), rows)
    waits = conditions[0]["axis"] == WAIT
    only = (
        ("only without", "only delayed") if waits else ("only delayed" if delay else "only perturbed", "only without")
    )
    head = (by, *_SUCCESS[:2], "difference, points", "95% interval", "p", *only)
    rows = [
        (
            _named(row),
            *_rate(row, "success_once"),
            *_difference("", row)[1:3],
            f"{row['p_value']:.2g}",
            str(row["first_only"]),
            str(row["second_only"]),
        )
        for row in conditions
    ]
    what, which = ("delay", "the episodes without a delay") if delay else ("perturbation", "the unperturbed episodes")
    said = f"{which}. Under each {what} the same episodes are repeated: difference from those without"
    if waits:
        said = "the episodes under the delay of the training. The same are repeated without: difference from the former"
    tests = "with Tango's interval for paired proportions and McNemar's exact test"
    return [*table(head, rows), "", f"The tables above are of {said}, {tests}."]


def _named(row: Mapping[str, Any]) -> str:
    """`camera 3`, `objects 5 from step 20`."""
    if row["axis"] == WAIT:
        return WITHOUT_DELAY
    return f"{row['axis']} {row['level']}" + (f" from step {row['from_step']}" if row["from_step"] else "")


def _comparison(comparison: Mapping[str, Any]) -> list[str]:
    head = ("task", "difference, points", "95% interval", "episodes", "only this", "only the other")
    rows = [_difference(item["task"], item) for item in comparison["tasks"]]
    if len(rows) > 1:
        rows.append(_difference("**all**", comparison))
    against = (
        f"Against {comparison['against']} on the same episodes ({100 * comparison['success_rate']:.1f}% there); "
        f"McNemar's exact test: p = {comparison['p_value']:.3g}; intervals: Tango's for paired proportions."
    )
    lines = [*table(head, rows), "", against]
    if perturbed := comparison.get("conditions"):
        head = ("perturbed by", *head[1:])
        lines += ["", *table(head, [_difference(_named(row), row) for row in perturbed])]
    return lines


def _difference(name: str, item: Mapping[str, Any]) -> tuple[str, ...]:
    return (
        name,
        f"{100 * item['difference']:+.1f}",
        f"{100 * item['difference_low']:+.1f} to {100 * item['difference_high']:+.1f}",
        str(item["episodes"]),
        str(item["first_only"]),
        str(item["second_only"]),
    )


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[column]) for row in (head, *rows)) for column in range(len(head))]
    rule = ["-" * widths[0], *("-" * (width - 1) + ":" for width in widths[1:])]
    return [_line(head, widths), _line(rule, widths), *(_line(row, widths) for row in rows)]


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    first, *others = (
        cell.ljust(width) if column == 0 else cell.rjust(width)
        for column, (cell, width) in enumerate(zip(cells, widths, strict=True))
    )
    return f"| {' | '.join((first, *others))} |"
