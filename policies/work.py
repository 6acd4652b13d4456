"""FLOPs and memory traffic that a decision or an update of a network needs, counted from its modules.

Counted are matrix products: 2 m k n for [m, k] times [k, n]; in a backward pass the same again for the gradient of each
factor that needs one. So a linear layer of W weights costs 2 W a token, and 2 W for the gradient of its input (a frozen
layer stops there), 2 W for that of its weights. Attention costs 4 d for each pair of a query and a key that it sees,
with d the heads' widths together (scores, and their product with the values), twice that in the backward pass
(Chowdhery et al. 2022, arXiv 2204.02311, appendix B; here only pairs that the mask allows count). What an
implementation adds (recomputed activations, masked pairs, rows of the vocabulary that nothing reads) counts as nothing:
model FLOPs utilisation is needed work by time and measured rate. torch's FlopCounterMode counts what is executed, so it
cannot take this module's place (docs/decisions/0036-flops-counted.md); tests compare the two where they must agree
(`dense`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import nn


@dataclass(frozen=True)
class Work:
    """Work of one pass over the network, for all rows together."""

    linear: float = 0.0
    """FLOPs of linear layers."""
    attention: float = 0.0
    """FLOPs of attention."""
    weight_bytes: float = 0.0
    """Weights that are read, once however many the rows."""
    cache_bytes: float = 0.0
    """Keys and values that are read."""

    @property
    def flops(self) -> float:
        return self.linear + self.attention

    @property
    def nbytes(self) -> float:
        return self.weight_bytes + self.cache_bytes

    def __add__(self, other: Work) -> Work:
        return Work(
            self.linear + other.linear,
            self.attention + other.attention,
            self.weight_bytes + other.weight_bytes,
            self.cache_bytes + other.cache_bytes,
        )

    def __mul__(self, factor: float) -> Work:
        return Work(*(factor * x for x in (self.linear, self.attention, self.weight_bytes, self.cache_bytes)))


def weight_count(module: nn.Module) -> int:
    """Weights of the linear layers, those of adapters too."""
    return sum(part.in_features * part.out_features for part in module.modules() if isinstance(part, nn.Linear))


def nbytes(module: nn.Module) -> int:
    """Bytes of the parameters; a parameter with several names counts once."""
    return sum({p.data_ptr(): p.numel() * p.element_size() for p in module.parameters()}.values())


def trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


class Costs(Protocol):
    """Counts of a policy's work."""

    def decision(self, rows: int) -> list[Work]:
        """Work of each forward pass in one batch's decision; the passes run one after the other."""
        ...

    def update(self, rows: int, cached: bool) -> Work:
        """Forward and backward pass of one micro-batch; `cached`: the result of `precompute` is given."""
        ...


FIRST = {f"0.self_attn.{name}_proj" for name in "qkv"}
"""Layers of the language model that read its input."""


def backward(module: nn.Module, tokens: int, before: bool, first: set[str]) -> float:
    """FLOPs of the linear layers' backward pass for one row.

    `before`: something that the part's input depends on is trained. `first` names the layers that read that input.
    """
    total, inside = 0.0, before or trains(module)
    for name, layer in module.named_modules():
        if isinstance(layer, nn.Linear):
            # The second matrix of an adapter reads the first.
            reads_input = any(f"{name}.".startswith(f"{prefix}.") for prefix in first) and ".lora_B" not in name
            weight = layer._parameters.get("weight")  # a quantised layer has none, nor trains
            trained = weight is not None and weight.requires_grad
            gradients = trained + (before if reads_input else inside)
            total += 2 * tokens * layer.in_features * layer.out_features * gradients
    return total


def batched(work: Work, rows: int) -> Work:
    """The work of one row for many: weights are read once."""
    return Work(rows * work.linear, rows * work.attention, work.weight_bytes, rows * work.cache_bytes)
