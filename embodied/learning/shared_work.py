"""What the ranks of a learner do in shares: passes over rows, without a gradient and with one.

Every rank has all rows, and takes its share of those that it is asked about; the answers are those of one rank that
takes them all. Ranks that hold shards of the policy need each other in every pass, and so make equally many.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from embodied import progress
from embodied.algorithms.estimators import Rows
from embodied.algorithms.objectives import Objective
from embodied.config.schema import Config, LossConfig
from embodied.devices import CPU, device_of
from embodied.learning.microbatch import LossSums, MicroBatchLoss, add_gradient, read
from embodied.learning.whole_policy import WholePolicy
from embodied.trajectories.batch import Trajectories

NOTHING = (math.inf, math.inf)
"""Denominators with which rows add nothing to a gradient."""


class SharedWork:
    """Passes of the policy that ranks hold."""

    def __init__(self, held: WholePolicy, config: Config, critic: bool, objective: Objective) -> None:
        self._held, self._policy, self._ranks = held, held.policy, held.ranks
        self._device = device_of(held.policy)
        self._config, self._critic, self._objective = config, critic, objective

    # --- without a gradient

    def precomputed(self, rows: Rows) -> Mapping[str, Tensor]:
        """`Policy.precompute` of all rows, in the host's memory."""
        whole: dict[str, Tensor] = {}
        done = 0
        with torch.no_grad(), self._ranks.waiting("look ahead"):
            for piece in self._pieces(len(rows)):
                progress.report()
                found = self._policy.precompute(rows.decisions.select(piece).inputs(self._device))
                for key, part in found.items():
                    if key not in whole:
                        share = self._ranks.largest_share(len(rows))
                        whole[key] = torch.empty(share, *part.shape[1:], dtype=part.dtype)
                    whole[key][done : done + len(piece)] = part.to(CPU)
                done += len(piece)
        return {key: self._ranks.gather_rows(part, len(rows)) for key, part in whole.items()}

    def log_prob(self, rows: Rows) -> Tensor:
        """[N, C, A] of all rows under the present policy, in the host's memory."""

        def evaluated(piece: Tensor) -> Tensor:
            part = rows.take(piece).to(self._device)
            return self._policy.evaluate(part.inputs, part.trace).log_prob

        return self._of_all(len(rows), evaluated)

    def values(self, batch: Trajectories) -> Tensor:
        """[T, B] or [T, B, C]: what the present critic says of the decisions that were taken; zero elsewhere. In the
        host's memory."""
        taken = batch.mask.flatten().nonzero()[:, 0]
        found = torch.zeros_like(batch.value)
        if len(taken):
            decisions = batch.decisions.select(taken)

            def judged(piece: Tensor) -> Tensor:
                part = decisions.select(piece)
                # `evaluate`, not `value`: shards of a policy meet for no other call.
                return self._policy.evaluate(part.inputs(self._device), part.trace(self._device)).value

            found.flatten(0, 1)[taken] = self._of_all(len(taken), judged)
        return found

    def _of_all(self, rows: int, found: Callable[[Tensor], Tensor]) -> Tensor:
        """[rows, ...] in the host's memory: what `found` says of each piece of this rank's share, of all ranks."""
        share = []
        with torch.no_grad(), self._ranks.waiting("evaluate"):
            for piece in self._pieces(rows):
                progress.report()
                share.append(found(piece).to(CPU))
        return self._ranks.gather_rows(torch.cat(share), rows)

    def _pieces(self, rows: int) -> Sequence[Tensor]:
        """This rank's share of all rows in their order, in micro-batches; a share that is shorter than others repeats
        a row."""
        share = self._ranks.share(torch.arange(rows))
        share = torch.cat([share, share.new_zeros(self._ranks.largest_share(rows) - len(share))])
        return share.split(self._config.optim.micro_batch or self._config.optim.minibatch or len(share))

    # --- with a gradient

    def add_gradient(
        self, rows: Rows, index: Tensor, loss: LossConfig, weights: float, values: float, more: bool = False
    ) -> list[MicroBatchLoss]:
        """Add the gradient of this rank's share of the rows `index`, of a loss with the given denominators.

        Then all ranks have the gradient of all shares, unless there is `more` to come: `sum_gradients` ends that.
        """
        mine, size = self._ranks.share(index), self._config.optim.micro_batch or len(index)
        counted = list(mine.split(size)) if len(mine) else []
        # A rank that has no row at all needs one pass to have a gradient, of zero.
        passes = max(-(-self._ranks.largest_share(len(index)) // size) if self._held.sharded else len(counted), 1)
        found = []
        for number in range(passes):
            self._held.last_pass(number == passes - 1 and not more)
            if number < len(counted):
                found.append(self._backward(rows.take(counted[number]), loss, weights, values))
            else:
                self._backward(rows.take(index[:1]), loss, *NOTHING)
        if not more:
            self._held.sum_gradients()
        return found

    def sum_gradients(self, rows: Rows) -> None:
        """Have the gradient of all ranks where each has added up its own; `rows` are some that it was of."""
        if self._held.sharded:  # shards are summed in a backward pass: one that adds nothing
            self._held.last_pass(True)
            self._backward(rows.take(torch.zeros(1, dtype=torch.int64)), self._config.loss, *NOTHING)
        self._held.sum_gradients()

    def clip(self) -> Tensor:
        """Scale the gradient down to the bound. Its norm before that, on the device."""
        return self._held.clip(self._config.optim.max_grad_norm)

    def read(self, shares: Sequence[MicroBatchLoss], norm: Tensor | None = None) -> tuple[LossSums, float]:
        """The sums of all ranks' shares, and the gradient's norm (or NaN); waits for the device."""
        sums, found = read(shares, norm)
        return (sums if self._ranks.size == 1 else LossSums.of(self._ranks.sum_numbers(vars(sums)))), found

    def _backward(self, rows: Rows, loss: LossConfig, weights: float, values: float) -> MicroBatchLoss:
        progress.report()
        credit = self._config.advantage.credit
        with self._ranks.waiting("update"):
            return add_gradient(self._policy, rows, loss, credit, self._critic, weights, values, self._objective)
