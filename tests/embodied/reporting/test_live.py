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

from embodied.reporting.live import ROWS, Progress, duration, steps
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


def test_without_a_terminal_each_iteration_is_one_line() -> None:
    console = a_console(terminal=False, width=80)
    with Progress("reach", 40, 0.9, console=console) as progress:
        for iteration in range(1, 6):
            progress.row(row(iteration))
        progress.note("checkpoint [000005] saved")
    lines = output_of(console).splitlines()
    assert len(lines) == 7 and "\x1b" not in output_of(console)
    assert "40 iterations" in lines[0] and "90%" in lines[0]
    assert lines[5].startswith("iter 5/40  env steps 20,480")
    for name in ("steps/s", "success", "return", *COMPONENTS):
        assert f"{name} " in lines[5]
    assert lines[6] == "checkpoint [000005] saved"


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


def test_steps_without_a_terminal_speak_at_each_tenth() -> None:
    console = a_console(terminal=False)
    with steps("Evaluating", 200, console=console) as bar:
        for _ in range(200):
            bar.advance()
    lines = output_of(console).splitlines()
    tenths = [f"Evaluating: {n}/200" for n in range(20, 200, 20)]
    assert [line.split(",")[0] for line in lines[1:-1]] == tenths
    assert all("left" in line for line in lines[1:-1])
    assert lines[-1].startswith("Evaluating: 200 done in ")


def test_steps_of_unknown_number_say_how_many_there_were() -> None:
    console = a_console(terminal=False)
    with steps("Searching", None, console=console) as bar:
        bar.advance(3)
    assert "Searching: 3 done" in output_of(console)


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
