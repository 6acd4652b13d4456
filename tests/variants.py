"""Which of a test's variants the default run has; the slow run has all of them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def often(chosen: Iterable[Any], every: Iterable[Any]) -> list[Any]:
    """Parameters for `pytest.mark.parametrize`: `every`, of which all but the `chosen` are marked slow. A tuple is
    several arguments.

    Raises `ValueError` for a chosen one that is not among them.
    """
    chosen, every = list(chosen), list(every)
    if unknown := [one for one in chosen if one not in every]:
        raise ValueError(f"not among the variants: {unknown}")
    slow = pytest.mark.slow
    return [
        pytest.param(*(one if isinstance(one, tuple) else (one,)), marks=() if one in chosen else slow) for one in every
    ]
