"""Charts of the page, drawn by matplotlib as inline SVG: they need no network, print well, follow the page's light or
dark colours, and carry the values that the page shows under the pointer in a `data-points` attribute.

A chart's width is in the page's pixels at its usual size; the page scales it. Whatever text is given is escaped.
"""

from __future__ import annotations

import io
import json
import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Format = Callable[[float], str]

COLOURS = ("#3b76c4", "#e58a1f", "#1f9e8f", "#8d61c4", "#cc4b63", "#7d8590")
"""Colours of several curves in one chart, distinct on white, on black, and to the colour-blind."""

_MAX_POINTS = 600
_DOTTED = 40
"""Largest number of places at which a curve has a dot at each value."""
_END_WIDTH, _END_HEIGHT, _END_GAP = 140, 14, 6
"""Pixels that the name at a curve's end may be wide, that it is high, and that it stands right of the curve."""
_MAX_BARS = 150
_LEFT, _RIGHT, _TOP, _BOTTOM = 46, 12, 10, 36
_TEXT, _GRID, _AXIS, _MARK, _CURVE = "#000001", "#000002", "#000003", "#000004", "#000005"
_COLOURS = {
    _TEXT: "var(--muted)",
    _GRID: "var(--grid)",
    _AXIS: "var(--edge)",
    _MARK: "var(--good)",
    _CURVE: "var(--accent)",
}
"""Matplotlib knows no variables of CSS: it draws in colours that stand for them."""


@dataclass(frozen=True)
class Line:
    """A curve. `y` may lack values, which leave a gap."""

    name: str
    y: Sequence[float | None]
    faint: bool = False
    colour: str = _CURVE
    band: Sequence[tuple[float, float] | None] = ()
    """Low and high at each place, filled in; none, where there is nothing to fill."""
    bars: Sequence[tuple[float, float] | None] = ()
    """Low and high of single values, each drawn as a bar through its point; none: values are joined to a curve."""
    dashes: tuple[float, float] | None = None
    """Lengths of a dash and of the gap after it, in widths of the line; None: the curve is not dashed."""
    end: str = ""
    """Name that is written at the curve's end."""


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


def exact(value: float, show: Format = compact) -> str:
    """A value as the pointer shows it, in six digits; in percent where `show` is `percent`."""
    return f"{100 * value:.6g}%" if show is percent else f"{value:.6g}"


def lines(
    x: Sequence[float],
    curves: Sequence[Line],
    x_label: str,
    heads: Sequence[str],
    *,
    width: int = 420,
    height: int = 210,
    show: Format = compact,
    y_range: tuple[float, float] | None = None,
    mark_y: float | None = None,
) -> str:
    """Curves over `x`, from 0. `heads[i]` is the first line of what the pointer shows at `x[i]`; `mark_y`
    draws a dashed line. With more than 600 points every n-th is drawn, and the last."""
    keep = _thin(len(x))
    values = [v for curve in curves for v in curve.y if v is not None]
    y_range = y_range or _padded(min(values, default=0.0), max(values, default=1.0))
    ends = [_fitting(curve.end) for curve in curves]
    right = _RIGHT + math.ceil(max(map(_text_width, ends), default=0.0))
    whole = all(float(place).is_integer() for place in x)
    axes = _axes(width, height, (0.0, max(x, default=1.0)), y_range, x_label, show, right=right, whole_x=whole)
    if mark_y is not None:
        axes.axhline(mark_y, color=_MARK, linewidth=1, dashes=(5, 4))
    clip = not all(y_range[0] <= value <= y_range[1] for value in values)  # a dot on the edge is shown whole
    for curve in curves:
        if curve.bars:
            _draw_bars(axes, x, curve)
            continue
        y = np.array([math.nan if (v := curve.y[i]) is None else v for i in keep])
        if curve.band:
            low, high = np.array([curve.band[i] or (math.nan, math.nan) for i in keep]).T
            axes.fill_between([x[i] for i in keep], low, high, color=curve.colour, alpha=0.18, linewidth=0)
        axes.plot(
            [x[i] for i in keep],
            y,
            color=curve.colour,
            linewidth=1.25 if curve.faint else 2.0,
            alpha=0.45 if curve.faint else 1.0,
            linestyle="-" if curve.dashes is None else (0, curve.dashes),
            marker="o",
            markersize=2 if len(keep) > _DOTTED else 3.5,
            markeredgewidth=0,
            clip_on=clip,
            markevery=_alone(y) if len(keep) > _DOTTED else None,
        )
    _name_ends(axes, x, curves, ends)
    points: list[list[object]] = []
    for i in keep:
        texts = [f"{c.name} {exact(v, show)}" for c in curves if (v := c.y[i]) is not None]
        points.append([_pixel(axes, x[i]), heads[i], *texts])
    return _svg(axes, points)


def _name_ends(axes: Axes, x: Sequence[float], curves: Sequence[Line], names: Sequence[str]) -> None:
    """`names` at the curves' last values, moved apart where they would cover each other, within the height of the
    plot. Where it has no room for all, those of faint curves are left out first, and a last line counts them."""
    ends: list[tuple[float, float, str, Line]] = []
    for curve, name in zip(curves, names, strict=True):
        known = [(x[i], value) for i, value in enumerate(curve.y) if value is not None]
        if name and known:
            across, up = axes.transData.transform(known[-1])
            ends.append((float(across), float(up), name, curve))
    figure, plot = axes.figure, axes.bbox
    lowest, highest = float(plot.y0) + _END_HEIGHT / 2, float(plot.y1) - _END_HEIGHT / 2
    room = int((highest - lowest) // _END_HEIGHT) + 1
    if len(ends) > room:
        ends.sort(key=lambda end: end[3].faint)  # in the order of the curves otherwise
        more, ends = len(ends) - room + 1, ends[: room - 1]
        right = max(across for across, *_ in ends)
        ends.append((right, lowest, f"and {more} more", Line("", (), colour=_TEXT)))
    ends.sort(key=lambda end: end[1])
    heights = _apart([up for _, up, *_ in ends], lowest, highest, _END_HEIGHT)
    for (across, _, name, curve), up in zip(ends, heights, strict=True):
        place = (across + _END_GAP) / figure.bbox.width, up / figure.bbox.height
        figure.text(*place, name, color=curve.colour, fontsize=11.5, va="center_baseline", parse_math=False)


def _apart(wanted: Sequence[float], lowest: float, highest: float, gap: float) -> list[float]:
    """Places from `lowest` to `highest`, at least `gap` apart and near the wanted ones, which are sorted. All must
    have room."""
    places: list[float] = []
    for number, place in enumerate(wanted):
        least = lowest if not places else places[-1] + gap
        most = highest - gap * (len(wanted) - 1 - number)
        places.append(min(max(place, least), most))
    return places


def _fitting(name: str) -> str:
    """The name; where it is wider than the names at curves' ends may be, without its middle: names of runs often begin
    alike, and end in the seed."""
    kept, shown = len(name), name
    while _text_width(shown) > _END_WIDTH:
        kept -= 1
        shown = name[: (kept + 1) // 2] + "…" + name[len(name) - kept // 2 :]
    return shown


def _text_width(text: str) -> float:
    """Pixels that text of the charts' size is wide, in a wide font: a browser's is hardly wider. Letters of East Asian
    scripts are as wide as they are high."""
    wide = sum(unicodedata.east_asian_width(letter) in "WF" for letter in text)
    broad = sum(letter in "mwMW@%…—" for letter in text)
    capital = sum(letter.isupper() and letter not in "MW" for letter in text)
    return 11.5 * wide + 11.3 * broad + 8.6 * capital + 7.2 * (len(text) - wide - broad - capital)


def _draw_bars(axes: Axes, x: Sequence[float], curve: Line) -> None:
    """Draw all bars, also where a curve with the same number of points would leave some out."""
    known = [(i, v, bar) for i, (v, bar) in enumerate(zip(curve.y, curve.bars, strict=True)) if v is not None and bar]
    places = [x[i] for i, _, _ in known]
    lows, highs = ([bar[end] for *_, bar in known] for end in (0, 1))
    # Not clipped: a point at 100% lies on the edge.
    axes.vlines(places, lows, highs, color=curve.colour, linewidth=1.5, clip_on=False)
    axes.plot(
        places, [v for _, v, _ in known], color=curve.colour, linewidth=0, marker="o", markersize=4, clip_on=False
    )


def stacked_bars(
    shares: Sequence[Mapping[str, float]],
    x: Sequence[float],
    colours: Mapping[str, str],
    x_label: str,
    *,
    width: int = 420,
    height: int = 210,
) -> str:
    """A bar per iteration, divided into the shares named in `colours`. With more than 150 iterations a bar
    is the mean of several consecutive ones, and says so under the pointer."""
    size = max(1, math.ceil(len(x) / _MAX_BARS))
    groups = [range(start, min(start + size, len(x))) for start in range(0, len(x), size)]
    means = {n: np.array([np.mean([shares[i].get(n, 0.0) for i in group]) for group in groups]) for n in colours}
    step = (x[-1] - x[0]) / (len(x) - 1) if len(x) > 1 else 1.0
    lefts = np.array([x[group[0]] - step / 2 for group in groups])
    rights = np.array([x[group[-1]] + step / 2 for group in groups])
    top_share = max(1.0, float(np.sum(list(means.values()), 0).max()))
    axes = _axes(width, height, (float(lefts[0]), float(rights[-1])), (0.0, top_share), x_label, percent)
    edges, base = np.append(lefts, rights[-1]), np.zeros(len(groups) + 1)
    for name, colour in colours.items():
        top = base + np.append(means[name], 0.0)
        axes.fill_between(edges, base, top, step="post", color=colour, linewidth=0)  # a bar each would take seconds
        base = top
    points: list[list[object]] = []
    for number, group in enumerate(groups):
        last = f"–{compact(x[group[-1]])}, mean" if len(group) > 1 else ""
        texts = [f"{name} {percent(mean[number])}" for name, mean in means.items()]
        middle = float(lefts[number] + rights[number]) / 2
        points.append([_pixel(axes, middle), f"{x_label} {compact(x[group[0]])}{last}", *texts])
    return _svg(axes, points)


def standalone(svg: str) -> str:
    """A chart of the page as a separate file, in colours on white."""
    colours = "--muted:#57606a;--grid:#e6e8eb;--edge:#9aa2ab;--good:#1f9e8f;--accent:#3b76c4"
    style = f"<style>svg{{{colours};background:#fff;font-family:sans-serif}} .cursor{{display:none}}</style>"
    opening, rest = svg.split(">", 1)
    return f'{opening} xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink">{style}{rest}\n'


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
    """About `count` round numbers or fewer within the range, 1, 2 or 5 times a power of ten apart."""
    from matplotlib.ticker import MaxNLocator

    if not (math.isfinite(high - low) and high > low):
        return [low]
    found = MaxNLocator(about, steps=[1, 2, 5, 10], min_n_ticks=3).tick_values(low, high)
    room = 1e-9 * (high - low)
    return [float(tick) for tick in found if low - room <= tick <= high + room]


def _axes(
    width: int,
    height: int,
    x_range: tuple[float, float],
    y_range: tuple[float, float],
    x_label: str,
    show_y: Format,
    *,
    right: int = _RIGHT,
    whole_x: bool = False,
) -> Axes:
    """Axes of a chart: one unit of the figure is a pixel of the page. With `whole_x` there is no tick between whole
    numbers."""
    from matplotlib.figure import Figure  # takes half a second: only where it is used

    figure = Figure((width / 72, height / 72), dpi=72, facecolor="none")
    inner = (_LEFT / width, _BOTTOM / height, 1 - (_LEFT + right) / width, 1 - (_TOP + _BOTTOM) / height)
    axes = figure.add_axes(inner, facecolor="none", axisbelow=True)
    axes.spines[["top", "left", "right"]].set_visible(False)
    axes.spines["bottom"].set_color(_AXIS)
    axes.set_xlabel(x_label, fontsize=12, color=_TEXT, labelpad=2, parse_math=False)
    (first, last), (bottom, top) = _wide(*x_range), _wide(*y_range)
    x_ticks, y_ticks = ticks(first, last, (width - right) // 80), ticks(bottom, top, height // 36)
    if whole_x:
        x_ticks = [tick for tick in x_ticks if tick.is_integer()]
    axes.set_xticks(x_ticks, _labels(x_ticks, compact))
    axes.set_yticks(y_ticks, _labels(y_ticks, show_y))
    axes.set_xlim(first, last)
    axes.set_ylim(bottom, top)
    axes.grid(axis="y", color=_GRID, linewidth=1)
    axes.tick_params(labelsize=11.5, color=_AXIS, labelcolor=_TEXT)
    axes.tick_params(axis="y", length=0)
    return axes


def _labels(values: Sequence[float], show: Format) -> list[str]:
    """Labels by `show`; if two are equal, with enough digits to distinguish them."""
    texts, digits = [show(value) for value in values], 4
    while len(set(texts)) < len(texts) and digits < 16:
        texts, digits = [f"{value:.{digits}g}" for value in values], digits + 1
    return texts


def _alone(y: npt.NDArray[np.float64]) -> list[int]:
    """Positions of single values between gaps, which no line shows."""
    known = np.concatenate([[False], np.isfinite(y), [False]])
    return [int(i) for i in np.flatnonzero(known[1:-1] & ~known[:-2] & ~known[2:])]


def _pixel(axes: Axes, x: float) -> float:
    return round(float(axes.transData.transform((x, 0.0))[0]), 1)


def _wide(low: float, high: float) -> tuple[float, float]:
    """The range, made one that can be divided by: a constant gets room on both sides."""
    return (low, high) if high > low else (low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2)


def _padded(low: float, high: float) -> tuple[float, float]:
    room = 0.06 * (high - low)
    return (0.0 if 0 <= low <= room else low - room), high + room


def _thin(count: int) -> list[int]:
    step = max(1, math.ceil(count / _MAX_POINTS))
    return sorted({*range(0, count, step), count - 1}) if count else []


def _svg(axes: Axes, points: Sequence[Sequence[object]]) -> str:
    """The figure as an element of the page, in the page's colours and font, with a cursor that the page moves."""
    import matplotlib

    out = io.StringIO()
    nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    # Text stays text; names of definitions, which all charts of the page share, depend on what is defined alone.
    figure = axes.get_figure(root=True)
    assert figure is not None
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "charts"}):
        figure.savefig(out, format="svg", metadata=nothing)
    drawn = out.getvalue()
    content = drawn[drawn.index(">", drawn.index("<svg")) + 1 :]
    for stand_in, css in _COLOURS.items():
        content = content.replace(stand_in, css)
    width, height = (round(side) for side in figure.bbox.size)
    data = escape(json.dumps(points, separators=(",", ":"), ensure_ascii=False))
    cursor = f'<line class="cursor" y1="{_TOP}" y2="{height - _BOTTOM}"/>'
    opening = f'<svg class="chart" viewBox="0 0 {width} {height}" data-points="{data}">'
    return opening + content.replace("</svg>", f"{cursor}</svg>").strip()
