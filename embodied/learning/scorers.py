"""Scorers: workers between rollout and learner that add to trajectories. `ReferenceWorker` adds log-probs of a frozen
policy, `RewardWorker` replaces the simulator's rewards by a function's or a classifier's.

Parts of an iteration's trajectories leave a scorer in the order in which they came.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from embodied import progress
from embodied.config.schema import Config
from embodied.devices import CPU, Affinity, device_of, find_device
from embodied.errors import UserError
from embodied.learning.success_classifier import SuccessClassifier
from embodied.trajectories.batch import Trajectories
from embodied.workflows.context import WorkerContext
from policies.capabilities import HasAdapter
from policies.contract import Policy, PolicySpec
from sim_farm.named_code import named


class Scorer:
    """Base of scorers. Subclasses define `make` and `work`."""

    takes: ClassVar[frozenset[str]] = frozenset({"trajectories", "episodes"})
    makes: ClassVar[frozenset[str]] = takes
    """Data of edges to and from a scorer: whole rollouts, or parts of whole episodes."""

    def __init__(self, affinity: Affinity | None = None) -> None:
        self._affinity = affinity or Affinity()
        self._ready: deque[Trajectories] = deque()

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise `UserError` for settings that the scorer cannot work with. Called before any worker is started."""

    def work(self, batch: Trajectories) -> Trajectories:
        """The trajectories with the scores added. Must not write into the tensors of `batch`."""
        raise NotImplementedError

    def receive(self, batch: Trajectories, iteration: int) -> float:
        """Score a part of an iteration's trajectories. Returns the seconds that it took."""
        begin = time.monotonic()
        with self._affinity.applied():
            self._ready.append(self.work(batch))
        return time.monotonic() - begin

    def trajectories(self) -> Trajectories:
        """The oldest scored part that was not returned yet."""
        return self._ready.popleft()

    def share(self, policy: Policy) -> None:
        """Use the policy of the learner, which is in this process. Ignored by scorers without a policy."""


# --- the reference policy


class ReferenceWorker(Scorer):
    """Fills `Trajectories.reference_log_prob` from the policy that training began with.

    The loss draws the policy towards it (`loss.reference_kl`). In the learner's process, with an adapter that is new in
    this run, the reference is the learner's own policy without the adapter, and takes no memory. Otherwise it is a
    frozen copy.
    """

    def __init__(self, context: WorkerContext, policy: Policy | None) -> None:
        """`policy`: the one that training begins with; None if `share` is called later."""
        super().__init__(context.affinity)
        self._context = context
        self._policy = None if policy is None else policy.requires_grad_(False)
        self._as_it_began: Callable[[], AbstractContextManager[None]] = nullcontext
        """Context in which the policy is the one that training began with."""
        optim = context.config.optim
        self._micro_batch = optim.micro_batch or optim.minibatch

    @classmethod
    def make(cls, context: WorkerContext) -> ReferenceWorker:
        """The reference worker of a run, new or resumed: the configuration determines the first policy."""
        return cls(context, context.policy())

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise `UserError` where nothing is drawn towards the reference."""
        if not config.loss.reference_kl:
            raise UserError(
                f"the workflow {config.workflow} has a reference policy, and loss.reference_kl is 0: set it to the "
                "weight of the divergence from it (0.01, for example), or take a workflow without"
            )

    def share(self, policy: Policy) -> None:
        """Use the learner's untrained policy, if its present state can be had from it later; else a copy."""
        if isinstance(policy, HasAdapter) and policy.has_new_adapter:
            self._policy, self._as_it_began = policy, policy.without_adapter
        else:
            own = replace(self._context, shares=False).policy()
            assert own is not None
            self._policy = own.requires_grad_(False)

    def work(self, batch: Trajectories) -> Trajectories:
        """The trajectories with `reference_log_prob` [T, B, C, A], zero for masked decisions."""
        assert self._policy is not None, "a reference worker without a policy is given one by share"
        taken = batch.mask.flatten().nonzero()[:, 0]
        found = torch.zeros_like(batch.log_prob.flatten(0, 1))
        with torch.no_grad(), self._as_it_began():
            for rows in taken.split(self._micro_batch or max(len(taken), 1)):
                found[rows] = self._log_prob(self._policy, batch, rows)
                progress.report()
        return replace(batch, reference_log_prob=found.view_as(batch.log_prob))

    def _log_prob(self, policy: Policy, batch: Trajectories, rows: Tensor) -> Tensor:
        decisions, device = batch.decisions.select(rows), device_of(policy)
        return policy.evaluate(decisions.inputs(device), decisions.trace(device)).log_prob.to(CPU)


# --- rewards from frames and instructions


Judge = Callable[[Mapping[str, Tensor], Sequence[str]], Any]
"""(frames uint8 [N, H, W, 3] for each camera, N instructions) -> float32 [N], tensor or array."""


class RewardWorker(Scorer):
    """Replaces `Trajectories.reward` and `step_reward` by a reward model's, from frames and instructions.

    A decision is judged by the observation of the environment's next decision. Where none follows in the trajectories,
    since the episode or the rollout ends, it is judged by its own observation, the last that was rendered for the
    policy. The judgement is the decision's whole reward, credited to the last of its executed actions. Successes and
    ends of episodes stay the simulator's.
    """

    def __init__(self, judge: Judge, rows: int, device: torch.device, affinity: Affinity | None = None) -> None:
        """`rows` are judged at once (0: all), with their frames on the device."""
        super().__init__(affinity)
        self._judge, self._rows, self._device = judge, rows, device

    @classmethod
    def make(cls, context: WorkerContext) -> RewardWorker:
        """The reward worker of a run. Raises `UserError` for a function or classifier that is not there or does not
        fit."""
        config = context.config
        device = find_device(context.affinity.device or config.policy.device)
        if config.reward.function is not None:
            judge, device = function_of(config.reward.function), CPU
        else:
            judge = _classifier_of(config, context.spec).to(device).probability
        rows = config.optim.micro_batch or config.optim.minibatch
        return cls(judge, rows, device, context.affinity)

    @classmethod
    def check(cls, config: Config) -> None:
        """Raise `UserError` unless there is a reward model, and the frames and instructions that it reads."""
        if config.reward.model is None:
            raise UserError(
                f"the workflow {config.workflow} has a reward worker, and reward.model is not set: name a function as "
                "package.module:NAME, or a folder that `embodied reward` wrote"
            )
        missing = [name for name in ("images", "instruction") if name not in config.policy.reads]
        if missing:
            raise UserError(
                "the reward worker judges frames and instructions, of which only those are kept that policy.reads "
                f"names: add {' and '.join(missing)}"
            )
        if config.reward.function is not None:
            function_of(config.reward.function)
        elif config.reward.classifier is not None:
            SuccessClassifier.load(config.reward.classifier)

    def work(self, batch: Trajectories) -> Trajectories:
        """The trajectories with the judge's rewards."""
        reward = torch.where(batch.mask, self._of_outcomes(batch), 0.0)
        step_reward = batch.step_reward
        if step_reward is not None:
            places = torch.arange(step_reward.shape[-1]) * batch.alive
            last = places.amax(-1, keepdim=True)
            step_reward = torch.zeros_like(step_reward).scatter_(-1, last, reward[..., None])
        return replace(batch, reward=reward, step_reward=step_reward)

    def _of_outcomes(self, batch: Trajectories) -> Tensor:
        """[T, B] judgements of the observation after each decision."""
        taken = batch.mask.flatten().nonzero()[:, 0]
        scores = torch.zeros(batch.mask.numel())
        for rows in taken.split(self._rows or max(len(taken), 1)):
            scores[rows] = self._judged(batch, rows)
            progress.report()
        scores = scores.view_as(batch.reward)
        follows = batch.mask[1:] & ~(batch.terminated | batch.truncated)[:-1]
        return torch.cat([torch.where(follows, scores[1:], scores[:-1]), scores[-1:]])

    def _judged(self, batch: Trajectories, rows: Tensor) -> Tensor:
        inputs = batch.decisions.select(rows).inputs(self._device)
        # Of the observations that a decision was made on, the present one is judged.
        frames = {name: shown[:, -1] if shown.dim() == 5 else shown for name, shown in inputs.frames.items()}
        found = torch.as_tensor(self._judge(frames, inputs.instruction)).detach().to(CPU, torch.float32)
        if found.shape != rows.shape or not bool(found.isfinite().all()):
            raise UserError(
                f"a reward is one finite number for each of {len(rows)} rows; the judge returned "
                f"{list(found.shape)}{'' if found.shape != rows.shape else ', not all of them finite'}"
            )
        return found


def function_of(name: str) -> Judge:
    """The function `package.module:NAME`. Raises `UserError` where there is none."""
    found = named(name, UserError)
    if not callable(found):
        raise UserError(f"reward.model {name!r} is a {type(found).__name__}, not a function")
    return found


def _classifier_of(config: Config, spec: PolicySpec) -> SuccessClassifier:
    """The configuration's classifier. Raises `UserError` unless its frames are like the policy's."""
    folder = config.reward.classifier
    assert folder is not None
    found = SuccessClassifier.load(folder)
    looks, lacking = found.looks, [name for name in found.looks.cameras if name not in spec.cameras]
    if lacking or (looks.image_size, looks.orientation) != (spec.image_size, config.env.orientation):
        raise UserError(
            f"the classifier in {folder} looks at {', '.join(looks.cameras)} with "
            f"{looks.image_size} pixels, {looks.orientation}; the run draws {', '.join(spec.cameras)} with "
            f"{spec.image_size}, {config.env.orientation}: set env.cameras, env.image_size and env.orientation to the "
            "classifier's, or record and train another"
        )
    return found.requires_grad_(False).eval()
