"""What a learner's updates are steered by: learning rates, the loss's weights, and the scale of returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from embodied.algorithms.controls import Controls
from embodied.algorithms.estimators import Rows
from embodied.algorithms.ppo import alive_actions
from embodied.config import Config, LossConfig
from embodied.data.trajectories import Trajectories


class UpdateControls:
    """Equal on all ranks of a learner, since all of them measure the same."""

    def __init__(self, config: Config) -> None:
        self._config = config
        self._state = Controls.of(config)

    def numbers(self) -> dict[str, float]:
        """The state, for a checkpoint."""
        return self._state.numbers(self._config)

    def load(self, numbers: Mapping[str, float]) -> None:
        """Go on with what `numbers` wrote."""
        self._state = Controls.read(numbers, self._config)

    @property
    def loss(self) -> LossConfig:
        """Of the update that comes."""
        return self._state.loss(self._config.loss)

    def set_learning_rates(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        """Those of the iteration, of policy and value head."""
        optim = self._config.optim
        share = 1 - iteration / self._config.iterations if optim.anneal else 1.0
        share *= min(1.0, (iteration + 1) / (optim.lr_warmup + 1))
        policy, value_head = optimizer.param_groups
        policy["lr"] = optim.policy_lr * share * self._state.lr_share
        value_head["lr"] = optim.value_lr * share

    def in_rewards(self, batch: Trajectories) -> Trajectories:
        """The trajectories with values in the unit of rewards, where the critic speaks in deviations of returns."""
        if not self._config.advantage.normalise_returns:
            return batch
        mean, deviation = self._state.scale

        def unscaled(value: Tensor) -> Tensor:
            return value * deviation + mean

        return replace(
            batch,
            value=unscaled(batch.value),
            final_value=unscaled(batch.final_value),
            last_value=unscaled(batch.last_value),
        )

    def in_deviations(self, rows: Rows) -> Rows:
        """The rows with values and returns in deviations of returns, of which these are some more."""
        if not self._config.advantage.normalise_returns or not len(rows):
            return rows
        returns = rows.returns
        counted = returns[alive_actions(rows.executed, returns.shape[1])] if returns.ndim == 2 else returns
        counted = counted.double()
        self._state = self._state.seen(float(counted.mean()), float(counted.square().mean()))
        mean, deviation = self._state.scale
        return replace(rows, value=(rows.value - mean) / deviation, returns=(returns - mean) / deviation)

    def note(self, metrics: Mapping[str, float], learned: bool) -> dict[str, float]:
        """Adapt to an update's metrics, unless nothing was `learned`. What is steered, as metrics."""
        config, used = self._config, self._state
        if learned:
            self._state = used.after(config, metrics)
        found = {}
        if config.loss.reference_kl_target is not None:
            found["learner/reference_kl_weight"] = used.reference_kl
        if config.loss.entropy_target is not None:
            found["learner/entropy_coef"] = used.entropy_coef
        if config.advantage.normalise_returns:
            found["learner/return_mean"], found["learner/return_deviation"] = used.scale
        return found
