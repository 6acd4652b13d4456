"""Checkpoints with random weights: config.json says from which seed the weights are drawn, so that
gigabytes are neither written nor read; and the words of their tokenizers.
"""

from __future__ import annotations

import string
from pathlib import Path

import torch
from torch import Tensor, nn

from policies.contract import PolicyError

MOST_WEIGHTS = 10**11
"""Largest number of parameters of such a network."""
RANDOM_WEIGHTS = "random_weights"
"""Entry of config.json: the seed of the weights."""
INSTRUCTION = "pick up the black bowl between the plate and the ramekin and place it on the plate"
"""Instruction of the benchmarks, from LIBERO-Spatial."""
FURTHER_WORDS = (
    "move push pull pick put place reach grasp lift bring touch open close turn take go gripper hand arm robot ball "
    "cube block target goal peg drawer door cabinet stove bottle basket red green blue yellow white left right middle "
    "top bottom front back onto into from on in of to at with near up down over behind beside point"
)
"""Further whole words of the tokenizers: for speed a prompt's length is what counts."""
SINGLE = ("\n", *string.ascii_letters, *string.digits, *string.punctuation)
"""Characters with which they spell other words."""


def check_weights(source: Path, network: nn.Module) -> None:
    """Raise `PolicyError`, which names the source, if a network on the meta device has more than there can be."""
    count = sum(tensor.numel() for tensor in network.state_dict().values())
    if count > MOST_WEIGHTS:
        raise PolicyError(f"{source} describes a network of {count} numbers; at most {MOST_WEIGHTS} can be read")


def draw(name: str, tensor: Tensor, generator: torch.Generator, scale: float = 1.0) -> None:
    """Fill a parameter in place, on its device.

    Matrices keep activations of order one, biases are near zero, and other vectors near `scale`.
    """
    with torch.no_grad():
        if tensor.dim() > 1:
            tensor.normal_(0, tensor[0].numel() ** -0.5, generator=generator)
        else:
            tensor.normal_(0.0 if name.endswith("bias") else scale, 0.1, generator=generator)
