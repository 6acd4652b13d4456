"""Predicted memory of a run on one card, by part, and the smallest change of settings with which it fits.

Weights, gradients and moments are counted. What a decision and an update take beside them is predicted:
the policy is copied to tensors without numbers (`FakeTensorMode`), and computes one decision
and one micro-batch. Every operation's result is counted from when it is made until nothing refers to it: activations,
what the backward pass keeps, and what a product takes for a moment. What an allocator adds by rounding, and what
libraries take for themselves, is not counted.
"""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import (
    FakeTensorMode,
)
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.learning.quantised_adam import BLOCK, LEAST
from embodied.learning.recompute import recompute
from policies.contract import Inputs, Policy
from policies.errors import PolicyError
from policies.quantised import library


class LiveBytes(TorchDispatchMode):
    """Counts bytes of the tensors that operations within make, while they are referred to."""

    def __init__(self) -> None:
        super().__init__()
        self.now = self.peak = 0
        self._known: set[int] = set()

    def ignore(self, tensors: Any) -> None:
        """Leave out the memory of these tensors, which were there before."""
        self._known |= {tensor.untyped_storage()._cdata for tensor in tensors}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(found):
            if isinstance(leaf, Tensor):
                self._count(leaf)
        return found

    def _count(self, tensor: Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage._cdata in self._known:
            return
        self._known.add(storage._cdata)
        size = storage.nbytes()
        self.now += size
        self.peak = max(self.peak, self.now)
        weakref.finalize(storage, self._free, storage._cdata, size)

    def _free(self, pointer: int, size: int) -> None:
        self._known.discard(pointer)
        self.now -= size


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
    decision: int | None
    """Most that a decision takes beside them, keys and values among it; None: not predicted."""
    update: int | None
    """Most that a micro-batch takes: activations, and what a product takes for a moment."""

    @property
    def total(self) -> int:
        """Decisions and updates take turns."""
        lasting = self.frozen + self.trained + self.gradients + self.moments + self.average
        return lasting + max(self.decision or 0, self.update or 0)

    def fits(self, card_gb: float) -> bool:
        return self.total + RESERVE <= card_gb * 1e9


def card_memory(config: Config, policy: Policy, inputs: Inputs, *, acting: int, learning: int) -> CardMemory:
    """Predict the memory with decisions of `acting` rows and micro-batches of `learning`; `inputs` are of one row."""
    every = [*policy.parameters()]
    trained = [p for p in every if p.requires_grad]
    size = sum(p.numel() * p.element_size() for p in trained)
    packed = [p for p in trained if p.numel() >= LEAST] if config.optim.moments else []
    numbers = sum(p.numel() for p in packed)
    moments = 2 * (size - sum(p.numel() * p.element_size() for p in packed)) + 2 * (numbers + 4 * numbers // BLOCK)
    if config.optim.recompute:
        recompute(policy)
    found = peaks(policy, inputs, acting=acting, learning=learning)
    return CardMemory(
        frozen=sum(p.numel() * p.element_size() for p in every if not p.requires_grad),
        trained=size,
        gradients=size,
        moments=moments,
        average=4 * sum(p.numel() for p in trained) if config.optim.ema is not None else 0,
        decision=None if found is None else found.decision,
        update=None if found is None else found.update,
    )


def smallest_change(config: Config, predict: Builds, card_gb: float, rows: int, adapted: bool) -> Config | None:
    """The configuration with the fewest and cheapest changes that fits on the card; None: none does. `rows`: samples of
    a micro-batch now; `adapted`: an adapter hangs on the policy, whose base can be quantised."""
    one: Mapping[str, Mapping[str, Any]] = {"optim": {"micro_batch": 1}}
    steps: list[Mapping[str, Mapping[str, Any]]] = [one, {"optim": {"recompute": True}}]
    if config.optim.sharding != "sharded":  # which divides a policy, and leaves its numbers as they are
        steps += [{"optim": {"moments": "int8"}}]
        steps += [{"policy": {"base": "int8"}}, {"policy": {"base": "nf4"}}] if adapted else []
    together = [steps[: count + 1] for count in range(1, len(steps))]
    for changes in [[step] for step in steps] + together:
        changed = _changed(config, changes)
        try:
            if changed.optim.moments is not None:
                library()
            fits = predict(changed).fits(card_gb)
        except (UserError, PolicyError):  # not for this policy, or not installed
            continue
        if not fits:
            continue
        if changes != [one]:
            return changed
        halves = [rows >> power for power in range(1, rows.bit_length())]
        larger = (_changed(config, [{"optim": {"micro_batch": half}}]) for half in halves if half > 1)
        return next((each for each in larger if predict(each).fits(card_gb)), changed)
    return None


def _changed(config: Config, changes: Sequence[Mapping[str, Mapping[str, Any]]]) -> Config:
    for change in changes:
        for section, values in change.items():
            part = getattr(config, section).model_copy(update=values)
            config = config.model_copy(update={section: part})
    return config


@dataclass(frozen=True)
class Peaks:
    """Bytes beside what lasts."""

    decision: int
    """Most that is allocated during a decision, keys and values among it."""
    update: int
    """Most that is allocated during forward and backward pass of a micro-batch, without the gradients of trained
    weights."""


def peaks(policy: Policy, inputs: Inputs, *, acting: int, learning: int) -> Peaks | None:
    """Predict them for decisions of `acting` rows and micro-batches of `learning`; `inputs` are of one row. None for a
    policy whose computation depends on numbers, as the length of an answer does, or does not run on tensors without."""
    try:
        return _peaks(policy, inputs, acting, learning)
    except (PolicyError, UserError):
        raise
    except Exception:  # whatever a policy of one's own does that such tensors or a copy of it do not allow
        return None


def _peaks(policy: Policy, inputs: Inputs, acting: int, learning: int) -> Peaks:
    acted, learned = (inputs.rows(torch.zeros(count, dtype=torch.int64)) for count in (acting, learning))
    with _fake(policy) as (there, fake):
        rows = _moved(acted, there)
        noise = torch.zeros(acting, policy.noise_dim)
        with LiveBytes() as live:
            live.ignore([*fake.parameters(), *fake.buffers()])
            fake.act(rows, noise)
        decision = live.peak
        rows = _moved(learned, there)
        action = fake.act(rows, torch.zeros(learning, policy.noise_dim))
        trace = {name: tensor.detach() for name, tensor in action.trace.items()}
        trained = [p for p in fake.parameters() if p.requires_grad]
        for parameter in trained:
            parameter.grad = torch.zeros_like(parameter)
        del action
        with LiveBytes() as live:
            live.ignore([*fake.parameters(), *fake.buffers(), *(p.grad for p in trained if p.grad is not None)])
            terms = fake.evaluate(rows, trace)
            (terms.log_prob.sum() + terms.entropy.sum() + terms.value.sum()).backward()
        return Peaks(decision, live.peak)


@contextmanager
def _fake(policy: Policy) -> Iterator[tuple[Callable[[Tensor | None], Any], Policy]]:
    """The policy without numbers on the meta device, and a function that takes other tensors there."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def there(tensor: Tensor | None) -> Any:
        with mode:
            return None if tensor is None else mode.from_tensor(tensor.detach())

    own = [*policy.parameters(), *policy.buffers()]
    copied = copy.deepcopy(policy, {id(t): there(t).requires_grad_(t.requires_grad) for t in own})
    with mode:
        yield there, copied


def _moved(found: Inputs, there: Callable[[Tensor | None], Any]) -> Inputs:
    frames: Mapping[str, Tensor] = {name: there(frame) for name, frame in found.frames.items()}
    return replace(found, state=there(found.state), proprio=there(found.proprio), frames=frames)
