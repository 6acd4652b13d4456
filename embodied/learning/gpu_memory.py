"""Tensors that one process shows to others on the same GPU, which map them there (CUDA IPC): nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from embodied.devices import await_devices
from embodied.errors import UserError


@dataclass(frozen=True)
class GpuTensors:
    """What another process needs to map them. They are there as long as who shows them keeps them."""

    handles: Mapping[str, tuple[Callable[..., Tensor], tuple[Any, ...]]]
    """By name: what makes the tensor in another process, and from what."""

    def mapped(self) -> dict[str, Tensor]:
        """The tensors themselves, which whoever shows them may change later. Raises `UserError` where the GPU's driver
        does not let this process have them."""
        try:
            return {name: make(*arguments) for name, (make, arguments) in self.handles.items()}
        except RuntimeError as error:
            raise UserError(
                f"the learner's weights cannot be mapped by another process on the same GPU: {error}. Give both GPUs "
                "of their own, or one process (a collocated plan)"
            ) from error


def show(tensors: Mapping[str, Tensor]) -> GpuTensors:
    """Tensors on a GPU, complete, for other processes."""
    found = {name: reduce_tensor(tensor.detach()) for name, tensor in tensors.items()}
    await_devices(tensors.values())
    return GpuTensors(found)


def gpu_name(device: torch.device) -> str:
    """The GPU's own name, the same in every process; '' for the host."""
    return str(torch.cuda.get_device_properties(device).uuid) if device.type == "cuda" else ""
