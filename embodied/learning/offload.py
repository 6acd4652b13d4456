"""Offload: tensors leave a device's memory and return, when workers of a collocated plan take turns.

On a GPU, tensors go to pinned memory of the host and return. On a machine without one the host's memory is the
device, and they go to a file. Either way they come back equal to the last bit.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TypeGuard

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from embodied.devices import await_devices, release, to_host
from policies.cuda_graphs import forget

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor


@dataclass(frozen=True)
class Switch:
    """One offload, or one return."""

    bytes: int
    seconds: float


class Offload:
    """The tensors of a policy, an optimiser, or both, in the device's memory or out of it."""

    def __init__(self, spill: Path, module: nn.Module | None, optimizer: torch.optim.Optimizer | None) -> None:
        self._spill, self._module, self._optimizer = spill, module, optimizer
        self._away: dict[str, Tensor] | None = None
        self._on_disk = False
        self._shards: dict[str, int] = {}
        """Bytes of each tensor that is a shard. FSDP2 has other views of its storage: that is emptied and refilled in
        place."""

    @property
    def away(self) -> bool:
        return self._away is not None

    def unload(self) -> Switch:
        """Free the device's memory; nothing may compute with the tensors before `load`."""
        begin = time.perf_counter()
        if self._away is not None:
            return Switch(0, 0.0)
        tensors = self._tensors()
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        self._on_disk = all(t.device.type == "cpu" for t in tensors.values())
        if self._on_disk:
            self._spill.parent.mkdir(parents=True, exist_ok=True)
            save_file({name: t.detach().contiguous() for name, t in tensors.items()}, self._spill)
            self._away = {}
        else:
            self._away = to_host({name: tensor.detach() for name, tensor in tensors.items()})
        for name, tensor in tensors.items():
            if name in self._shards:
                tensor.untyped_storage().resize_(0)
            else:
                tensor.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
        if self._module is not None:
            forget(self._module)
        release()
        return Switch(size, time.perf_counter() - begin)

    def load(self) -> Switch:
        """Bring everything back; does nothing if it never left."""
        begin = time.perf_counter()
        if self._away is None:
            return Switch(0, 0.0)
        found: Mapping[str, Tensor] = load_file(self._spill) if self._on_disk else self._away
        size, tensors = 0, self._tensors()
        for name, tensor in tensors.items():
            if name in self._shards:
                tensor.copy_(found[name], non_blocking=True)
                size += tensor.numel() * tensor.element_size()
                continue
            # A copy: what is mapped from a file lies anywhere, and matrix products round by alignment.
            tensor.data = found[name].to(tensor.device, tensor.dtype, copy=True, non_blocking=True)
            size += tensor.numel() * tensor.element_size()
        await_devices(tensors.values())
        self._away = None
        self._spill.unlink(missing_ok=True)
        return Switch(size, time.perf_counter() - begin)

    def _tensors(self) -> dict[str, Tensor]:
        """Parameters, buffers and the optimiser's state by name; gradients are dropped."""
        found: dict[str, Tensor] = {}
        if self._module is not None:
            found |= {f"parameter.{name}": p for name, p in self._module.named_parameters()}
            found |= {f"buffer.{name}": b for name, b in self._module.named_buffers()}
        if self._optimizer is not None:
            self._optimizer.zero_grad(set_to_none=True)
            for number, state in enumerate(self._optimizer.state.values()):
                found |= {f"optimizer.{number}.{key}": t for key, t in state.items() if isinstance(t, Tensor)}
        return {name: self._local(name, t) if _is_shard(t) else t for name, t in found.items()}

    def _local(self, name: str, tensor: DTensor) -> Tensor:
        """This process's memory of a sharded tensor, flat."""
        local: Tensor = tensor.to_local().detach()
        storage = local.untyped_storage()
        if self._away is not None:
            storage.resize_(self._shards[name])
        self._shards[name] = storage.nbytes()
        return torch.empty(0, dtype=local.dtype, device=local.device).set_(storage)


def _is_shard(tensor: Tensor) -> TypeGuard[DTensor]:
    """True for a `DTensor`. Importing its module takes a second: without that import there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)
