"""What a process writes while it does other things."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Written:
    """When something was written, by the machine's monotonic clock."""

    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass
class BackgroundWriter:
    """A thread that writes one thing at a time."""

    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "writer"))
    _writing: Future[Written] | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Have the thread do this. Waits for what it did before, and raises its failure."""
        self.wait()
        begin_ns = time.monotonic_ns()

        def timed() -> Written:
            write()
            return Written(begin_ns, time.monotonic_ns())

        self._writing = self._threads.submit(timed)

    @property
    def busy(self) -> bool:
        """Whether it is writing at the moment."""
        return self._writing is not None and not self._writing.done()

    def settle(self) -> None:
        """Wait until nothing is being written; `wait` will say what became of it."""
        if self._writing is not None:
            wait([self._writing])

    def wait(self) -> Written | None:
        """Wait until what was begun is written; None where nothing was since the last time.

        Raises its failure, once. One who is interrupted while he waits may wait again.
        """
        self.settle()
        writing, self._writing = self._writing, None
        return None if writing is None else writing.result()
