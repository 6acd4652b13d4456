"""Random weights as a checkpoint on the disk: a run's workers read it, where drawing 7.5B numbers on a CPU takes each
of them a minute."""

from __future__ import annotations

from pathlib import Path

import torch

from policies.files import SINGLE, write_tensors
from policies.openvla.model import build_empty, load_model
from policies.openvla.sizes import write_random


def write_checkpoint(folder: Path, model: str, device: str, dtype: str) -> int:
    """Write the Hugging Face directory of a named model, its weights drawn on the device; their bytes."""
    write_random(folder, model)
    with torch.device(device):
        network = load_model(folder, dtype)
    tensors = {name: tensor.cpu().contiguous() for name, tensor in network.checkpoint_state().items()}
    # Part of the published files, though nothing depends on it.
    unused = build_empty(network.config).unused
    tensors |= {name: torch.zeros(tensor.shape, dtype=network.dtype) for name, tensor in unused.items()}
    write_tensors(folder / SINGLE, tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in network.state_dict().values())
