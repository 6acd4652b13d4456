"""A policy whose parameters are sharded over the learner's ranks (FSDP2), as a variation of `ReplicatedPolicy`.

    replicated  gradients are summed in flat buckets, once per optimiser step (`parallel`)
    sharded     parameters are gathered for each pass group by group (`GathersInGroups.shards`), gradients are summed
                and scattered in the last backward pass of a step; the optimiser works on shards

Both give the same sums. A policy that trains in 16 bits is sharded with master weights in float32, which the optimiser
steps; passes compute in 16 bits as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from embodied.config.schema import Config
from embodied.devices import CPU, copies
from embodied.errors import UserError
from embodied.learning.parallel import ReplicatedPolicy, copied, copy_without_memory, state_like, write_nothing
from embodied.run import checkpoint, optimizer_shards
from embodied.run.checkpoint import MASTER, CheckpointError
from embodied.runtime.ranks import Ranks, bind
from embodied.workflows.sizes import holds_shards
from policies.capabilities import GathersInGroups
from policies.contract import Policy, actor_parameters

T = TypeVar("T")
SHORT = (torch.bfloat16, torch.float16)
"""Types of parameters in which small steps are lost."""
WRITE_S = 1800.0
"""Longest time from the first rank's part of a checkpoint to the last's, in seconds."""


class ShardedPolicy(ReplicatedPolicy):
    """A shard of each parameter on every rank. Construct it after parameters are frozen, before the optimiser."""

    sharded = True

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        super().__init__(policy, ranks)
        bind(ranks.rank)
        self._types = {name: parameter.dtype for name, parameter in policy.named_parameters()}
        """Types of the parameters before they were sharded."""
        _check_scalars(policy)
        self._snapshot = copy_without_memory(policy) if ranks.first else None
        # A process group for the writers alone: meanwhile the ranks train with the other.
        self._writers = ranks.another_group(WRITE_S)
        self._mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        self._host_mesh = init_device_mesh("cpu", (ranks.size,))
        # The parameters of modules in `shards` are gathered when these are called; the rest when `evaluate` begins.
        for group, parameters in shard_groups(policy):
            self._shard(group, parameters)
        for method in ("evaluate", "imitate", "precompute"):
            if hasattr(policy, method):
                register_fsdp_forward_method(policy, method)
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                # The losses of all ranks have one denominator: gradients are summed, not averaged. gloo cannot average.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)

    def _shard(self, modules: list[nn.Module], parameters: Mapping[str, nn.Parameter]) -> None:
        """Shard these modules' parameters, as one group."""
        trained = {parameter.dtype for parameter in parameters.values() if parameter.requires_grad}
        if len(trained) > 1:
            examples = {p.dtype: name for name, p in parameters.items() if p.requires_grad}
            listed = ", ".join(f"{name} is {dtype}" for dtype, name in examples.items())
            raise UserError(
                f"parameters that are gathered together are trained in one type, and {listed}: set optim.sharding to "
                "whole, or name their modules apart in the policy's `shards`"
            )
        precision = MixedPrecisionPolicy(cast_forward_inputs=False)
        if trained & set(SHORT):
            (short,) = trained
            for parameter in parameters.values():
                if parameter.requires_grad:
                    parameter.data = parameter.data.float()
            precision = MixedPrecisionPolicy(short, torch.float32, cast_forward_inputs=False)
        whole: nn.Module | list[nn.Module] = modules[0] if len(modules) == 1 else modules
        fully_shard(whole, mesh=self._mesh, mp_policy=precision)  # type: ignore[arg-type]

    @contextmanager
    def critic_only(self, active: bool) -> Iterator[None]:
        """The whole backward pass runs: shards are gathered and summed by hooks, which were set when all of the policy
        was trained. The actor's gradient is dropped afterwards."""
        yield
        if active:
            for parameter in actor_parameters(self.policy):
                parameter.grad = None

    def padded(self, mine: Sequence[T], most: int, blank: T) -> list[tuple[T, bool]]:
        """See `ReplicatedPolicy`; all ranks make equally many passes, since each gathers parameters from all."""
        return [(each, True) for each in mine] + [(blank, False)] * (most - len(mine))

    def begin_pass(self, last: bool) -> None:
        """See `ReplicatedPolicy`; the backward pass of the last one sums the gradients."""
        super().begin_pass(last)
        root = self.policy
        assert isinstance(root, FSDPModule)
        root.set_requires_gradient_sync(last)

    @contextmanager
    def gathered(self) -> Iterator[None]:
        """See `ReplicatedPolicy`; meanwhile the device holds all parameters, in the type that passes compute in."""
        modules = [module for module in self.policy.modules() if isinstance(module, FSDPModule)]
        with self.ranks.waiting("gather the policy"):
            for module in modules:
                module.set_reshard_after_forward(False, recurse=False)
                module.unshard()
        try:
            yield
        finally:
            for module in modules:
                module.reshard()
                module.set_reshard_after_forward(module is not self.policy, recurse=False)  # as `fully_shard` has it

    def sum_gradients(self) -> None:
        """The last backward pass has summed them."""

    def clip_grad_norm(self, limit: float) -> Tensor:
        norm = super().clip_grad_norm(limit)
        if not isinstance(norm, DTensor):
            return norm
        with self.ranks.waiting("measure the gradient"):
            return norm.full_tensor()

    def weights(self) -> dict[str, Tensor]:
        found = {}
        for name, tensor in self._changing().items():
            whole = self._gathered(tensor).to(self._types.get(name, tensor.dtype))
            if self.ranks.first:
                found[name] = whole.to(CPU)
        return found

    def stage(
        self, root: Path, state: checkpoint.RunState, optimizer: torch.optim.Optimizer, environments: checkpoint.Arrays
    ) -> Callable[[], None]:
        """See `ReplicatedPolicy`; every rank writes its shards of the optimiser's tensors, rank 0 also the policy, in
        the format of one rank. Where a rank cannot reach the folder, rank 0 writes everything.
        """
        whole, shards = self._whole(), self._optimizer_shards(optimizer)
        averages = {
            name: self._on_first(optimizer.state[parameter][checkpoint.AVERAGE])
            for name, parameter in self.policy.named_parameters()
            if checkpoint.AVERAGE in optimizer.state.get(parameter, {})
        }
        self.ranks.first_does("begin the checkpoint", lambda: checkpoint.begin(root, state))
        partial = checkpoint.partial_folder(root, state)
        folder = partial / checkpoint.SHARDS
        gathered: dict[str, Tensor] = {}
        if shared := self._all_see(partial):
            shards = self._copied_shards(shards)
        else:
            gathered = {name: self._on_first(shard) for name, shard in shards.items()}

        def write_shards() -> None:
            with checkpoint.writing(root, state):
                optimizer_shards.write(folder, shards, self._writers)

        if not self.ranks.first:
            return write_shards if shared else write_nothing
        names = {id(parameter): name for name, parameter in self.policy.named_parameters()}
        steps = {names[id(parameter)]: float(each["step"]) for parameter, each in optimizer.state.items()}
        policy, arrays = self._snapshot_with(whole | copies(self._buffers())), copied(environments)
        shapes = {name: shard.shape for name, shard in shards.items()}

        def write() -> None:
            with self._completing(root, state, policy):
                if shared:  # first: the other ranks wait for it
                    write_shards()
                    optimizer_shards.require_whole(folder, shapes)
                else:
                    checkpoint.write_optimizer(partial, gathered)
                checkpoint.write_run(partial, state, policy, steps, arrays, averages)
                checkpoint.complete(partial)

        return write

    @property
    def stages_own_tensors(self) -> bool:
        return False

    def load(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        whole = self._whole()
        shared = self._all_see(folder / checkpoint.SHARDS)
        moments = checkpoint.OptimizerState({}, {})

        def read() -> None:
            nonlocal moments
            with self._as_whole(whole) as policy:
                checkpoint.load_weights(folder, policy)
            moments = checkpoint.OptimizerState({}, checkpoint.read_steps(folder))
            if not shared:
                moments = checkpoint.OptimizerState.read(folder)
            moments.check_fits(folder, dict(self.policy.named_parameters()))

        self.ranks.first_does("read the checkpoint", read)
        parameters = dict(self.policy.named_parameters())
        for name, tensor in self._changing().items():
            if name in parameters:
                self._spread(moments.tensors.get(f"{MASTER}{name}", whole.get(name)), parameters[name])
            else:
                self.ranks.broadcast(tensor)
        averaged: bool = self.ranks.broadcast_plain((folder / checkpoint.AVERAGE).is_dir())
        keys = (*checkpoint.MOMENTS, *((checkpoint.AVERAGE,) if averaged else ()))
        steps: dict[str, float] = self.ranks.broadcast_plain(moments.steps)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in parameters.items():
            if name in steps and id(parameter) in trained:
                optimizer.state[parameter] = state_like(parameter, steps[name], keys)
        self._fill(folder, moments, optimizer, shared)

    def _fill(
        self, folder: Path, moments: checkpoint.OptimizerState, optimizer: torch.optim.Optimizer, shared: bool
    ) -> None:
        """Fill every rank's shards of the optimiser's tensors from the folder, or from rank 0, which has read them."""
        shards = self._optimizer_shards(optimizer)
        if shared:
            with self.ranks.waiting("read their shards"):
                optimizer_shards.read_shards(folder / checkpoint.SHARDS, shards)
            self._check_finite(folder / checkpoint.SHARDS, shards)
            return
        for name, shard in shards.items():
            if not name.startswith(MASTER):
                self._spread(moments.tensors.get(name), shard)

    def _check_finite(self, folder: Path, shards: Mapping[str, Tensor]) -> None:
        """Raise `CheckpointError` on all ranks where one of them has read a number that is not finite."""
        wrong = {name: float(not torch.isfinite(_local(shard)).all()) for name, shard in shards.items()}
        for name, ranks in (self.ranks.sum_numbers(wrong) if wrong else {}).items():
            if ranks:
                raise CheckpointError(f"{folder}: {name!r} has numbers that are not finite; use an earlier checkpoint")

    def _optimizer_shards(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """This rank's shards by the names in a checkpoint, with the master weights of a policy in 16 bits."""
        parameters = dict(self.policy.named_parameters())
        found = {
            f"{key}.{name}": optimizer.state[parameter][key]
            for name, parameter in parameters.items()
            if parameter in optimizer.state
            for key in checkpoint.kept(optimizer.state[parameter])
        }
        masters = {name: p.detach() for name, p in parameters.items() if p.dtype != self._types[name]}
        return found | {f"{MASTER}{name}": tensor for name, tensor in masters.items()}

    def _copied_shards(self, shards: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copies of this rank's shards, as shards in the host's memory."""
        like = {name: shard for name, shard in shards.items() if isinstance(shard, DTensor)}
        own = copies({name: shard.to_local() for name, shard in like.items()})
        return {
            name: DTensor.from_local(
                own[name], self._host_mesh, shard.placements, run_check=False, shape=shard.shape, stride=shard.stride()
            )
            for name, shard in like.items()
        }

    def _all_see(self, folder: Path) -> bool:
        """True if every rank sees the folder: ranks may be on machines that share no files."""
        return self.ranks.sum_numbers({"see": float(folder.is_dir())})["see"] == self.ranks.size

    # --- whole tensors and shards

    @contextmanager
    def _as_whole(self, parameters: Mapping[str, Tensor]) -> Iterator[Policy]:
        """On rank 0, in the block: a separate policy with these very parameters and this policy's buffers. What is
        loaded into it is loaded into both."""
        snapshot = self._snapshot_with(dict(parameters) | self._buffers())
        try:
            yield snapshot
        finally:
            self._empty(snapshot)

    def _buffers(self) -> dict[str, Tensor]:
        """All that are saved, by name."""
        parameters = dict(self.policy.named_parameters(remove_duplicate=False))
        return {name: tensor for name, tensor in self._changing().items() if name not in parameters}

    def _gathered(self, tensor: Tensor) -> Tensor:
        """The whole tensor, on every rank. Every rank must call it."""
        if not isinstance(tensor, DTensor):
            return tensor
        with self.ranks.waiting("gather a tensor"):
            return tensor.full_tensor().detach()

    def _on_first(self, tensor: Tensor) -> Tensor:
        """The whole tensor in rank 0's host memory; nothing on the others."""
        found = self._gathered(tensor)
        return found.to(CPU, copy=found is tensor) if self.ranks.first else torch.empty(0)

    def _whole(self) -> dict[str, Tensor]:
        """All parameters on rank 0, in the policy's own types; nothing on the others."""
        found = {}
        for name, parameter in self.policy.named_parameters():
            tensor = self._on_first(parameter)
            if self.ranks.first:
                found[name] = tensor.to(self._types[name])
        return found

    def _spread(self, whole: Tensor | None, into: Tensor) -> None:
        """Fill every rank's shard from the whole tensor, which rank 0 has."""
        assert isinstance(into, DTensor)
        sent = torch.empty(into.shape, dtype=into.dtype, device=self.ranks.device)
        if self.ranks.first:
            assert whole is not None
            sent.copy_(whole)
        self.ranks.broadcast(sent)
        with torch.no_grad():
            into.copy_(distribute_tensor(sent, self._mesh, into.placements, src_data_rank=None))


def shard_groups(policy: Policy) -> list[tuple[list[nn.Module], dict[str, nn.Parameter]]]:
    """The groups of modules that are gathered together, with their parameters; last the policy with all others."""
    named = policy.shards() if isinstance(policy, GathersInGroups) else ()
    groups = [list(group) for group in (*named, [policy.value_head])]
    found = [(group, _parameters(group)) for group in groups]
    taken = {id(p) for _, parameters in found for p in parameters.values()}
    rest = {name: p for name, p in policy.named_parameters() if id(p) not in taken}
    return [each for each in found if each[1]] + [([policy], rest)]


def rank_bytes(policy: Policy, ranks: int, sharded: bool, averaged: bool) -> dict[str, int]:
    """Bytes that each rank keeps of a policy that is not sharded yet, beside activations: what lasts, and
    `gathered_at_once`, which passes gather of it. `averaged`: an average of the weights is kept.

    Of shards, parameters that train in 16 bits have masters, gradients, moments and average in float32.
    """
    numbers = list(policy.parameters())
    trained = [p for p in numbers if p.requires_grad]

    def size(tensors: Iterable[Tensor], least: int = 0) -> int:
        return sum(t.numel() * max(t.element_size(), least) for t in tensors)

    least, parts = (4, ranks) if sharded else (0, 1)
    gathered = [size(parameters.values()) for _, parameters in shard_groups(policy)] if sharded else []
    return {
        "weights": (size(trained, least) + size(p for p in numbers if not p.requires_grad)) // parts,
        "gradients": size(trained, least) // parts,
        "moments": 2 * size(trained, least) // parts,
        "average": size(trained, 4) // parts if averaged else 0,
        # The next group is gathered while one computes; what is in no group stays.
        "gathered_at_once": gathered[-1] + sum(sorted(gathered[:-1])[-2:]) if sharded else 0,
    }


def parallelised(policy: Policy, config: Config, ranks: Ranks) -> ReplicatedPolicy:
    """The policy on one of several connected ranks, replicated or sharded by `optim.sharding`."""
    sizes = {True: 0, False: 0}
    for parameter in policy.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    sharded = holds_shards(config, sizes[True], sum(sizes.values()), ranks.device.type != "cpu")
    return ShardedPolicy(policy, ranks) if sharded and ranks.size > 1 else ReplicatedPolicy(policy, ranks)


def _parameters(modules: list[nn.Module]) -> dict[str, nn.Parameter]:
    return {f"{i}.{name}": p for i, module in enumerate(modules) for name, p in module.named_parameters()}


def _local(shard: Tensor) -> Tensor:
    return shard.to_local() if isinstance(shard, DTensor) else shard


def _check_scalars(policy: Policy) -> None:
    for name, parameter in policy.named_parameters():
        if parameter.ndim == 0:
            raise UserError(f"{name} is a single number, which has no shards: set optim.sharding to whole")
