"""Deferred Ctrl-C: a section that must not be interrupted is finished first, if it takes a few seconds at most."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

GRACE_S = 5.0


@contextmanager
def deferred_interrupts() -> Iterator[None]:
    """Raise `KeyboardInterrupt` for SIGINT or SIGTERM at the end of the block rather than within it.

    A second signal, or `GRACE_S` seconds after the first, interrupts the block all the same. Outside the main
    thread, where signals do not arrive, this does nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    pending: list[int] = []

    def note(number: int, frame: Any) -> None:
        if pending:
            raise KeyboardInterrupt
        pending.append(number)
        signal.setitimer(signal.ITIMER_REAL, GRACE_S)

    numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGALRM)
    before = {number: signal.signal(number, note) for number in numbers}
    try:
        yield
    finally:
        if pending:
            signal.setitimer(signal.ITIMER_REAL, 0)
        for number, handler in before.items():
            signal.signal(number, handler)
    if pending:
        raise KeyboardInterrupt
