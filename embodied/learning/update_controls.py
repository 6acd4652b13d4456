"""What a learner's updates are steered by: learning rates, the loss's weights, and the scale of returns."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from embodied.algorithms.controls import Controls
from embodied.algorithms.estimators import Rows
from embodied.algorithms.ppo import alive_actions
from embodied.config.schema import Config, LossConfig
from embodied.errors import UserError
from embodied.run import checkpoint
from embodied.trajectories.batch import Trajectories


class UpdateControls:
    """Equal on all ranks of a learner, since all of them measure the same."""

    def __init__(self, config: Config) -> None:
        """Raises `UserError` where `policy.init` has a critic that speaks in deviations of returns and this run's does
        not."""
        self._config = config
        self._state = Controls.of(config)
        self._earlier = self._state.scale
        """Of an update before."""
        begun = config.policy.init
        if begun is not None and (begun / "state.json").is_file():
            numbers = checkpoint.read_state(begun).controls
            self._take({name: number for name, number in numbers.items() if name.startswith("return_")}, str(begun))

    def numbers(self) -> dict[str, float]:
        """The state, for a checkpoint."""
        return self._state.numbers(self._config)

    def load(self, numbers: Mapping[str, float]) -> None:
        """Go on with what `numbers` wrote. Raises `UserError` where the critic would be misunderstood."""
        self._take(numbers, "the checkpoint")

    def _take(self, numbers: Mapping[str, float], source: str) -> None:
        if "return_weight" in numbers and not self._config.advantage.normalise_returns:
            raise UserError(
                f"the critic of {source} speaks in deviations of returns, and advantage.normalise_returns is off: "
                "set it to true"
            )
        self._state = Controls.read(numbers, self._config)
        self._earlier = self._state.scale

    @property
    def loss(self) -> LossConfig:
        """Of the update that comes."""
        return self._state.loss(self._config.loss)

    def set_learning_rates(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        """Those of the iteration, of policy and value head."""
        optim = self._config.optim
        share = 1 - iteration / self._config.iterations if optim.anneal else 1.0
        policy, value_head = optimizer.param_groups
        # Each rises from its own first step on.
        policy["lr"] = optim.policy_lr * share * self._risen(iteration - optim.critic_warmup) * self._state.lr_share
        value_head["lr"] = optim.value_lr * share * self._risen(iteration)

    def _risen(self, iteration: int) -> float:
        return max(0.0, min(1.0, (iteration + 1) / (self._config.optim.lr_warmup + 1)))

    def in_rewards(self, batch: Trajectories, now: Tensor | None = None) -> Trajectories:
        """The trajectories with values in the unit of rewards, where the critic speaks in deviations of returns.

        `now` [T, B] or [T, B, C], where the critic spoke an update ago: what the present one says of the decisions.
        Observations that no decision followed keep the value of then.
        """
        if not self._config.advantage.normalise_returns:
            return batch if now is None else replace(batch, value=now)
        then = self._state.scale if now is None else self._earlier
        return replace(
            batch,
            value=_unscaled(batch.value if now is None else now, self._state.scale),
            final_value=_unscaled(batch.final_value, then),
            last_value=_unscaled(batch.last_value, then),
        )

    def in_deviations(self, rows: Rows) -> Rows:
        """The rows with values and returns in deviations of returns, of which these are some more.

        Values are again as the critic said them: only so does loss.value_clip bound how far it moves.
        """
        if not self._config.advantage.normalise_returns or not len(rows):
            return rows
        returns = rows.returns
        counted = returns[alive_actions(rows.executed, returns.shape[1])] if returns.ndim == 2 else returns
        counted = counted.double()
        self._earlier = before, width = self._state.scale
        self._state = self._state.seen(float(counted.mean()), float(counted.square().mean()))
        mean, deviation = self._state.scale
        return replace(rows, value=(rows.value - before) / width, returns=(returns - mean) / deviation)

    def note(self, metrics: Mapping[str, float], iteration: int) -> dict[str, float]:
        """Adapt to the metrics of an update that changed the policy. What is steered, as metrics."""
        config, used = self._config, self._state
        if metrics["learner/steps"] and iteration >= config.optim.critic_warmup:
            self._state = used.after(config, metrics)
        found = {}
        if config.loss.reference_kl_target is not None:
            found["learner/reference_kl_weight"] = used.reference_kl
        if config.loss.entropy_target is not None:
            found["learner/entropy_coef"] = used.entropy_coef
        if config.advantage.normalise_returns:
            found["learner/return_mean"], found["learner/return_deviation"] = used.scale
        return found


def _unscaled(value: Tensor, scale: tuple[float, float]) -> Tensor:
    mean, deviation = scale
    return value * deviation + mean
