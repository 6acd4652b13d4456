"""Plans as pictures: timelines of one iteration, predicted or measured, and predicted beside measured times."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from embodied.run.trace import COMPONENTS, Span
from schedulers import Simulation

OTHER = "#6b7280"
CLOSE_UP_ROUNDS = 3
"""Rounds of the loop that a close-up shows."""
MOST_TRACKS = 24


@dataclass(frozen=True)
class Bar:
    """A component at work."""

    track: str
    component: str
    start_s: float
    end_s: float


def bars_of(simulation: Simulation) -> list[Bar]:
    return [Bar(e.track, e.component, e.start_s, e.end_s) for e in simulation.events]


def bars_of_spans(spans: Sequence[Span], begin_ns: int) -> list[Bar]:
    """Bars of a measured iteration's work; waiting is left out."""
    found = []
    for span in spans:
        component = _component(span)
        if component is not None:
            found.append(Bar(span.track, component, (span.start_ns - begin_ns) / 1e9, (span.end_ns - begin_ns) / 1e9))
    return found


def draw_plan(path: Path, simulations: Mapping[str, Simulation]) -> None:
    """A row of pictures per plan: the whole iteration, and a close-up of the loop's middle."""
    draw_timelines(path, {name: bars_of(simulation) for name, simulation in simulations.items()})


def draw_timelines(path: Path, timelines: Mapping[str, Sequence[Bar]]) -> None:
    """Each timeline whole on the left and, on the right, a few rounds of its loop."""
    plt = _pyplot()
    heights = [1.1 + 0.28 * min(MOST_TRACKS, len({bar.track for bar in bars})) for bars in timelines.values()]
    figure, axes = plt.subplots(
        len(timelines), 2, figsize=(13, sum(heights)), squeeze=False, height_ratios=heights, layout="constrained"
    )
    longest = max((bar.end_s for bars in timelines.values() for bar in bars), default=1.0)
    for (name, bars), (whole, close) in zip(timelines.items(), axes, strict=True):
        _draw(whole, bars, 0.0, longest)
        whole.set_title(name, loc="left", fontsize=10)
        start, end = _middle(bars)
        _draw(close, bars, start, end)
        close.set_title("a few rounds of the loop", loc="left", fontsize=9, color=OTHER)
        close.set_yticklabels([])
    shown = list(dict.fromkeys(bar.component for bars in timelines.values() for bar in bars))
    handles = [plt.Rectangle((0, 0), 1, 1, color=_colour(name)) for name in shown]
    figure.legend(handles, shown, loc="outside lower center", ncols=len(shown), frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_bars(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Predicted beside measured iteration times; rows have `workload`, `mode`, `predicted_s`, `measured_s` and the
    interval `measured_low_s`, `measured_high_s`."""
    plt = _pyplot()
    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure, axes = plt.subplots(
        1, len(workloads), figsize=(1.5 + 3.2 * len(workloads), 3.4), squeeze=False, layout="constrained"
    )
    for workload, axis in zip(workloads, axes[0], strict=True):
        mine = [row for row in rows if row["workload"] == workload]
        at = range(len(mine))
        axis.bar([x - 0.2 for x in at], [row["predicted_s"] for row in mine], 0.38, color="#b8c4d6", label="predicted")
        measured = [row["measured_s"] for row in mine]
        error = [
            [row["measured_s"] - row["measured_low_s"] for row in mine],
            [row["measured_high_s"] - row["measured_s"] for row in mine],
        ]
        axis.bar([x + 0.2 for x in at], measured, 0.38, yerr=error, color="#3b76c4", ecolor="#1f2937", label="measured")
        axis.set_xticks(list(at), [row["mode"] + (" *" if row.get("chosen") else "") for row in mine], fontsize=8)
        axis.set_title(workload, fontsize=9)
        axis.set_ylabel("s per iteration")
        axis.spines[["top", "right"]].set_visible(False)
    figure.legend(*axes[0][0].get_legend_handles_labels(), loc="outside lower center", ncols=2, frameon=False)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _draw(axis: Any, bars: Sequence[Bar], start: float, end: float) -> None:
    tracks = list(dict.fromkeys(bar.track for bar in bars))[:MOST_TRACKS]
    for row, track in enumerate(tracks):
        mine = [bar for bar in bars if bar.track == track and bar.end_s > start and bar.start_s < end]
        for component in dict.fromkeys(bar.component for bar in mine):
            pieces = [(bar.start_s, bar.end_s - bar.start_s) for bar in mine if bar.component == component]
            axis.broken_barh(pieces, (row - 0.4, 0.8), color=_colour(component), linewidth=0)
    axis.set_yticks(range(len(tracks)), tracks, fontsize=8)
    axis.set_ylim(len(tracks) - 0.4, -0.6)
    axis.set_xlim(start, max(end, start + 1e-9))
    axis.set_xlabel("s", fontsize=8, loc="right", labelpad=0)
    axis.tick_params(labelsize=8)
    axis.spines[["top", "right"]].set_visible(False)


def _middle(bars: Sequence[Bar]) -> tuple[float, float]:
    """A stretch that holds a few of the policy's calls, from the middle of the loop."""
    calls = sorted((bar.start_s, bar.end_s) for bar in bars if bar.component == "policy")
    if len(calls) < 2 * CLOSE_UP_ROUNDS:
        return 0.0, max((bar.end_s for bar in bars), default=1.0)
    first = len(calls) // 2 - CLOSE_UP_ROUNDS
    return calls[first][0], calls[first + 2 * CLOSE_UP_ROUNDS - 1][1]


def _component(span: Span) -> str | None:
    kind = without_task(span.track.split()[0])
    if kind == "policy":
        return "policy" if span.name.startswith("act") else "transport" if span.name == "transport" else None
    if kind == "learner":
        return "learner"
    if kind in ("physics", "render"):
        return "render" if span.name.startswith("draw") else "physics"
    return None


def _colour(component: str) -> str:
    return COMPONENTS.get(without_task(component), OTHER)


def without_task(component: str) -> str:
    """`physics` of `physics-1`: tasks' simulators look alike."""
    name, _, number = component.rpartition("-")
    return name if name and number.isdigit() else component


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    return plt
