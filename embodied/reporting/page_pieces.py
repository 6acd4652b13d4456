"""What the pages of runs are put together from: sections, cards and what is written on them. All return HTML."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from html import escape

from embodied.reporting import charts


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


def legend(colours: Mapping[str, str]) -> str:
    """What each colour stands for; the names are HTML."""
    return "".join(
        f'<span class="legend"><i style="background:{css}"></i>{name}</span>' for name, css in colours.items()
    )


def time_unit(longest_s: float) -> tuple[float, str]:
    """Seconds in the unit in which times up to `longest_s` are best read, and the unit's name."""
    if longest_s >= 2 * 3600:
        return 3600.0, "h"
    return (60.0, "min") if longest_s >= 2 * 60 else (1.0, "s")


def interval(low: float, high: float) -> str:
    """Two rates as `45.6% to 59.3%`."""
    return f"{charts.percent(low)} to {charts.percent(high)}"
