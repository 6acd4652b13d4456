"""Checkpoints with random weights: config.json says from which seed the weights are drawn, so that
gigabytes are neither written nor read; and the words of their tokenizers.
"""

from __future__ import annotations

import string
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from policies.errors import PolicyError, shown
from policies.files import SHOWN_ERROR

N = TypeVar("N", bound=nn.Module)

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
_UNDRAWN = ContextVar("undrawn", default=False)
SINGLE = ("\n", *string.ascii_letters, *string.digits, *string.punctuation)
"""Characters with which they spell other words."""


@contextmanager
def undrawn() -> Iterator[None]:
    """Within, networks of random weights are built without numbers, on the meta device: 15 GB are neither drawn nor
    held where shapes alone count, as for a prediction of memory."""
    token = _UNDRAWN.set(True)
    try:
        yield
    finally:
        _UNDRAWN.reset(token)


def drawn_on() -> torch.device:
    """The device that random weights are drawn on: torch's default device, or the meta device within `undrawn`."""
    return torch.device("meta") if _UNDRAWN.get() else torch.get_default_device()


def empty_network(path: Path, build: Callable[[], N]) -> N:
    """The network that the config.json at `path` describes, on the meta device. Raises `PolicyError` where its parts do
    not fit together, or it has more numbers than there can be."""
    try:
        with torch.device("meta"):
            network = build()
    except PolicyError:
        raise
    except Exception as error:  # transformers and timm raise anything for what they have not thought of
        what = str(error)[:SHOWN_ERROR] or type(error).__name__
        raise PolicyError(f"{path} does not describe a network that can be built: {what}") from error
    check_weights(path, network)
    return network


def seed_of(path: Path, config: Mapping[str, Any]) -> int:
    """The seed of random weights in the config.json at `path`. Raises `PolicyError` for what is none."""
    seed = config[RANDOM_WEIGHTS]
    if type(seed) is not int or not 0 <= seed < 2**63:
        raise PolicyError(f"{path}: {RANDOM_WEIGHTS} must be a seed, got {shown(seed)}")
    return seed


def check_weights(source: Path, network: nn.Module) -> None:
    """Raise `PolicyError`, which names the source, if a network on the meta device has more than there can be."""
    count = sum(tensor.numel() for tensor in network.state_dict().values())
    if count > MOST_WEIGHTS:
        raise PolicyError(f"{source} describes a network of {count} numbers; at most {MOST_WEIGHTS} can be read")


def draw_network(
    network: nn.Module,
    seed: int,
    dtype_of: Callable[[str], torch.dtype],
    scale_of: Callable[[str], float] = lambda name: 1.0,
) -> torch.Generator:
    """Give an empty network random weights, on the device of `drawn_on`. The functions give the dtype of a parameter,
    and the `scale` of `draw` for it, by its name. Returns the generator, which may draw more."""
    device = drawn_on()
    for name, parameter in network.named_parameters():
        parameter.data = parameter.data.to(dtype_of(name))
    network.to_empty(device=device)
    generator = generator_on(device, seed)
    for name, tensor in network.state_dict().items():
        draw(name, tensor, generator, scale_of(name))
    return generator


def generator_on(device: torch.device, seed: int) -> torch.Generator:
    """A generator for tensors on the device; nothing is drawn on the meta device."""
    return torch.Generator("cpu" if device.type == "meta" else device).manual_seed(seed)


def draw(name: str, tensor: Tensor, generator: torch.Generator, scale: float = 1.0) -> None:
    """Fill a parameter in place, on its device.

    Matrices keep activations of order one, biases are near zero, and other vectors near `scale`.
    """
    if tensor.is_meta:
        return
    with torch.no_grad():
        if tensor.dim() > 1:
            tensor.normal_(0, tensor[0].numel() ** -0.5, generator=generator)
        else:
            tensor.normal_(0.0 if name.endswith("bias") else scale, 0.1, generator=generator)
