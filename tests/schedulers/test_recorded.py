"""The planner chooses and predicts what it did when these problems were recorded, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.schedulers.recorded_problems import KEYS, recorded
from tests.variants import often

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded" / "choices.json").read_text())


MANY = {"random", "memory", "tail", "home", "uneven", "communication", "lending"}
"""Kinds with ten or sixteen random problems."""
FEW = 6
"""Of these problems the default run has."""
COSTLY = ("large:", "three tasks:", "libero:3", "libero:10")
"""Problems that take half a second and more."""
OFTEN = [
    key
    for key in KEYS
    if not key.startswith(COSTLY) and (key.partition(":")[0] not in MANY or int(key.partition(":")[2]) < FEW)
]
OFTEN += ["large:chain6 0"]


@pytest.mark.parametrize("key", often(OFTEN, KEYS))
def test_choice_ranking_and_predictions_are_those_recorded(key: str) -> None:
    assert recorded(key) == RECORDED[key]
