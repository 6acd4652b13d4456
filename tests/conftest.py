"""What every test starts from."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

# Before NumPy and PyTorch are loaded, here and in processes that tests start: small matrices are fastest on one thread,
# and the processes of a test run share the cores.
os.environ.setdefault("OMP_NUM_THREADS", "1")

from sim_farm import memory  # noqa: E402

# A shell starts what it puts into the background with SIGINT ignored, and Python then leaves it so. Tests send
# it to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until `pytest_collection_finish`

RAY = "ray"
"""Name of the group of tests that share one Ray."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Assign every test to a group, which one process runs (`--dist loadgroup`).

    A file is a group, because its tests share what is expensive. All files that use the shared Ray are one group: Ray
    is started once for a test run. That group comes first, because it takes longest.
    """
    shared = {item.path for item in items if "ray_runtime" in getattr(item, "fixturenames", ())}
    items.sort(key=lambda item: item.path not in shared)  # stable: otherwise in pytest's order
    for item in items:
        if item.get_closest_marker("xdist_group") is None:
            item.add_marker(pytest.mark.xdist_group(RAY if item.path in shared else item.location[0]))


def pytest_collection_finish() -> None:
    """What was imported and collected is there to the end: looking at it again and again is a sixth of a run's time."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[Path]]:
    """Asked, the shared memory that this test has made and that is there: others on this machine make some too."""
    mine = f"{memory.PREFIX}{os.getpid()}-"
    monkeypatch.setattr(memory, "PREFIX", mine)
    return lambda: set(memory.FOLDER.glob(f"{mine}*"))
