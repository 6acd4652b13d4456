"""Policies on the tiny checkpoints of pi0 and pi0.5."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import policies
from policies import Inputs, PolicySpec
from policies.conformance import laws
from policies.flow_vla.network import Prefix
from policies.pi0.network import Pi0Network

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
    found = laws.random_inputs(spec, rows, seed)
    return replace(found, instruction=tuple(TEXTS[row % 2] for row in range(rows)))


def velocity(network: Pi0Network, prefix: Prefix, state: Tensor, x: Tensor, t: Tensor) -> Tensor:
    """[B, H, A] float32 at x [B, H, A] and times [B]."""
    return network.velocity_of(network.suffix(prefix, state, x, t))


def sample(network: Pi0Network, prefix: Prefix, state: Tensor, noise: Tensor, steps: int) -> Tensor:
    """The chunk [B, H, A] to which Euler's method takes the noise in so many steps."""
    x = noise
    for step in range(steps):
        t = torch.full((len(x),), 1 - step / steps, device=x.device)
        x = x - velocity(network, prefix, state, x, t) / steps
    return x
