"""Deferred Ctrl-C: a section that must not be interrupted is finished first."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def deferred_interrupts(wait: Callable[[], None] = lambda: None) -> Iterator[None]:
    """Raise `KeyboardInterrupt` for SIGINT or SIGTERM at the end of the block rather than within it.

    `wait` is called at the first signal, to tell the user what is waited for. A second one interrupts the block all the
    same. Outside the main thread, where signals do not arrive, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pending:
            raise KeyboardInterrupt
        pending.append(number)
        wait()

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if pending:
        raise KeyboardInterrupt
