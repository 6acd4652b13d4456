"""Tests that build LIBERO's scenes call `require()` when they are imported."""

from __future__ import annotations

import pytest

from sim_farm.backends.libero.package import assets
from sim_farm.contract import FarmError


def require() -> None:
    """Skip the importing module where LIBERO's assets are neither here nor to be had, with the line that says how."""
    try:
        assets()
    except FarmError as error:
        pytest.skip(str(error), allow_module_level=True)
