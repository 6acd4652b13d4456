"""FLOPs and memory traffic of a decision or an update of pi0's network (`policies.work`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from torch import nn

from policies.pi0.mixture import Attention
from policies.quantised import weight_dtype
from policies.work import FIRST, Work, backward, batched, nbytes, trains, weight_count

if TYPE_CHECKING:
    from policies.pi0.policy import Pi0

HEADS = ("action_", "state_", "time_")
"""Beginnings of the names of layers around the expert."""


class Pi0Costs:
    """Counts the work of a policy whose prompts are padded to the same number of tokens."""

    def __init__(self, policy: Pi0) -> None:
        self.policy, self.network, self.sizes = policy, policy.network, policy.sizes
        self.images = len(policy.spec.cameras)
        self.patches = self.images * self.sizes.patches
        self.prefix_tokens = self.patches + self.sizes.prompt_len
        self.suffix_tokens = self.sizes.horizon + (0 if self.sizes.adaptive else 1)
        vlm = self.sizes.vlm
        self.depth, self.attention_width = vlm.depth, vlm.num_heads * vlm.head_dim
        self.key_width = vlm.num_kv_heads * vlm.head_dim
        self.element = weight_dtype(self.network.projector).itemsize

    def prefix(self) -> Work:
        """Work of the prefix for one row; the critic reads all of its outputs."""
        vision, layers = self.network.vision, self.network.mixture.vlm.layers
        patch, tower = vision.embeddings.patch_embedding.weight, vision.encoder
        linear = 2 * self.patches * (weight_count(tower) + patch.numel() + weight_count(self.network.projector))
        seen = 4 * self.sizes.vision.hidden_size * self.sizes.patches**2 * self.sizes.vision.num_hidden_layers
        own = Work(linear, self.images * seen, nbytes(vision) + nbytes(self.network.projector))
        pairs = 4 * self.attention_width * self.prefix_tokens**2 * self.depth
        return own + Work(2 * self.prefix_tokens * weight_count(layers), pairs, nbytes(layers))

    def suffix(self) -> Work:
        """Work of the action expert for one row at one denoising step."""
        network, tokens = self.network, self.suffix_tokens
        pairs = 4 * self.attention_width * tokens * (self.prefix_tokens + tokens) * self.depth
        cache = 2 * self.prefix_tokens * self.key_width * self.depth * self.element
        return Work(self._linear(), pairs, nbytes(network.mixture.expert) + self._heads_bytes(), cache)

    def _linear(self) -> float:
        """FLOPs of the suffix's linear layers: layers for each token, projections for each action, time and norms
        once."""
        network, horizon = self.network, self.sizes.horizon
        layers = network.mixture.expert.layers
        adaptive = sum(weight_count(norm) for norm in self._norms())
        ends = weight_count(network.action_in_proj) + weight_count(network.action_out_proj)
        total = 2 * self.suffix_tokens * (weight_count(layers) - adaptive) + 2 * horizon * ends
        if self.sizes.adaptive:
            final = weight_count(network.mixture.expert.norm)
            time = weight_count(network.time_mlp_in) + weight_count(network.time_mlp_out)
            return total + 2 * (adaptive + final + time)
        both = weight_count(network.action_time_mlp_in) + weight_count(network.action_time_mlp_out)
        return total + 2 * horizon * both + 2 * weight_count(network.state_proj)

    def _norms(self) -> list[nn.Module]:
        """Two of each layer; pi0.5's have a linear layer each, of what conditions them."""
        names = ("input_layernorm", "post_attention_layernorm")
        return [getattr(layer, name) for layer in self.network.mixture.expert.layers for name in names]

    def _heads_bytes(self) -> int:
        return sum(nbytes(part) for name, part in self.network.named_children() if name.startswith(HEADS))

    def _critics_suffix(self) -> Work:
        """The suffix without the projection to velocities."""
        return self.suffix() + Work(-2 * self.sizes.horizon * weight_count(self.network.action_out_proj))

    def critic(self) -> Work:
        return Work(2 * weight_count(self.policy.value_head), 0.0, nbytes(self.policy.value_head))

    def decision(self, rows: int) -> list[Work]:
        """Work of each forward pass in one batch's decision; the passes run one after the other."""
        before = self.prefix() + self.critic()
        extra = [self._critics_suffix()] if self.policy.reads_suffix else []
        steps = [self.suffix()] * self.policy.denoising.steps
        return [batched(work, rows) for work in (before, *extra, *steps)]

    def update(self, rows: int, cached: bool, dense: bool = False) -> Work:
        """Forward and backward of one micro-batch; `cached`: the prefix's keys and values are given.

        `dense` counts the gradients of a frozen prefix's keys and values too, which attention may find with the others.
        """
        denoising, suffix = self.policy.denoising, self.suffix()
        trained = trains(self.network.mixture.vlm)
        # Each product again for the gradients of its input and of its weight. Chunk, state and time have none.
        network = self.network
        other = network.time_mlp_in if self.sizes.adaptive else network.state_proj
        first = 2 * (self.sizes.horizon * weight_count(network.action_in_proj) + weight_count(other))
        pairs = 3 * suffix.attention
        if not trained and not dense:
            pairs -= suffix.attention * self.prefix_tokens / (self.prefix_tokens + self.suffix_tokens)
        work = Work(3 * suffix.linear - first, pairs, 2 * suffix.weight_bytes, suffix.cache_bytes)
        work = work * (1 if denoising.picks else denoising.steps) + self._critic_update()
        if self.policy.reads_suffix:
            work += self._critics_suffix()
        if not cached:
            work += self.prefix()
        return batched(work + self._prefix_backward() if trained else work, rows)

    def _critic_update(self) -> Work:
        """Its first layer's input has no gradient unless the critic trains the network."""
        first = next(part for part in self.policy.value_head.modules() if isinstance(part, nn.Linear))
        spared = 0 if self.policy.options.critic_trains_network else 2 * weight_count(first)
        return self.critic() * 3 + Work(-spared)

    def _prefix_backward(self) -> Work:
        """Backward pass of the vision-language model where it is trained: only keys and values of its last layer reach
        the expert."""
        network, tokens, layers = self.network, self.prefix_tokens, self.network.mixture.vlm.layers
        last = layers[-1].self_attn
        assert isinstance(last, Attention)
        linear = backward(layers[:-1], tokens, True, FIRST)
        linear += 4 * tokens * (weight_count(last.k_proj) + weight_count(last.v_proj))
        tower, patch = network.vision.encoder, network.vision.embeddings.patch_embedding.weight
        linear += 4 * self.patches * (weight_count(tower) + weight_count(network.projector))
        linear += 2 * self.patches * patch.numel()
        sizes = self.sizes.vision
        seen = self.images * 4 * sizes.hidden_size * self.sizes.patches**2 * sizes.num_hidden_layers
        pairs = 4 * self.attention_width * tokens**2 * (self.depth - 1)
        return Work(linear, 2 * (seen + pairs), self.prefix().weight_bytes)
