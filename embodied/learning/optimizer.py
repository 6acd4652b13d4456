"""The optimiser of a policy, and its steps. Every step of the project is taken here, on one rank or on several.

begin      forget the last gradient
...        backward passes, micro-batch by micro-batch
norm       sum the gradients over the ranks, and scale them down to `optim.max_grad_norm`
take       Adam's step
"""

from __future__ import annotations

import torch
from torch import Tensor

from embodied.config.schema import OptimConfig
from embodied.learning.parallel import ReplicatedPolicy
from policies.contract import Policy, actor_parameters


def make_optimizer(policy: Policy, *, policy_lr: float, value_lr: float | None, eps: float) -> torch.optim.Adam:
    """Adam with learning rates of their own for actor and value head; `value_lr` None: the actor alone is trained."""
    groups = [{"params": list(actor_parameters(policy)), "lr": policy_lr, "name": "policy"}]
    if value_lr is not None:
        groups.append({"params": list(policy.value_head.parameters()), "lr": value_lr, "name": "value_head"})
    return torch.optim.Adam(groups, eps=eps, fused=True)


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
        """Take the step."""
        self._optimizer.step()
