"""One micro-batch of an update: its gradient, and its contribution to the reported statistics.

Losses are sums over rows, divided by denominators of the whole minibatch, so that their sum is the same for every size
of micro-batch. On a GPU nothing here waits for the device: denominators are counted in the host's memory, and
statistics are read once for all micro-batches of an optimiser step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from embodied.algorithms.estimators import Rows
from embodied.algorithms.objectives import Objective, ratio
from embodied.algorithms.ppo import (
    Credit,
    RatioUnit,
    alive_actions,
    k3,
    reduce_to_unit,
    sum_units,
    unit_mask,
    value_loss,
)
from embodied.config.schema import LossConfig
from embodied.devices import device_of, to_host
from policies.contract import Policy


@dataclass
class LossSums:
    """Running sums over the units, values and rows of an update."""

    policy_loss: float = 0.0
    value_loss: float = 0.0
    entropy: float = 0.0
    approx_kl: float = 0.0
    clipped: float = 0.0
    off_policy: float = 0.0
    reference_kl: float = 0.0
    auxiliary: float = 0.0
    units: int = 0
    weights: float = 0.0
    """Of the units: what the policy's loss is divided by."""
    values: int = 0
    """What the critic was asked for: one of each row, or of each of its executed actions."""
    rows: int = 0

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> LossSums:
        """From sums by name; counts are whole numbers again."""
        found = cls()
        for key, number in numbers.items():
            setattr(found, key, type(getattr(found, key))(number))
        return found

    def add(self, other: LossSums) -> None:
        for key in self.__dataclass_fields__:
            setattr(self, key, getattr(self, key) + getattr(other, key))


@dataclass(frozen=True)
class MicroBatchLoss:
    """A micro-batch's share of the sums; the device may still be at work on it."""

    measured: Mapping[str, Tensor]
    """Those of `LossSums` that the policy has to be evaluated for."""
    counted: LossSums
    """The others."""


def read(shares: Sequence[MicroBatchLoss], norm: Tensor | None = None) -> tuple[LossSums, float]:
    """The sum over micro-batches, and the gradient's norm (or NaN); waits for the device."""
    awaited = {f"{i}.{key}": t for i, share in enumerate(shares) for key, t in share.measured.items()}
    found = to_host(awaited if norm is None else awaited | {"norm": norm})
    total = LossSums()
    for i, share in enumerate(shares):
        sums: dict[str, Any] = vars(share.counted) | {key: float(found[f"{i}.{key}"]) for key in share.measured}
        total.add(LossSums(**sums))
    return total, float(found["norm"]) if norm is not None else float("nan")


def add_gradient(
    policy: Policy,
    rows: Rows,
    settings: LossConfig,
    credit: Credit,
    critic: bool,
    weights: float,
    values: float,
    objective: Objective = ratio,
) -> MicroBatchLoss:
    """Add the gradient of these rows' share of a loss with the given denominators; `critic`: with the value's part.

    The rows are in the host's memory.
    """
    device, (_, chunk, dims) = device_of(policy), rows.log_prob.shape
    unit = settings.ratio_unit
    units, counted = count_units(rows.executed, rows.weight, dims, unit)
    count = LossSums(units=units, weights=counted, values=count_values(rows.executed, credit), rows=len(rows))
    places = _places(unit_mask(rows.executed, chunk, dims, unit), device)
    valued = _places(alive_actions(rows.executed, chunk), device) if credit == "action" else (...,)
    rows = rows.to(device)
    new = policy.evaluate(rows.inputs, rows.trace)
    log_prob, entropy = (reduce_to_unit(found, rows.executed, unit)[0] for found in (new.log_prob, new.entropy))
    surrogate = objective(new, rows, settings, places)
    spread = sum_units(entropy, places, rows.weight)
    loss = surrogate.loss / weights - settings.entropy_coef * spread / weights
    error, divergence, further = (loss.new_zeros(()) for _ in range(3))
    if new.auxiliary is not None:
        further = sum_units(new.auxiliary[:, None].expand_as(entropy), places, rows.weight)
        loss = loss + further / weights
    if settings.reference_kl and rows.reference_log_prob is not None:
        reference = reduce_to_unit(rows.reference_log_prob, rows.executed, unit)[0]
        per_unit = k3(log_prob, reference)
        divergence = sum_units(per_unit, places)
        loss = loss + settings.reference_kl * sum_units(per_unit, places, rows.weight) / weights
    if critic:
        error = value_loss(new.value[valued], rows.value[valued], rows.returns[valued], settings.value_clip)
        loss = loss + settings.value_coef * error / values
    loss.backward()  # type: ignore[no-untyped-call]
    measured = {
        "policy_loss": surrogate.loss.detach(),
        "value_loss": error.detach(),
        "entropy": spread.detach(),
        "approx_kl": surrogate.approx_kl,
        "clipped": surrogate.clipped,
        "off_policy": surrogate.off_policy,
        "reference_kl": divergence.detach(),
        "auxiliary": further.detach(),
    }
    return MicroBatchLoss(measured, count)


def count_units(executed: Tensor, weight: Tensor, dims: int, unit: RatioUnit) -> tuple[int, float]:
    """Units of the ratio in rows that executed so many actions, and the sum of their weights."""
    units = {"chunk": torch.ones_like(executed), "action": executed, "element": executed * dims}[unit]
    return int(units.sum()), float((units * weight).sum())


def count_values(executed: Tensor, credit: Credit) -> int:
    """The critic's values of rows that executed so many actions."""
    return int(executed.sum()) if credit == "action" else len(executed)


def _places(mask: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """Rows and columns of what counts, on the device; `mask` is in the host's memory."""
    return tuple(index.to(device) for index in mask.nonzero(as_tuple=True))
