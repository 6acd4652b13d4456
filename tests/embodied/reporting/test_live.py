"""The live table: every number in a terminal and outside of one, and the terminal given back."""

from __future__ import annotations

import io
import math
import os
import random
import re
import signal
import subprocess
import sys

import pytest
from rich.console import Console

from embodied import cli
from embodied.commands.arguments import EvalArguments
from embodied.reporting.live import ROWS, Progress, duration, quiet, steps
from embodied.run.trace import COMPONENTS
from tests.embodied.reporting.synthetic import metrics_row

HIDE_CURSOR, SHOW_CURSOR = "\x1b[?25l", "\x1b[?25h"


def a_console(terminal: bool, width: int = 140) -> Console:
    return Console(file=io.StringIO(), force_terminal=terminal, width=width, height=40, color_system=None)


def output_of(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def row(iteration: int) -> dict[str, float]:
    counts = {"iteration": iteration, "env_steps": 4096 * iteration}
    return {**metrics_row(iteration, random.Random(iteration)), **counts}


def last_picture(console: Console) -> str:
    """What stands on the screen at the end: everything after the table was last redrawn."""
    text = output_of(console).split("\x1b[1A")[-1]
    return re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", text)


def lines_of(console: Console) -> list[str]:
    """The lines without the time of day at their beginnings."""
    lines = output_of(console).splitlines()
    assert all(re.match(r"\d\d:\d\d:\d\d  ", line) for line in lines), lines
    return [line[10:] for line in lines]


class Clock:
    """A clock that goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def iterations_shown(total: int, each_s: float, ended: int | None = None) -> list[int]:
    """The iterations that have a line in the log, for `ended` of `total` iterations of `each_s` seconds."""
    console, clock = a_console(terminal=False), Clock()
    with Progress("reach", total, 0.9, console=console, clock=clock) as progress:
        for iteration in range(1, (ended or total) + 1):
            clock.now_s += each_s
            progress.row({"iteration": iteration, "env_steps": 512 * iteration})
    return [int(line.split("/")[0].removeprefix("iter ")) for line in lines_of(console)[1:]]


def test_without_a_terminal_a_line_has_every_number_and_the_time_of_day() -> None:
    console = a_console(terminal=False, width=80)
    with Progress("reach", 40, 0.9, console=console) as progress:
        for iteration in range(1, 6):
            progress.row(row(iteration))
        progress.note("checkpoint [000005] saved")
    lines = lines_of(console)
    assert "\x1b" not in output_of(console)
    assert "40 iterations" in lines[0] and "90%" in lines[0]
    assert lines[1].startswith("iter 1/40  env steps 4,096") and lines[2] == "checkpoint [000005] saved"
    assert lines[3].startswith("iter 5/40  env steps 20,480"), "the last iteration, however the run ends"
    for name in ("steps/s", "success", "return", *COMPONENTS, "left"):
        assert f"{name} " in lines[3]


@pytest.mark.parametrize(
    ("total", "each_s", "ended", "shown"),
    [
        (30, 0.5, None, [1, 30]),  # over in seconds: its first and its last
        (30, 10.0, None, [*range(1, 29, 3), 30]),  # at the tenths, half a minute apart
        (30, 40.0, 8, [1, 3, 6, 8]),  # it reached its target before its last
        (1000, 120.0, 21, [1, 6, 11, 16, 21]),  # a tenth takes hours: every ten minutes
    ],
)
def test_a_log_has_few_lines(total: int, each_s: float, ended: int | None, shown: list[int]) -> None:
    assert iterations_shown(total, each_s, ended) == shown


@pytest.mark.parametrize("terminal", [False, True])
def test_quiet_shows_no_progress_and_keeps_what_is_told(terminal: bool) -> None:
    console = a_console(terminal=terminal)
    with quiet(), Progress("reach", 40, 0.9, console=console) as progress:
        progress.row(row(1))
        with steps("Evaluating", 2, console=console) as bar:
            bar.advance()
        progress.note("physics 0 was lost and is replaced")
    assert output_of(console).endswith("physics 0 was lost and is replaced\n") and output_of(console).count("\n") == 1


def test_in_a_terminal_the_last_rows_stand_in_a_table() -> None:
    console = a_console(terminal=True)
    with Progress("reach", 40, 0.9, console=console) as progress:
        for iteration in range(1, 21):
            progress.row(row(iteration))
    picture = last_picture(console)
    for title in ("iter", "env steps", "steps/s", "success", "physics", "transport", "idle"):
        assert title in picture
    shown = [int(line.split()[0]) for line in picture.splitlines() if re.match(r"\s*\d+ ", line)]
    assert shown == list(range(21 - ROWS, 21))
    assert "20/40" in picture and "81,920" in picture


@pytest.mark.parametrize("width", [80, 100, 140])
def test_the_table_fits_the_terminal(width: int) -> None:
    console = a_console(terminal=True, width=width)
    with Progress("a_run_with_a_rather_long_name", 4000, 0.9, console=console) as progress:
        progress.row({**row(3999), "env_steps": 98_765_432, "farm/env_steps_per_s": 12_345})
    picture = last_picture(console)
    assert "…" not in picture.split("\n", 1)[1]
    assert "98,765,432" in picture and "12,345" in picture
    assert all(len(line.rstrip()) <= width for line in picture.splitlines())


def test_what_was_not_measured_is_a_dash() -> None:
    console = a_console(terminal=False)
    with Progress("reach", 40, None, console=console) as progress:
        progress.row({"iteration": 1, "env/success_once": math.nan})
    assert "success –" in output_of(console) and "policy –" in output_of(console)


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_the_cursor_comes_back_after_an_error(error: type[BaseException]) -> None:
    console = a_console(terminal=True)
    with pytest.raises(error), Progress("reach", 40, 0.9, console=console) as progress:
        progress.row(row(1))
        raise error
    assert output_of(console).rfind(SHOW_CURSOR) > output_of(console).rfind(HIDE_CURSOR) >= 0


def test_an_interrupted_program_gives_its_terminal_back() -> None:
    program = (
        "import time\nfrom embodied.reporting.live import Progress\n"
        "with Progress('reach', 40, 0.9) as progress:\n"
        "    progress.row({'iteration': 1, 'env_steps': 4096})\n    time.sleep(60)\n"
    )
    ours, theirs = os.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "120"}
    child = subprocess.Popen([sys.executable, "-c", program], stdout=theirs, stderr=subprocess.DEVNULL, env=environment)
    os.close(theirs)
    seen = b""
    while b"4,096" not in seen:
        seen += os.read(ours, 4096)
    child.send_signal(signal.SIGINT)
    try:
        while chunk := os.read(ours, 4096):
            seen += chunk
    except OSError:  # how Linux reports that the other side of a terminal is closed
        pass
    os.close(ours)
    assert child.wait(timeout=240) != 0
    text = seen.decode()
    assert text.rfind(SHOW_CURSOR) > text.rfind(HIDE_CURSOR) >= 0


def test_steps_in_a_terminal_count_and_tell_the_time_left() -> None:
    console = a_console(terminal=True)
    with steps("Loading scenes", 4, console=console) as bar:
        for index in range(3):
            bar.advance(text=f"scene [{index}]")
    picture = last_picture(console)
    assert "Loading scenes" in picture and "3/4" in picture and "left" in picture and "scene [2]" in picture


@pytest.mark.parametrize("given", [True, False])
def test_the_option_quiet_is_what_makes_a_command_quiet(given: bool) -> None:
    console = a_console(terminal=False)
    with cli._shown(EvalArguments("a run", quiet=given)), steps("Evaluating", 2, console=console) as bar:
        bar.advance(2)
    assert ("Evaluating" in output_of(console)) is not given


@pytest.mark.parametrize(("each_s", "shown"), [(0.01, []), (4.0, list(range(20, 200, 20)))])
def test_steps_without_a_terminal_speak_at_their_ends_and_at_tenths_that_take_long(
    each_s: float, shown: list[int]
) -> None:
    console, clock = a_console(terminal=False), Clock()
    with steps("Evaluating", 200, console=console, clock=clock) as bar:
        for _ in range(200):
            clock.now_s += each_s
            bar.advance()
    first, *lines, last = lines_of(console)
    assert [line.split(",")[0] for line in lines] == [f"Evaluating: {n}/200" for n in shown]
    assert all("left" in line for line in lines)
    assert first == "Evaluating …" and last.startswith("Evaluating: 200 done in ")


def test_steps_of_unknown_number_say_how_many_there_were_and_nothing_where_none_is_counted() -> None:
    console = a_console(terminal=False)
    with steps("Searching", None, console=console) as bar:
        bar.advance(3)
    with steps("Starting Ray", None, console=console):
        pass
    assert "Searching: 3 done" in output_of(console) and "Starting Ray: done in 0 s" in output_of(console)
    animated = a_console(terminal=True)
    with steps("Starting Ray", None, console=animated):
        pass
    assert "Starting Ray" in last_picture(animated) and "0/?" not in last_picture(animated)


def test_steps_may_run_while_the_table_stands() -> None:
    console = a_console(terminal=True)
    with Progress("reach", 40, 0.9, console=console) as progress:
        progress.row(row(1))
        with steps("Evaluating", 2, console=console) as bar:
            bar.advance(2)
        progress.row(row(2))
    assert "2/2" in output_of(console) and "8,192" in output_of(console)


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0 s"), (42, "42 s"), (59.7, "1 min 00 s"), (192, "3 min 12 s"), (18420, "5 h 07 min")]
    + [(97200, "1 d 03 h")],
)
def test_durations_read_well(seconds: float, text: str) -> None:
    assert duration(seconds) == text
