"""Bells: a ring wakes who waits, in another process too, and none is lost."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import numpy as np
import pytest

from sim_farm.shared_memory.doorbell import Doorbell
from sim_farm.shared_memory.memory import Block, Field

ROOT = Path(__file__).resolve().parents[2]
FIELDS = {"bells": Field((2,), "int32", 0), "count": Field((3,), "int64", 0)}
ROUNDS = 5000

ANSWER = f"""
import sys
from sim_farm.shared_memory.doorbell import Doorbell
from sim_farm.shared_memory.memory import Block, Field
block = Block.attach({FIELDS!r}, sys.argv[1])
mine, theirs = (Doorbell(block.arrays["bells"], index) for index in (0, 1))
asked, answered, lost = (block.arrays["count"][i : i + 1] for i in range(3))
while answered[0] < {ROUNDS}:
    seen = mine.value()
    if asked[0] > answered[0]:
        answered[0] += 1
        theirs.ring()
    elif not mine.wait(seen, timeout_s=120):
        lost[0] += 1
        break
"""


@pytest.fixture
def block() -> Iterator[Block]:
    with closing(Block.create(FIELDS, shared=True)) as block:
        yield block


def test_no_ring_is_lost_between_two_processes(block: Block) -> None:
    """Thousands of questions and answers; each waits for the other's ring, and a lost one would be waited for."""
    requested, answered, lost = (block.arrays["count"][i : i + 1] for i in range(3))
    theirs, mine = Doorbell(block.arrays["bells"], 0), Doorbell(block.arrays["bells"], 1)
    with subprocess.Popen([sys.executable, "-c", ANSWER, str(block.name)], cwd=ROOT) as process:
        for number in range(1, ROUNDS + 1):
            requested[0] = number
            theirs.ring()
            while answered[0] < number:
                seen = mine.value()
                if answered[0] < number:
                    assert mine.wait(seen, timeout_s=120), f"the answer to question {number} did not wake the asker"
        assert process.wait(timeout=240) == 0
    assert answered[0] == ROUNDS and not lost[0]


def test_a_ring_wakes_every_sleeping_process() -> None:
    bells = np.zeros(3, np.int32)
    bell = Doorbell(bells, 1)
    woken: list[bool] = []
    sleepers = [threading.Thread(target=lambda: woken.append(bell.wait(0, timeout_s=30))) for _ in range(4)]
    for sleeper in sleepers:
        sleeper.start()
    time.sleep(0.05)  # so that they sleep rather than look; the law holds either way
    Doorbell(bells, 1).ring()
    for sleeper in sleepers:
        sleeper.join(timeout=240)
    assert woken == [True] * 4
    assert bells[0] == bells[2] == 0, "a ring touched another bell"


def test_a_ring_before_the_wait_is_seen() -> None:
    bell = Doorbell(np.zeros(1, np.int32), 0)
    seen = bell.value()
    bell.ring()
    assert bell.value() != seen and bell.wait(seen, timeout_s=0)


@pytest.mark.parametrize("timeout_s", [0, 0.01, 1.05])
def test_a_wait_without_a_ring_ends_with_false(timeout_s: float) -> None:
    assert not Doorbell(np.zeros(1, np.int32), 0).wait(0, timeout_s)


def test_a_bell_rings_past_the_largest_number() -> None:
    bells = np.full(1, np.iinfo(np.int32).max, np.int32)
    bell = Doorbell(bells, 0)
    seen = bell.value()
    bell.ring()
    assert bell.wait(seen, timeout_s=0)


def test_a_ring_that_was_begun_before_others_hides_none_of_them() -> None:
    """Ringers are not synchronised: one may be suspended within its ring while another rings several times."""
    bells = np.zeros(1, np.int32)
    bell, other = Doorbell(bells, 0), Doorbell(bells, 0)
    for rings in range(1, 5):
        suspended = _SuspendedRing(bells)
        for _ in range(rings):
            other.ring()
        seen = bell.value()
        suspended.finish()
        other.ring()
        assert bell.wait(seen, timeout_s=0), f"{rings} rings and a late one: the last ring is not noticed"


class _SuspendedRing:
    """A ring by a process that the system suspends between reading the bell and writing it."""

    def __init__(self, bells: np.ndarray) -> None:
        self._bells = bells
        self._own = bells.copy()
        Doorbell(self._own, 0).ring()

    def finish(self) -> None:
        self._bells[0] = self._own[0]
