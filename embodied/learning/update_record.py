"""What an update leaves on record: its metrics, and the rows of a step that was skipped."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from safetensors.torch import save_file

from embodied.algorithms.estimators import Rows
from embodied.algorithms.ppo import alive_actions
from embodied.learning.microbatch import LossSums


@dataclass(frozen=True)
class CollectStatistics:
    """What became of a part of an iteration's trajectories."""

    rows: int
    """Decisions to learn from."""
    groups: int
    """Episode groups that teach something."""
    learn_s: float
    """Time spent on them already."""


@dataclass(frozen=True)
class TrainedBytes:
    """How large a learner's policy is."""

    parameters: int
    """Of all parameters."""
    trained: int
    """Of those that are trained: so much is one gradient. With adapters, theirs alone."""
    weights: int
    """What `weights` hands out."""


def metrics_of(rows: Rows, sums: LossSums, norms: list[float]) -> dict[str, float]:
    """By name, of an update that learned from the rows; `norms` of its steps' gradients."""
    returns, value = rows.returns, rows.value
    if returns.ndim == 2:
        alive = alive_actions(rows.executed, returns.shape[1])
        returns, value = returns[alive], value[alive]
    spread = float(returns.var()) if len(returns) > 1 else 0.0
    explained = 1 - float((returns - value).var()) / spread if spread > 0 else float("nan")
    return {
        "learner/policy_loss": sums.policy_loss / (sums.weights or 1),
        "learner/value_loss": sums.value_loss / max(sums.values, 1),
        "learner/entropy": sums.entropy / (sums.weights or 1),
        "learner/approx_kl": sums.approx_kl / max(sums.units, 1),
        "learner/clip_fraction": sums.clipped / max(sums.units, 1),
        "learner/grad_norm": float(np.mean(norms)) if norms else float("nan"),
        "learner/explained_variance": explained,
        "learner/steps": float(len(norms)),
        "learner/skipped_steps": float(len(norms) - np.isfinite(norms).sum()),
    }


def keep_rows(rows: Rows, folder: Path, iteration: int) -> None:
    """Write a minibatch into the folder, for inspection."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{iteration:06d}-{len(list(folder.iterdir())):03d}.safetensors"
    inputs = rows.inputs
    tensors = {key: getattr(rows, key) for key in ("log_prob", "value", "advantage", "returns", "executed")}
    tensors |= {f"trace.{key}": tensor for key, tensor in rows.trace.items()}
    tensors |= {f"inputs.frames.{key}": tensor for key, tensor in inputs.frames.items()}
    for key in ("state", "proprio"):
        if getattr(inputs, key) is not None:
            tensors[f"inputs.{key}"] = getattr(inputs, key)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
