"""Weights and statistics that are not finite: refused where they are read, for a policy would act on them silently."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from policies.contract import PolicyError


def check_finite(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Raise `PolicyError`, which names the first such tensor, if one read from `path` has NaN or infinite numbers."""
    for name, tensor in tensors.items():
        if not tensor.is_floating_point() or not tensor.numel():
            continue
        if tensor.element_size() < 2:  # of 8 bits, of which torch knows no extremes
            tensor = tensor.float()
        # The extremes take one pass and no memory; NaN is both of them wherever there is one.
        low, high = torch.aminmax(tensor)
        if not (low.isfinite() and high.isfinite()):
            raise PolicyError(
                f"{path}: {name[:200]!r} has numbers that are not finite: a policy cannot act with it. Use an earlier "
                "checkpoint, or train again (a smaller learning rate is the usual remedy)"
            )
