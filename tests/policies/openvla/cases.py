"""What the tests of OpenVLA and OpenVLA-OFT start from: golden values, tiny checkpoints, batches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from policies import Inputs, PolicySpec, build
from policies.conformance import laws
from policies.openvla.normalisation import Statistics, choose_statistics, read_datasets

GOLDEN = Path(__file__).parents[2] / "golden"
OPENVLA, OFT = GOLDEN / "openvla", GOLDEN / "openvla_oft"
INSTRUCTIONS = ("pick up the black bowl", "open the top drawer and put the red mug inside")
OFT_INSTRUCTIONS = (
    "put the bowl on the plate",
    "pick up the black bowl next to the cookie box and open the drawer",
)
ONE_ACTION = PolicySpec(action_dim=7, cameras=("base",), image_size=40)
CHUNK = PolicySpec(action_dim=7, chunk=3, cameras=("base", "wrist"), image_size=40)
TEXTS = ("pick", "open the top drawer", "push it")


def golden(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "golden.safetensors")


def random_inputs(spec: PolicySpec, rows: int, seed: int, texts: tuple[str, ...] = TEXTS) -> Inputs:
    """Noise as frames, and instructions of different lengths."""
    inputs = laws.random_inputs(spec, rows, seed)
    return replace(inputs, instruction=tuple(texts[row % len(texts)] for row in range(rows)))


def make(kind: str, spec: PolicySpec, checkpoint: Path, **options: Any) -> Any:
    """The policy with a small critic, as after some training. Any: tests look into it."""
    policy = build(kind, spec, seed=0, checkpoint=str(checkpoint), **{"value_widths": [16], **options})
    laws.perturb(policy, 0.02, seed=6)
    return policy


def gripper_of(convention: str) -> list[dict[str, str]]:
    """The transforms of an option that names a gripper's convention; `raw`: as the network says it."""
    return [] if convention == "raw" else [{"kind": "gripper", "convention": convention}]


def error(found: Tensor, expected: Tensor) -> float:
    """Largest absolute difference."""
    assert found.shape == expected.shape, f"{list(found.shape)}, expected {list(expected.shape)}"
    return float((found.detach().double() - expected.detach().double()).abs().max())


def statistics_of(folder: Path, config: Mapping[str, Any], key: str = "") -> Statistics:
    """The statistics `key` of a checkpoint; without a key those of its only dataset."""
    return choose_statistics(folder, read_datasets(folder, config), key)
