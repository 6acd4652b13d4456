"""Capabilities that only some policies have, each a protocol that a caller asks for by type:

    if isinstance(policy, Precomputes): ...

A policy has one by defining its methods. Symbols in shapes are those of `policies.contract`; N rows, D numbers.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from policies.contract import Action, Inputs, Policy
from policies.errors import PolicyError
from policies.work import Costs


@runtime_checkable
class Imitates(Protocol):
    """A policy that learns from demonstrations."""

    def imitate(self, inputs: Inputs, actions: Tensor, counted: Tensor, noise: Tensor) -> Tensor:
        """[B] float32 with gradients: the loss of taking the demonstrated actions; the likelier, the lower.

        `actions` [B, P, A] float32 in the environment's units, P = `spec.predicted`; `counted` [B, P] bool, the others
        lie beyond the episode's end; each row's loss is a mean over its counted elements, of an answer in tokens their
        sum. `noise` [B, Z] is standard normal, for losses that are drawn.
        """
        ...


@runtime_checkable
class ImitatesEarlier(Imitates, Protocol):
    """A policy whose loss is of actions before the present one, too: what it predicts begins at an earlier one of its
    observations (Diffusion Policy, arXiv 2303.04137)."""

    earlier_actions: int
    """E: number of actions before the present one. `imitate` takes actions [B, E + P, A]; those before the episode's
    beginning are its first one, and not counted."""


def earlier_actions(policy: Policy) -> int:
    """Number of actions before the present one with which the actions of the policy's `imitate` begin."""
    return policy.earlier_actions if isinstance(policy, ImitatesEarlier) else 0


@runtime_checkable
class Precomputes(Protocol):
    """A policy with an untrained part, whose outputs need not be computed again for each evaluation."""

    def precompute(self, inputs: Inputs) -> Mapping[str, Tensor]:
        """The part of `evaluate` that no trained weight enters; no gradient. Each tensor has B rows.

        Where rows are evaluated several times, it is computed once and joins their traces, in which `evaluate` looks
        for it. Empty where options leave no such part.
        """
        ...


@runtime_checkable
class Observes(Protocol):
    """A policy with running statistics of what it observes, as buffers."""

    def observe(self, inputs: Inputs) -> None:
        """Update the statistics from the inputs of a rollout, once after each update, or from those of demonstrations.

        Of K > 1 observations the present one counts: the earlier ones are present ones of other rows.
        """
        ...


@dataclass(frozen=True)
class Normalised:
    """Numbers that a policy normalises, N rows of D, beside the statistics by which it does."""

    name: str
    """`action`, `proprio` or `state`."""
    values: Tensor
    """[N, D] as the statistics take them: after the policy's transforms."""
    low: Tensor
    """[D] what becomes -1; NaN for a number that stays as it is."""
    high: Tensor
    """[D] what becomes 1."""


@runtime_checkable
class Normalises(Protocol):
    """A policy that normalises observations or actions by statistics."""

    def normalised_numbers(self, inputs: Inputs, actions: Tensor) -> Sequence[Normalised]:
        """Demonstrated `actions` [N, A] in the environment's units, and the proprioception [N, P] and state [N, S] of
        the `inputs`, beside the statistics that normalise them. They are single observations of any policy."""
        ...


@runtime_checkable
class HasUnits(Protocol):
    """A policy whose actions have the units of a checkpoint's statistics or of demonstrations."""

    own_units: str
    """Option, and its value, with which units are those of the demonstrations: `asset demonstrations`."""

    @property
    def normalised_by(self) -> str:
        """Source of the statistics that give actions and observations their units, in words."""
        ...

    def adopt_units(self, actions: Tensor, proprio: Tensor | None) -> None:
        """Take the ranges of the demonstrated actions [N, A] (and of proprioception [N, P]) as the policy's units,
        unless they are a checkpoint's. Called once, before supervised training."""
        ...


def source_of_statistics(policy: Policy) -> str:
    """Source of the statistics that normalise what the policy reads and returns, in words."""
    if isinstance(policy, HasUnits):
        return policy.normalised_by
    if isinstance(policy, Normalises):
        return "observations by the rows learned from; actions are in the environment's units"
    return "nothing: observations and actions are in the environment's units"


@runtime_checkable
class ResizesFrames(Protocol):
    """A policy that brings frames of any size to its network's."""

    @property
    def network_image_size(self) -> int:
        """Height and width in pixels of the pictures that the network is shown."""
        ...


@runtime_checkable
class Predicts(Protocol):
    """A policy that can return more actions of a decision than are executed."""

    def predict(self, inputs: Inputs, noise: Tensor | None) -> Tensor:
        """[B, P, A] float32 in the environment's units, P = `spec.predicted`: the actions of a decision, of which those
        of `act`'s chunk are the first. No gradient."""
        ...


@runtime_checkable
class Ensembles(Predicts, Protocol):
    """A policy that decides at every env step, and whose predictions of one step by several decisions are averaged
    where it is evaluated (temporal ensembling, arXiv 2304.13705)."""

    @property
    def ensemble(self) -> float | None:
        """m of the weights exp(-m i), i = 0 for the oldest prediction. None: a decision's own actions are executed."""
        ...


@dataclass(frozen=True)
class LeftOver:
    """The remaining actions of each row's last decision, when the next one begins."""

    actions: Tensor
    """[B, L, A] float32 in the environment's units, the action of the present env step first. L may be 0."""
    there: Tensor
    """bool [B]; False: the row's episode begins, and its actions mean nothing."""
    delay: int
    """Number of the actions that are executed before the decision arrives."""
    jacobian: bool = True
    """True: errors are propagated to the noisy actions as in the paper; False: as LeRobot computes it."""

    def to(self, device: torch.device | str) -> LeftOver:
        """The same with all tensors on the device."""
        return replace(self, actions=self.actions.to(device), there=self.there.to(device))


@runtime_checkable
class RealTimeChunks(Protocol):
    """A policy whose decision can agree with what is left of its last one, which is executed while it is computed
    (real-time chunking, arXiv 2506.07339). `PolicyFormat.continues` says so before it is built."""

    def continue_chunk(self, inputs: Inputs, noise: Tensor | None, left: LeftOver) -> Tensor:
        """[B, P, A] float32 in the environment's units, P = `spec.predicted`: the actions of the decision, those first
        that the delay makes past. Rows without a left-over are decided as by `act`. No gradient."""
        ...


@runtime_checkable
class VariesInLength(Protocol):
    """A policy whose decisions are of a length that depends on what is decided, as answers in tokens are."""

    def longest(self, inputs: Inputs, noise: Tensor) -> Mapping[str, Tensor]:
        """The trace of a decision of the greatest length. Computed are the passes of it that take the most memory, with
        nothing drawn: the policy's weights may be tensors without numbers. No gradient."""
        ...


@runtime_checkable
class CountsWork(Protocol):
    """A policy whose needed arithmetic and memory traffic are counted from its network's modules."""

    def costs(self, instruction: str) -> Costs:
        """Counts for prompts as long as the instruction's."""
        ...


@runtime_checkable
class HasAdapter(Protocol):
    """A policy on whose network a low-rank adapter may hang."""

    @property
    def has_new_adapter(self) -> bool:
        """True if all that is trained of the actor is an adapter that changes nothing yet: then `without_adapter` is,
        from now on and whatever is learned, the policy as it is now."""
        ...

    def without_adapter(self) -> AbstractContextManager[None]:
        """A context in which the policy computes as if it had no adapter. Nothing is copied, and nothing may be trained
        within. Raises `PolicyError` where no adapter hangs on it."""
        ...


@runtime_checkable
class Quantises(Protocol):
    """A policy whose frozen base under an adapter can be stored in fewer bits."""

    def quantise_base(self, base: str) -> None:
        """Store the frozen matrices in fewer bits, `base` as in `policies.quantised`. Called once, when the policy is
        built. Raises `PolicyError` where no adapter hangs on it."""
        ...


@runtime_checkable
class GathersInGroups(Protocol):
    """A large policy that processes with shards can gather in groups of modules, instead of all at once."""

    def shards(self) -> Sequence[Sequence[nn.Module]]:
        """Groups of modules whose parameters are gathered and freed together where processes hold a shard of each.

        Within `evaluate`, every module named is used by being called and in no other way: a call is what gathers it.
        Modules of one group are called one after the other, and share what is tied. What is in no group stays gathered
        from the beginning of `evaluate` to the end of the backward pass, except for the value head, which is a
        separate group.
        """
        ...


@dataclass(frozen=True)
class PublishedWeights:
    """Weights by which another program samples."""

    folder: Path
    """Folder of the weights: the program reads only this folder, and no other version's."""
    version: int
    """Number of updates in them."""


@runtime_checkable
class SampledElsewhere(Protocol):
    """A policy whose decisions of a rollout another program draws, with that program's noise: a generation engine.

    Their log-probs are that program's, for the same distribution as those of `evaluate`, from which they differ by
    rounding at least: an update corrects the difference. `act` stays the policy's own; evaluations call it.
    """

    def publish(self, weights: PublishedWeights) -> None:
        """Write the present weights into their folder, and have the program take them. Afterwards nothing is decided by
        older ones. Called once for each version. Raises `PolicyError` for a program that cannot be reached, or does
        not take them."""
        ...

    def sample(self, inputs: Inputs, weights: PublishedWeights) -> Action:
        """Have the program decide by these weights. No gradient. Raises `PolicyError` for a program that does not
        answer in time, or not by these weights."""
        ...


PROTOCOLS: tuple[type, ...] = (
    *(Imitates, ImitatesEarlier, Precomputes, Observes, Normalises, HasUnits, ResizesFrames, Predicts, Ensembles),
    *(RealTimeChunks, HasAdapter, Quantises, VariesInLength, CountsWork, GathersInGroups, SampledElsewhere),
)
METHODS = {
    name: protocol.__name__
    for protocol in PROTOCOLS
    for name, member in vars(protocol).items()
    if inspect.isfunction(member) and not name.startswith("_")
}
"""Methods of the protocols, with the names of these."""


def check_names(policy: Policy) -> None:
    """Raise `PolicyError` where an attribute of another meaning has the name of a capability's method: the policy would
    be taken for one that has the capability, in some versions of Python."""
    for name, protocol in METHODS.items():
        if hasattr(policy, name) and not inspect.isroutine(getattr(policy, name)):
            raise PolicyError(
                f"the policy {policy.kind or type(policy).__name__} has an attribute {name!r}, which is the method by "
                f"which a policy is {protocol} (policies/capabilities.py): give it another name"
            )
