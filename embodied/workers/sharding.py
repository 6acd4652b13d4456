"""What each rank of a learner holds of the policy: the whole, or a shard of every parameter (FSDP2).

    whole      gradients are summed in flat buckets, once per optimiser step
    sharded    parameters are gathered for each pass group by group (`Policy.shards`), gradients are summed and
               scattered in the last backward pass of a step; the optimiser works on shards

Both give the learner the same sums. A policy that trains in 16 bits is sharded with masters in float32, which the
optimiser steps; passes compute in 16 bits as ever.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor

from embodied import checkpoint, optimizer_shards
from embodied.config import Config
from embodied.errors import UserError
from embodied.workers.devices import CPU, defines
from embodied.workers.ranks import Ranks, bind
from embodied.workers.weights import trained
from embodied.workflows.sizes import holds_shards
from policies.contract import Policy

SHORT = (torch.bfloat16, torch.float16)
"""Types in which small steps are lost."""
MASTER = "master."
"""Of a parameter's float32 copy, in a checkpoint of the optimiser."""


class WholePolicy:
    """Every rank holds all of the policy."""

    sharded = False

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        self.policy, self.ranks = policy, ranks

    def last_pass(self, last: bool) -> None:
        """Say whether the next backward pass is the last before the gradient is needed."""

    def sum_gradients(self) -> None:
        """After the last pass: have the gradient of all ranks on each of them."""
        self.ranks.sum_gradients(self.policy.parameters())

    def weights(self) -> dict[str, Tensor]:
        """What training changes, by name, in the policy's own type; on rank 0, of which the caller must not change it.
        Every rank has to be asked."""
        return self._changing() if self.ranks.first else {}

    def save(
        self, root: Path, state: checkpoint.RunState, optimizer: torch.optim.Optimizer, environments: checkpoint.Arrays
    ) -> None:
        """Have rank 0 write a checkpoint, in the format of one rank."""
        self.ranks.first_does(
            "write the checkpoint", lambda: checkpoint.write(root, state, self.policy, optimizer, environments)
        )

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


class ShardedPolicy(WholePolicy):
    """Every rank holds its shard of each parameter. To be made before the optimiser, after what is frozen is."""

    sharded = True

    def __init__(self, policy: Policy, ranks: Ranks) -> None:
        super().__init__(policy, ranks)
        bind(ranks.rank)
        self._types = {name: parameter.dtype for name, parameter in policy.named_parameters()}
        """Of the policy by itself."""
        _check_scalars(policy)
        self._plain = _empty_copy(policy) if ranks.first else None
        self._mesh = init_device_mesh(ranks.device.type, (ranks.size,))
        # What is called as a module is gathered by itself; the rest when `evaluate` begins.
        groups = [list(group) for group in (*policy.shards(), [policy.value_head])]
        for group in [group for group in groups if any(list(module.parameters()) for module in group)]:
            self._shard(group, _parameters(group))
        taken = {id(p) for group in groups for p in _parameters(group).values()}
        rest = {name: p for name, p in policy.named_parameters() if id(p) not in taken}
        self._shard([policy], rest)
        for method in ("evaluate", "precompute"):
            if method == "evaluate" or defines(policy, method):
                register_fsdp_forward_method(policy, method)
        for module in policy.modules():
            if isinstance(module, FSDPModule):
                # The losses of ranks have one denominator: a sum is wanted. gloo would not divide in any case.
                module.set_force_sum_reduction_for_comms(True)
                module.set_gradient_divide_factor(1.0)

    def _shard(self, modules: list[nn.Module], parameters: Mapping[str, nn.Parameter]) -> None:
        """Divide these modules' parameters, as one group."""
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

    def last_pass(self, last: bool) -> None:
        self._root.set_requires_gradient_sync(last)

    def sum_gradients(self) -> None:
        """They were summed in the last pass."""

    @property
    def _root(self) -> FSDPModule:
        assert isinstance(self.policy, FSDPModule)
        return self.policy

    def weights(self) -> dict[str, Tensor]:
        found = {}
        for name, tensor in self._changing().items():
            whole = self._gathered(tensor).to(self._types.get(name, tensor.dtype))
            if self.ranks.first:
                found[name] = whole.to(CPU)
        return found

    def save(
        self, root: Path, state: checkpoint.RunState, optimizer: torch.optim.Optimizer, environments: checkpoint.Arrays
    ) -> None:
        """Have rank 0 write the policy as one process would, and every rank its shards of the optimiser's tensors.

        Where a rank cannot reach the folder, rank 0 writes all.
        """
        whole = self._whole()
        names = {id(parameter): name for name, parameter in self.policy.named_parameters()}
        steps = {names[id(parameter)]: float(each["step"]) for parameter, each in optimizer.state.items()}

        def begin() -> None:
            with self._as_whole(whole) as policy:
                checkpoint.begin(root, state, policy, steps, environments)

        self.ranks.first_does("write the checkpoint", begin)
        partial, shards = checkpoint.partial_folder(root, state), self._optimizer_shards(optimizer)
        if self._all_see(partial):
            with checkpoint.writing(root, state), self.ranks.waiting("write their shards"):
                optimizer_shards.write(partial / optimizer_shards.FOLDER, shards)
        else:
            tensors = {name: self._on_first(shard) for name, shard in shards.items()}
            self.ranks.first_does(
                "write the optimiser's state", lambda: save_file(tensors, partial / "optimizer.safetensors")
            )

        def complete() -> None:
            with checkpoint.writing(root, state):
                checkpoint.complete(partial)

        self.ranks.first_does("complete the checkpoint", complete)

    def load(self, folder: Path, optimizer: torch.optim.Optimizer) -> None:
        whole = self._whole()
        shared = self._all_see(folder / optimizer_shards.FOLDER)
        moments = checkpoint.OptimizerState({}, {})

        def read() -> None:
            nonlocal moments
            with self._as_whole(whole) as policy:
                checkpoint.load_weights(folder, policy)
            moments = checkpoint.OptimizerState({}, checkpoint.read_steps(folder))
            if not shared:
                moments = checkpoint.OptimizerState.read(folder)

        self.ranks.first_does("read the checkpoint", read)
        parameters = dict(self.policy.named_parameters())
        for name, tensor in self._changing().items():
            if name in parameters:
                self._spread(moments.tensors.get(f"{MASTER}{name}", whole.get(name)), parameters[name])
            else:
                self.ranks.broadcast(tensor)
        steps: dict[str, float] = self.ranks.broadcast_plain(moments.steps)
        trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
        for name, parameter in parameters.items():
            if name in steps and id(parameter) in trained:
                state = {key: torch.zeros_like(parameter) for key in checkpoint.MOMENTS}
                optimizer.state[parameter] = {"step": torch.tensor(steps[name], device=parameter.device), **state}
        self._fill(folder, moments, optimizer, shared)

    def _fill(
        self, folder: Path, moments: checkpoint.OptimizerState, optimizer: torch.optim.Optimizer, shared: bool
    ) -> None:
        """Every rank's shards of the optimiser's tensors: from the folder, or from rank 0, which has read them."""
        shards = self._optimizer_shards(optimizer)
        if shared:
            with self.ranks.waiting("read their shards"):
                optimizer_shards.read_shards(folder / optimizer_shards.FOLDER, shards)
            return
        for name, shard in shards.items():
            if not name.startswith(MASTER):
                self._spread(moments.tensors.get(name), shard)

    def _optimizer_shards(self, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
        """This rank's, by the names that a checkpoint has; with the masters of a policy of 16 bits."""
        parameters = dict(self.policy.named_parameters())
        found = {
            f"{key}.{name}": optimizer.state[parameter][key]
            for name, parameter in parameters.items()
            if parameter in optimizer.state
            for key in checkpoint.MOMENTS
        }
        masters = {name: p.detach() for name, p in parameters.items() if p.dtype != self._types[name]}
        return found | {f"{MASTER}{name}": tensor for name, tensor in masters.items()}

    def _all_see(self, folder: Path) -> bool:
        """Whether it is a folder for every rank: they may be on machines that share no files."""
        return self.ranks.sum_numbers({"see": float(folder.is_dir())})["see"] == self.ranks.size

    # --- whole tensors and shards

    @contextmanager
    def _as_whole(self, parameters: Mapping[str, Tensor]) -> Iterator[Policy]:
        """Of rank 0: within, a policy by itself with these parameters, and with the buffers of this one. What is loaded
        into it is found in both."""
        plain = self._plain
        assert plain is not None
        names = {id(p): name for name, p in plain.named_parameters()}
        tied = {name: names[id(p)] for name, p in plain.named_parameters(remove_duplicate=False)}
        state = self.policy.state_dict()
        empty = {name: torch.empty_like(tensor, device="meta") for name, tensor in parameters.items()}
        plain.load_state_dict(
            {name: parameters[tied[name]] if name in tied else tensor for name, tensor in state.items()}, assign=True
        )
        try:
            yield plain
        finally:
            plain.load_state_dict({name: empty[own] for name, own in tied.items()}, strict=False, assign=True)

    def _gathered(self, tensor: Tensor) -> Tensor:
        """The whole tensor, on every rank; every rank has to be asked."""
        if not isinstance(tensor, DTensor):
            return tensor
        with self.ranks.waiting("gather a tensor"):
            return tensor.full_tensor().detach()

    def _on_first(self, tensor: Tensor) -> Tensor:
        """The whole tensor in rank 0's host memory; nothing on the others."""
        found = self._gathered(tensor)
        return found.to(CPU) if self.ranks.first else torch.empty(0)

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


def held(policy: Policy, config: Config, ranks: Ranks) -> WholePolicy:
    """The policy as each of the ranks, which are connected, is to hold it by `optim.sharding`."""
    sizes = {True: 0, False: 0}
    for parameter in policy.parameters():
        sizes[parameter.requires_grad] += parameter.numel()
    sharded = holds_shards(config, sizes[True], sum(sizes.values()), ranks.device.type != "cpu")
    return ShardedPolicy(policy, ranks) if sharded and ranks.size > 1 else WholePolicy(policy, ranks)


def _parameters(modules: list[nn.Module]) -> dict[str, nn.Parameter]:
    return {f"{i}.{name}": p for i, module in enumerate(modules) for name, p in module.named_parameters()}


def _check_scalars(policy: Policy) -> None:
    for name, parameter in policy.named_parameters():
        if parameter.ndim == 0:
            raise UserError(f"{name} is a single number, which has no shards: set optim.sharding to whole")


def _empty_copy(policy: Policy) -> Policy:
    """The same policy with parameters that take no memory."""
    empty = {id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in policy.parameters()}
    return copy.deepcopy(policy, dict(empty))
