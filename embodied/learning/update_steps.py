"""The optimiser steps of an update: epochs of minibatches over all rows, or one step whose gradient was added up part
by part.

Every rank of a learner takes the same steps: `SharedWork` sums gradients and statistics over them.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from embodied.algorithms.estimators import Rows
from embodied.algorithms.ppo import behaviour_weight, reduce_to_unit
from embodied.config.schema import Config, OptimConfig
from embodied.devices import defines
from embodied.errors import UserError
from embodied.learning.microbatch import LossSums, count_units, count_values
from embodied.learning.shared_work import SharedWork
from embodied.learning.update_controls import UpdateControls
from embodied.learning.update_record import keep_rows
from embodied.learning.whole_policy import WholePolicy
from embodied.trajectories.random_streams import permutation
from policies.contract import Policy

BEHAVIOUR_BOUND = 2.0
"""Truncation of the weight proximal / behaviour where the rollout is one update behind."""


class OffPolicy(UserError):
    """The learner does not reproduce the log-probs that the rollout recorded."""


class NonFinite(UserError):
    """Losses or gradients were not finite several steps in a row."""


def make_optimizer(policy: Policy, settings: OptimConfig) -> torch.optim.Adam:
    """Actor and value head with learning rates of their own."""
    return torch.optim.Adam(
        [
            {"params": list(policy.actor_parameters()), "lr": settings.policy_lr, "name": "policy"},
            {"params": list(policy.value_head.parameters()), "lr": settings.value_lr, "name": "value_head"},
        ],
        eps=settings.adam_eps,
        fused=True,
    )


class UpdateSteps:
    """Takes the steps of a rank that holds its part of the policy.

    `behind` says that an earlier policy than the present one has acted.
    """

    def __init__(
        self,
        held: WholePolicy,
        work: SharedWork,
        optimizer: torch.optim.Optimizer,
        controls: UpdateControls,
        config: Config,
        run_dir: Path,
    ) -> None:
        self._held, self._policy, self._ranks, self._work = held, held.policy, held.ranks, work
        self._optimizer, self._controls, self._run_dir = optimizer, controls, run_dir
        self._unit, self._credit, self._config = config.loss.ratio_unit, config.advantage.credit, config.optim
        self._seed = config.seed
        self._streamed = LossSums()
        self._non_finite = 0
        self.first_ratio_error = float("nan")
        """The mean |ratio - 1| at the first minibatch of the last update that was checked."""

    def epochs(self, rows: Rows, iteration: int, behind: bool) -> tuple[LossSums, list[float], bool]:
        """Epochs of permuted minibatches; ends early at the KL bound. Loss sums, gradient norms, whether it ended so.

        Raises `OffPolicy` if the first minibatch's ratios are not one, and `NonFinite` after several steps in a row
        that had to be skipped.
        """
        rows = self._proximal(self._precomputed(rows, behind), behind)
        sums, norms = LossSums(), list[float]()
        for epoch in range(self._config.epochs):
            order = torch.from_numpy(permutation(self._seed, iteration, epoch, len(rows)))
            for number, index in enumerate(order.split(self._config.minibatch or len(order))):
                part, norm = self._step(rows, index, iteration, check=epoch == number == 0)
                sums.add(part)
                if norm is None:
                    return sums, norms, True
                norms.append(norm)
        return sums, norms, False

    def stream(self, rows: Rows, behind: bool) -> None:
        """Add a part's gradient. `step_streamed` divides the sum by denominators that are known after the last part."""
        first = self._streamed.rows == 0
        if first:
            self._optimizer.zero_grad(set_to_none=True)
        rows = self._proximal(self._precomputed(rows, behind), behind)
        every = torch.arange(len(rows))
        part, _ = self._work.read(self._work.add_gradient(rows, every, self._controls.loss, 1.0, 1, more=True))
        if first:
            self._check_on_policy(part.off_policy / part.units)
        self._streamed.add(part)

    def step_streamed(self, rows: Rows, iteration: int) -> tuple[LossSums, list[float]]:
        """The one step of an update that was added up part by part; `rows` are all of its rows."""
        sums, self._streamed = self._streamed, LossSums()
        if not len(rows):
            return sums, []
        self._work.sum_gradients(rows)
        for parameter in self._policy.parameters():
            if parameter.grad is not None:
                parameter.grad /= sums.weights
        norm = float(self._work.clip())
        self._apply(rows, torch.arange(len(rows)), sums, norm, iteration)
        return sums, [norm]

    def _precomputed(self, rows: Rows, behind: bool) -> Rows:
        """The rows. If they are evaluated more than once, their traces also hold the result of `Policy.precompute`."""
        evaluations = self._config.epochs + behind
        if evaluations == 1 or not defines(self._policy, "precompute"):
            return rows
        return replace(rows, precomputed=self._work.precomputed(rows))

    def _proximal(self, rows: Rows, behind: bool) -> Rows:
        """The rows with the log-probs that ratios are taken to: those of the policy that acted.

        Where the rollout is an update behind, they are those of the present policy, and every unit is weighted by the
        ratio of the present to the acting probability (the decoupled objective).
        """
        if not behind:
            return rows
        now = self._work.log_prob(rows)
        unit = self._unit
        proximal, _ = reduce_to_unit(now, rows.executed, unit)
        behaviour, _ = reduce_to_unit(rows.log_prob, rows.executed, unit)
        return replace(rows, log_prob=now, importance=behaviour_weight(proximal, behaviour, BEHAVIOUR_BOUND))

    def _step(self, rows: Rows, index: Tensor, iteration: int, check: bool) -> tuple[LossSums, float | None]:
        """One optimiser step on the rows `index`. The gradient norm, or None where the KL bound ends the update."""
        self._optimizer.zero_grad(set_to_none=True)
        executed, dims = rows.executed[index], rows.log_prob.shape[-1]
        units, weights = count_units(executed, rows.weight[index], dims, self._unit)
        values = count_values(executed, self._credit)
        with self._held.critic_alone(iteration < self._config.critic_warmup):
            shares = self._work.add_gradient(rows, index, self._controls.loss, weights, values)
        sums, norm = self._work.read(shares, self._work.clip())
        if check:
            self._check_on_policy(sums.off_policy / units)
        if self._config.target_kl is not None and sums.approx_kl / units > 1.5 * self._config.target_kl:
            return sums, None
        self._apply(rows, index, sums, norm, iteration)
        return sums, norm

    def _apply(self, rows: Rows, index: Tensor, sums: LossSums, norm: float, iteration: int) -> None:
        """Step, unless loss or gradient is not finite."""
        loss = sums.policy_loss + sums.value_loss + sums.entropy
        if np.isfinite(norm) and np.isfinite(loss):
            self._non_finite = 0
            self._optimizer.step()
        else:
            self._skip(rows.take(index), iteration, loss, norm)

    def _check_on_policy(self, off_policy: float) -> None:
        tolerance = self._policy.ratio_tolerance
        if not off_policy <= tolerance:
            raise OffPolicy(
                f"at the first minibatch the mean |ratio - 1| is {off_policy:.2e}, above the policy's tolerance of "
                f"{tolerance:.0e}: the learner does not compute the log-probs that the rollout recorded. Usual causes: "
                "another sampling temperature, dropout, preprocessing, an adapter that is not loaded, or precision"
            )
        self.first_ratio_error = off_policy

    def _skip(self, rows: Rows, iteration: int, loss: float, norm: float) -> None:
        """Skip the step and keep the minibatch for inspection. Raises `NonFinite` after several in a row."""
        self._non_finite += 1
        folder = self._run_dir / "non_finite"
        if self._ranks.first:
            keep_rows(rows, folder, iteration)
        if self._non_finite >= self._config.non_finite_limit:
            raise NonFinite(
                f"loss {loss} and gradient norm {norm} were not finite for {self._non_finite} optimiser steps in a "
                f"row; the parameters were left as they were and the minibatches are in {folder}. A smaller "
                "learning rate, or a look at the rewards and observations in there, is the usual way on"
            )
