"""Policies on the tiny checkpoints of pi0 and pi0.5."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import policies
from policies import Inputs, PolicySpec
from tests.policies import conformance

GOLDEN = Path(__file__).parents[2] / "golden"
SPEC = PolicySpec(action_dim=7, chunk=6, proprio_dim=7, cameras=("front", "wrist"), image_size=32)
NO_STATE = replace(SPEC, proprio_dim=0)
TURNED, DELTA = {"kind": "turn_images"}, {"kind": "delta_actions", "dims": 6}
TEXTS = ("pick up the black bowl", "open the drawer")


def make(family: str, spec: PolicySpec = SPEC, **options: Any) -> Any:
    """A policy of three steps and a small critic. Any: tests look into it."""
    settings = {"checkpoint": str(GOLDEN / family / "checkpoint"), "steps": 3, "value_widths": [8], **options}
    return policies.build("pi0", spec, seed=1, **settings)


def inputs_of(spec: PolicySpec, rows: int, seed: int) -> Inputs:
    found = conformance.random_inputs(spec, rows, seed)
    return replace(found, instruction=tuple(TEXTS[row % 2] for row in range(rows)))
