"""A learner's rank that holds all of the policy. `sharding` has those that hold shards of it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

from embodied.devices import copies
from embodied.learning.weights import trained
from embodied.run import checkpoint
from embodied.runtime.ranks import Ranks
from policies.contract import Policy


class WholePolicy:
    """Every rank holds all of the policy."""

    sharded = False

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self.policy, self.ranks = policy, ranks
        self._plain: Policy | None = None
        """Of rank 0: the same policy by itself, with parameters that take no memory."""

    def last_pass(self, last: bool) -> None:
        """Say whether the next backward pass is the last before the gradient is needed."""

    def sum_gradients(self) -> None:
        """After the last pass: have the gradient of all ranks on each of them."""
        self.ranks.sum_gradients(self.policy.parameters())

    def clip(self, bound: float) -> Tensor:
        """Scale the gradient, once it is summed, down to this norm. Its norm before that, on the device."""
        return nn.utils.clip_grad_norm_(self.policy.parameters(), bound)

    def weights(self) -> dict[str, Tensor]:
        """What training changes, by name, in the policy's own type; on rank 0, of which the caller must not change it.
        Every rank has to be asked."""
        return self._changing() if self.ranks.first else {}

    @contextmanager
    def critic_alone(self, alone: bool) -> Iterator[None]:
        """A pass within, if it is `alone`, gives the value head a gradient and nobody else: no backward pass is made
        through the rest."""
        actor = [parameter for parameter in self.policy.actor_parameters() if parameter.requires_grad and alone]
        for parameter in actor:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in actor:
                parameter.requires_grad_(True)

    def stage(
        self, root: Path, state: checkpoint.RunState, optimizer: torch.optim.Optimizer, environments: checkpoint.Arrays
    ) -> Callable[[], None]:
        """Copy to the host's memory what a checkpoint is made of. Every rank has to be asked.

        What is returned writes this rank's part of the copies, and the last one completes the checkpoint; meanwhile
        the policy may change. Here rank 0 writes all, in the format of one rank. What is frozen is not copied.
        """
        if not self.ranks.first:
            return nothing
        known = checkpoint.OptimizerState.of(self.policy, optimizer)
        known = replace(known, tensors=copies(known.tensors))
        policy, arrays = self._staged(), copied(environments)

        def write() -> None:
            with self._completing(root, state, policy):
                checkpoint.write_state(root, state, policy, known, arrays)

        return write

    @contextmanager
    def _completing(self, root: Path, state: checkpoint.RunState, staged: Policy) -> Iterator[None]:
        """Within, the checkpoint is written; nothing is left of one that cannot be."""
        try:
            with checkpoint.writing(root, state):
                yield
        except BaseException:
            checkpoint.discard(root, state)
            raise
        finally:
            self._let_go(staged)

    @property
    def lends_frozen(self) -> bool:
        """Whether what is staged refers to tensors of the policy itself: those that training does not change."""
        return any(not parameter.requires_grad for parameter in self.policy.parameters())

    def _staged(self) -> Policy:
        """Of rank 0: a policy by itself that stays as this one is now."""
        everything = {name: parameter.detach() for name, parameter in self.policy.named_parameters()}
        return self._with(everything | copies(self._changing()))

    def _with(self, tensors: Mapping[str, Tensor]) -> Policy:
        """Of rank 0: a policy by itself that has these very tensors, until `_let_go`. There is one at a time."""
        plain = self._plain = self._plain or empty_copy(self.policy)
        own = {id(p): nn.Parameter(tensors[name], p.requires_grad) for name, p in self.policy.named_parameters()}
        named = {name: own[id(p)] for name, p in self.policy.named_parameters(remove_duplicate=False)}
        plain.load_state_dict({name: named.get(name, tensors.get(name)) for name in plain.state_dict()}, assign=True)
        return plain

    def _let_go(self, plain: Policy) -> None:
        state = plain.state_dict()
        plain.load_state_dict({name: torch.empty_like(t, device="meta") for name, t in state.items()}, assign=True)

    def load(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Take policy and optimiser from a verified checkpoint, which rank 0 reads."""
        self.ranks.first_does("read the checkpoint", lambda: self._read(folder, optimizer))
        if self.ranks.size == 1:
            return
        for tensor in self._changing().values():
            self.ranks.broadcast(tensor)
        names = {id(parameter): name for name, parameter in self.policy.named_parameters()}
        parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        known = self.ranks.broadcast_plain([name for name, p in parameters.items() if optimizer.state.get(p)])
        for name in known:
            parameter = parameters[name]
            if not self.ranks.first:
                optimizer.state[parameter] = {
                    "step": torch.zeros((), device=parameter.device),
                    **{key: torch.empty_like(parameter) for key in checkpoint.MOMENTS},
                }
            for key in ("step", *checkpoint.MOMENTS):
                self.ranks.broadcast(optimizer.state[parameter][key])

    def _read(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        checkpoint.load_weights(folder, self.policy)
        checkpoint.load_optimizer(folder, self.policy, optimizer)

    def _changing(self) -> dict[str, Tensor]:
        """Trained parameters and all buffers that are saved, by name."""
        return {name: tensor.detach() for name, tensor in trained(self.policy).items()}


def empty_copy(policy: Policy) -> Policy:
    """The same policy with parameters that take no memory."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in policy.parameters()}
    return copy.deepcopy(policy, dict(empty))


def copied(arrays: checkpoint.Arrays) -> checkpoint.Arrays:
    return {name: array.copy() for name, array in arrays.items()}


def nothing() -> None:
    """What a rank writes that has no part of a checkpoint."""
