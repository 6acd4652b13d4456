"""Adaptive coefficients: weights of the loss, the learning rate, the scale of returns.

They are functions of the metrics of earlier updates, and part of a checkpoint.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace

import torch
from torch import Tensor

from embodied.algorithms.advantages import alive_actions
from embodied.algorithms.samples import Samples
from embodied.config.schema import Config, LossConfig
from embodied.errors import UserError, nearest
from embodied.metric import Metric
from embodied.run import checkpoint
from embodied.trajectories.batch import Trajectories

KEPT = 0.9
"""Decay of the running statistics of returns, per iteration."""
LEAST_DEVIATION = 1e-4
"""Least deviation that returns are divided by, so that equal returns are not blown up."""
RATE_STEP, RATE_RANGE = 1.5, (1e-2, 10.0)
"""Factor of one change of the learning rate, and its range, in multiples of `optim.policy_lr`."""
WEIGHT_RANGE = (1e-3, 1e3)
"""Range of an adaptive weight of the loss, in multiples of its first value."""
ENTROPY_RATE = 0.5
"""Change of the logarithm of the entropy's weight per nat below the target, and its limit per iteration."""


METRICS = (
    Metric(
        "learner/reference_kl_weight", "weight", "Weight of the divergence, where loss.reference_kl_target moves it."
    ),
    Metric("learner/entropy_coef", "weight", "Weight of the entropy bonus, where loss.entropy_target moves it."),
    Metric("learner/return_mean", "reward", "Running mean of returns, with advantage.normalise_returns."),
    Metric("learner/return_deviation", "reward", "Running deviation of returns, likewise."),
)
"""The adaptive coefficients."""


@dataclass(frozen=True)
class Controls:
    """State of the adaptive coefficients after some updates."""

    reference_kl: float
    """Weight of the divergence from the reference policy."""
    entropy_coef: float
    lr_share: float = 1.0
    """Learning rate as a share of `optim.policy_lr`."""
    return_mean: float = 0.0
    return_square: float = 1.0
    """Mean of the squares."""
    return_weight: float = 0.0
    """Weight of the returns seen so far, up to 1 (Adam's bias correction)."""

    @classmethod
    def of(cls, config: Config) -> Controls:
        """Before the first update."""
        return cls(config.loss.reference_kl, config.loss.entropy_coef)

    @classmethod
    def read(cls, numbers: Mapping[str, float], config: Config) -> Controls:
        """State from `numbers`; coefficients that the configuration does not adapt have its values. Raises `UserError`
        for unknown names."""
        known = list(asdict(cls.of(config)))
        for name in numbers:
            if name not in known:
                raise UserError(f"the checkpoint has a control {name!r}{nearest(name, known)}; use an earlier one")
        found = cls(**{**asdict(cls.of(config)), **numbers})
        if config.loss.reference_kl_target is None:
            found = replace(found, reference_kl=config.loss.reference_kl)
        if config.loss.entropy_target is None:
            found = replace(found, entropy_coef=config.loss.entropy_coef)
        return found if config.optim.lr_kl is not None else replace(found, lr_share=1.0)

    def numbers(self, config: Config) -> dict[str, float]:
        """Numbers that differ from those before the first update."""
        begun = asdict(Controls.of(config))
        return {name: number for name, number in asdict(self).items() if number != begun[name]}

    def loss(self, settings: LossConfig) -> LossConfig:
        """The loss of the next update."""
        return settings.model_copy(update={"reference_kl": self.reference_kl, "entropy_coef": self.entropy_coef})

    def after(self, config: Config, measured: Mapping[str, float]) -> Controls:
        """The state after an update with these metrics."""
        loss, found = config.loss, self
        divergence, entropy = measured.get("learner/reference_kl"), measured["learner/entropy"]
        if loss.reference_kl_target is not None and divergence is not None and math.isfinite(divergence):
            weight = adapted_weight(self.reference_kl, divergence, loss.reference_kl_target)
            found = replace(found, reference_kl=_bounded(weight, loss.reference_kl))
        if loss.entropy_target is not None and math.isfinite(entropy):
            step = ENTROPY_RATE * max(-1.0, min(1.0, loss.entropy_target - entropy))
            found = replace(found, entropy_coef=_bounded(self.entropy_coef * math.exp(step), loss.entropy_coef))
        change = measured["learner/approx_kl"]
        if config.optim.lr_kl is not None and math.isfinite(change):
            found = replace(found, lr_share=adapted_share(self.lr_share, change, config.optim.lr_kl))
        return found

    def seen(self, mean: float, square: float) -> Controls:
        """The state with an iteration's returns: their mean and the mean of their squares."""

        def joined(before: float, now: float) -> float:
            return KEPT * self.return_weight * before + (1 - KEPT) * now

        weight = KEPT * self.return_weight + 1 - KEPT
        return replace(
            self,
            return_mean=joined(self.return_mean, mean) / weight,
            return_square=joined(self.return_square, square) / weight,
            return_weight=weight,
        )

    @property
    def scale(self) -> tuple[float, float]:
        """Mean and deviation of returns; 0 and 1 before any were seen."""
        deviation = math.sqrt(max(self.return_square - self.return_mean**2, 0.0))
        return self.return_mean, max(deviation, LEAST_DEVIATION)


def _bounded(weight: float, begun: float) -> float:
    return max(WEIGHT_RANGE[0] * begun, min(WEIGHT_RANGE[1] * begun, weight))


def adapted_weight(weight: float, divergence: float, target: float) -> float:
    """The weight of a divergence, doubled where that was above 1.5 targets and halved where it was below target / 1.5
    (Schulman et al. 2017, arXiv 1707.06347, section 4)."""
    if divergence > 1.5 * target:
        return 2 * weight
    return weight / 2 if divergence < target / 1.5 else weight


def adapted_share(share: float, change: float, target: float) -> float:
    """The share of a learning rate: less where an update's KL divergence was above 2 targets, more where it was below
    half of one (Rudin et al. 2021, arXiv 2109.11978)."""
    if change > 2 * target:
        share /= RATE_STEP
    elif 0 < change < target / 2:
        share *= RATE_STEP
    return max(RATE_RANGE[0], min(RATE_RANGE[1], share))


# --- in a learner


class UpdateControls:
    """The learning rates, the loss's weights and the scale of returns of a learner. Equal on all ranks, which measure
    the same."""

    def __init__(self, config: Config) -> None:
        """Raises `UserError` where the critic of `policy.init` predicts in deviations of returns and this run's does
        not."""
        self._config = config
        self._state = Controls.of(config)
        self._earlier = self._state.scale
        """Scale of the update before."""
        begun = config.policy.init
        if begun is not None and (begun / "state.json").is_file():
            numbers = checkpoint.read_state(begun).controls
            self._take({name: number for name, number in numbers.items() if name.startswith("return_")}, str(begun))

    def numbers(self) -> dict[str, float]:
        """The state, for a checkpoint."""
        return self._state.numbers(self._config)

    def load(self, numbers: Mapping[str, float]) -> None:
        """Continue from `numbers`. Raises `UserError` where the critic predicts in other units."""
        self._take(numbers, "the checkpoint")

    def _take(self, numbers: Mapping[str, float], source: str) -> None:
        if "return_weight" in numbers and not self._config.advantage.normalise_returns:
            raise UserError(
                f"the critic of {source} predicts in deviations of returns, and advantage.normalise_returns is off: "
                "set it to true"
            )
        self._state = Controls.read(numbers, self._config)
        self._earlier = self._state.scale

    @property
    def loss(self) -> LossConfig:
        """Settings of the loss of the next update."""
        return self._state.loss(self._config.loss)

    def set_learning_rates(self, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        """Set the iteration's learning rates of policy and value head."""
        optim = self._config.optim
        share = 1 - iteration / self._config.iterations if optim.anneal else 1.0
        policy, value_head = optimizer.param_groups
        # Each rises from its own first step on.
        policy["lr"] = optim.policy_lr * share * self._risen(iteration - optim.critic_warmup) * self._state.lr_share
        value_head["lr"] = optim.value_lr * share * self._risen(iteration)

    def _risen(self, iteration: int) -> float:
        return max(0.0, min(1.0, (iteration + 1) / (self._config.optim.lr_warmup + 1)))

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
        counted = returns[alive_actions(samples.executed, returns.shape[1])] if returns.ndim == 2 else returns
        counted = counted.double()
        self._earlier = before, width = self._state.scale
        self._state = self._state.seen(float(counted.mean()), float(counted.square().mean()))
        mean, deviation = self._state.scale
        return replace(samples, value=(samples.value - before) / width, returns=(returns - mean) / deviation)

    def note(self, metrics: Mapping[str, float], iteration: int) -> dict[str, float]:
        """Adapt to the metrics of an update. Returns the adaptive coefficients as metrics."""
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
