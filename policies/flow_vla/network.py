"""The network of a flow-matching vision-language-action model, as its policy uses it.

A vision-language model reads images and the instruction: the prefix. It never sees what the action expert reads, so its
keys and values are computed once for all denoising steps. Time runs from t = 1 (noise) to t = 0 (actions),
x_t = t e + (1 - t) a, and the velocity is dx/dt = e - a.

B rows, I images, L tokens of the prompt, P tokens of the prefix, H actions of a chunk, A numbers of an action, W width
of the vision-language model, w that of the expert, K heads of keys and values, D numbers of a head.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from policies.lora import AdaptedModel
from policies.quantised import dequantised_state

DIGESTED = (
    "projector.weight",
    "action_out_proj.weight",
    "mixture.vlm.layers.0.mlp.down_proj.weight",
    "mixture.expert.layers.0.self_attn.q_proj.weight",
)
"""Tensors of a network that identify it: any fine-tuning changes at least one of them."""
OF_THE_VLM = ("vision.", "projector.", "embedding.", "mixture.vlm.")
"""Beginnings of the names of the vision-language model's tensors."""


@dataclass(frozen=True)
class Observation:
    """Preprocessed inputs of the network."""

    pixels: Tensor
    """[B, I, 3, height, width] in -1..1. Absent cameras come after those that are present; they may be left out."""
    present: Tensor
    """[B, I] bool: images of absent cameras keep their tokens, which nothing sees."""
    tokens: Tensor
    """[B, L] int64, the prompt, filled up."""
    counted: Tensor
    """[B, L] bool: the tokens that are the prompt's."""
    state: Tensor
    """[B, S] float32, normalised, filled up with zeros. pi0.5 has it in the prompt, if at all."""


@dataclass(frozen=True)
class Cache:
    """Keys, rotated, and values of the prefix, for each layer [B, K, P, D]. A suffix pass reads them."""

    keys: tuple[Tensor, ...]
    values: tuple[Tensor, ...]


@dataclass(frozen=True)
class Prefix:
    """Keys and values of images and prompt, for a suffix pass."""

    cache: Cache
    present: Tensor
    """[B, P] bool."""
    hidden: Tensor
    """[B, P, W], the vision-language model's outputs. Those of absent tokens mean nothing."""


class FlowNetwork(AdaptedModel):
    """A network that gives the velocity of a noisy chunk.

    The vision-language model is `vision`, `projector`, `embedding` and `mixture.vlm`, the expert `mixture.expert`;
    `checkpoint_name` gives their tensors' names in a checkpoint.
    """

    folder: Path | None = None
    """Source of the tensors."""

    @property
    def base_folder(self) -> Path | None:
        return self.folder

    @property
    def digested(self) -> tuple[str, ...]:
        return tuple(map(self.checkpoint_name, DIGESTED))

    def own_name(self, stored: str) -> str:
        """The network's name of a checkpoint's tensor."""
        raise NotImplementedError

    def adapter_name(self, name: str) -> str:
        return self.checkpoint_name(self.own_name(name))

    def checkpoint_state(self) -> dict[str, Tensor]:
        return {self.checkpoint_name(name): tensor for name, tensor in dequantised_state(self).items()}

    def prefix(self, seen: Observation) -> Prefix:
        """One pass over images and prompt."""
        raise NotImplementedError

    def with_state(self, prefix: Prefix, state: Tensor) -> Prefix:
        """The prefix followed by what the vision-language model reads of the state [B, S]: nothing by default."""
        return prefix

    def suffix(self, prefix: Prefix, state: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """[B, H, w]: the expert's outputs for x [B, H, A] at times [B]; the prefix is that of `with_state`."""
        raise NotImplementedError

    def velocity_of(self, suffix: Tensor) -> Tensor:
        """[B, H, A] float32 from the expert's outputs."""
        raise NotImplementedError

    def joint_velocity(self, seen: Observation, x: Tensor, t: Tensor) -> Tensor:
        """[B, H, A] float32 at x [B, H, A] and times [B], with gradients to prefix and suffix."""
        prefix = self.with_state(self.prefix(seen), seen.state)
        return self.velocity_of(self.suffix(prefix, seen.state, x, t))


def blocks_seen(present: Tensor, begins: Tensor) -> Tensor:
    """Mask of the tokens that each token sees, bool [B, L, L] as [query, key]: those `present` (bool [B, L]) in its own
    block and the blocks before it. A block begins where `begins` bool [L] is True; an absent token sees nothing."""
    block = begins.cumsum(0)
    return (block[None, :] <= block[:, None])[None] & present[:, None, :] & present[:, :, None]


def positions_of(present: Tensor) -> Tensor:
    """int64 [B, L]: the number of tokens that are present before each, so that absent ones add nothing."""
    return present.long().cumsum(1) - 1


def mean_of(prefix: Prefix) -> Tensor:
    """[B, W] float32: the mean output of the tokens that are present."""
    counted = prefix.present[..., None]
    return (prefix.hidden.float() * counted).sum(1) / counted.sum(1)


def one_block(tokens: int, device: torch.device) -> Tensor:
    """bool [L]: where blocks begin, if all tokens see each other."""
    return torch.zeros(tokens, dtype=torch.bool, device=device)
