"""The planner chooses and predicts what it did when these problems were recorded, to the last bit."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.schedulers.recorded_problems import KEYS, SLOW, recorded

RECORDED: dict[str, Any] = json.loads((Path(__file__).parent / "recorded" / "choices.json").read_text())


@pytest.mark.parametrize("key", [pytest.param(key, marks=pytest.mark.slow) if key in SLOW else key for key in KEYS])
def test_choice_ranking_and_predictions_are_those_recorded(key: str) -> None:
    assert recorded(key) == RECORDED[key]
