"""Writing in the background of a process."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Written:
    """Begin and end of a write, by the machine's monotonic clock."""

    begin_ns: int
    end_ns: int

    @property
    def seconds(self) -> float:
        return (self.end_ns - self.begin_ns) / 1e9


@dataclass
class BackgroundWriter:
    """A thread that does one write at a time."""

    _threads: ThreadPoolExecutor = field(default_factory=lambda: ThreadPoolExecutor(1, "writer"))
    _writing: Future[Written] | None = None

    def begin(self, write: Callable[[], None]) -> None:
        """Start a write in the thread. Waits for the write before it, and raises its failure."""
        self.wait()
        begin_ns = time.monotonic_ns()

        def timed() -> Written:
            write()
            return Written(begin_ns, time.monotonic_ns())

        self._writing = self._threads.submit(timed)

    @property
    def busy(self) -> bool:
        """True while a write is in progress."""
        return self._writing is not None and not self._writing.done()

    def settle(self) -> None:
        """Wait until no write is in progress; `wait` returns its result."""
        if self._writing is not None:
            wait([self._writing])

    def wait(self) -> Written | None:
        """Wait for the write that was begun; None where none was since the last call.

        Raises its failure, once. After an interrupt, `wait` may be called again.
        """
        self.settle()
        writing, self._writing = self._writing, None
        return None if writing is None else writing.result()
