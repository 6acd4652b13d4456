"""What the modules of this package share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sim_farm import memory
from tests.sim_farm.checks import close_kept


@pytest.fixture(scope="module", autouse=True)
def no_simulator_outlives_its_module() -> Iterator[None]:
    yield
    close_kept()


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[Path]]:
    """Asked, the shared memory that this test has made and that is there: others on this machine make some too."""
    mine = f"{memory.PREFIX}{os.getpid()}-"
    monkeypatch.setattr(memory, "PREFIX", mine)
    return lambda: set(memory.FOLDER.glob(f"{mine}*"))
