"""Deferred Ctrl-C: a section that must not be interrupted is finished first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferrable_interrupts(wait: Callable[[], None] = lambda: None) -> Iterator[Callable[[], None]]:
    """Yield `defer`: once it is called, SIGINT and SIGTERM raise `KeyboardInterrupt` at the end of the block rather
    than within it.

    `wait` is called at the first signal, to tell the user what is waited for. A second one interrupts the block all the
    same. Outside the main thread, where signals do not arrive, this does nothing.
    """
    pending: list[int] = []
    before: dict[signal.Signals, Any] = {}

    def note(number: int, frame: Any) -> None:
        if pending:
            raise KeyboardInterrupt
        pending.append(number)
        wait()

    def defer() -> None:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                before[number] = signal.signal(number, note)

    try:
        yield defer
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if pending:
        raise KeyboardInterrupt


@contextmanager
def deferred_interrupts(wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Defer interrupts for the whole block, as `deferrable_interrupts` does once its `defer` is called."""
    with deferrable_interrupts(wait) as defer:
        defer()
        yield
