"""What the modules of this package share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from sim_farm.conformance.checks import close_kept


@pytest.fixture(scope="module", autouse=True)
def no_simulator_outlives_its_module() -> Iterator[None]:
    yield
    close_kept()
