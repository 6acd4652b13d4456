"""The scale of returns, which follows from earlier updates and is part of a checkpoint, and an iteration's learning
rates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from embodied.algorithms.samples import Samples
from embodied.config.schema import Config, risen
from embodied.errors import UserError, nearest
from embodied.metric import Metric
from embodied.run import checkpoint
from embodied.trajectories.batch import Trajectories

KEPT = 0.9
"""Decay of the running statistics of returns, per iteration."""
LEAST_DEVIATION = 1e-4
"""Least deviation that returns are divided by, so that equal returns are not blown up."""


METRICS = (
    Metric("learner/return_mean", "reward", "Running mean of returns, with advantage.normalise_returns."),
    Metric("learner/return_deviation", "reward", "Running deviation of returns, likewise."),
)
"""The scale of returns."""


GONE = ("lr_share", "entropy_coef", "reference_kl")
"""Controls that checkpoints of earlier versions have: the learning rate by KL, and two adaptive coefficients."""


@dataclass(frozen=True)
class ReturnScale:
    """Running statistics of returns after some updates."""

    return_mean: float = 0.0
    return_square: float = 1.0
    """Mean of the squares."""
    return_weight: float = 0.0
    """Weight of the returns seen so far, up to 1 (Adam's bias correction)."""

    @classmethod
    def read(cls, numbers: Mapping[str, float]) -> ReturnScale:
        """The statistics in `numbers`, without controls that are `GONE`. Raises `UserError` for other names."""
        known = list(asdict(cls()))
        numbers = {name: number for name, number in numbers.items() if name not in GONE}
        for name in numbers:
            if name not in known:
                raise UserError(f"the checkpoint has a control {name!r}{nearest(name, known)}; use an earlier one")
        return cls(**numbers)

    def seen(self, mean: float, square: float) -> ReturnScale:
        """The statistics with an iteration's returns: their mean and the mean of their squares."""

        def joined(before: float, now: float) -> float:
            return KEPT * self.return_weight * before + (1 - KEPT) * now

        weight = KEPT * self.return_weight + 1 - KEPT
        return ReturnScale(joined(self.return_mean, mean) / weight, joined(self.return_square, square) / weight, weight)

    @property
    def scale(self) -> tuple[float, float]:
        """Mean and deviation of returns; 0 and 1 before any were seen."""
        deviation = math.sqrt(max(self.return_square - self.return_mean**2, 0.0))
        return self.return_mean, max(deviation, LEAST_DEVIATION)


class UpdateControls:
    """The learning rates and the scale of returns of a learner. Equal on all ranks, which measure the same."""

    def __init__(self, config: Config) -> None:
        """Raises `UserError` where the critic of `policy.init` predicts in deviations of returns and this run's does
        not."""
        self._config = config
        self._state = ReturnScale()
        self._earlier = self._state.scale
        """Scale of the update before."""
        begun = config.policy.init
        if begun is not None and (begun / "state.json").is_file():
            self._take(checkpoint.read_state(begun).controls, str(begun))

    def numbers(self) -> dict[str, float]:
        """The numbers that differ from those before the first update, for a checkpoint."""
        begun = asdict(ReturnScale())
        return {name: number for name, number in asdict(self._state).items() if number != begun[name]}

    def load(self, numbers: Mapping[str, float]) -> None:
        """Continue from `numbers`. Raises `UserError` where the critic predicts in other units."""
        self._take(numbers, "the checkpoint")

    def _take(self, numbers: Mapping[str, float], source: str) -> None:
        if "return_weight" in numbers and not self._config.advantage.normalise_returns:
            raise UserError(
                f"the critic of {source} predicts in deviations of returns, and advantage.normalise_returns is off: "
                "set it to true"
            )
        self._state = ReturnScale.read(numbers)
        self._earlier = self._state.scale

    def set_learning_rates(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        """Set the iteration's learning rates of policy and value head."""
        optim = self._config.optim
        share = optim.fallen(iteration, self._config.iterations)
        # Each rises from its own first step on.
        begun = risen(iteration - optim.critic_warmup, optim.lr_warmup)
        rates = {
            "policy": optim.policy_lr * share * begun,
            "value_head": optim.value_lr * share * risen(iteration, optim.lr_warmup),
        }
        for group in optimizer.param_groups:
            group["lr"] = rates[group["name"]]

    def in_rewards(self, batch: Trajectories, now: Tensor | None = None) -> Trajectories:
        """The trajectories with values in the unit of rewards, where the critic predicts in deviations of returns.

        `now` [T, B] or [T, B, C]: values of the decisions under the present critic, if the recorded ones are an update
        older. Observations without a decision keep their recorded value.
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

    def in_deviations(self, samples: Samples) -> Samples:
        """The samples with values and returns in deviations of returns; their returns join the running statistics.

        Values are then the critic's own outputs, so that `loss.value_clip` limits its change.
        """
        if not self._config.advantage.normalise_returns or not len(samples):
            return samples
        returns = samples.returns
        counted = returns[samples.alive] if returns.ndim == 2 else returns
        counted = counted.double()
        self._earlier = before, width = self._state.scale
        self._state = self._state.seen(float(counted.mean()), float(counted.square().mean()))
        mean, deviation = self._state.scale
        return replace(samples, value=(samples.value - before) / width, returns=(returns - mean) / deviation)

    def metrics(self) -> dict[str, float]:
        """The scale of returns as metrics."""
        if not self._config.advantage.normalise_returns:
            return {}
        mean, deviation = self._state.scale
        return {"learner/return_mean": mean, "learner/return_deviation": deviation}


def _unscaled(value: Tensor, scale: tuple[float, float]) -> Tensor:
    mean, deviation = scale
    return value * deviation + mean
