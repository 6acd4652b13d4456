"""What besides weights a run needs to go on: `state.json` of a checkpoint, checked before any of it is used."""

from __future__ import annotations

import json
import math
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from embodied.errors import nearest, unreadable
from embodied.files import read_json

FILE = "state.json"
STAGES = ("rl", "sft")
MOST_COUNT = 2**53
"""Counts above it are nothing that was counted; up to it they are exact as floats too."""
MOST_NUMBER = 1e100
"""Its square is still a number."""


@dataclass(frozen=True)
class RunState:
    """What besides weights a run needs to go on."""

    iteration: int
    """Iterations done."""
    env_steps: int
    wall_s: float
    recent_success: tuple[bool, ...]
    """Outcome of the last training episodes, oldest first."""
    stage: str = "rl"
    """What was learned from: simulation (`rl`) or demonstrations (`sft`, whose iterations are optimiser steps)."""
    controls: Mapping[str, float] = field(default_factory=dict)
    """What has adapted itself from update to update (`embodied.algorithms.controls`)."""


def write_state_file(folder: Path, state: RunState, steps: Mapping[str, float]) -> None:
    """Write the state, and the optimiser's steps by the parameters' names, into a checkpoint that is begun."""
    data = {**state.__dict__, "recent_success": list(state.recent_success), "optimizer": {"step": dict(steps)}}
    (folder / FILE).write_text(json.dumps(data, indent=1))


def read_state_file(folder: Path) -> tuple[RunState, dict[str, float]]:
    """The state and the optimiser's steps. Raises `CheckpointError` where they are nothing that was written."""
    path = folder / FILE
    try:
        return _parsed(read_json(path))
    except (OSError, ValueError) as error:
        raise unreadable(path, error) from error


def _parsed(data: Any) -> tuple[RunState, dict[str, float]]:
    data = _mapping("it", data)
    required = ["iteration", "env_steps", "wall_s", "recent_success", "optimizer"]
    for key in required:
        if key not in data:
            raise ValueError(f"{key} is missing")
    known = [*required, "stage", "controls"]
    for key in data:
        if key not in known:
            raise ValueError(f"unknown key {key[:80]!r}{nearest(key[:80], known)}")
    recent, stage = data["recent_success"], data.get("stage", "rl")
    if not isinstance(recent, list) or not all(isinstance(one, bool) for one in recent):
        raise ValueError("recent_success must be a list of true and false")
    if stage not in STAGES:
        raise ValueError(f"stage must be {' or '.join(STAGES)}, not {_shown(stage)}")
    steps = _mapping("optimizer.step", _mapping("optimizer", data["optimizer"]).get("step"))
    controls = _mapping("controls", data.get("controls", {}))
    state = RunState(
        iteration=_count("iteration", data["iteration"]),
        env_steps=_count("env_steps", data["env_steps"]),
        wall_s=_number("wall_s", data["wall_s"], 0.0),
        recent_success=tuple(recent),
        stage=stage,
        controls={name: _number(f"controls.{name}", number) for name, number in controls.items()},
    )
    return state, {name: float(_count(f"optimizer.step of {name}", step)) for name, step in steps.items()}


def _mapping(name: str, value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object, not {_shown(value)}")
    return value


def _number(name: str, value: Any, least: float = -MOST_NUMBER) -> float:
    # In this order: an integer may be larger than a float can be.
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value <= MOST_NUMBER:
        raise ValueError(f"{name} must be a finite number{' from 0 on' if least == 0 else ''}, not {_shown(value)}")
    return float(value)


def _count(name: str, value: Any) -> int:
    number = _number(name, value, 0.0)
    if number > MOST_COUNT or number != math.floor(number):
        raise ValueError(f"{name} must be a whole number up to {MOST_COUNT}, not {_shown(value)}")
    return int(value)


def _shown(value: Any) -> str:
    return reprlib.repr(value)
