"""Recomputed activations (Chen et al. 2016, arXiv 1604.06174): less memory for an update, which takes longer.

A backward pass needs what each operation of the forward pass has read. Where activations are recomputed, only the
inputs of a policy's blocks are kept, and the backward pass computes a block again just before it needs it. The numbers
are the same. The blocks are the modules of `GathersInGroups.shards`: a policy calls each of them.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from embodied.errors import UserError
from policies.capabilities import GathersInGroups
from policies.contract import Policy
from policies.work import trains


def check_recomputes(kind: str, policy: type[Policy]) -> None:
    """Raise `UserError` for a kind whose policies name no blocks."""
    if not issubclass(policy, GathersInGroups):
        raise UserError(
            f"optim.recompute is for large policies, which are computed block by block, and {kind} names no blocks: "
            "leave it out; a smaller optim.micro_batch takes less memory"
        )


def recompute(policy: Policy) -> None:
    """From now on recompute the activations of the policy's blocks wherever there are gradients."""
    check_recomputes(policy.kind, type(policy))
    for group in policy.shards():
        for module in group:
            if not isinstance(module, nn.Linear):  # which keeps its input at most
                module.forward = partial(_recomputed, module, module.forward)


def _recomputed(module: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled() or not (_differentiable(args) or _differentiable(kwargs) or trains(module)):
        return forward(*args, **kwargs)
    # No block draws random numbers: there is no state of a generator to keep.
    return checkpoint(forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def _differentiable(found: Any) -> bool:
    """True if a gradient reaches one of the tensors in nested arguments."""
    return any(isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in tree_leaves(found))
