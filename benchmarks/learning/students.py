"""The small networks whose vision-language model is trained before they become policies (`base_checkpoint.py`)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from benchmarks.learning.worlds import World
from policies import Policy, PolicySpec
from policies.files import CONFIG, SINGLE, read_json, write_json, write_tensors
from policies.openvla import sizes as openvla_sizes
from policies.openvla.model import build_empty
from policies.openvla.normalisation import DEMONSTRATIONS
from policies.openvla.options import TokenOptions
from policies.openvla.policy import OpenVLA
from policies.pi0 import sizes as pi0_sizes
from policies.pi0.checkpoint import save_network
from policies.pi0.options import Pi0Options
from policies.pi0.policy import Pi0
from policies.random_weights import RANDOM_WEIGHTS, draw
from policies.smolvla import sizes as smolvla_sizes
from policies.smolvla.options import TRAINED, SmolVLAOptions
from policies.smolvla.policy import SmolVLA

ACTION_DIM = 3


@dataclass(frozen=True)
class Student:
    """A network in training. N pictures of S x S pixels, L tokens of width W."""

    policy: Policy
    see: Callable[[Tensor], Tensor]
    """uint8 [N, S, S, 3] to what the language model reads of them [N, L, W]."""
    eyes: Sequence[nn.Module]
    """What `see` runs through."""
    width: int
    save: Callable[[], None]
    """Write the weights, in 16 bits, beside the configuration that the network was built from."""


def openvla(model: str, world: World, folder: Path, seed: int) -> Student:
    openvla_sizes.write_random(folder, f"{model}-{world.size}", seed)
    spec = PolicySpec(ACTION_DIM, cameras=(world.camera,), image_size=world.image_size)
    policy = OpenVLA(spec, TokenOptions(checkpoint=str(folder), unnorm_key=DEMONSTRATIONS))
    network = policy.model

    def save() -> None:
        generator = torch.Generator().manual_seed(seed)
        unused = {name: torch.empty(tensor.shape) for name, tensor in build_empty(network.config).unused.items()}
        for name, tensor in unused.items():  # no output depends on these: they are drawn
            draw(name, tensor, generator)
        tensors = {
            name: t.detach().bfloat16().contiguous() for name, t in (network.checkpoint_state() | unused).items()
        }
        save_file(tensors, folder / SINGLE, metadata={"format": "pt"})
        _forget(folder, RANDOM_WEIGHTS)

    def see(frames: Tensor) -> Tensor:
        return network.embed_images(policy.pixels(frames)[:, None])

    return Student(policy, see, (network.vision_backbone, network.projector), network.width, save)


def pi0(model: str, world: World, folder: Path, seed: int) -> Student:
    """It reads a state, and is shown none before it has a robot."""
    pi0_sizes.write_random(folder, f"{model}-{world.size}", seed)
    action_dim, horizon = (read_json(folder / CONFIG)[key] for key in ("action_dim", "action_horizon"))
    proprio_dim = action_dim if model == "pi0" else 0
    spec = PolicySpec(
        ACTION_DIM, horizon, cameras=(world.camera,), image_size=world.image_size, proprio_dim=proprio_dim
    )
    policy = Pi0(spec, Pi0Options(checkpoint=str(folder), asset=DEMONSTRATIONS, train="all"))
    network = policy.network

    def save() -> None:
        network.unused = network.unused.bfloat16()
        save_network(network.bfloat16(), folder, "openpi")
        _forget(folder, RANDOM_WEIGHTS, "pi05")

    def see(frames: Tensor) -> Tensor:
        return network.embed_images(policy.pixels(frames)[:, None])

    return Student(policy, see, (network.vision, network.projector), network.sizes.vlm.width, save)


def smolvla(model: str, world: World, folder: Path, seed: int) -> Student:
    """It reads a state, and is shown none before it has a robot."""
    smolvla_sizes.write_random(folder, f"{model}-{world.size}", seed)
    horizon, state_dim = (read_json(folder / CONFIG)[key] for key in ("chunk_size", "max_state_dim"))
    spec = PolicySpec(ACTION_DIM, horizon, cameras=(world.camera,), image_size=world.image_size, proprio_dim=state_dim)
    policy = SmolVLA(spec, SmolVLAOptions(checkpoint=str(folder), asset=DEMONSTRATIONS, train=TRAINED))
    network = policy.network

    def save() -> None:
        write_tensors(folder / SINGLE, {name: t.detach().bfloat16() for name, t in network.checkpoint_state().items()})
        _forget(folder, RANDOM_WEIGHTS)

    def see(frames: Tensor) -> Tensor:
        return network.embed_images(policy.pixels(frames)[:, None])[:, 0] / math.sqrt(network.sizes.vlm.width)

    return Student(policy, see, (network.vision, network.projector), network.sizes.vlm.width, save)


STUDENTS = {"openvla": openvla, "pi0": pi0, "pi05": pi0, "smolvla": smolvla}


def _forget(folder: Path, *names: str) -> None:
    """Entries of the configuration that are of random weights."""
    config = {name: value for name, value in read_json(folder / CONFIG).items() if name not in names}
    write_json(folder / CONFIG, config)
