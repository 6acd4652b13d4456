"""What all losses of imitation share. B rows, C actions of a chunk, A action dimensions."""

from __future__ import annotations

import torch
from torch import Tensor


def only_counted(actions: Tensor, counted: Tensor) -> Tensor:
    """[B, H, A] with zeros for the actions that are not counted [B, H], whatever stands there: NaN times zero, in a
    backward pass, would still be NaN."""
    return torch.where(counted[..., None], actions, torch.zeros_like(actions))


def counted_mean(losses: Tensor, counted: Tensor) -> Tensor:
    """[B]: each row's mean of the losses [B, H, A] over its counted actions [B, H]; 0 for a row without any."""
    weights = counted[..., None].to(losses.dtype).expand_as(losses)
    return (losses * weights).sum((1, 2)) / weights.sum((1, 2)).clamp(min=1)
