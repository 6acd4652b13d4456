"""FLOPs and memory traffic that a decision or an update of OpenVLA's or pi0's network needs, counted from its modules.

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

from torch import nn

from policies.contract import Policy
from policies.openvla.config import TOWERS
from policies.openvla.oft import OpenVLAOFT
from policies.openvla.policy import TokenPolicy
from policies.pi0.mixture import Attention
from policies.pi0.policy import Pi0


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
    return sum(part.weight.numel() for part in module.modules() if isinstance(part, nn.Linear))


def nbytes(module: nn.Module) -> int:
    """Bytes of the parameters; a parameter with several names counts once."""
    return sum({p.data_ptr(): p.numel() * p.element_size() for p in module.parameters()}.values())


def trains(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def causal_pairs(columns: int) -> float:
    """Pairs of a query and a key in a causal sequence."""
    return columns * (columns + 1) / 2


class Costs:
    """Counts the work of a policy for a prompt of fixed length in tokens."""

    def __init__(self, policy: TokenPolicy, prompt: int) -> None:
        self.policy, self.model = policy, policy.model
        self.oft = policy if isinstance(policy, OpenVLAOFT) else None
        self.tokens = policy.spec.chunk * policy.spec.action_dim
        self.images = len(policy.spec.cameras)
        proprio = self.oft is not None and self.oft.proprio_projector is not None
        self.before = prompt + self.images * self.model.config.patches + int(proprio)
        """Columns before the actions."""
        llama = self.model.language_model
        self.layers = llama.model.layers
        first = self.layers[0].self_attn
        self.attention_width = llama.config.num_attention_heads * first.head_dim
        self.key_width = llama.config.num_key_value_heads * first.head_dim
        self.element = llama.lm_head.weight.element_size()

    @property
    def columns(self) -> int:
        """Columns of the sequence that an update evaluates; OFT decides with the same."""
        return self.before + self.tokens + (-1 if self.oft is None else int(self.oft.stop))

    def vision(self) -> Work:
        """Both towers for one row's images."""
        work = Work()
        for name in TOWERS:
            tower = getattr(self.model.vision_backbone, name)
            patches = self.model.config.patches
            seen = patches + tower.num_prefix_tokens
            linear = 2 * seen * weight_count(tower.blocks) + 2 * patches * tower.patch_embed.proj.weight.numel()
            attention = 4 * tower.embed_dim * seen**2 * len(tower.blocks)
            work += Work(linear, attention, nbytes(tower))
        return Work(work.linear * self.images, work.attention * self.images, work.weight_bytes)

    def projector(self) -> Work:
        patches = self.images * self.model.config.patches
        return Work(2 * patches * weight_count(self.model.projector), 0.0, nbytes(self.model.projector))

    def llama(self, queries: int, read: int, pairs: float) -> Work:
        """Work of the layers for `queries` tokens of one row. The last layer's MLP is counted only for the `read`
        tokens whose final states are used."""
        spared = weight_count(self.layers[-1].mlp) * (queries - read)
        attention = 4 * self.attention_width * pairs * len(self.layers)
        return Work(2 * (queries * weight_count(self.layers) - spared), attention, nbytes(self.layers))

    def head(self, tokens: int) -> Work:
        """Work of the logits for `tokens` action tokens."""
        rows = self.model.config.bins * self.model.width
        return Work(2 * tokens * rows, 0.0, rows * self.element)

    def critic(self) -> Work:
        return Work(2 * weight_count(self.policy.value_head), 0.0, nbytes(self.policy.value_head))

    def decision(self, rows: int, dense: bool = False) -> list[Work]:
        """Work of each forward pass in one batch's decision; the passes run one after the other. `dense` is as in
        `update`."""
        before = self.vision() + self.projector() + self.critic()
        if self.oft is not None:
            columns = self.columns
            llama = self.llama(columns, columns if dense else self.tokens, columns**2)
            return [batched(before + llama + self.head(self.tokens), rows)]
        prefill = self.llama(self.before, self.before if dense else 1, causal_pairs(self.before))
        passes = [batched(before + prefill + self.head(1), rows)]
        for keys in range(self.before + 1, self.before + self.tokens):
            step = batched(self.llama(1, 1, keys) + self.head(1), rows)
            cache = 2.0 * rows * keys * self.key_width * len(self.layers) * self.element
            passes.append(step + Work(cache_bytes=cache))
        return passes

    def update(self, rows: int, cached: bool, dense: bool = False) -> Work:
        """Forward and backward of one micro-batch; `cached`: vision features are given.

        `dense` counts what is not needed but may be computed too: pairs of a query and a key that are masked, states
        that nothing reads.
        """
        columns = self.columns
        pairs, read = columns**2 if self.oft or dense else causal_pairs(columns), columns if dense else self.tokens
        llama, patches = self.llama(columns, read, pairs), self.images * self.model.config.patches
        backbone, projector = self.model.vision_backbone, self.model.projector
        early = trains(backbone)
        middle = early or trains(projector) or self.model.language_model.model.embed_tokens.weight.requires_grad
        linear = backward(projector, patches, early, {"fc1"}) + backward(self.layers, columns, middle, FIRST)
        linear -= backward(self.layers[-1].mlp, columns - read, True, set())
        work = self.projector() + llama + self.critic() * 3 + self._head_update() + Work(linear, 2 * llama.attention)
        if not cached:
            work += self.vision()
            if early:
                work += self._vision_backward()
        # The layers' weights are read in the backward pass too.
        return batched(work + Work(weight_bytes=llama.weight_bytes), rows)

    def _head_update(self) -> Work:
        head = self.head(self.tokens)
        trained = self.model.language_model.lm_head.weight.requires_grad
        return head + Work((2.0 if trained else 1.0) * head.linear)

    def _vision_backward(self) -> Work:
        linear, patches = 0.0, self.images * self.model.config.patches
        for name in TOWERS:
            tower = getattr(self.model.vision_backbone, name)
            embedding = tower.patch_embed.proj.weight
            seen = patches + self.images * tower.num_prefix_tokens
            linear += backward(tower.blocks, seen, embedding.requires_grad, {"0.attn.qkv"})
            linear += 2 * patches * embedding.numel() * embedding.requires_grad
        return Work(linear, 2 * self.vision().attention)


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
            gradients = layer.weight.requires_grad + (before if reads_input else inside)
            total += 2 * tokens * layer.weight.numel() * gradients
    return total


def batched(work: Work, rows: int) -> Work:
    """The work of one row for many: weights are read once."""
    return Work(rows * work.linear, rows * work.attention, work.weight_bytes, rows * work.cache_bytes)


def costs_of(policy: Policy, instruction: str) -> Costs | FlowCosts | None:
    """Counts of a policy with one of the counted networks, for prompts as long as the instruction's; None for
    others."""
    if isinstance(policy, Pi0):
        return FlowCosts(policy)
    return Costs(policy, len(policy.prompts.tokens(instruction))) if isinstance(policy, TokenPolicy) else None


# --- How much arithmetic and memory traffic a decision or an update of pi0's network needs, counted from its
# modules as `flops.py` does for OpenVLA's.


HEADS = ("action_", "state_", "time_")
"""Beginnings of the names of layers around the expert."""


class FlowCosts:
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
        self.element = self.network.projector.weight.element_size()

    def prefix(self) -> Work:
        """Work of the prefix for one row; the critic reads all of its outputs."""
        vision, layers = self.network.vision, self.network.mixture.vlm.layers
        patch, tower = vision.embeddings.patch_embedding.weight, vision.encoder
        linear = 2 * self.patches * (weight_count(tower) + patch.numel() + self.network.projector.weight.numel())
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
        spared = 0 if self.policy.options.critic_trains_network else 2 * first.weight.numel()
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
        linear += 4 * self.patches * (weight_count(tower) + network.projector.weight.numel())
        linear += 2 * self.patches * patch.numel()
        sizes = self.sizes.vision
        seen = self.images * 4 * sizes.hidden_size * self.sizes.patches**2 * sizes.num_hidden_layers
        pairs = 4 * self.attention_width * tokens**2 * (self.depth - 1)
        return Work(linear, 2 * (seen + pairs), self.prefix().weight_bytes)
