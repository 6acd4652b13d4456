"""Gemma layers of two widths that share attention: a vision-language model (`vlm`) and an action expert.

In each layer l every stack s has tokens x_s of its own width, and attention is over the tokens of both:

    n_s, g_s = norm_s(x_s)                        g_s: the gate of an adaptive norm, else 1
    q, k, v = [W^q n_s], [W^k n_s], [W^v n_s]     the stacks' tokens one after the other
    h = attention(rotate(q), rotate(k), v)        over keys that the mask lets a query see
    x_s = x_s + g_s W_s^o h_s
    m_s, g_s = norm'_s(x_s)
    x_s = x_s + g_s mlp_s(m_s)

The prefix (images and language) never sees the suffix (state and actions). So its keys and values are computed once and
are all that a suffix pass needs of it. pi0 is arXiv 2410.24164; the arithmetic is that of openpi's gemma_pytorch.py.
B rows, L tokens, W a stack's width, N heads, K heads of keys and values, D numbers of a head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from policies.flow_vla.network import Cache
from policies.layers import rotation

EPS = 1e-6
"""Epsilon of all norms."""
HIDDEN = -2.3819763e38
"""Number added to the score of a masked key. Finite: a query that sees nothing attends to all keys alike."""


@dataclass(frozen=True)
class StackSizes:
    """Sizes of one stack. Stacks that share attention have heads alike."""

    width: int
    depth: int
    mlp_dim: int
    num_heads: int
    num_kv_heads: int
    head_dim: int


class Norm(nn.Module):
    """x / rms(x) times (1 + weight)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width))

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
        return (_rms_normed(x) * (1 + self.weight.float())).to(x.dtype), None


class AdaptiveNorm(nn.Module):
    """x / rms(x) scaled, shifted and later gated by what a linear layer makes of the condition [B, W] (pi0.5)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.dense = nn.Linear(width, 3 * width)
        nn.init.zeros_(self.dense.weight)

    def forward(self, x: Tensor, condition: Tensor | None) -> tuple[Tensor, Tensor | None]:
        assert condition is not None, "an adaptive norm needs its condition"
        scale, shift, gate = self.dense(condition)[:, None].chunk(3, -1)
        return (_rms_normed(x) * (1 + scale.float()) + shift.float()).to(x.dtype), gate.to(x.dtype)


class Attention(nn.Module):
    """One stack's projections. The attention between them is the mixture's."""

    def __init__(self, sizes: StackSizes) -> None:
        super().__init__()
        queries, keys = sizes.num_heads * sizes.head_dim, sizes.num_kv_heads * sizes.head_dim
        self.head_dim = sizes.head_dim
        self.q_proj = nn.Linear(sizes.width, queries, bias=False)
        self.k_proj = nn.Linear(sizes.width, keys, bias=False)
        self.v_proj = nn.Linear(sizes.width, keys, bias=False)
        self.o_proj = nn.Linear(queries, sizes.width, bias=False)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """[B, L, W] to queries [B, N, L, D], keys and values [B, K, L, D]."""
        q, k, v = (project(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for project in self.projections)
        return q, k, v

    @property
    def projections(self) -> tuple[nn.Linear, nn.Linear, nn.Linear]:
        return self.q_proj, self.k_proj, self.v_proj


class MLP(nn.Module):
    """Gated, with tanh-GELU."""

    def __init__(self, sizes: StackSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.width, sizes.mlp_dim, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.mlp_dim, bias=False)
        self.down_proj = nn.Linear(sizes.mlp_dim, sizes.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(functional.gelu(self.gate_proj(x), approximate="tanh") * self.up_proj(x))


class Layer(nn.Module):
    """One stack's part of a layer."""

    def __init__(self, sizes: StackSizes, adaptive: bool) -> None:
        super().__init__()
        norm = AdaptiveNorm if adaptive else Norm
        self.input_layernorm = norm(sizes.width)
        self.self_attn = Attention(sizes)
        self.post_attention_layernorm = norm(sizes.width)
        self.mlp = MLP(sizes)

    @property
    def halves(self) -> tuple[list[nn.Module], list[nn.Module]]:
        """Modules called before the attention, in order, and modules called after it."""
        before: list[nn.Module] = [self.input_layernorm, *self.self_attn.projections]
        return before, [self.self_attn.o_proj, self.post_attention_layernorm, self.mlp]

    def finish(self, x: Tensor, attended: Tensor, gate: Tensor | None, condition: Tensor | None) -> Tensor:
        """The layer's output [B, L, W] of its input x, given what its tokens attended to [B, L, N * D]."""
        x = _gated(x, self.self_attn.o_proj(attended), gate)
        normed, gate = self.post_attention_layernorm(x, condition)
        return _gated(x, self.mlp(normed), gate)


class Stack(nn.Module):
    """The layers of one width, and the norm after the last."""

    def __init__(self, sizes: StackSizes, adaptive: bool) -> None:
        super().__init__()
        self.sizes = sizes
        self.layers = nn.ModuleList(Layer(sizes, adaptive) for _ in range(sizes.depth))
        self.norm = AdaptiveNorm(sizes.width) if adaptive else Norm(sizes.width)


class Mixture(nn.Module):
    """The vision-language model and the action expert."""

    def __init__(self, vlm: StackSizes, expert: StackSizes, adaptive_expert: bool) -> None:
        super().__init__()
        self.vlm = Stack(vlm, adaptive=False)
        self.expert = Stack(expert, adaptive=adaptive_expert)

    @property
    def layers(self) -> list[Layer]:
        """Layers of both stacks."""
        return [layer for stack in (self.vlm, self.expert) for layer in stack.layers]  # type: ignore[misc]

    def prefix(self, x: Tensor, positions: Tensor, seen: Tensor) -> tuple[Tensor, Cache]:
        """Pass tokens [B, P, W] at positions int64 [B, P] through the layers; `seen` bool [B, P, P] is True for the
        tokens that each token sees. Returns their normed outputs, and their keys and values."""
        (hidden,), caches = self._run((self.vlm,), (x,), (None,), positions, seen, None)
        return hidden, Cache(tuple(keys for keys, _ in caches), tuple(values for _, values in caches))

    def suffix(self, x: Tensor, positions: Tensor, seen: Tensor, cache: Cache, condition: Tensor | None) -> Tensor:
        """Outputs, normed, of the expert's tokens [B, S, W]; `seen` bool [B, S, P + S]. The cache stays as it is."""
        (hidden,), _ = self._run((self.expert,), (x,), (condition,), positions, seen, cache)
        return hidden

    def joint(
        self, prefix: Tensor, suffix: Tensor, positions: Tensor, seen: Tensor, condition: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Both in one pass, with gradients to both; positions [B, P + S], `seen` bool [B, P + S, P + S]."""
        stacks, conditions = (self.vlm, self.expert), (None, condition)
        (first, second), _ = self._run(stacks, (prefix, suffix), conditions, positions, seen, None)
        return first, second

    def _run(
        self,
        stacks: Sequence[Stack],
        xs: Sequence[Tensor],
        conditions: Sequence[Tensor | None],
        positions: Tensor,
        seen: Tensor,
        cache: Cache | None,
    ) -> tuple[list[Tensor], list[tuple[Tensor, Tensor]]]:
        sizes = stacks[0].sizes
        turn = rotation(positions, sizes.head_dim)
        bias = torch.zeros(seen.shape, device=seen.device).masked_fill_(~seen, HIDDEN)[:, None].to(xs[0].dtype)
        found, kept = list(xs), []
        for number in range(sizes.depth):
            layers: list[Layer] = [stack.layers[number] for stack in stacks]  # type: ignore[misc]
            normed = [layer.input_layernorm(x, c) for layer, x, c in zip(layers, found, conditions, strict=True)]
            heads = [layer.self_attn(x) for layer, (x, _) in zip(layers, normed, strict=True)]
            q, k, v = (torch.cat(parts, 2) for parts in zip(*heads, strict=True))
            q, k = _rotate(q, turn), _rotate(k, turn)
            kept.append((k, v))
            if cache is not None:
                k, v = torch.cat([cache.keys[number], k], 2), torch.cat([cache.values[number], v], 2)
            h = functional.scaled_dot_product_attention(q, k, v, bias, enable_gqa=True).transpose(1, 2).flatten(2)
            parts = h.split([x.shape[1] for x in found], 1)
            found = [
                layer.finish(x, part, gate, condition)
                for layer, x, part, (_, gate), condition in zip(layers, found, parts, normed, conditions, strict=True)
            ]
        ends = [stack.norm(x, condition)[0] for stack, x, condition in zip(stacks, found, conditions, strict=True)]
        return ends, kept


def _rms_normed(x: Tensor) -> Tensor:
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + EPS)


def _gated(x: Tensor, change: Tensor, gate: Tensor | None) -> Tensor:
    return x + change if gate is None else x + change * gate


def _rotate(x: Tensor, turn: tuple[Tensor, Tensor]) -> Tensor:
    cos, sin = (part.to(x.dtype) for part in turn)
    first, second = x.chunk(2, -1)
    return x * cos + torch.cat([-second, first], -1) * sin
