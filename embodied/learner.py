"""The learner: turns trajectories into an updated policy.

    advantages over the whole batch -> epochs of permuted minibatches -> loss sums / global denominators -> step

Rows that are masked never reach the model: they are compacted away before batching.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from embodied import checkpoint
from embodied.config import LearnerConfig, PPOConfig, UserError
from embodied.noise import permutation
from embodied.ppo import generalised_advantages, normalise, policy_loss, reduce_to_unit, value_loss
from embodied.trajectories import Trajectories
from policies.contract import Inputs, Policy


class OffPolicy(UserError):
    """The learner does not reproduce the log-probs that the rollout recorded."""


class NonFinite(UserError):
    """Losses or gradients were not finite several steps in a row."""


@dataclass(frozen=True)
class Rows:
    """The decisions that were really taken, flattened; every tensor has N rows."""

    inputs: Inputs
    trace: Mapping[str, Tensor]
    log_prob: Tensor
    value: Tensor
    advantage: Tensor
    returns: Tensor
    executed: Tensor

    def take(self, index: Tensor) -> Rows:
        return Rows(
            self.inputs.rows(index),
            {key: tensor[index] for key, tensor in self.trace.items()},
            *(getattr(self, key)[index] for key in ("log_prob", "value", "advantage", "returns", "executed")),
        )

    def __len__(self) -> int:
        return len(self.value)


def to_rows(batch: Trajectories, ppo: PPOConfig) -> Rows:
    """Advantages and returns of the batch, and its rows without the masked ones."""
    advantage, returns = generalised_advantages(
        batch.reward,
        batch.value,
        batch.terminated,
        batch.truncated,
        batch.final_value,
        batch.last_value,
        ppo.gamma,
        ppo.lam,
        ppo.bootstrap,
    )
    if ppo.normalise_advantages:
        advantage = normalise(advantage, batch.mask)
    rows = Rows(
        batch.inputs,
        batch.trace,
        batch.log_prob.flatten(0, 1),
        batch.value.flatten(),
        advantage.flatten(),
        returns.flatten(),
        batch.executed.flatten(),
    )
    return rows if bool(batch.mask.all()) else rows.take(batch.mask.flatten().nonzero()[:, 0])


@dataclass
class _Sums:
    """Running sums over the units and rows of an update."""

    policy_loss: float = 0.0
    value_loss: float = 0.0
    entropy: float = 0.0
    approx_kl: float = 0.0
    clipped: float = 0.0
    off_policy: float = 0.0
    units: int = 0
    rows: int = 0

    def add(self, other: _Sums) -> None:
        for key in self.__dataclass_fields__:
            setattr(self, key, getattr(self, key) + getattr(other, key))


class Learner:
    """Holds the policy that is trained and its optimiser. One `update` per rollout."""

    def __init__(
        self, policy: Policy, ppo: PPOConfig, config: LearnerConfig, seed: int, iterations: int, run_dir: Path
    ) -> None:
        self.policy, self._ppo, self._config = policy, ppo, config
        self._seed, self._iterations, self._run_dir = seed, iterations, run_dir
        self.optimizer = torch.optim.Adam(
            [
                {"params": list(policy.actor_parameters()), "lr": config.policy_lr, "name": "policy"},
                {"params": list(policy.value_head.parameters()), "lr": config.value_lr, "name": "value_head"},
            ],
            eps=1e-5,
            fused=True,
        )
        self._non_finite = 0
        self._first_ratio_error = float("nan")

    def weights(self) -> dict[str, Tensor]:
        """Parameters and statistics, as the policy worker loads them. The caller must not change them."""
        return {key: tensor.detach() for key, tensor in self.policy.state_dict().items()}

    def update(self, batch: Trajectories, iteration: int) -> dict[str, float]:
        """One iteration's epochs. Returns metrics by name.

        Raises `OffPolicy` if the first minibatch's ratios are not one, `NonFinite` after several steps in a
        row that had to be skipped.
        """
        begin = time.monotonic()
        with _threads(self._config.threads):
            rows = to_rows(batch, self._ppo)
            if len(rows) == 0:
                raise UserError("the rollout holds no decision that was really taken; nothing can be learned from it")
            self._set_learning_rates(iteration)
            sums, stopped = _Sums(), False
            norms: list[float] = []
            for epoch in range(self._config.epochs):
                order = torch.from_numpy(permutation(self._seed, iteration, epoch, len(rows)))
                for number, index in enumerate(order.split(self._config.minibatch)):
                    part, norm = self._step(rows, index, iteration, check=epoch == number == 0)
                    sums.add(part)
                    if norm is None:
                        stopped = True
                        break
                    norms.append(norm)
                if stopped:
                    break
            self.policy.observe(rows.inputs)
        metrics = self._metrics(rows, sums, norms, stopped)
        return {**metrics, "learner/update_s": time.monotonic() - begin}

    def save(self, root: Path, state: checkpoint.RunState, environments: dict[str, np.ndarray]) -> None:
        """Write a checkpoint of policy, optimiser and run below `root`."""
        checkpoint.write(root, state, self.policy, self.optimizer, environments)

    def load(self, folder: Path) -> None:
        """Take policy and optimiser from a verified checkpoint."""
        checkpoint.load_weights(folder, self.policy)
        checkpoint.load_optimizer(folder, self.policy, self.optimizer)

    def _step(self, rows: Rows, index: Tensor, iteration: int, check: bool) -> tuple[_Sums, float | None]:
        """One optimiser step on the rows `index`. The gradient norm, or None where the KL bound ends the update."""
        self.optimizer.zero_grad(set_to_none=True)
        units = self._count_units(rows.executed[index], rows.log_prob.shape)
        sums = _Sums()
        for micro in index.split(self._config.micro_batch or len(index)):
            sums.add(self._backward(rows.take(micro), units, len(index)))
        if check:
            self._check_on_policy(sums.off_policy / units)
        if self._ppo.target_kl is not None and sums.approx_kl / units > 1.5 * self._ppo.target_kl:
            return sums, None
        norm = float(torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self._config.max_grad_norm))
        loss = sums.policy_loss + sums.value_loss + sums.entropy
        if not np.isfinite(norm) or not np.isfinite(loss):
            self._skip(rows.take(index), iteration, loss, norm)
            return sums, norm
        self._non_finite = 0
        self.optimizer.step()
        return sums, norm

    def _count_units(self, executed: Tensor, shape: torch.Size) -> int:
        per_row = {"chunk": torch.ones_like(executed), "action": executed, "element": executed * shape[-1]}
        return int(per_row[self._ppo.ratio_unit].sum())

    def _backward(self, rows: Rows, units: int, total_rows: int) -> _Sums:
        """Add the gradient of these rows' share of the minibatch's loss."""
        ppo = self._ppo
        new = self.policy.evaluate(rows.inputs, rows.trace)
        log_prob, mask = reduce_to_unit(new.log_prob, rows.executed, ppo.ratio_unit)
        old, _ = reduce_to_unit(rows.log_prob, rows.executed, ppo.ratio_unit)
        entropy, _ = reduce_to_unit(new.entropy, rows.executed, ppo.ratio_unit)
        surrogate = policy_loss(log_prob, old, rows.advantage, mask, ppo.clip, ppo.clip_high or ppo.clip, ppo.dual_clip)
        critic = value_loss(new.value, rows.value, rows.returns, ppo.value_clip)
        spread = entropy[mask].sum()
        loss = surrogate.loss / units + ppo.value_coef * critic / total_rows - ppo.entropy_coef * spread / units
        loss.backward()
        return _Sums(
            policy_loss=float(surrogate.loss.detach()),
            value_loss=float(critic.detach()),
            entropy=float(spread.detach()),
            approx_kl=float(surrogate.approx_kl),
            clipped=float(surrogate.clipped),
            off_policy=float(surrogate.off_policy),
            units=int(mask.sum()),
            rows=len(rows),
        )

    def _check_on_policy(self, off_policy: float) -> None:
        tolerance = self.policy.ratio_tolerance
        if not off_policy <= tolerance:
            raise OffPolicy(
                f"at the first minibatch the mean |ratio - 1| is {off_policy:.2e}, above the policy's tolerance of "
                f"{tolerance:.0e}: the learner does not compute the log-probs that the rollout recorded. Usual causes: "
                "another sampling temperature, dropout, preprocessing, an adapter that is not loaded, or precision"
            )
        self._first_ratio_error = off_policy

    def _skip(self, rows: Rows, iteration: int, loss: float, norm: float) -> None:
        """Leave the parameters alone, keep the minibatch for inspection, and give up after several in a row."""
        self._non_finite += 1
        folder = self._run_dir / "non_finite"
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{iteration:06d}-{len(list(folder.iterdir())):03d}.safetensors"
        tensors = {key: getattr(rows, key) for key in ("log_prob", "value", "advantage", "returns", "executed")}
        tensors |= {f"trace.{key}": tensor for key, tensor in rows.trace.items()}
        tensors |= {f"inputs.frames.{key}": tensor for key, tensor in rows.inputs.frames.items()}
        for key in ("state", "proprio"):
            if getattr(rows.inputs, key) is not None:
                tensors[f"inputs.{key}"] = getattr(rows.inputs, key)
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, path)
        if self._non_finite >= self._config.non_finite_limit:
            raise NonFinite(
                f"loss {loss} and gradient norm {norm} were not finite for {self._non_finite} optimiser steps in a "
                f"row; the parameters were left as they were and the minibatches are in {folder}. A smaller "
                "learning rate, or a look at the rewards and observations in there, is the usual way on"
            )

    def _set_learning_rates(self, iteration: int) -> None:
        share = 1 - iteration / self._iterations if self._config.anneal else 1.0
        for group, rate in zip(
            self.optimizer.param_groups, (self._config.policy_lr, self._config.value_lr), strict=True
        ):
            group["lr"] = rate * share

    def _metrics(self, rows: Rows, sums: _Sums, norms: list[float], stopped: bool) -> dict[str, float]:
        spread = float(rows.returns.var())
        explained = 1 - float((rows.returns - rows.value).var()) / spread if spread > 0 else float("nan")
        return {
            "learner/policy_loss": sums.policy_loss / max(sums.units, 1),
            "learner/value_loss": sums.value_loss / max(sums.rows, 1),
            "learner/entropy": sums.entropy / max(sums.units, 1),
            "learner/approx_kl": sums.approx_kl / max(sums.units, 1),
            "learner/clip_fraction": sums.clipped / max(sums.units, 1),
            "learner/grad_norm": float(np.mean(norms)) if norms else float("nan"),
            "learner/explained_variance": explained,
            "learner/first_ratio_error": self._first_ratio_error,
            "learner/steps": float(len(norms)),
            "learner/skipped_steps": float(len(norms) - np.isfinite(norms).sum()),
            "learner/stopped_by_kl": float(stopped),
            "learner/policy_lr": float(self.optimizer.param_groups[0]["lr"]),
        }


@contextmanager
def _threads(wanted: int) -> Iterator[None]:
    """PyTorch's CPU threads within the block; 0 takes one per core. A simulator in the same process wants one."""
    before = torch.get_num_threads()
    torch.set_num_threads(wanted or len(os.sched_getaffinity(0)))
    try:
        yield
    finally:
        torch.set_num_threads(before)
