"""The reference worker: says how likely the policy that training began with finds what was decided.

The loss draws the policy towards it (`loss.reference_kl`). Beside the learner, and with an adapter that training began
anew, it is the learner's own policy with the adapter left out, and holds no weights. Otherwise it holds a frozen copy.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from embodied import progress
from embodied.config.schema import Config
from embodied.devices import CPU, device_of
from embodied.errors import UserError
from embodied.learning.scorer import Scorer
from embodied.trajectories.batch import Trajectories
from embodied.workflows.context import WorkerContext
from policies.contract import Policy


class ReferenceWorker(Scorer):
    """Fills `Trajectories.reference_log_prob`."""

    adds: ClassVar[frozenset[str]] = frozenset({"reference_log_prob"})

    def __init__(self, context: WorkerContext, policy: Policy | None) -> None:
        """`policy` as training begins with it; None: `share` will give one."""
        super().__init__(context.affinity)
        self._context = context
        self._policy = None if policy is None else policy.requires_grad_(False)
        self._shared = False
        optim = context.config.optim
        self._micro_batch = optim.micro_batch or optim.minibatch

    @classmethod
    def make(cls, context: WorkerContext) -> ReferenceWorker:
        """The reference worker of a run, new or resumed: what it began with follows from the configuration."""
        return cls(context, context.policy())

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise `UserError` where nothing is drawn towards the reference."""
        if not (config.loss.reference_kl or config.advantage.reward_kl):  # the learner checks where the latter counts
            raise UserError(
                f"the workflow {config.workflow} has a reference policy, and loss.reference_kl is 0: set it to the "
                "weight of the divergence from it (0.01, for example), or take a workflow without. In "
                "reinforce_reference, advantage.reward_kl does too"
            )

    def share(self, policy: Policy) -> None:
        """Use the learner's policy, which has learned nothing yet, if what it is now can be had from it later on."""
        self._shared = policy.has_new_adapter
        if self._shared:
            self._policy = policy
        else:
            own = replace(self._context, shares=False).policy()
            assert own is not None
            self._policy = own.requires_grad_(False)

    def work(self, batch: Trajectories) -> Trajectories:
        """`reference_log_prob` [T, B, C, A] of the decisions that were taken; those of others are zero."""
        assert self._policy is not None, "the worker was made to be given a policy by share"
        taken = batch.mask.flatten().nonzero()[:, 0]
        found = torch.zeros_like(batch.log_prob.flatten(0, 1))
        with torch.no_grad(), self._as_it_began(self._policy):
            for rows in taken.split(self._micro_batch or max(len(taken), 1)):
                found[rows] = self._log_prob(self._policy, batch, rows)
                progress.report()
        return replace(batch, reference_log_prob=found.view_as(batch.log_prob))

    def _log_prob(self, policy: Policy, batch: Trajectories, rows: Tensor) -> Tensor:
        decisions, device = batch.decisions.select(rows), device_of(policy)
        return policy.evaluate(decisions.inputs(device), decisions.trace(device)).log_prob.to(CPU)

    def _as_it_began(self, policy: Policy) -> AbstractContextManager[None]:
        return policy.without_adapter() if self._shared else nullcontext()
