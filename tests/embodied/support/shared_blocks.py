"""The shared memory that processes have in use."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

import psutil

from sim_farm.shared_memory.memory import FOLDER, PREFIX


def mapped(pids: Iterable[int]) -> set[Path]:
    """The project's blocks that these processes have mapped: others on this machine may have some too."""
    found: set[Path] = set()
    for pid in pids:
        with suppress(psutil.NoSuchProcess):  # it has ended since it was listed
            found |= {Path(one.path) for one in psutil.Process(pid).memory_maps()}
    return {path for path in found if path.parent == FOLDER and path.name.startswith(PREFIX)}
