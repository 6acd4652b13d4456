"""Adam whose two moments are stored in 8 bits (Dettmers et al. 2022, arXiv 2110.02861).

A moment is divided into blocks of 256 numbers, each with its largest magnitude; a number is the index of the nearest of
256 levels, which are closer together near zero. A step dequantises the moments of one parameter, computes with them as
Adam does, and quantises them again. Quantising what was dequantised changes nothing: a checkpoint has the dequantised
moments, in the form of Adam's, and a run that resumes from it computes the same.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.optim.adam import adam

from embodied.errors import UserError
from embodied.learning.eager_adam import EagerAdam
from embodied.run.checkpoint import MOMENTS
from policies.quantised import dynamic_levels, library

BLOCK = 256
LEAST = 4096
"""Numbers of a parameter from which its moments are quantised: those of smaller ones take no memory."""
LARGEST = "_largest"
"""Ends the name of a moment's magnitudes, float32, in the state of a parameter."""


class QuantisedAdam(EagerAdam):
    """The state of a parameter is that of `torch.optim.Adam`, with `exp_avg` and `exp_avg_sq` as uint8 of the
    parameter's shape, and their blocks' magnitudes beside them."""

    def __init__(self, params: Any, **settings: Any) -> None:
        """Raises `UserError` for parameters that are shards, `PolicyError` where bitsandbytes is not installed."""
        library()
        super().__init__(params, **settings)
        if any(hasattr(p, "full_tensor") for group in self.param_groups for p in group["params"]):
            raise UserError(
                "optim.moments is int8, and the learner's ranks have shards of the policy, whose moments are divided "
                "already: leave optim.moments out, or set optim.sharding to whole"
            )

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is None, "gradients are there"
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros((), device=parameter.device)
                    state |= {key: torch.zeros_like(parameter) for key in MOMENTS}
                moments = [self.moment(parameter, key) for key in MOMENTS]
                adam(
                    [parameter], [parameter.grad], [moments[0]], [moments[1]], [], [state["step"]],
                    fused=True, decoupled_weight_decay=group["decoupled_weight_decay"], amsgrad=False,
                    beta1=beta1, beta2=beta2, lr=group["lr"], weight_decay=group["weight_decay"], eps=group["eps"],
                    maximize=False,
                )  # fmt: skip
                for key, moment in zip(MOMENTS, moments, strict=True):
                    _quantise(state, key, moment)

    def moment(self, parameter: Tensor, key: str) -> Tensor:
        """The moment `key` of a parameter, in its type."""
        state: dict[str, Any] = self.state[parameter]
        tensor: Tensor = state[key]
        largest = state.get(f"{key}{LARGEST}")
        if largest is None:
            return tensor
        levels = dynamic_levels(tensor.device, signed=key == MOMENTS[0])
        found: Tensor = torch.ops.bitsandbytes.dequantize_blockwise(tensor, largest, levels, BLOCK, parameter.dtype)
        return found.view(tensor.shape)

    def pack(self) -> None:
        for state in self.state.values():
            for key in MOMENTS:
                _quantise(state, key, state[key])


def _quantise(state: dict[str, Any], key: str, moment: Tensor) -> None:
    state[key] = moment
    if moment.numel() < LEAST:
        return
    levels = dynamic_levels(moment.device, signed=key == MOMENTS[0])
    blocks = functional.pad(moment.float().flatten(), (0, -moment.numel() % BLOCK)).view(-1, BLOCK)
    largest = blocks.abs().amax(1)
    scaled = blocks / largest.clamp_min(torch.finfo(torch.float32).tiny)[:, None]
    # Exactly the nearest: bitsandbytes' own function takes a neighbour now and then, and not the same one again.
    codes = torch.bucketize(scaled, (levels[1:] + levels[:-1]) / 2, out_int32=True).to(torch.uint8)
    state |= {key: codes.flatten()[: moment.numel()].view(moment.shape), f"{key}{LARGEST}": largest}
