"""The optimiser of a policy, and its steps. Every step that trains a policy is taken here, on any number of ranks.

    begin      forget the last gradient
    ...        backward passes, micro-batch by micro-batch
    norm       sum the gradients over the ranks, and scale them down to `optim.max_grad_norm`
    take       Adam's step, or AdamW's; the average of the weights moves (`optim.ema`)

The average is part of the optimiser's state of each parameter: checkpoints, shards and offload have it as they have
Adam's moments (docs/decisions/0193-average-of-the-weights.md).
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.config.schema import OptimConfig
from embodied.errors import UserError
from embodied.learning.eager_adam import EagerAdam
from embodied.learning.parallel import ReplicatedPolicy
from embodied.learning.quantised_adam import QuantisedAdam
from embodied.run.checkpoint import AVERAGE
from policies.contract import Policy, actor_parameters


def make_optimizer(
    policy: Policy, settings: OptimConfig, *, policy_lr: float, value_lr: float | None, eps: float
) -> torch.optim.Adam:
    """Adam with separate learning rates for actor and value head; `value_lr` None: the actor alone is trained. With
    `optim.weight_decay` it is AdamW (Loshchilov and Hutter 2019, arXiv 1711.05101); with `optim.moments` its moments
    are quantised. Raises `UserError` where nothing that is trained would decay."""
    parts = [("policy", actor_parameters(policy), policy_lr)]
    if value_lr is not None:
        parts.append(("value_head", policy.value_head.parameters(), value_lr))
    decay, groups = settings.weight_decay, []
    for name, own, lr in parts:
        parameters = list(own)
        shares = [(parameters, 0.0)]
        if decay:
            matrices = [parameter for parameter in parameters if parameter.ndim > 1]
            others = [parameter for parameter in parameters if parameter.ndim < 2]
            shares = [(part, share) for part, share in ((matrices, decay), (others, 0.0)) if part]
        groups += [{"params": part, "lr": lr, "name": name, "weight_decay": share} for part, share in shares]
    if decay and not any(p.requires_grad for g in groups if g["weight_decay"] for p in g["params"]):
        raise UserError(
            f"optim.weight_decay is {decay:g}, and nothing that is trained is a matrix, which alone decays (norms and "
            "biases do not): set it to 0"
        )
    kind = EagerAdam if settings.moments is None else QuantisedAdam
    return kind(groups, eps=eps, fused=True, decoupled_weight_decay=decay > 0)


class OptimizerSteps:
    """The steps of one rank's optimiser; all ranks take the same ones."""

    def __init__(self, parallel: ReplicatedPolicy, optimizer: torch.optim.Optimizer, settings: OptimConfig) -> None:
        self._parallel, self._optimizer, self._settings = parallel, optimizer, settings

    def begin(self) -> None:
        """Forget the last gradient."""
        self._optimizer.zero_grad(set_to_none=True)

    def norm(self, divided_by: float = 1.0) -> Tensor:
        """Sum the gradients over the ranks, divide them, and scale them down to `optim.max_grad_norm`. Returns the
        gradient's norm before that, on the device."""
        self._parallel.sum_gradients()
        if divided_by != 1.0:
            for parameter in self._parallel.policy.parameters():
                if parameter.grad is not None:
                    parameter.grad /= divided_by
        return self._parallel.clip_grad_norm(self._settings.max_grad_norm)

    def take(self) -> None:
        """Take the step, and move the average of the weights towards them; it begins as they are before the first
        step."""
        decay, states = self._settings.ema, self._optimizer.state
        if decay is None:
            self._optimizer.step()
            return
        trained = [p for group in self._optimizer.param_groups for p in group["params"]]
        begun = {
            p: p.detach().to(torch.promote_types(p.dtype, torch.float32), copy=True)
            for p in trained
            if (p.grad is not None or states.get(p)) and AVERAGE not in states.get(p, {})
        }
        self._optimizer.step()
        for parameter, average in begun.items():
            states[parameter][AVERAGE] = average
        for parameter in trained:
            if AVERAGE in states.get(parameter, {}):
                average = _local(states[parameter][AVERAGE])
                average.lerp_(_local(parameter.detach()).to(average.dtype), 1 - decay)


def _local(tensor: Tensor) -> Tensor:
    """This rank's part of a tensor, in the same memory."""
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part
