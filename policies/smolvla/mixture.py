"""Llama layers of two widths: a vision-language model (`vlm`), and an action expert that reads its keys and values.

The layers are of two kinds. In both, the vision-language model's tokens attend to themselves:

    joint     the expert's tokens attend to the keys and values of both, at positions after the prefix
    cross     the expert's tokens attend to the prefix alone. Its keys and values are the expert's projections of the
              vision-language model's rotated keys, and of its values; its queries' positions begin at 0

SmolVLA is arXiv 2506.01844; the arithmetic is that of LeRobot's smolvlm_with_expert.py. Rotations and scores are in 32
bits; the rotations' base is 10,000, whatever `rope_theta` of the vision-language model is. B rows, P tokens of the
prefix, S of the suffix, W a stack's width, N heads, K heads of keys and values, D numbers of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from policies.flow_vla.network import Cache
from policies.layers import rotation
from policies.quantised import weight_dtype


@dataclass(frozen=True)
class StackSizes:
    """Sizes of one stack. Stacks that share attention have heads and layers alike."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    """Epsilon of the norms."""


class Norm(nn.Module):
    """weight * x / rms(x)."""

    def __init__(self, sizes: StackSizes) -> None:
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(sizes.width)), sizes.eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)
        return self.weight * normed.to(x.dtype)


class Attention(nn.Module):
    """One stack's projections; keys and values are of `read` numbers, of its own tokens if that is its width."""

    def __init__(self, sizes: StackSizes, read: int) -> None:
        super().__init__()
        queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.head_dim = sizes.head_dim
        self.q_proj = nn.Linear(sizes.width, queries, bias=False)
        self.k_proj = nn.Linear(read, keys, bias=False)
        self.v_proj = nn.Linear(read, keys, bias=False)
        self.o_proj = nn.Linear(queries, sizes.width, bias=False)

    def queries(self, x: Tensor) -> Tensor:
        """[B, L, W] to [B, N, L, D]."""
        return self.q_proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def keys_values(self, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """[B, L, `read`] each to [B, K, L, D]."""
        pairs = ((self.k_proj, keys), (self.v_proj, values))
        k, v = (project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project, x in pairs)
        return k, v


class MLP(nn.Module):
    """Gated, with SiLU."""

    def __init__(self, sizes: StackSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.width, sizes.mlp_dim, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.mlp_dim, bias=False)
        self.down_proj = nn.Linear(sizes.mlp_dim, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    """One stack's part of a layer."""

    def __init__(self, sizes: StackSizes, read: int) -> None:
        super().__init__()
        self.input_layernorm = Norm(sizes)
        self.self_attn = Attention(sizes, read)
        self.post_attention_layernorm = Norm(sizes)
        self.mlp = MLP(sizes)

    @property
    def halves(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Modules called before the attention, in order, and modules called after it."""
        attention = self.self_attn
        before: list[nn.Module] = [self.input_layernorm, attention.q_proj, attention.k_proj, attention.v_proj]
        return before, [attention.o_proj, self.post_attention_layernorm, self.mlp]

    def finish(self, x: Tensor, attended: Tensor) -> Tensor:
        """The layer's output [B, L, W] of its input x, given what its tokens attended to [B, L, N * D]."""
        x = self.self_attn.o_proj(attended.to(weight_dtype(self.self_attn.o_proj))) + x
        return self.mlp(self.post_attention_layernorm(x)) + x


class Stack(nn.Module):
    """The layers of one width, and the norm after the last."""

    def __init__(self, sizes: StackSizes, reads: Sequence[int]) -> None:
        super().__init__()
        self.sizes = sizes
        self.layers = nn.ModuleList(Layer(sizes, read) for read in reads)
        self.norm = Norm(sizes)


class Mixture(nn.Module):
    """The vision-language model and the action expert."""

    def __init__(self, vlm: StackSizes, expert: StackSizes, joint: Sequence[bool]) -> None:
        """`joint` says of each layer whether the expert's tokens attend to their own, too."""
        super().__init__()
        self.joint = tuple(joint)
        keys = vlm.num_kv_heads * vlm.head_dim
        self.vlm = Stack(vlm, [vlm.width] * vlm.depth)
        self.expert = Stack(expert, [expert.width if both else keys for both in self.joint])

    @property
    def layers(self) -> list[Layer]:
        """Layers of both stacks."""
        return [layer for stack in (self.vlm, self.expert) for layer in stack.layers]  # type: ignore[misc]

    def prefix(self, x: Tensor, positions: Tensor, seen: Tensor, before: Cache | None = None) -> tuple[Tensor, Cache]:
        """Pass tokens [B, L, W] at positions int64 [B, L] through the vision-language model; `seen` bool [B, L, P + L]
        is True for the tokens that each token sees, those of the cache `before` first. Returns their normed outputs,
        and keys and values of all."""
        turn, bias = rotation(positions, self.vlm.sizes.head_dim), _bias(seen)
        keys, values = list[Tensor](), list[Tensor]()
        for number, layer in enumerate(self._of(self.vlm)):
            normed = layer.input_layernorm(x)
            q, (k, v) = layer.self_attn.queries(normed), layer.self_attn.keys_values(normed, normed)
            q, k = _rotate(q, turn), _rotate(k, turn)
            if before is not None:
                k, v = torch.cat([before.keys[number], k], 2), torch.cat([before.values[number], v], 2)
            keys.append(k)
            values.append(v)
            x = layer.finish(x, _attend(q, k, v, bias))
        return self.vlm.norm(x), Cache(tuple(keys), tuple(values))

    def suffix(self, x: Tensor, positions: Tensor, seen: Tensor, cache: Cache) -> Tensor:
        """Outputs, normed, of the expert's tokens [B, S, W] at positions int64 [B, S]; `seen` bool [B, S, P + S]."""
        head_dim, known = self.expert.sizes.head_dim, cache.keys[0].shape[2]
        after, bias = rotation(positions, head_dim), _bias(seen)
        own = torch.arange(x.shape[1], device=x.device).expand(positions.shape)
        alone, bias_of_prefix = rotation(own, head_dim), bias[..., :known]
        for layer, both, keys, values in zip(self._of(self.expert), self.joint, cache.keys, cache.values, strict=True):
            attention = layer.self_attn
            normed = layer.input_layernorm(x)
            q = attention.queries(normed)
            if both:
                k, v = attention.keys_values(normed, normed)
                k, v = torch.cat([keys, _rotate(k, after)], 2), torch.cat([values, v], 2)
                attended = _attend(_rotate(q, after), k, v, bias)
            else:
                dtype = weight_dtype(attention.k_proj)
                read = (part.transpose(1, 2).flatten(2).to(dtype) for part in (keys, values))
                k, v = attention.keys_values(*read)
                attended = _attend(_rotate(q, alone), k, v, bias_of_prefix)
            x = layer.finish(x, attended)
        return self.expert.norm(x)

    def _of(self, stack: Stack) -> list[Layer]:
        return list(stack.layers)  # type: ignore[arg-type]


def _bias(seen: Tensor) -> Tensor:
    """float32 [B, 1, Q, L]: added to scores. Finite, so that a query that sees nothing attends to all keys alike."""
    hidden = torch.finfo(torch.float32).min
    return torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, hidden)[:, None]


def _attend(q: Tensor, k: Tensor, v: Tensor, bias: Tensor) -> Tensor:
    """[B, L, N * D] in the dtype of the values, of queries [B, N, L, D] and keys and values [B, K, P, D]."""
    h = functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), bias, enable_gqa=True)
    return h.transpose(1, 2).flatten(2).to(v.dtype)


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = turn
    wide = x.float()
    first, second = wide.chunk(2, -1)
    return (wide * cos + torch.cat([-second, first], -1) * sin).to(x.dtype)
