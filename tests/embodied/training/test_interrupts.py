"""Ctrl-C in the middle of an update: the update is finished, unless it comes twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from embodied.learning.learner import Learner
from embodied.reporting.metrics import read
from embodied.run import checkpoint
from embodied.training.interrupts import deferred_interrupts
from embodied.training.loop import FINISHING
from tests.embodied.commands.test_cli import here

NUMBERS = pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM], ids=lambda number: number.name)


def interrupted(block: Callable[[], None], events: list[str]) -> None:
    with pytest.raises(KeyboardInterrupt), deferred_interrupts(lambda: events.append("wait")):
        block()


@NUMBERS
def test_a_block_is_finished_before_it_is_interrupted(number: signal.Signals) -> None:
    before, events = signal.getsignal(number), list[str]()

    def block() -> None:
        signal.raise_signal(number)
        events.append("done")

    interrupted(block, events)
    assert events == ["wait", "done"]
    assert signal.getsignal(number) is before


@NUMBERS
def test_a_second_signal_does_not_wait(number: signal.Signals) -> None:
    events = list[str]()

    def block() -> None:
        signal.raise_signal(number)
        signal.raise_signal(signal.SIGINT)
        events.append("done")

    interrupted(block, events)
    assert events == ["wait"]


def test_without_a_signal_nothing_is_raised_and_other_threads_are_left_alone() -> None:
    with deferred_interrupts():
        pass
    ran = []

    def elsewhere() -> None:
        with deferred_interrupts():
            ran.append(True)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert ran


LONG = """
import sys
from embodied.cli import main
from embodied.learning.learner import Learner
import time

finish = Learner.finish

def slow(self, iteration):
    if iteration == 2:
        print("in the update", flush=True)
        time.sleep(6)  # an update that takes longer than the five seconds after which it was once given up
    return finish(self, iteration)

Learner.finish = slow
sys.exit(main(sys.argv[1:]))
"""


def command_in(folder: Path) -> list[str]:
    """A run whose checkpoints are ten iterations apart."""
    command = ["train", "reach", "--runs-dir", str(folder), "--name", "run"]
    return [
        *command,
        "--runtime.mode",
        "inline",
        "--iterations",
        "20",
        "--checkpoint-every",
        "10",
        "--eval.videos",
        "0",
    ]


def assert_third_is_kept(output: str, folder: Path) -> None:
    output = " ".join(output.split())
    assert FINISHING in output and "iteration 3 is kept" in output, output
    assert len(read(folder / "run")) == 3
    latest = checkpoint.latest(folder / "run" / "checkpoints")
    assert latest is not None and latest.name == "000003"


def test_an_update_is_kept_by_an_interrupt_within_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finish = Learner.finish

    def interrupted_in_the_third(learner: Learner, iteration: int) -> dict[str, float]:
        if iteration == 2:
            signal.raise_signal(signal.SIGINT)
        return finish(learner, iteration)

    monkeypatch.setattr(Learner, "finish", interrupted_in_the_third)
    status, output = here(*command_in(tmp_path))
    assert status == 130, output
    assert_third_is_kept(output, tmp_path)


@pytest.mark.slow
def test_an_update_that_takes_long_is_kept_by_one_interrupt(tmp_path: Path) -> None:
    command = [sys.executable, "-c", LONG, *command_in(tmp_path)]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env={**os.environ, "COLUMNS": "200"}
    )
    assert process.stdout is not None
    output = ""
    for line in process.stdout:
        output += line
        if "in the update" in line:
            process.send_signal(signal.SIGINT)
            break
    output += process.communicate(timeout=240)[0]
    assert_third_is_kept(output, tmp_path)
