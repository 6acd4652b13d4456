"""One iteration as a picture: a row per track, a bar per span coloured by component, arrows if they fit.

The SVG is written here and not by matplotlib, as the charts are: each of up to some thousand bars has a tooltip of its
own, and bars that are too close to be told apart are drawn as one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape

from embodied.reporting.charts import compact, ticks
from embodied.run.trace import COMPONENTS, ITERATIONS, Span, track_order

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
