"""Action tokens, the statistics that give them a unit, and what a gripper command means.

Source: prismatic/vla/action_tokenizer.py and prismatic/extern/hf/modeling_prismatic.py of openvla/openvla. B rows,
C actions of a chunk, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from policies.contract import PolicyError
from policies.openvla.config import BINS
from policies.openvla.files import read_json

STATISTICS = "dataset_statistics.json"
EDGES = np.linspace(-1, 1, BINS)
GRIPPERS = ("raw", "libero", "maniskill")
SUFFIX = "_no_noops"
"""LIBERO's datasets are listed with this suffix in some checkpoints and without it in others."""
PROPRIO_EPS = 1e-8


@dataclass(frozen=True)
class Statistics:
    """Of one dataset."""

    key: str
    low: Tensor
    """float64 [A]: the first percentile of each dimension."""
    high: Tensor
    """float64 [A]: the 99th."""
    mask: Tensor
    """bool [A]: dimensions that have a unit; the others (the gripper) stay in -1..1."""
    proprio: tuple[Tensor, Tensor] | None = None
    """float64 [P] twice: the percentiles of proprioception."""

    def unnormalise(self, actions: Tensor, eps: float = 0.0) -> Tensor:
        """[.., A] in -1..1 to the dataset's unit, in float64. OpenVLA-OFT adds 1e-8 to the range."""
        low, high, mask = (tensor.to(actions.device) for tensor in (self.low, self.high, self.mask))
        actions = actions.double()
        return torch.where(mask, 0.5 * (actions + 1) * (high - low + eps) + low, actions)

    def normalise_proprio(self, proprio: Tensor) -> Tensor:
        """[.., P] to -1..1, clipped, in float64."""
        if self.proprio is None:
            raise PolicyError(f"the statistics {self.key!r} have no proprioception")
        low, high = (tensor.to(proprio.device) for tensor in self.proprio)
        if proprio.shape[-1] != len(low):
            raise PolicyError(f"the statistics {self.key!r} are of {len(low)} numbers, got {list(proprio.shape)}")
        return (2 * (proprio.double() - low) / (high - low + PROPRIO_EPS) - 1).clamp(-1, 1)


def token_of(actions: Tensor, action_vocab: int) -> Tensor:
    """[..] numbers, clipped to -1..1, to int64 token ids: -1 is the vocabulary's last token, 1 the 256th last."""
    edges = torch.from_numpy(EDGES).to(actions.device)
    return action_vocab - torch.bucketize(actions.double().clamp(-1, 1), edges, right=True)


def action_of(tokens: Tensor, action_vocab: int) -> Tensor:
    """int64 [..] token ids to float64 bin centres. There are 255: the two lowest action tokens share the last."""
    centres = torch.from_numpy((EDGES[:-1] + EDGES[1:]) / 2).to(tokens.device)
    return centres[(action_vocab - tokens - 1).clamp(0, BINS - 2)]


def convert_gripper(chunk: Tensor, convention: str) -> Tensor:
    """[.., A] with the last number, the gripper's, as an environment takes it. The model says 0 closed, 1 open.

    `raw` leaves it. `libero`: -1 open, 1 closed, nothing between. `maniskill` (and SimplerEnv's WidowX): 1 open,
    -1 closed, nothing between.
    """
    if convention == "raw":
        return chunk
    gripper = chunk[..., -1:]
    if convention == "libero":
        command = -torch.sign(2 * gripper - 1)
    else:
        command = 2 * (gripper > 0.5).to(chunk.dtype) - 1
    return torch.cat([chunk[..., :-1], command], -1)


def check_gripper(convention: str) -> str:
    if convention not in GRIPPERS:
        raise PolicyError(f"gripper must be one of {', '.join(GRIPPERS)}, got {convention!r}")
    return convention


def read_statistics(folder: Path, config: Mapping[str, Any], key: str = "") -> Statistics:
    """The statistics `key` of a checkpoint; without a key those of its only dataset.

    `dataset_statistics.json`, which fine-tuning writes, wins over config.json's norm_stats.
    """
    path = folder / STATISTICS
    source = str(path) if path.exists() else f"{folder / 'config.json'}'s norm_stats"
    every = read_json(path) if path.exists() else config.get("norm_stats")
    if not isinstance(every, dict) or not every:
        raise PolicyError(f"no statistics in {folder}: neither {STATISTICS} nor norm_stats in config.json")
    if not key:
        if len(every) != 1:
            raise PolicyError(f"{source} has several datasets: set unnorm_key to one of {', '.join(sorted(every))}")
        key = next(iter(every))
    short = key.removesuffix(SUFFIX)
    found = next((name for name in (key, short, short + SUFFIX) if name in every), None)
    if found is None:
        raise PolicyError(f"unknown unnorm_key {key!r}; {source} has: {', '.join(sorted(every))}")
    try:
        action, proprio = every[found]["action"], every[found].get("proprio")
        low, high = _numbers(action["q01"]), _numbers(action["q99"])
        mask = torch.tensor(action.get("mask", [True] * len(low)), dtype=torch.bool)
        if not low.shape == high.shape == mask.shape:
            raise ValueError("q01, q99 and mask are of different lengths")
        percentiles = None if proprio is None else (_numbers(proprio["q01"]), _numbers(proprio["q99"]))
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise PolicyError(f"{source}: {found!r} has no usable q01, q99 and mask: {error!r}") from error
    return Statistics(found, low, high, mask, percentiles)


def _numbers(values: Any) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.float64)
    if tensor.dim() != 1 or not tensor.isfinite().all():
        raise ValueError(f"expected a list of finite numbers, got {values!r}")
    return tensor
