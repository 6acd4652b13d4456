"""Policies on the tiny checkpoints of SmolVLA."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import policies
from policies import Inputs, PolicySpec
from policies.conformance import laws

GOLDEN = Path(__file__).parents[2] / "golden" / "smolvla"
SPEC = PolicySpec(action_dim=7, chunk=4, proprio_dim=8, cameras=("image", "image2"), image_size=64)
TEXTS = ("pick up the black bowl and place it on the plate", "open the drawer")


def make(spec: PolicySpec = SPEC, **options: Any) -> Any:
    """A policy of three steps and a small critic. Any: tests look into it."""
    folder = {"checkpoint": str(GOLDEN / "checkpoint"), "backbone": str(GOLDEN / "vlm")}
    return policies.build("smolvla", spec, seed=1, **{**folder, "steps": 3, "value_widths": [8], **options})


def inputs_of(spec: PolicySpec, rows: int, seed: int) -> Inputs:
    found = laws.random_inputs(spec, rows, seed)
    return replace(found, instruction=tuple(TEXTS[row % 2] for row in range(rows)))


def sampled(policy: Any, inputs: Inputs, noise: Tensor) -> Tensor:
    """The chunk [B, H, A], in the network's units, to which Euler's method takes the noise [B, H, A]."""
    with torch.no_grad():
        seen = policy._observation(inputs)
        prefix = policy.network.with_state(policy.network.prefix(seen), seen.state)
        x, steps = noise, policy.denoising.steps
        for step in range(steps):
            t = policy.denoising.times[step].expand(len(x))
            x = x - policy.network.velocity_of(policy.network.suffix(prefix, seen.state, x, t)) / steps
    return x


def edit(path: Path, **entries: Any) -> None:
    """Replace entries of a JSON file; `...` takes one out."""
    raw = json.loads(path.read_text()) | entries
    path.write_text(json.dumps({name: value for name, value in raw.items() if value is not ...}))


def of_lerobot_03(folder: Path) -> None:
    """Make a folder one of before LeRobot 0.4: no processors, and their statistics among the weights."""
    statistics = load_file(folder / "policy_preprocessor_step_5_normalizer_processor.safetensors")
    tensors = load_file(folder / "model.safetensors")
    for name, tensor in statistics.items():
        key, _, statistic = name.rpartition(".")
        parts = ("normalize_targets", "unnormalize_outputs") if key == "action" else ("normalize_inputs",)
        if statistic in ("mean", "std"):
            tensors |= {f"{part}.buffer_{key.replace('.', '_')}.{statistic}": tensor.clone() for part in parts}
    for path in folder.glob("policy_*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")
