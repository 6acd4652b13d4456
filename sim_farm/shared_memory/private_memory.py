"""The memory that a process has by itself, and returning freed memory to the system."""

from __future__ import annotations

import ctypes
import gc
import os
from pathlib import Path


def private_bytes(pid: int | None = None) -> int:
    """Bytes of memory that a process, this one or another of the machine, shares with no other process; 0 if the
    system does not say, also of one that has ended."""
    try:
        pages = Path(f"/proc/{pid or 'self'}/statm").read_text().split()
    except OSError:
        return 0
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


def give_back() -> None:
    """Return to the system what has been freed; glibc would keep most of it for the process's next wishes."""
    gc.collect()  # simulators are full of cycles
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)
