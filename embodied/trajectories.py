"""What a rollout hands to the learner."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from policies.contract import Inputs


@dataclass(frozen=True)
class Trajectories:
    """T decisions of each of B environments. Row t * B + b of the flat tensors is decision t of environment b.

    Nothing in here depends on how many workers or stages produced it.
    """

    inputs: Inputs
    """T * B rows."""
    trace: Mapping[str, Tensor]
    """T * B rows each."""
    log_prob: Tensor
    """[T, B, C, A] under the policy that acted, per element."""
    value: Tensor
    """[T, B]"""
    reward: Tensor
    """[T, B] summed over the executed steps of the chunk."""
    executed: Tensor
    """[T, B] int64, executed env steps of the chunk."""
    mask: Tensor
    """[T, B] bool, the decision was really taken."""
    terminated: Tensor
    truncated: Tensor
    """[T, B] bool, the decision ended its episode."""
    final_value: Tensor
    """[T, B] value of the ended episode's own final observation; zero elsewhere."""
    last_value: Tensor
    """[B] value of the observation after the last decision."""
    version: int
    """Number of updates the acting policy had seen."""

    @property
    def env_steps(self) -> int:
        return int(self.executed[self.mask].sum())


def join_inputs(parts: Sequence[Inputs], order: Tensor) -> Inputs:
    """The rows of `parts`, one after the other, rearranged so that new row i is old row `order[i]`."""
    first = parts[0]
    whole = replace(
        first,
        state=None if first.state is None else torch.cat([p.state for p in parts if p.state is not None]),
        proprio=None if first.proprio is None else torch.cat([p.proprio for p in parts if p.proprio is not None]),
        frames={name: torch.cat([p.frames[name] for p in parts]) for name in first.frames},
        instruction=tuple(text for p in parts for text in p.instruction),
    )
    return whole.rows(order)
