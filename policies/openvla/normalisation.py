"""Units of actions and proprioception: percentiles of a dataset, read, taken over and written again.

Source: prismatic/extern/hf/modeling_prismatic.py and prismatic/vla/datasets/rlds/utils/data_utils.py of
openvla/openvla. A action dimensions, P numbers of proprioception, N demonstrated actions.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from policies.contract import PolicyError
from policies.files import CONFIG, SHOWN_ERROR, read_json, shown, write_json

STATISTICS = "dataset_statistics.json"
DEMONSTRATIONS = "demonstrations"
"""Name of a dataset that every checkpoint accepts: the demonstrations that the policy itself learns from."""
PERCENTILES = (0.01, 0.99)
BOUNDS = {"percentiles": ("q01", "q99"), "extremes": ("min", "max")}
"""Entries of the statistics that became -1 and 1. The training decides which, and the checkpoint does not record it:
OpenVLA-OFT takes the extremes for ALOHA, else the percentiles."""
SUFFIX = "_no_noops"
"""LIBERO's datasets are listed with this suffix in some checkpoints and without it in others."""
PROPRIO_EPS = 1e-8


class Statistics(nn.Module):
    """Statistics of a dataset. Buffers, so that they move with the policy's weights; float64 whatever the network's
    dtype."""

    low: Tensor
    """float64 [A]: the first percentile of each dimension."""
    high: Tensor
    """float64 [A]: the 99th."""
    mask: Tensor
    """bool [A]: dimensions that have a unit; the others (the gripper) stay in -1..1."""
    proprio_low: Tensor
    """float64 [P], or [0] where the dataset has no proprioception."""
    proprio_high: Tensor

    def __init__(
        self,
        key: str,
        low: Tensor,
        high: Tensor,
        mask: Tensor,
        proprio: tuple[Tensor, Tensor] | None = None,
        *,
        bounds: str = "percentiles",
    ) -> None:
        super().__init__()
        self.key, self.bounds = key, bounds
        none = low.new_zeros(0)
        for name, tensor in zip(
            ("low", "high", "mask", "proprio_low", "proprio_high"), (low, high, mask, *(proprio or (none, none))),
            strict=True,
        ):  # fmt: skip
            # A copy: two of them may be one tensor.
            self.register_buffer(name, tensor.clone())

    def _apply(self, fn: Any, recurse: bool = True) -> Statistics:
        """Move, but do not cast: 16 bits are enough for weights, not for units."""
        before = dict(self._buffers)
        super()._apply(fn, recurse)
        for name, tensor in before.items():
            moved = self._buffers[name]
            if tensor is not None and moved is not None and moved.dtype != tensor.dtype:
                self._buffers[name] = tensor.to(moved.device)
        return self

    def unnormalise(self, actions: Tensor, eps: float = 0.0) -> Tensor:
        """[.., A] in -1..1 to the dataset's unit, in float64. OpenVLA-OFT adds 1e-8 to the range."""
        actions = actions.double()
        return torch.where(self.mask, 0.5 * (actions + 1) * (self.high - self.low + eps) + self.low, actions)

    def normalise(self, actions: Tensor, eps: float = 0.0) -> Tensor:
        """The inverse, clipped to -1..1, in float64; 0 in a dimension in which the dataset is one number."""
        actions = actions.double()
        span = self.high - self.low
        scaled = 2 * (actions - self.low) / torch.where(span == 0, 1.0, span + eps) - 1
        scaled = torch.where(span == 0, 0.0, scaled.clamp(-1, 1))
        return torch.where(self.mask, scaled, actions)

    def normalise_proprio(self, proprio: Tensor) -> Tensor:
        """[.., P] to -1..1, clipped, in float64."""
        low, high = self.proprio_low, self.proprio_high
        if not len(low):
            raise PolicyError(f"the statistics {self.key!r} have no proprioception")
        if proprio.shape[-1] != len(low):
            raise PolicyError(f"the statistics {self.key!r} are of {len(low)} numbers, got {list(proprio.shape)}")
        return (2 * (proprio.double() - low) / (high - low + PROPRIO_EPS) - 1).clamp(-1, 1)

    def adopt(self, actions: Tensor, proprio: Tensor | None, gripper: bool) -> None:
        """Become the percentiles of the actions [N, A] and, where these statistics have any, of proprioception [N, P].

        `gripper`: the last dimension is a gripper's 0 or 1, and has no unit.
        """
        found = _percentiles("actions", actions, len(self.low))
        if proprio is not None and len(self.proprio_low):
            found |= {f"proprio_{end}": t for end, t in _percentiles("proprio", proprio, len(self.proprio_low)).items()}
        for name, tensor in found.items():
            self.get_buffer(name).copy_(tensor)
        self.mask.fill_(True)
        self.mask[-1] = not gripper

    def entry(self) -> dict[str, Any]:
        """Entry of `dataset_statistics.json`."""
        action = {"q01": self.low.tolist(), "q99": self.high.tolist(), "mask": self.mask.tolist()}
        if not len(self.proprio_low):
            return {"action": action}
        return {"action": action, "proprio": {"q01": self.proprio_low.tolist(), "q99": self.proprio_high.tolist()}}


def identity(action_dim: int, proprio_dim: int) -> Statistics:
    """Statistics of demonstrations before there are any: units are those of the network, -1..1."""
    ones, proprio = (torch.ones(size, dtype=torch.float64) for size in (action_dim, proprio_dim))
    return Statistics(DEMONSTRATIONS, -ones, ones, ones.bool(), (-proprio, proprio))


def read_datasets(folder: Path, config: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of all datasets of a checkpoint, unchecked; none where it has none.

    `dataset_statistics.json`, which fine-tuning writes, wins over config.json's norm_stats.
    """
    path = folder / STATISTICS
    every = read_json(path) if path.exists() else config.get("norm_stats")
    if every is not None and not isinstance(every, dict):
        raise PolicyError(f"{folder / CONFIG}: norm_stats must hold an object, it holds a {type(every).__name__}")
    return every or {}


def with_adapters(datasets: Mapping[str, Any], adapter: Path) -> dict[str, Any]:
    """Statistics of a base and, winning over them, those that an adapter of it was trained with."""
    own = read_json(adapter / STATISTICS) if (adapter / STATISTICS).exists() else {}
    return {**datasets, **own}


def choose_statistics(
    source: Path, datasets: Mapping[str, Any], key: str = "", bounds: str = "percentiles"
) -> Statistics:
    """The statistics `key`; without a key those of the only dataset. `source` is named in messages."""
    least, most = BOUNDS[bounds]
    if not datasets:
        raise PolicyError(f"no statistics in {source}: neither {STATISTICS} nor norm_stats in config.json")
    if not key:
        if len(datasets) != 1:
            raise PolicyError(
                f"{source} has several datasets: set unnorm_key to one of {', '.join(sorted(datasets)[:20])}"
            )
        key = next(iter(datasets))
    short = key.removesuffix(SUFFIX)
    found = next((name for name in (key, short, short + SUFFIX) if name in datasets), None)
    if found is None:
        raise PolicyError(
            f"unknown unnorm_key {shown(key)}; {source} has: {', '.join(map(shown, sorted(datasets)[:20]))}"
        )
    try:
        action, proprio = datasets[found]["action"], datasets[found].get("proprio")
        low, high = _numbers(action[least]), _numbers(action[most])
        mask = torch.tensor(action.get("mask", [True] * len(low)), dtype=torch.bool)
        if not low.shape == high.shape == mask.shape:
            raise ValueError(f"{least}, {most} and mask are of different lengths")
        if (mask & (low > high)).any():
            raise ValueError(f"{least} is above {most} in dimension {int((mask & (low > high)).nonzero()[0])}")
        ends = None if proprio is None else _proprio(proprio, least, most)
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        what = f"it lacks {error}" if isinstance(error, KeyError) else str(error)[:SHOWN_ERROR]
        raise PolicyError(
            f"{source}: {shown(found)} has no usable {least}, {most} and mask: {what}. Copy {STATISTICS} again from "
            f"where the checkpoint was trained, or set unnorm_key to {DEMONSTRATIONS} and learn from demonstrations"
        ) from error
    return Statistics(found, low, high, mask, ends, bounds=bounds)


def _proprio(entry: Mapping[str, Any], least: str, most: str) -> tuple[Tensor, Tensor]:
    low, high = _numbers(entry[least]), _numbers(entry[most])
    mask = torch.tensor(entry.get("mask", [True] * len(low)), dtype=torch.bool)
    if not low.shape == high.shape == mask.shape:
        raise ValueError(f"{least}, {most} and mask of proprio are of different lengths")
    # Numbers without a unit stay as they are, clipped: these ends are the ones that do so.
    return torch.where(mask, low, -1.0), torch.where(mask, high, 1 - PROPRIO_EPS)


def read_state(folder: Path, own: Statistics) -> dict[str, Tensor]:
    """Statistics of a saved policy's folder that replace `own`, under the names of its state dict.

    Nothing, where a folder without statistics (PEFT's own) holds an adapter: they are its base's, as `own` are.
    """
    config = read_json(folder / CONFIG) if (folder / CONFIG).exists() else {}
    datasets = read_datasets(folder, config)
    if not datasets and own.key != DEMONSTRATIONS:
        return {}
    state = choose_statistics(folder, datasets, own.key, own.bounds).state_dict()
    for name, tensor in own.state_dict().items():
        if state[name].shape != tensor.shape:
            raise PolicyError(f"{folder}: the statistics {own.key!r} have {len(state[name])} {name}, not {len(tensor)}")
    return state


def write_statistics(folder: Path, datasets: Mapping[str, Any], statistics: Statistics) -> None:
    """Write what the checkpoint said of its datasets and, if they are the policy's units, the demonstrations.

    Those are added to config.json's norm_stats too, if there is one: the reference's own code asks it first.
    """
    own = {statistics.key: statistics.entry()} if statistics.key == DEMONSTRATIONS else {}
    write_json(folder / STATISTICS, dict(datasets) | own)
    if own and (folder / CONFIG).exists():
        config = read_json(folder / CONFIG)
        write_json(folder / CONFIG, config | {"norm_stats": (config.get("norm_stats") or {}) | own})


def _percentiles(what: str, values: Tensor, size: int) -> dict[str, Tensor]:
    """`low` and `high`, float64 [size], of the values [N, size]."""
    rows = values.detach().double().cpu().numpy()
    if rows.ndim != 2 or not len(rows) or rows.shape[1] != size or not np.isfinite(rows).all():
        raise PolicyError(f"demonstrated {what} must be finite numbers [N, {size}], got {list(values.shape)}")
    low, high = np.quantile(rows, PERCENTILES, axis=0)
    return {"low": torch.from_numpy(low), "high": torch.from_numpy(high)}


def _numbers(values: Any) -> Tensor:
    tensor = torch.tensor(values, dtype=torch.float64)
    if tensor.dim() != 1 or not tensor.float().isfinite().all():
        raise ValueError(f"expected a list of finite numbers, got {shown(values)}")
    return tensor
