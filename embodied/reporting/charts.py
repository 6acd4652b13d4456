"""Charts as small inline SVG: they need no network, print well, follow the page's light or dark colours, and
carry the values that the page shows under the pointer in a `data-points` attribute.

A chart's width is in the page's pixels at its usual size; the page scales it. Whatever text is given is
escaped here.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape

Format = Callable[[float], str]

_MAX_POINTS = 600
_MAX_BARS = 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 36


@dataclass(frozen=True)
class Line:
    """A curve. `y` may lack values, which leave a gap; `css` is a colour of the page or any of CSS."""

    name: str
    y: Sequence[float | None]
    css: str = "var(--accent)"
    faint: bool = False


def compact(value: float) -> str:
    """`0.00012` as `1.2e-4`, `1234567` as `1.23M`, `0.98765` as `0.988`."""
    size = abs(value)
    if size == 0:
        return "0"
    if size < 1e-3:
        mantissa, exponent = f"{value:.1e}".split("e")
        return f"{mantissa.removesuffix('.0')}e{int(exponent)}"
    if size < 1e4:
        return f"{value:,.0f}" if size >= 1e3 else f"{value:.3g}"
    rounded = float(f"{value:.3g}")
    limit, unit = next(pair for pair in ((1e9, "G"), (1e6, "M"), (1e3, "k")) if abs(rounded) >= pair[0])
    return f"{rounded / limit:.4g}{unit}"


def percent(value: float) -> str:
    return f"{100 * value:.3g}%"


def lines(
    x: Sequence[float],
    curves: Sequence[Line],
    x_label: str,
    heads: Sequence[str],
    *,
    width: int = 560,
    height: int = 250,
    show: Format = compact,
    y_range: tuple[float, float] | None = None,
    mark_y: float | None = None,
) -> str:
    """Curves over `x`, from 0. `heads[i]` is the first line of what the pointer shows at `x[i]`; `mark_y`
    draws a dashed line. With more than 600 points every n-th is drawn, and the last."""
    keep = _thin(len(x))
    values = [v for curve in curves for v in curve.y if v is not None]
    low, high = y_range or _padded(min(values, default=0.0), max(values, default=1.0))
    frame = _Frame(width, height, (0.0, max(x, default=1.0)), (low, high))
    parts = [frame.grid(x_label, show)]
    if mark_y is not None and low <= mark_y <= high:
        y = frame.y(mark_y)
        parts.append(f'<line class="mark" x1="{_LEFT}" x2="{width - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
    for curve in curves:
        css = f'class="curve{" faint" if curve.faint else ""}" style="stroke:{escape(curve.css)}"'
        parts += [f'<path {css} d="{path}"/>' for path in _paths(frame, x, curve.y, keep)]
    points: list[list[object]] = []
    for i in keep:
        texts = [f"{c.name} {show(v)}" for c in curves if (v := c.y[i]) is not None]
        points.append([round(frame.x(x[i]), 1), heads[i], *texts])
    return _svg(width, height, "".join(parts), points)


def stacked_bars(
    shares: Sequence[Mapping[str, float]],
    x: Sequence[float],
    colours: Mapping[str, str],
    x_label: str,
    *,
    width: int = 560,
    height: int = 250,
) -> str:
    """A bar per iteration, divided into the shares named in `colours`. With more than 150 iterations a bar
    is the mean of several consecutive ones, and says so under the pointer."""
    size = max(1, math.ceil(len(x) / _MAX_BARS))
    groups = [range(start, min(start + size, len(x))) for start in range(0, len(x), size)]
    means = [{n: sum(shares[i].get(n, 0.0) for i in group) / len(group) for n in colours} for group in groups]
    top = max([1.0, *(sum(mean.values()) for mean in means)])
    step = (x[-1] - x[0]) / (len(x) - 1) if len(x) > 1 else 1.0
    frame = _Frame(width, height, (x[0] - step / 2, x[-1] + step / 2), (0.0, top))
    parts, points = [frame.grid(x_label, percent)], []
    for group, mean in zip(groups, means, strict=True):
        left, right = frame.x(x[group[0]] - step / 2), frame.x(x[group[-1]] + step / 2)
        gap = min(1.0, 0.15 * (right - left))
        base = 0.0
        for name, css in colours.items():
            y, base = frame.y(base), base + mean[name]
            rect = f'x="{left:.1f}" y="{frame.y(base):.1f}" width="{right - left - gap:.2f}"'
            parts.append(f'<rect {rect} height="{y - frame.y(base):.2f}" fill="{escape(css)}"/>')
        last = f"–{compact(x[group[-1]])}, mean" if len(group) > 1 else ""
        head = f"{x_label} {compact(x[group[0]])}{last}"
        points.append([round((left + right) / 2, 1), head, *(f"{n} {percent(v)}" for n, v in mean.items())])
    return _svg(width, height, "".join(parts), points)


def trailing_mean(values: Sequence[float | None], window: int) -> list[float | None]:
    """The mean of the last `window` values there are, at each place; None before the first."""
    means: list[float | None] = []
    recent: list[float] = []
    for value in values:
        if value is not None:
            recent = [*recent[-(window - 1) :], value] if window > 1 else [value]
        means.append(sum(recent) / len(recent) if recent else None)
    return means


def ticks(low: float, high: float, about: int) -> list[float]:
    """About so many round numbers within the range, 1, 2 or 5 times a power of ten apart."""
    if not (math.isfinite(high - low) and high > low):
        return [low]
    power = 10.0 ** math.floor(math.log10((high - low) / about))
    steps = [power * factor for factor in (1, 2, 5, 10)]
    step = min(steps, key=lambda step: abs((high - low) / step - about))
    return [n * step for n in range(math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9) + 1)]


class _Frame:
    """The plotting area: maps values to pixels."""

    def __init__(self, width: int, height: int, x: tuple[float, float], y: tuple[float, float]) -> None:
        self._width, self._height = width, height
        self._x, self._y = _wide(*x), _wide(*y)

    def x(self, value: float) -> float:
        low, high = self._x
        return _LEFT + (value - low) / (high - low) * (self._width - _LEFT - _RIGHT)

    def y(self, value: float) -> float:
        low, high = self._y
        return self._height - _BOTTOM - (value - low) / (high - low) * (self._height - _TOP - _BOTTOM)

    def grid(self, x_label: str, show_y: Format) -> str:
        right, bottom = self._width - _RIGHT, self._height - _BOTTOM
        parts = []
        for tick in ticks(*self._y, about=max(3, self._height // 42)):
            y = self.y(tick)
            parts.append(f'<line class="grid" x1="{_LEFT}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" text-anchor="end">{show_y(tick)}</text>')
        for tick in ticks(*self._x, about=max(2, self._width // 90)):
            x = self.x(tick)
            parts.append(f'<line class="tick" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
            parts.append(f'<text x="{x:.1f}" y="{bottom + 16}" text-anchor="middle">{compact(tick)}</text>')
        middle = (_LEFT + right) / 2
        parts.append(f'<line class="axis" x1="{_LEFT}" x2="{right}" y1="{bottom}" y2="{bottom}"/>')
        label = f'<text class="label" x="{middle}" y="{self._height - 4}" text-anchor="middle">'
        return "".join(parts) + f"{label}{escape(x_label)}</text>"


def _wide(low: float, high: float) -> tuple[float, float]:
    """The range, made one that can be divided by: a constant gets room on both sides."""
    return (low, high) if high > low else (low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2)


def _padded(low: float, high: float) -> tuple[float, float]:
    room = 0.06 * (high - low)
    return (0.0 if 0 <= low <= room else low - room), high + room


def _thin(count: int) -> list[int]:
    step = max(1, math.ceil(count / _MAX_POINTS))
    return sorted({*range(0, count, step), count - 1}) if count else []


def _paths(frame: _Frame, x: Sequence[float], y: Sequence[float | None], keep: Sequence[int]) -> list[str]:
    """One path per unbroken stretch of values; a single value is drawn as a dot by the line's round cap."""
    paths: list[list[str]] = [[]]
    for i in keep:
        value = y[i]
        if value is None:
            paths.append([])
        else:
            paths[-1].append(f"{frame.x(x[i]):.1f},{frame.y(value):.1f}")
    return [f"M{' L'.join(path if len(path) > 1 else path * 2)}" for path in paths if path]


def _svg(width: int, height: int, content: str, points: Sequence[Sequence[object]]) -> str:
    data = escape(json.dumps(points, separators=(",", ":"), ensure_ascii=False))
    cursor = f'<line class="cursor" y1="{_TOP}" y2="{height - _BOTTOM}"/>'
    return f'<svg class="chart" viewBox="0 0 {width} {height}" data-points="{data}">{content}{cursor}</svg>'
