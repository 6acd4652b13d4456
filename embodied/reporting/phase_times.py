"""Phase times: an iteration's rollout, update and rest, predicted beside measured. They say why the plan that was
predicted best was not the fastest measured, where it was not."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from embodied.reporting.plan_picture import Bar, without_task

IN_ROLLOUT = ("physics", "render", "policy", "transport")
"""Components whose work is the rollout; that of all others is the update."""
PHASES = {
    "rollout_s": "rollout",
    "waiting_s": "rollout, no component at work",
    "update_s": "update",
    "rest_s": "sync and the rest",
}
"""Fields of `PhaseTimes` and their names on a page."""


@dataclass(frozen=True)
class PhaseTimes:
    """Seconds of one iteration. Rollout, update and rest add up to it, unless rollout and update overlap."""

    rollout_s: float
    """From the beginning of its first component's work to the end of the last's."""
    waiting_s: float
    """Part of the rollout in which no component is at work: messages, and waiting for the processor."""
    update_s: float
    """From the beginning of the update's work to its end."""
    rest_s: float
    """Outside both: weight sync, switches between phases, sending of trajectories."""


def phase_times(bars: Iterable[Bar], seconds: float) -> PhaseTimes:
    """The phases of an iteration, from the times when its components work; work outside the iteration is cut off."""
    rollout: list[tuple[float, float]] = []
    update: list[tuple[float, float]] = []
    for bar in bars:
        start, end = max(bar.start_s, 0.0), min(bar.end_s, seconds)
        if start < end:
            (rollout if without_task(bar.component) in IN_ROLLOUT else update).append((start, end))
    extents = [extent for extent in (_extent(rollout), _extent(update)) if extent is not None]
    lengths = [_covered([extent]) if (extent := _extent(times)) else 0.0 for times in (rollout, update)]
    return PhaseTimes(lengths[0], lengths[0] - _covered(rollout), lengths[1], seconds - _covered(extents))


def rows_of(predicted: PhaseTimes, measured: PhaseTimes) -> dict[str, dict[str, float]]:
    """The phases as plain data: `rollout_s` to its `predicted` and `measured` seconds, and so on."""
    ahead, found = asdict(predicted), asdict(measured)
    return {name: {"predicted": ahead[name], "measured": found[name]} for name in PHASES}


def why_not_fastest(modes: Sequence[Mapping[str, Any]]) -> list[str]:
    """Sentences on the plan that was predicted best and the fastest measured. `modes` are the rows of a comparison."""
    chosen = next(row for row in modes if row["chosen"])
    fastest = min(modes, key=lambda row: row["measured_s"])
    best, first = chosen["mode"], fastest["mode"]
    if chosen is fastest:
        return [f"{best} (*) was predicted best, and was the fastest measured."]
    said = [
        f"{best} (*) was predicted best ({chosen['predicted_s']:.3f} s; {first} {fastest['predicted_s']:.3f} s), and "
        f"{first} was the fastest measured ({fastest['measured_s']:.3f} s; {best} {chosen['measured_s']:.3f} s, "
        f"{chosen['measured_s'] / fastest['measured_s'] - 1:.1%} longer)."
    ]
    gaps = {
        name: [chosen["phases"][name][kind] - fastest["phases"][name][kind] for kind in ("predicted", "measured")]
        for name in PHASES
        if name != "waiting_s"
    }
    parts = [f"{PHASES[name]} {ahead:+.3f} predicted, {found:+.3f} measured" for name, (ahead, found) in gaps.items()]
    said.append(f"Seconds of {best} minus those of {first}: {'; '.join(parts)}.")
    reason = max(gaps, key=lambda name: gaps[name][1] - gaps[name][0])
    said.append(f"What was not predicted is mostly in this phase: {PHASES[reason]}.")
    if chosen["measured_low_s"] <= fastest["measured_high_s"]:
        said.append("Their 95% intervals overlap: these measurements do not tell the two apart.")
    return said


def _extent(times: Sequence[tuple[float, float]]) -> tuple[float, float] | None:
    return (min(start for start, _ in times), max(end for _, end in times)) if times else None


def _covered(times: Iterable[tuple[float, float]]) -> float:
    """Seconds that lie in at least one of the stretches."""
    covered, until = 0.0, 0.0
    for start, end in sorted(times):
        covered += max(0.0, end - max(start, until))
        until = max(until, end)
    return covered
