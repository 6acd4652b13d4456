"""One update of the policy: epochs of permuted minibatches, and one optimiser step per minibatch.

    for each epoch, for each minibatch:
        for each micro-batch: loss.backward()
        sum the gradients over the learner's ranks, clip, step

Losses are sums over samples, divided by denominators of the whole minibatch: the gradient is the same for every size of
micro-batch and every number of ranks. On a GPU the host waits for the device once per optimiser step: denominators are
counted in the host's memory, and the statistics of all micro-batches are read together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from embodied.algorithms.advantages import Credit
from embodied.algorithms.losses import (
    Objective,
    RatioUnit,
    decoupled,
    divergence,
    k3,
    ratio,
    reduce_to_unit,
    sum_units,
    unit_mask,
    value_loss,
)
from embodied.algorithms.samples import Samples
from embodied.config.schema import Config, LossConfig
from embodied.devices import device_of, to_host
from embodied.errors import UserError
from embodied.learning.optimizer import OptimizerSteps
from embodied.learning.parallel import ReplicatedPolicy, log_probs_of, precomputed_of
from embodied.metric import Metric
from embodied.trajectories.random_streams import permutation
from policies.capabilities import Precomputes, SampledElsewhere
from policies.contract import Policy


class OffPolicy(UserError):
    """The learner does not reproduce the log-probs that the rollout recorded."""


class EngineMismatch(UserError):
    """The engine that writes answers is not the policy that learns from them."""


class NonFinite(UserError):
    """Losses or gradients were not finite several steps in a row."""


# --- measurements of an update


@dataclass
class LossSums:
    """Running sums over the units, values and samples of an update."""

    policy_loss: float = 0.0
    value_loss: float = 0.0
    entropy: float = 0.0
    approx_kl: float = 0.0
    clipped: float = 0.0
    off_policy: float = 0.0
    reference_kl: float = 0.0
    auxiliary: float = 0.0
    units: int = 0
    weights: float = 0.0
    """Sum of the units' weights: the denominator of the policy loss."""
    values: int = 0
    """Number of values: one per sample, or one per executed action."""
    samples: int = 0

    @classmethod
    def of(cls, numbers: Mapping[str, float]) -> LossSums:
        """Build the sums from numbers by name; counts become integers."""
        found = cls()
        for key, number in numbers.items():
            setattr(found, key, type(getattr(found, key))(number))
        return found

    def add(self, other: LossSums) -> None:
        for key in self.__dataclass_fields__:
            setattr(self, key, getattr(self, key) + getattr(other, key))


@dataclass
class UpdateStatistics:
    """Measurements of an update."""

    sums: LossSums = field(default_factory=LossSums)
    grad_norms: list[float] = field(default_factory=list)
    """Norm of the gradient before clipping, per optimiser step."""
    stopped_by_kl: bool = False
    first_ratio_error: float = float("nan")
    """Mean |ratio - 1| at the first minibatch."""
    engine_kl: float | None = None
    """Sum over `engine_actions` of the KL divergence of the engine from the learner; None where no engine acts, or its
    weights are older."""
    engine_actions: int = 0


# --- the update


class Update:
    """The update as one rank of the learner computes it; all ranks take the same steps.

    `run` is an update from all samples of a rollout at once. `accumulate` and `step_accumulated` are one of a single
    step, whose gradient is added up while parts of the rollout arrive. `behind`: True if the rollout's policy is an
    update older than the present one.
    """

    def __init__(
        self,
        parallel: ReplicatedPolicy,
        *,
        loss: LossFunction,
        optimizer: torch.optim.Optimizer,
        config: Config,
        run_dir: Path,
    ) -> None:
        self._parallel, self._policy = parallel, parallel.policy
        self._loss = loss
        self._steps = OptimizerSteps(parallel, optimizer, config.optim)
        self._config, self._seed, self._run_dir = config.optim, config.seed, run_dir
        self._elsewhere = isinstance(self._policy, SampledElsewhere)
        """True if the log-probs of rollouts are another program's."""
        self._accumulated = UpdateStatistics()
        self._non_finite = 0
        """Steps skipped in a row."""

    def run(self, samples: Samples, iteration: int, behind: bool) -> UpdateStatistics:
        """Epochs of permuted minibatches over the samples; ends early at the KL limit.

        Raises `OffPolicy` if the first minibatch's ratios are not one, and `NonFinite` after several steps in a row
        that were skipped.
        """
        found, config = UpdateStatistics(), self._config
        if not len(samples):
            return found
        samples = self._prepared(samples, behind, found)
        for epoch in range(config.epochs):
            order = torch.from_numpy(permutation(self._seed, iteration, epoch, len(samples)))
            for minibatch in order.split(config.minibatch or len(order)):
                self._steps.begin()
                with self._parallel.critic_only(iteration < config.critic_warmup):
                    losses = self._backward(samples, minibatch, Denominators.of(samples, minibatch, self._loss))
                sums, grad_norm = self._read(losses, self._steps.norm())
                found.sums.add(sums)
                if not found.grad_norms:
                    found.first_ratio_error = self._checked_ratio_error(sums)
                if self._beyond_kl_limit(sums):
                    found.stopped_by_kl = True
                    return found
                if self._finite(samples, minibatch, sums, grad_norm, iteration):
                    self._steps.take()
                found.grad_norms.append(grad_norm)
        return found

    def _backward(
        self, samples: Samples, minibatch: Tensor, denominators: Denominators, synchronise: bool = True
    ) -> list[MicroBatchLoss]:
        """Add the gradient of this rank's share of `samples[minibatch]`, micro-batch by micro-batch.

        `synchronise`: False if more passes follow before the gradient is needed.
        """
        size, losses = self._config.micro_batch or len(minibatch), []
        for index, counts in self._parallel.micro_batches(minibatch, size, synchronise):
            divided_by = denominators if counts else NO_GRADIENT
            loss, statistics = micro_batch_loss(self._policy, samples.take(index), self._loss, divided_by)
            loss.backward()  # type: ignore[no-untyped-call]
            del loss  # its graph
            if counts:
                losses.append(statistics)
        return losses

    def _finite(self, samples: Samples, minibatch: Tensor, sums: LossSums, grad_norm: float, iteration: int) -> bool:
        """True if loss and gradient are finite. Otherwise the step is skipped, and the minibatch kept for inspection.

        Raises `NonFinite` after several skipped steps in a row.
        """
        loss = sums.policy_loss + sums.value_loss + sums.entropy
        if np.isfinite(grad_norm) and np.isfinite(loss):
            self._non_finite = 0
            return True
        self._non_finite += 1
        folder = self._run_dir / "non_finite"
        if self._parallel.ranks.first:
            save_minibatch(samples.take(minibatch), folder, iteration)
        if self._non_finite >= NON_FINITE_LIMIT:
            raise NonFinite(
                f"loss {loss} and gradient norm {grad_norm} were not finite for {self._non_finite} optimiser steps in "
                f"a row; the parameters were left as they were and the minibatches are in {folder}. A smaller "
                "learning rate, or a look at the rewards and observations in there, is the usual way on"
            )
        return False

    def _read(self, losses: Sequence[MicroBatchLoss], norm: Tensor | None = None) -> tuple[LossSums, float]:
        """The statistics of all micro-batches of all ranks, and the gradient's norm. Waits for the device."""
        sums, grad_norm = read_losses(losses, norm)
        return LossSums.of(self._parallel.ranks.sum_numbers(vars(sums))), grad_norm

    def _checked_ratio_error(self, sums: LossSums) -> float:
        """Mean |ratio - 1| of the first minibatch. Raises `OffPolicy` where it is above the policy's tolerance."""
        error, tolerance = sums.off_policy / sums.units, self._policy.ratio_tolerance
        if not error <= tolerance:
            raise OffPolicy(
                f"at the first minibatch the mean |ratio - 1| is {error:.2e}, above the policy's tolerance of "
                f"{tolerance:.0e}: the learner does not compute the log-probs that the rollout recorded. Usual causes: "
                "another sampling temperature, dropout, preprocessing, an adapter that is not loaded, or precision"
            )
        return error

    def _beyond_kl_limit(self, sums: LossSums) -> bool:
        target = self._config.target_kl
        return target is not None and sums.approx_kl / sums.units > 1.5 * target

    def _prepared(self, samples: Samples, behind: bool, found: UpdateStatistics) -> Samples:
        """The samples as the loss reads them.

        With several evaluations per sample, the result of `Precomputes.precompute` joins the traces. With a rollout an
        update behind, or one that another program sampled, the objective is the decoupled one. Raises `EngineMismatch`.
        """
        if self._config.epochs + (behind or self._elsewhere) > 1 and isinstance(self._policy, Precomputes):
            samples = replace(samples, precomputed=precomputed_of(self._parallel, samples, self._evaluated_at_once))
        if behind or self._elsewhere:
            now = log_probs_of(self._parallel, samples, self._evaluated_at_once)
            if self._elsewhere and not behind:
                self._measure_engine(samples, now, found)
            samples = decoupled(samples, now, self._loss.settings.ratio_unit)
        return samples

    def _measure_engine(self, samples: Samples, log_prob: Tensor, found: UpdateStatistics) -> None:
        """Add up the divergence of the engine from the learner, [N, C, A] whose log-probs of the samples are given."""
        kl, actions = divergence(samples, log_prob)
        found.engine_kl, found.engine_actions = (found.engine_kl or 0.0) + kl, found.engine_actions + actions
        mean = kl / max(actions, 1)
        if not mean <= ENGINE_KL_LIMIT:
            raise EngineMismatch(
                f"the engine's log-probs of its answers are {mean:.3g} nats per action (KL, k3) from the learner's at "
                f"the same weights, more than {ENGINE_KL_LIMIT:g}: it does not write by the policy that "
                "learns. Usual causes: another temperature (vLLM: start it with --logprobs-mode processed_logprobs), "
                "weights that were not taken, quantised weights, another chat template's end"
            )

    @property
    def _evaluated_at_once(self) -> int:
        return self._config.micro_batch or self._config.minibatch

    # --- an update of one step, whose gradient is accumulated while parts of the rollout arrive

    def accumulate(self, samples: Samples, behind: bool) -> None:
        """Add the gradient of a part's samples. `step_accumulated` divides it by the totals of all parts."""
        found = self._accumulated
        first = found.sums.samples == 0
        if first:
            self._steps.begin()
        samples = self._prepared(samples, behind, found)
        every = torch.arange(len(samples))
        sums, _ = self._read(self._backward(samples, every, Denominators(1.0, 1), synchronise=False))
        if first:
            found.first_ratio_error = self._checked_ratio_error(sums)
        found.sums.add(sums)

    def step_accumulated(self, samples: Samples, iteration: int) -> UpdateStatistics:
        """The step of an accumulated gradient; `samples` are those of all parts."""
        found, self._accumulated = self._accumulated, UpdateStatistics()
        if not len(samples):
            return found
        if self._parallel.sharded:  # shards are summed in a backward pass: one that adds nothing
            self._backward(samples, torch.zeros(1, dtype=torch.int64), NO_GRADIENT)
        grad_norm = float(self._steps.norm(divided_by=found.sums.weights))
        if self._finite(samples, torch.arange(len(samples)), found.sums, grad_norm, iteration):
            self._steps.take()
        found.grad_norms.append(grad_norm)
        return found


# --- the loss of a micro-batch


@dataclass(frozen=True)
class LossFunction:
    """The loss of an update: the workflow's objective, and the settings of its terms."""

    settings: LossConfig
    credit: Credit = "chunk"
    """Unit that has a value and an advantage: a whole chunk, or each of its actions."""
    critic: bool = True
    """The value head is trained too."""
    objective: Objective = ratio


@dataclass(frozen=True)
class Denominators:
    """Totals of a whole minibatch, by which the losses of its micro-batches are divided."""

    weight: float
    """Sum of the weights of the units of `loss.ratio_unit`."""
    values: float
    """Number of values that the critic is trained on."""

    @classmethod
    def of(cls, samples: Samples, index: Tensor, loss: LossFunction) -> Denominators:
        """Totals of the minibatch `samples[index]`."""
        executed = samples.executed[index]
        _, weight = _count_units(executed, samples.weight[index], samples.log_prob.shape[-1], loss.settings.ratio_unit)
        return cls(weight, _count_values(executed, loss.credit))


NO_GRADIENT = Denominators(float("inf"), float("inf"))
"""Denominators with which samples contribute a gradient of zero."""


@dataclass(frozen=True)
class MicroBatchLoss:
    """A micro-batch's contribution to `LossSums`; its tensors may still be in computation on the device."""

    measured: Mapping[str, Tensor]
    """Sums that the policy is evaluated for, by name."""
    counted: LossSums
    """The counts; the measured fields are 0."""


def micro_batch_loss(
    policy: Policy, samples: Samples, loss: LossFunction, denominators: Denominators
) -> tuple[Tensor, MicroBatchLoss]:
    """The loss of these samples, a scalar with a gradient, and their contribution to the statistics.

    The samples are in the host's memory.
    """
    device, dims = device_of(policy), samples.log_prob.shape[-1]
    settings, unit = loss.settings, loss.settings.ratio_unit
    units, weight = _count_units(samples.executed, samples.weight, dims, unit)
    values = _count_values(samples.executed, loss.credit)
    counted = LossSums(units=units, weights=weight, values=values, samples=len(samples))
    places = _places(unit_mask(samples.alive, dims, unit), device)
    valued = _places(samples.alive, device) if loss.credit == "action" else (...,)
    samples = samples.to(device)

    new = policy.evaluate(samples.inputs, samples.trace)
    log_prob, unit_entropy = (reduce_to_unit(found, samples.alive, unit)[0] for found in (new.log_prob, new.entropy))
    objective = loss.objective(new, samples, settings, places)
    entropy = sum_units(unit_entropy, places, samples.weight)
    total = objective.loss / denominators.weight - settings.entropy_coef * entropy / denominators.weight

    auxiliary, reference_kl, value_error = (total.new_zeros(()) for _ in range(3))
    if new.auxiliary is not None:  # the policy's own
        auxiliary = sum_units(new.auxiliary[:, None].expand_as(unit_entropy), places, samples.weight)
        total = total + auxiliary / denominators.weight
    if settings.reference_kl and samples.reference_log_prob is not None:
        unit_kl = k3(log_prob, reduce_to_unit(samples.reference_log_prob, samples.alive, unit)[0])
        reference_kl = sum_units(unit_kl, places)
        weighted = sum_units(unit_kl, places, samples.weight)
        total = total + settings.reference_kl * weighted / denominators.weight
    if loss.critic:
        value, old, returns = new.value[valued], samples.value[valued], samples.returns[valued]
        value_error = value_loss(value, old, returns, settings.value_clip)
        total = total + settings.value_coef * value_error / denominators.values

    measured = {
        "policy_loss": objective.loss.detach(),
        "value_loss": value_error.detach(),
        "entropy": entropy.detach(),
        "approx_kl": objective.approx_kl,
        "clipped": objective.clipped,
        "off_policy": objective.off_policy,
        "reference_kl": reference_kl.detach(),
        "auxiliary": auxiliary.detach(),
    }
    return total, MicroBatchLoss(measured, counted)


def read_losses(losses: Sequence[MicroBatchLoss], norm: Tensor | None = None) -> tuple[LossSums, float]:
    """The sum over micro-batches, and the gradient's norm (or NaN). Waits for the device, once."""
    awaited = {f"{i}.{key}": t for i, loss in enumerate(losses) for key, t in loss.measured.items()}
    found = to_host(awaited if norm is None else awaited | {"norm": norm})
    total = LossSums()
    for i, loss in enumerate(losses):
        measured: dict[str, Any] = {key: float(found[f"{i}.{key}"]) for key in loss.measured}
        total.add(replace(loss.counted, **measured))
    return total, float(found["norm"]) if norm is not None else float("nan")


def _count_units(executed: Tensor, weight: Tensor, dims: int, unit: RatioUnit) -> tuple[int, float]:
    """Number of units of the ratio in samples with these numbers of executed actions, and the sum of their weights."""
    units = {"chunk": torch.ones_like(executed), "action": executed, "element": executed * dims}[unit]
    return int(units.sum()), float((units * weight).sum())


def _count_values(executed: Tensor, credit: Credit) -> int:
    """Number of the critic's values in samples with these numbers of executed actions."""
    return int(executed.sum()) if credit == "action" else len(executed)


def _places(mask: Tensor, device: torch.device) -> tuple[Tensor, ...]:
    """Indices of the true entries, on the device; `mask` is in the host's memory."""
    return tuple(index.to(device) for index in mask.nonzero(as_tuple=True))


# --- metrics, and minibatches kept for inspection


ENGINE_KL_LIMIT = 0.1
"""KL divergence of an engine that acts from the learner at the same weights, in nats per action, above which the run
ends."""
NON_FINITE_LIMIT = 3
"""Consecutive optimiser steps that are skipped (loss or gradient not finite) before the run ends."""
METRICS = (
    Metric("learner/policy_loss", "loss", "Loss of the policy, a mean over samples."),
    Metric("learner/value_loss", "loss", "Loss of the value head, a mean over values; 0 without a critic."),
    Metric("learner/entropy", "nats", "Entropy of what the policy samples from, a mean over samples."),
    Metric("learner/approx_kl", "nats", "Approximate KL divergence from the acting policy, a mean over ratios."),
    Metric("learner/clip_fraction", "share", "Ratios that the clip range cut off."),
    Metric("learner/grad_norm", "norm", "Norm of the gradient before it is scaled down, a mean over optimiser steps."),
    Metric(
        "learner/explained_variance", "share", "Variance of returns that values explain; empty if returns are equal."
    ),
    Metric("learner/steps", "steps", "Optimiser steps."),
    Metric("learner/skipped_steps", "steps", "Those that were skipped, since loss or gradient was not finite."),
    Metric("learner/first_ratio_error", "ratio", "Largest distance from 1 of the first minibatch's ratios."),
    Metric("learner/stopped_by_kl", "0 or 1", "1 if optim.target_kl ended the update early."),
    Metric("learner/reference_kl", "nats", "KL divergence from the reference policy, where the loss has it."),
    Metric("learner/auxiliary_loss", "loss", "Loss that the policy itself adds, where it does."),
    Metric(
        "learner/engine_kl",
        "nats",
        "KL divergence of the generation engine from the learner at the same weights, a mean over actions (k3).",
    ),
)
"""Metrics of an update on samples."""


def metrics_of(samples: Samples, found: UpdateStatistics, settings: LossConfig) -> dict[str, float]:
    """Metrics by name of an update on the samples."""
    sums, norms = found.sums, found.grad_norms
    returns, value = samples.returns, samples.value
    if returns.ndim == 2:
        returns, value = returns[samples.alive], value[samples.alive]
    spread = float(returns.var()) if len(returns) > 1 else 0.0
    explained = 1 - float((returns - value).var()) / spread if spread > 0 else float("nan")
    metrics = {
        "learner/policy_loss": sums.policy_loss / (sums.weights or 1),
        "learner/value_loss": sums.value_loss / max(sums.values, 1),
        "learner/entropy": sums.entropy / (sums.weights or 1),
        "learner/approx_kl": sums.approx_kl / max(sums.units, 1),
        "learner/clip_fraction": sums.clipped / max(sums.units, 1),
        "learner/grad_norm": float(np.mean(norms)) if norms else float("nan"),
        "learner/explained_variance": explained,
        "learner/steps": float(len(norms)),
        "learner/skipped_steps": float(len(norms) - np.isfinite(norms).sum()),
        "learner/first_ratio_error": found.first_ratio_error,
        "learner/stopped_by_kl": float(found.stopped_by_kl),
    }
    if settings.reference_kl:
        metrics["learner/reference_kl"] = sums.reference_kl / max(sums.units, 1)
    if found.engine_kl is not None:
        metrics["learner/engine_kl"] = found.engine_kl / max(found.engine_actions, 1)
    if sums.auxiliary:
        metrics["learner/auxiliary_loss"] = sums.auxiliary / sums.weights
    return metrics


def save_minibatch(samples: Samples, folder: Path, iteration: int) -> None:
    """Write the samples into the folder, for inspection."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{iteration:06d}-{len(list(folder.iterdir())):03d}.safetensors"
    inputs = samples.inputs
    names = ("log_prob", "value", "advantage", "returns", "executed", "first")
    tensors = {key: getattr(samples, key) for key in names if getattr(samples, key) is not None}
    tensors |= {f"trace.{key}": tensor for key, tensor in samples.trace.items()}
    tensors |= {f"inputs.frames.{key}": tensor for key, tensor in inputs.frames.items()}
    for key in ("state", "proprio"):
        if getattr(inputs, key) is not None:
            tensors[f"inputs.{key}"] = getattr(inputs, key)
    save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
