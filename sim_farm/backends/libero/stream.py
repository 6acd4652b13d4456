"""Where the random stream of a seed has run to after each reset of a stock LIBERO environment.

LIBERO draws from NumPy's global generator at resets alone: no env step and no policy's end of an episode moves it.
Published evaluations seed it once per task, so that what trial k begins with depends on the k resets before it. A
process replays them once, and remembers the generator's state after each.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from sim_farm.backends.libero.tasks import LiberoTask

CACHED_STREAMS = 256
"""Streams that a process keeps: of training's seeds each has one position of 2.5 kB."""


@dataclass(frozen=True)
class Position:
    """Of a stream, before a reset."""

    generator: Any
    """NumPy's state (`np.random.get_state`)."""
    loads: int
    """How often the model was loaded. LIBERO draws the articulated fixtures' positions once for each load."""


@functools.lru_cache(maxsize=CACHED_STREAMS)
def stream_of(task: LiberoTask, seed: int, unseeded_resets: int) -> list[Position]:
    """The known positions of the stream, by the number of resets before them; whoever replays one more appends it."""
    # A stock environment loads its model when it is built, and at each reset.
    return [Position(np.random.RandomState(seed).get_state(), loads=1 + unseeded_resets)]


@contextmanager
def callers_generator() -> Iterator[None]:
    """Within the block NumPy's global generator may be drawn from; afterwards it is where it was."""
    state = np.random.get_state()
    try:
        yield
    finally:
        np.random.set_state(state)
