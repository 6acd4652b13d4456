"""The live display of a run: a table in a terminal; elsewhere now and then a line with the time of day.

Lines are for someone who looks into the log of a job: the first iteration, then one at each tenth of the work, but none
within half a minute of another, and one at least every ten minutes; and the last.
"""

from __future__ import annotations

import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from datetime import datetime

from rich import get_console
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    SpinnerColumn,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.progress import Progress as Bars
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from embodied.files import is_full

_log = logging.getLogger(__name__)
ROWS = 12
_WIDE_ENOUGH_FOR_RETURN = 88
_WIDE_ENOUGH_FOR_BAR = 112
_BAR_CELLS = 22
_CLOSEST_S, _FARTHEST_S = 30.0, 600.0
"""Seconds between two lines of one display: at least, and at most if anything happens."""
_QUIET: ContextVar[bool] = ContextVar("quiet", default=False)
# The terminal's own colours, which its owner has made readable on its background.
_COLOURS = {
    "physics": "blue",
    "render": "cyan",
    "policy": "yellow",
    "learner": "magenta",
    "transport": "red",
    "idle": "bright_black",
}


@dataclass(frozen=True)
class _Column:
    key: str
    title: str
    show: Callable[[float], str]


def _percent(value: float) -> str:
    return f"{100 * value:.0f}%"


_SUCCESS, _RETURN = "env/success_once", "env/return"
_COLUMNS = (
    _Column("iteration", "iter", lambda value: f"{value:.0f}"),
    _Column("env_steps", "env steps", lambda value: f"{value:,.0f}"),
    _Column("farm/env_steps_per_s", "steps/s", lambda value: f"{value:,.0f}"),
    _Column(_SUCCESS, "success", lambda value: f"{100 * value:.1f}%"),
    _Column(_RETURN, "return", lambda value: f"{value:.2f}"),
    *(_Column(f"time/{name}", name, _percent) for name in _COLOURS),
)


@contextmanager
def quiet() -> Iterator[None]:
    """Show no progress within the block: neither table nor bars, nor their lines. What `tell` prints stays."""
    before = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(before)


class _Pace:
    """When the next line is due, outside of a terminal."""

    def __init__(self, total: int | None, clock: Callable[[], float]) -> None:
        self._total, self._clock = total, clock
        self._shown_s, self._shown = clock(), 0.0

    def is_due(self, done: float) -> bool:
        """True if a line is to be shown now, which counts as shown."""
        since_s = self._clock() - self._shown_s
        tenth = bool(self._total) and 10 * done // self._total > 10 * self._shown // self._total
        if since_s < _CLOSEST_S or not (tenth or since_s >= _FARTHEST_S):
            return False
        self.shown(done)
        return True

    def shown(self, done: float) -> None:
        self._shown_s, self._shown = self._clock(), done


class Progress:
    """The progress of a training run: `row` after every iteration, `note` for what is worth a line.

    In a terminal, a table of the last rows, redrawn in place; elsewhere a line now and then, and none within `quiet`.
    Leaving the `with` block, for whatever reason, gives the terminal back as it was, and prints the last row.
    """

    def __init__(
        self,
        title: str,
        total_iterations: int,
        target: float | None,
        has_success: bool = True,
        *,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._title, self._total, self._clock = title, total_iterations, clock
        self._target = {_SUCCESS if has_success else _RETURN: target}
        self._console = console or get_console()
        self._rows: deque[dict[str, float]] = deque(maxlen=ROWS)
        self._began_s = self._last_row_s = clock()
        self._rows_seen = 0
        self._live: Live | None = None
        self._pace: _Pace | None = None
        self._waiting: dict[str, float] | None = None
        """The last row, where it has no line yet."""

    def __enter__(self) -> Progress:
        self._began_s = self._last_row_s = self._clock()
        if _QUIET.get():
            return self
        if _is_animated(self._console):
            self._live = Live(get_renderable=self._draw, console=self._console, refresh_per_second=2)
            self._live.start(refresh=True)
        else:
            self._pace = _Pace(self._total, self._clock)
            _line(self._console, f"{self._title}: {self._total} iterations{self._target_text()}")
        return self

    def __exit__(self, *_: object) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None
        if self._waiting is not None:
            _line(self._console, self._plain(self._waiting))
            self._waiting = None

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave the terminal to another display, of a step that is not an iteration."""
        live = self._live
        if live is not None:
            live.stop()
        try:
            yield
        finally:
            if live is not None:
                live.start(refresh=True)

    def row(self, values: Mapping[str, float]) -> None:
        """Show an iteration's numbers: `iteration` (how many are done) and those of the columns; others may
        be among them, and a missing one shows as a dash. Success has no column where rows have none."""
        self._rows.append(dict(values))
        self._rows_seen += 1
        self._last_row_s = self._clock()
        if self._live is not None:
            self._live.refresh()
        elif self._pace is not None:
            done = self._rows[-1].get("iteration", 0.0)
            if self._rows_seen == 1:
                self._pace.shown(done)
            elif not self._pace.is_due(done):
                self._waiting = self._rows[-1]
                return
            _line(self._console, self._plain(values))
            self._waiting = None

    def note(self, text: str) -> None:
        """Print a line that stays: above the table, where there is one."""
        _line(self._console, text)

    def _plain(self, values: Mapping[str, float]) -> str:
        numbers = [f"{column.title} {_shown(column, values)}" for column in self._columns()[1:]]
        return "  ".join([f"iter {_shown(_COLUMNS[0], values)}/{self._total}", *numbers, f"left {self._left()}"])

    def _left(self) -> str:
        """Time to the last iteration at the pace of those seen since the start (or the resume)."""
        done = self._rows[-1].get("iteration") if self._rows else None
        if done is None:
            return "–"
        pace_s = (self._last_row_s - self._began_s) / self._rows_seen
        return duration(max(self._total - done, 0) * pace_s)

    def _target_text(self) -> str:
        ((measure, target),) = self._target.items()
        if target is None:
            return ""
        return f" (target {_percent(target) if measure == _SUCCESS else f'return {target:g}'})"

    def _columns(self) -> list[_Column]:
        return [c for c in _COLUMNS if c.key != _SUCCESS or not self._rows or _SUCCESS in self._rows[-1]]

    def _draw(self) -> RenderableType:
        done = self._rows[-1].get("iteration", 0.0) if self._rows else 0.0
        head = Table.grid(padding=(0, 2))
        for _ in range(4):
            head.add_column(no_wrap=True)
        head.add_row(
            Text(self._title, style="bold"),
            ProgressBar(total=max(self._total, 1), completed=done, width=16),
            Text(f"{done:.0f}/{self._total}{self._target_text()}"),
            Text(f"{duration(self._clock() - self._began_s)} elapsed, {self._left()} left", style="dim"),
        )
        return Group(head, self._table())

    def _table(self) -> Table:
        width = self._console.width
        columns = self._columns()
        if width < _WIDE_ENOUGH_FOR_RETURN and len(columns) == len(_COLUMNS):
            columns = [column for column in columns if column.key != _RETURN]
        table = Table(box=None, padding=(0, 1, 0, 0), header_style="bold")
        for column in columns:
            style = _COLOURS.get(column.title, "")
            table.add_column(Text(column.title, style=style), justify="right", no_wrap=True)
        if width >= _WIDE_ENOUGH_FOR_BAR:
            table.add_column("share of time", no_wrap=True)
        for values in self._rows:
            cells = [Text(_shown(column, values), style=self._style(column, values)) for column in columns]
            table.add_row(*cells, *([_time_bar(values)] if width >= _WIDE_ENOUGH_FOR_BAR else []))
        return table

    def _style(self, column: _Column, values: Mapping[str, float]) -> str:
        target = self._target.get(column.key)
        reached = target is not None and values.get(column.key, -math.inf) >= target
        measure = _SUCCESS if _SUCCESS in values else _RETURN
        return "bold green" if reached else "bold" if column.key == measure else ""


class _Steps:
    """Counter that `steps` yields."""

    def __init__(self, show: Callable[[int, str], None]) -> None:
        self._show = show
        self.done = 0

    def advance(self, count: int = 1, text: str = "") -> None:
        """`count` more are done; `text` says something about the last."""
        self.done += count
        self._show(self.done, text)


@contextmanager
def steps(
    title: str, total: int | None, console: Console | None = None, clock: Callable[[], float] = time.monotonic
) -> Iterator[_Steps]:
    """A bar with the time left for a step of set-up or evaluation that takes long:
    `with steps("Loading scenes", 40) as bar: … bar.advance()`. `total` None: there is nothing to count.

    Without a terminal: a line at the beginning, one now and then, and one at the end; none within `quiet`.
    """
    console = console or get_console()
    began_s = clock()
    if _QUIET.get():
        yield _Steps(lambda done, text: None)
        return
    if not _is_animated(console):
        _line(console, f"{title} …")
        bar = _Steps(_plain_steps(console, title, total, clock))
        yield bar
        counted = f"{bar.done} " if bar.done or total else ""
        _line(console, f"{title}: {counted}done in {duration(clock() - began_s)}")
        return
    name, text = (TextColumn(field, markup=False) for field in ("{task.description}", "{task.fields[text]}"))
    counted = () if total is None else (BarColumn(bar_width=30), MofNCompleteColumn())
    numbers = (*counted, TimeElapsedColumn(), _Left())
    with Bars(SpinnerColumn(), name, *numbers, text, console=console) as bars:
        task = bars.add_task(title, total=total, text="")
        yield _Steps(lambda done, text: bars.update(task, completed=done, text=text))


class _Left(TimeRemainingColumn):
    """The time left, with the word that tells it from the time elapsed."""

    def render(self, task: Task) -> Text:
        return Text("") if task.finished or task.total is None else super().render(task) + Text(" left")


def _plain_steps(
    console: Console, title: str, total: int | None, clock: Callable[[], float]
) -> Callable[[int, str], None]:
    pace, began_s = _Pace(total, clock), clock()

    def show(done: int, text: str) -> None:
        if done != total and pace.is_due(done):
            left = f"/{total}, {duration((clock() - began_s) * (total - done) / done)} left" if total else " done"
            _line(console, f"{title}: {done}{left}  {text}".rstrip())

    return show


def duration(seconds: float) -> str:
    """`42 s`, `3 min 12 s`, `5 h 07 min`, `2 d 03 h`."""
    whole = round(seconds)
    for unit_s, unit, part_s, part in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= unit_s:
            return f"{whole // unit_s} {unit} {whole % unit_s // part_s:02d} {part}"
    return f"{whole} s"


def _is_animated(console: Console) -> bool:
    return console.is_terminal and not console.is_dumb_terminal


def tell(text: str) -> None:
    """Print a line that stays: above the table, where there is one, and with the time of day, where there is no
    terminal."""
    _line(get_console(), text)


@contextmanager
def optional(what: str) -> Iterator[None]:
    """A block whose failure is a warning, for what only shows a result that is kept already: a film, a page."""
    try:
        yield
    except Exception as error:
        _log.debug("%s failed", what, exc_info=True)
        tell(f"Warning: {what} could not be made ({type(error).__name__}: {error}); the result is complete without it")


def _line(console: Console, text: str) -> None:
    # Not wrapped: a line in a log file is one line, and a program may read it.
    text = text if _is_animated(console) else f"{datetime.now():%H:%M:%S}  {text}"
    try:
        console.print(Text(text), soft_wrap=True)
    except OSError as error:
        if not is_full(error):  # a log on a full disk: what is printed is not what a run is for
            raise


def _shown(column: _Column, values: Mapping[str, float]) -> str:
    value = values.get(column.key)
    return "–" if value is None or not math.isfinite(value) else column.show(value)


def _time_bar(values: Mapping[str, float]) -> Text:
    """The iteration's time as a bar of `_BAR_CELLS` cells, coloured by component."""
    bar, filled = Text(), 0.0
    for name, colour in _COLOURS.items():
        share = values.get(f"time/{name}", 0.0)
        before, filled = filled, min(filled + (share if math.isfinite(share) else 0.0), 1.0)
        bar.append("━" * (round(filled * _BAR_CELLS) - round(before * _BAR_CELLS)), style=colour)
    return bar
