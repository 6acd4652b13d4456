"""Samples: the decisions that an update learns from, with their advantages, flattened."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from embodied.trajectories.batch import Decisions, TensorDecisions, Trajectories, alive_actions, join_decisions
from policies.contract import Inputs


@dataclass(frozen=True)
class Estimate:
    """Result of an estimator; all [T, B]. With `advantage.credit` action, advantages and returns are [T, B, C]."""

    advantage: Tensor
    returns: Tensor
    """Targets of the critic; read only where the workflow trains one."""
    keep: Tensor
    """bool, True if the decision carries a gradient."""
    weight: Tensor
    """Weight of each of the decision's units (`loss.ratio_unit`) in the loss; the update divides by their sum."""


@dataclass(frozen=True)
class Samples:
    """The decisions to learn from, flattened; every tensor has N rows."""

    decisions: Decisions
    """Observations and traces, in the trajectory memory or in tensors."""
    log_prob: Tensor
    """[N, C, A] under the rollout's policy."""
    value: Tensor
    """[N], or [N, C] with `advantage.credit` action; as advantages and returns."""
    advantage: Tensor
    returns: Tensor
    executed: Tensor
    """[N] number of the chunk's executed actions."""
    weight: Tensor
    """[N] weight of the sample in the loss and in its denominator."""
    importance: Tensor
    """[N, 1] or [N, U] weight of the sample's units in the loss alone: ratio of the present to the rollout's
    probability, where the rollout is an update behind."""
    reference_log_prob: Tensor | None = None
    """[N, C, A] under the frozen reference policy, where the workflow has one."""
    precomputed: Mapping[str, Tensor] = field(default_factory=dict)
    """Results of `Precomputes.precompute`, [N, ...] each; they join the traces."""
    first: Tensor | None = None
    """[N] place in the chunk of the first executed action; None: 0."""

    @property
    def alive(self) -> Tensor:
        """bool [N, C]: the actions that were executed."""
        return alive_actions(self.executed, self.log_prob.shape[1], self.first)

    def take(self, index: Tensor) -> Samples:
        """The samples at `index`; observations and traces stay where they are."""
        return self._changed(self.decisions.select(index), lambda tensor: tensor[index])

    def to(self, device: torch.device) -> Samples:
        """The same samples with all tensors on the device, observations and traces too: each is copied once."""
        decisions = TensorDecisions(self.decisions.inputs(device), self.decisions.trace(device))
        return self._changed(decisions, lambda tensor: tensor.to(device))

    def _changed(self, decisions: Decisions, change: Callable[[Tensor], Tensor]) -> Samples:
        there: dict[str, Any] = {key: getattr(self, key) for key in PER_SAMPLE if getattr(self, key) is not None}
        tensors = {key: change(tensor) for key, tensor in there.items()}
        return Samples(decisions, **tensors, precomputed={key: change(t) for key, t in self.precomputed.items()})

    @property
    def inputs(self) -> Inputs:
        return self.decisions.inputs()

    @property
    def trace(self) -> dict[str, Tensor]:
        return {**self.decisions.trace(), **self.precomputed}

    def __len__(self) -> int:
        return len(self.value)


PER_SAMPLE = (
    "log_prob", "value", "advantage", "returns", "executed", "weight", "importance", "reference_log_prob", "first",
)  # fmt: skip
"""Names of the tensors of `Samples`; the last two may be absent."""


def samples_of(batch: Trajectories, estimate: Estimate) -> Samples:
    """The batch's samples, without masked decisions, those that carry no gradient, and those that the next one has
    overtaken: nothing of them was executed."""
    reference, first = batch.reference_log_prob, batch.first
    samples = Samples(
        batch.decisions,
        batch.log_prob.flatten(0, 1),
        batch.value.flatten(0, 1),
        estimate.advantage.flatten(0, 1),
        estimate.returns.flatten(0, 1),
        batch.executed.flatten(),
        estimate.weight.flatten(),
        torch.ones(batch.mask.numel(), 1),
        None if reference is None else reference.flatten(0, 1),
        first=None if first is None else first.flatten(),
    )
    chosen = batch.mask & estimate.keep & (batch.executed > 0)
    return samples if bool(chosen.all()) else samples.take(chosen.flatten().nonzero()[:, 0])


def join_samples(parts: Sequence[Samples]) -> Samples:
    """The samples of all parts, one after the other."""
    if len(parts) == 1:
        return parts[0]
    tensors: dict[str, Any] = {
        key: torch.cat([getattr(part, key) for part in parts])
        for key in PER_SAMPLE
        if getattr(parts[0], key) is not None
    }
    return Samples(join_decisions([part.decisions for part in parts]), **tensors)
