"""Predicted memory of a run on one card, by part, and the smallest change of settings with which it fits.

Weights, gradients, moments and the average of the weights are counted. What a decision and an update take beside them
is predicted: the policy is copied to tensors without numbers (`Uncomputed`), decides once, and takes a step of the
run's own optimiser. Every operation's result is counted from when it is made until nothing refers to it: activations,
what the backward pass keeps, and what a product or a step takes for a moment. What an allocator adds by rounding, and
what libraries take for themselves, is not counted.
"""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.learning.optimizer import OptimizerSteps, make_optimizer
from embodied.learning.parallel import ReplicatedPolicy
from embodied.learning.quantised_adam import BLOCK, LEAST
from embodied.learning.recompute import recompute
from embodied.planning.uncomputed import Uncomputed
from embodied.runtime.ranks import Ranks
from policies.capabilities import HasAdapter, Imitates, Precomputes, VariesInLength, earlier_actions
from policies.contract import Inputs, Policy
from policies.errors import PolicyError
from policies.quantised import library

CARDS = (16, 24, 40, 48, 80, 96, 141)
"""Memory of usual cards in GB (1e9 bytes)."""
RESERVE = 10**9
"""Bytes that are left free for the driver's own, libraries, and an allocator's gaps: an assumption, which was not
measured."""
Builds = Callable[[Config], "CardMemory"]


@dataclass(frozen=True)
class CardMemory:
    """Bytes of a policy that acts and learns on one card, by part."""

    frozen: int
    """Weights that are not trained: the base of an adapter."""
    trained: int
    gradients: int
    moments: int
    average: int
    reference: int
    """Weights of the frozen copy that the loss draws the policy to (`loss.reference_kl`)."""
    decision: int | None
    """Most that a decision takes beside them, keys and values among it; None: not predicted."""
    update: int | None
    """Most that an update takes: activations of a micro-batch, and what a product or a step takes for a moment."""

    @property
    def lasting(self) -> int:
        """Bytes that are taken all the time: weights, gradients, moments, average and reference."""
        return self.frozen + self.trained + self.gradients + self.moments + self.average + self.reference

    @property
    def total(self) -> int:
        """Decisions and updates take turns."""
        return self.lasting + max(self.decision or 0, self.update or 0)

    def fits(self, card_gb: float) -> bool:
        return self.total + RESERVE <= card_gb * 1e9


@dataclass(frozen=True)
class Passes:
    """The passes over the policy that a run computes on its card."""

    inputs: Inputs
    """Inputs of one row."""
    acting: int
    """Rows of a decision."""
    learning: int
    """Rows of a micro-batch."""
    of_a_step: int = 1
    """Micro-batches of an optimiser step."""
    critic: bool = True
    """The value head is trained too."""
    imitates: bool = False
    """The loss is that of imitation, and no value head is trained."""

    @property
    def trains_critic(self) -> bool:
        return self.critic and not self.imitates


def card_memory(config: Config, policy: Policy, passes: Passes) -> CardMemory:
    """Predict the memory of the policy with the run's optimiser. The policy stays as it is, and may be one without
    numbers (`random_weights.undrawn`)."""
    every = [*policy.parameters()]
    critic = {id(p) for p in policy.value_head.parameters()}
    trained = [p for p in every if p.requires_grad]
    found = peaks(config, policy, passes)
    if found is None:
        stepped = [p for p in trained if passes.trains_critic or id(p) not in critic]
    else:
        stepped = [p for name, p in policy.named_parameters() if name in found.reached]
    gradients = _size(stepped)
    packed = [p for p in stepped if p.numel() >= LEAST] if config.optim.moments else []
    numbers = sum(p.numel() for p in packed)
    moments = 2 * (gradients - _size(packed)) + 2 * (numbers + 4 * numbers // BLOCK)
    average = 4 * sum(p.numel() for p in stepped) if config.optim.ema is not None else 0
    drawn_to = config.loss.reference_kl and not passes.imitates
    drawn_to = drawn_to and not (isinstance(policy, HasAdapter) and policy.has_new_adapter)
    return CardMemory(
        frozen=_size(every) - _size(trained),
        trained=_size(trained),
        gradients=gradients,
        moments=moments,
        average=average,
        reference=_size(every) if drawn_to else 0,
        decision=None if found is None else found.decision,
        update=None if found is None else max(0, found.learning - gradients - moments - average),
    )


def _size(tensors: Sequence[Tensor]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def smallest_change(config: Config, predict: Builds, card_gb: float, adapted: bool) -> Config | None:
    """The configuration that fits on the card with the smallest change of settings; None: none fits.

    Of two changes the smaller is

    1. the one that changes less of what is computed: nothing, then `optim.moments` (steps are rounded), then
       `policy.base int8` (another base by 0.6% of its norm) without and with it, then `nf4` (9%) without and with it;
    2. of these the one that costs less time: `optim.micro_batch`, as large as fits, then `optim.recompute`, then both
       (an update of OpenVLA-7B's LoRA on an H200: a micro-batch of 8 has 0.83 of the rate of 32, recomputation 0.70).

    `adapted`: an adapter hangs on the policy, whose base can be quantised.
    """

    def known(changed: Config) -> CardMemory | None:
        try:
            if changed.optim.moments is not None:
                library()
            return predict(changed)
        except (UserError, PolicyError):  # not for this policy, or not installed
            return None

    for base, moments in itertools.product(*_altering(config, adapted)):
        altered = _changed(_changed(config, "policy", base=base), "optim", moments=moments)
        for again in dict.fromkeys((config.optim.recompute, True)):
            found = _with_micro_batch(_changed(altered, "optim", recompute=again), known, card_gb)
            if found is not None:
                return found
    return None


def _altering(config: Config, adapted: bool) -> tuple[list[str | None], list[str | None]]:
    """Values of `policy.base` and of `optim.moments` that can be chosen, the smallest change first."""
    base, moments = config.policy.base, config.optim.moments
    if config.optim.sharding == "sharded":  # which divides a policy, and leaves its numbers as they are
        return [base], [moments]
    bases = (None, "int8", "nf4")
    return list(bases[bases.index(base) :] if adapted else [base]), list(dict.fromkeys((moments, "int8")))


def _with_micro_batch(config: Config, predict: Callable[[Config], CardMemory | None], card_gb: float) -> Config | None:
    """The configuration if it fits on the card, else with the largest power of two for a micro-batch that fits."""
    memory = predict(config)
    if memory is None or memory.lasting + RESERVE > card_gb * 1e9:
        return None
    if memory.fits(card_gb):
        return config
    found, rows = None, 1
    # One of as many rows as the whole minibatch has is the configuration itself, which does not fit.
    while rows < (config.optim.micro_batch or math.inf):
        smaller = _changed(config, "optim", micro_batch=rows)
        memory = predict(smaller)
        if memory is None or not memory.fits(card_gb):
            break
        found, rows = smaller, 2 * rows
    return found


def changes(before: Config, after: Config) -> str:
    """The changed settings as they are typed."""
    found = []
    for section in ("optim", "policy"):
        old, new = getattr(before, section), getattr(after, section)
        for name in type(old).model_fields:
            value = getattr(new, name)
            if getattr(old, name) != value:
                found.append(f"--{section}.{name} {str(value).lower() if isinstance(value, bool) else value}")
    return " ".join(found)


def _changed(config: Config, section: str, **values: Any) -> Config:
    return config.model_copy(update={section: getattr(config, section).model_copy(update=values)})


@dataclass(frozen=True)
class Peaks:
    """Most bytes that are allocated beside the weights."""

    decision: int
    """During a decision, keys and values among it."""
    learning: int
    """During optimiser steps: gradients, moments and the average of the weights among it."""
    reached: frozenset[str]
    """Names of the parameters that a gradient reaches. Only these have moments."""


def peaks(config: Config, policy: Policy, passes: Passes) -> Peaks | None:
    """Predict them. None for a policy that does not run on tensors without numbers, or cannot be copied."""
    try:
        return _peaks(config, policy, passes)
    except (PolicyError, UserError):
        raise
    except Exception:  # whatever a policy of one's own does that such tensors or a copy of it do not allow
        return None


def _peaks(config: Config, policy: Policy, passes: Passes) -> Peaks:
    acted, learned = (
        passes.inputs.rows(torch.zeros(count, dtype=torch.int64)) for count in (passes.acting, passes.learning)
    )
    own = [*policy.parameters(), *policy.buffers()]
    blank = copy.deepcopy(policy, {id(tensor): _blank(tensor) for tensor in own})
    own = [*blank.parameters(), *blank.buffers()]
    if config.optim.recompute:
        recompute(blank)
    with Uncomputed() as decision:
        decision.ignore(own)
        decided = _decide(blank, _given(acted), torch.zeros(passes.acting, policy.noise_dim))
    with Uncomputed():
        rows = torch.zeros(passes.learning, dtype=torch.int64)
        trace = {name: tensor[rows] for name, tensor in decided.items()}
    with Uncomputed() as learning:
        learning.ignore(own)
        reached = _learn(config, blank, passes, learned, trace)
    return Peaks(decision.peak, learning.peak, reached)


def _blank(tensor: Tensor) -> Tensor:
    """A tensor in place of a policy's: a parameter without numbers, or a copy of a buffer that has some."""
    if isinstance(tensor, nn.Parameter) or tensor.is_meta:
        found = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="cpu")
        return found.requires_grad_(tensor.requires_grad)
    return tensor.detach().to("cpu", copy=True)


def _decide(policy: Policy, rows: Inputs, noise: Tensor) -> Mapping[str, Tensor]:
    """The trace of a decision."""
    if isinstance(policy, VariesInLength):
        return policy.longest(rows, noise)
    with torch.no_grad():
        return policy.act(rows, noise).trace


def _learn(config: Config, policy: Policy, passes: Passes, rows: Inputs, trace: Mapping[str, Tensor]) -> frozenset[str]:
    """Two optimiser steps: the first makes moments and the average of the weights, and the second finds them. What is
    not the policy's is copied for a pass, as it is from the host's memory. Returns the names of the parameters that a
    gradient reaches."""
    optim = config.optim
    value_lr = optim.value_lr if passes.trains_critic else None
    optimizer = make_optimizer(policy, optim, policy_lr=optim.policy_lr, value_lr=value_lr, eps=optim.adam_eps)
    steps = OptimizerSteps(ReplicatedPolicy(policy, Ranks()), optimizer, optim)
    if optim.epochs > 1 and not passes.imitates and isinstance(policy, Precomputes):
        trace = {**trace, **policy.precompute(_given(rows))}
    for _ in range(2):
        if passes.of_a_step == 1:
            steps.begin()  # else the gradient of other passes is there
        _loss(policy, passes, rows, trace).backward()  # type: ignore[no-untyped-call]
        steps.norm()
        steps.take()
    return frozenset(name for name, parameter in policy.named_parameters() if parameter.grad is not None)


def _loss(policy: Policy, passes: Passes, rows: Inputs, trace: Mapping[str, Tensor]) -> Tensor:
    """A scalar with the graph of the run's loss."""
    if passes.imitates:
        assert isinstance(policy, Imitates)
        count, spec = passes.learning, policy.spec
        steps = earlier_actions(policy) + spec.predicted
        actions = torch.zeros(count, steps, spec.action_dim)
        counted = torch.ones(count, steps, dtype=torch.bool)
        return policy.imitate(_given(rows), actions, counted, torch.zeros(count, policy.noise_dim)).sum()
    terms = policy.evaluate(_given(rows), {name: tensor.clone() for name, tensor in trace.items()})
    loss = terms.log_prob.sum() + terms.entropy.sum()
    return loss + terms.value.sum() if passes.critic else loss


def _given(rows: Inputs) -> Inputs:
    """A copy of the observations, as a card is given them."""
    frames = {name: frame.clone() for name, frame in rows.frames.items()}
    state, proprio = (None if part is None else part.clone() for part in (rows.state, rows.proprio))
    return replace(rows, frames=frames, state=state, proprio=proprio)
