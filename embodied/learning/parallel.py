"""The policy on one rank of a learner: a replica of the whole, or (`sharding`) a shard of every parameter.

A learner of one rank is the plain case: micro-batches are those of all samples, and there is nothing to sum. Several
ranks all have the samples of all trajectories. Each evaluates its share of them; results are gathered and gradients are
summed, so that every rank has what one rank alone would have.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn

from embodied import progress
from embodied.algorithms.samples import Samples
from embodied.devices import CPU, copies, device_of
from embodied.learning.weight_sync import trained
from embodied.run import checkpoint
from embodied.runtime.ranks import Ranks
from embodied.trajectories.batch import Trajectories
from policies.contract import Policy, actor_parameters

T = TypeVar("T")


class ReplicatedPolicy:
    """The whole policy on every rank."""

    sharded = False

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self.policy, self.ranks = policy, ranks
        self._snapshot: Policy | None = None
        """On rank 0: a copy of the policy whose parameters take no memory, except while a checkpoint is written."""

    # --- the passes of an update

    def micro_batches(self, minibatch: Tensor, size: int, synchronise: bool = True) -> Iterator[tuple[Tensor, bool]]:
        """Yield this rank's share of a minibatch as pairs (int64 [M] indices of samples, True if they count), M at most
        `size`. The caller makes one forward and backward pass for each pair.

        A pass of samples that do not count contributes a gradient of zero: a rank without a share makes one, so that
        its parameters have gradients to sum. `synchronise`: False if more passes follow before the gradient is needed.
        """
        share = self.ranks.share(minibatch)
        most = -(-self.ranks.largest_share(len(minibatch)) // size)
        passes = self.padded(share.split(size) if len(share) else (), most, minibatch[:1])
        for number, (index, counts) in enumerate(passes):
            self.begin_pass(synchronise and number == len(passes) - 1)
            yield index, counts

    def padded(self, mine: Sequence[T], most: int, blank: T) -> list[tuple[T, bool]]:
        """The passes of this rank, `mine`, and True if they count; a rank without any has one of `blank`, which does
        not. `most` is the largest number of passes of a rank."""
        return [(each, True) for each in mine] or [(blank, False)]

    def begin_pass(self, last: bool) -> None:
        """Called before each forward and backward pass. `last`: the gradient is needed after it."""
        progress.report()

    def sum_gradients(self) -> None:
        """Sum the gradients over the ranks, once per optimiser step. Nothing to do on one rank."""
        self.ranks.sum_gradients(self.policy.parameters())

    def clip_grad_norm(self, limit: float) -> Tensor:
        """Scale the summed gradient down to this norm. Returns its norm before, on the device."""
        return nn.utils.clip_grad_norm_(self.policy.parameters(), limit)

    @contextmanager
    def critic_only(self, active: bool) -> Iterator[None]:
        """If `active`, backward passes in the block give a gradient to the value head alone, and do not run through
        the actor."""
        actor = [parameter for parameter in actor_parameters(self.policy) if active]
        for parameter in actor:
            parameter.requires_grad_(False)
        try:
            yield
        finally:
            for parameter in actor:
                parameter.requires_grad_(True)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """A block without gradients in which every rank can compute alone with the whole policy, by any method."""
        yield

    # --- weights and checkpoints

    def weights(self) -> dict[str, Tensor]:
        """Trained parameters and buffers by name, in the policy's own types; empty on ranks other than 0.

        Every rank must call it. The tensors are the policy's own: the caller must not change them.
        """
        return self._changing() if self.ranks.first else {}

    def stage(
        self, root: Path, state: checkpoint.RunState, optimizer: torch.optim.Optimizer, environments: checkpoint.Arrays
    ) -> Callable[[], None]:
        """Copy to the host's memory what a checkpoint is made of. Every rank must call it.

        Returns a function that writes this rank's part of the copies; the last one completes the checkpoint.
        Meanwhile the policy may change. Rank 0 writes everything, in the format of one rank. Frozen parameters are not
        copied.
        """
        if not self.ranks.first:
            return write_nothing
        known = checkpoint.OptimizerState.of(self.policy, optimizer)
        known = replace(known, tensors=copies(known.tensors))
        parameters = {name: parameter.detach() for name, parameter in self.policy.named_parameters()}
        snapshot = self._snapshot_with(parameters | copies(self._changing()))
        arrays = copied(environments)

        def write() -> None:
            with self._completing(root, state, snapshot):
                checkpoint.write_state(root, state, snapshot, known, arrays)

        return write

    @contextmanager
    def _completing(self, root: Path, state: checkpoint.RunState, snapshot: Policy) -> Iterator[None]:
        """The checkpoint is written in the block; nothing is left of one that fails."""
        try:
            with checkpoint.writing(root, state):
                yield
        except BaseException:
            checkpoint.discard(root, state)
            raise
        finally:
            self._empty(snapshot)

    @property
    def stages_own_tensors(self) -> bool:
        """True if a staged checkpoint refers to tensors of the policy itself: the frozen ones."""
        return any(not parameter.requires_grad for parameter in self.policy.parameters())

    def _snapshot_with(self, tensors: Mapping[str, Tensor]) -> Policy:
        """On rank 0: a separate policy with these very tensors, until `_empty`. There is one at a time."""
        snapshot = self._snapshot = self._snapshot or copy_without_memory(self.policy)
        own = {id(p): nn.Parameter(tensors[name], p.requires_grad) for name, p in self.policy.named_parameters()}
        named = {name: own[id(p)] for name, p in self.policy.named_parameters(remove_duplicate=False)}
        state = {name: named.get(name, tensors.get(name)) for name in snapshot.state_dict()}
        snapshot.load_state_dict(state, assign=True)
        return snapshot

    def _empty(self, snapshot: Policy) -> None:
        state = snapshot.state_dict()
        snapshot.load_state_dict({name: torch.empty_like(t, device="meta") for name, t in state.items()}, assign=True)

    def load(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        """Load policy and optimiser from a verified checkpoint, which rank 0 reads."""
        self.ranks.first_does("read the checkpoint", lambda: self._read(folder, optimizer))
        if self.ranks.size > 1:
            self._share_read(optimizer)
        if isinstance(optimizer, checkpoint.PacksMoments):
            optimizer.pack()

    def _share_read(self, optimizer: torch.optim.Optimizer) -> None:
        """Send what rank 0 has read to the other ranks."""
        for tensor in self._changing().values():
            self.ranks.broadcast(tensor)
        names = {id(parameter): name for name, parameter in self.policy.named_parameters()}
        parameters = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
        own = {name: checkpoint.kept(optimizer.state.get(p, {})) for name, p in parameters.items()}
        known = self.ranks.broadcast_plain({name: keys for name, keys in own.items() if keys})
        for name, keys in known.items():
            parameter = parameters[name]
            if not self.ranks.first:
                optimizer.state[parameter] = state_like(parameter, 0.0, keys)
            for key in ("step", *keys):
                self.ranks.broadcast(optimizer.state[parameter][key])

    def _read(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        checkpoint.load_weights(folder, self.policy)
        checkpoint.load_optimizer(folder, self.policy, optimizer)

    def _changing(self) -> dict[str, Tensor]:
        """Trained parameters and all buffers that are saved, by name."""
        return {name: tensor.detach() for name, tensor in trained(self.policy).items()}


def copy_without_memory(policy: Policy) -> Policy:
    """A copy of the policy whose parameters take no memory."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in policy.parameters()}
    return copy.deepcopy(policy, dict(empty))


def state_like(parameter: Tensor, step: float, keys: Sequence[str]) -> dict[str, Tensor]:
    """An optimiser's state for the parameter after `step` steps, with zeros in place of its values."""
    precise = torch.promote_types(parameter.dtype, torch.float32)
    return {
        "step": torch.tensor(step, device=parameter.device),
        **{
            key: torch.zeros_like(parameter, dtype=precise if key == checkpoint.AVERAGE else parameter.dtype)
            for key in keys
        },
    }


def copied(arrays: checkpoint.Arrays) -> checkpoint.Arrays:
    return {name: array.copy() for name, array in arrays.items()}


def write_nothing() -> None:
    """The write function of a rank that has no part of a checkpoint."""


# --- passes over samples without a gradient, in shares


def log_probs_of(parallel: ReplicatedPolicy, samples: Samples, size: int) -> Tensor:
    """[N, C, A] log-probs of all samples under the present policy, in the host's memory.

    `size` samples are evaluated at once (0: a rank's whole share), as in the functions below.
    """
    policy, device = parallel.policy, device_of(parallel.policy)

    def evaluate(index: Tensor) -> Tensor:
        part = samples.take(index).to(device)
        return policy.evaluate(part.inputs, part.trace).log_prob

    return _evaluate_all(parallel.ranks, len(samples), size, evaluate)


def values_of(parallel: ReplicatedPolicy, batch: Trajectories, size: int) -> Tensor:
    """[T, B] or [T, B, C] values of the executed decisions under the present critic, zero elsewhere, in the host's
    memory."""
    policy, device = parallel.policy, device_of(parallel.policy)
    taken = batch.mask.flatten().nonzero()[:, 0]
    found = torch.zeros_like(batch.value)
    if len(taken):
        decisions = batch.decisions.select(taken)

        def evaluate(index: Tensor) -> Tensor:
            part = decisions.select(index)
            # `evaluate`, not `value`: the parameters of a sharded policy are gathered for no other call.
            return policy.evaluate(part.inputs(device), part.trace(device)).value

        found.flatten(0, 1)[taken] = _evaluate_all(parallel.ranks, len(taken), size, evaluate)
    return found


def precomputed_of(parallel: ReplicatedPolicy, samples: Samples, size: int) -> Mapping[str, Tensor]:
    """`Precomputes.precompute` of all samples, in the host's memory."""
    policy, ranks, device = parallel.policy, parallel.ranks, device_of(parallel.policy)
    whole: dict[str, Tensor] = {}
    done = 0
    with torch.no_grad(), ranks.waiting("precompute"):
        for index in _equal_shares(ranks, len(samples), size):
            progress.report()
            found = policy.precompute(samples.decisions.select(index).inputs(device))
            for key, part in found.items():
                if key not in whole:
                    whole[key] = torch.empty(ranks.largest_share(len(samples)), *part.shape[1:], dtype=part.dtype)
                whole[key][done : done + len(index)] = part.to(CPU)
            done += len(index)
    return {key: ranks.gather_rows(part, len(samples)) for key, part in whole.items()}


def _evaluate_all(ranks: Ranks, samples: int, size: int, evaluate: Callable[[Tensor], Tensor]) -> Tensor:
    """[samples, ...] in the host's memory: the results of `evaluate` on all samples, from all ranks."""
    share = []
    with torch.no_grad(), ranks.waiting("evaluate"):
        for index in _equal_shares(ranks, samples, size):
            progress.report()
            share.append(evaluate(index).to(CPU))
    return ranks.gather_rows(torch.cat(share), samples)


def _equal_shares(ranks: Ranks, samples: int, size: int) -> Sequence[Tensor]:
    """This rank's share of all samples in their order, in micro-batches. A share shorter than others repeats a sample,
    so that all ranks make equally many passes: those of a sharded policy need each other in each."""
    share = ranks.share(torch.arange(samples))
    share = torch.cat([share, share.new_zeros(ranks.largest_share(samples) - len(share))])
    return share.split(size or len(share))
