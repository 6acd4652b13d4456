"""FLOPs and memory traffic of a decision or an update of OpenVLA's network (`policies.work`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from policies.openvla.config import TOWERS
from policies.work import FIRST, Work, backward, batched, nbytes, trains, weight_count

if TYPE_CHECKING:
    from policies.openvla.policy import TokenPolicy


def causal_pairs(columns: int) -> float:
    """Pairs of a query and a key in a causal sequence."""
    return columns * (columns + 1) / 2


class OpenVLACosts:
    """Counts the work of a policy for a prompt of fixed length in tokens."""

    def __init__(self, policy: TokenPolicy, prompt: int, stop: bool | None = None) -> None:
        """`prompt`: tokens beside the images and before the actions. `stop`: True if a token ends the actions, which
        are decided in one pass (OFT); None: they are decided one after the other."""
        self.policy, self.model, self.stop = policy, policy.model, stop
        self.tokens = policy.spec.chunk * policy.spec.action_dim
        self.images = len(policy.spec.cameras)
        self.before = prompt + self.images * self.model.config.patches
        """Columns before the actions."""
        llama = self.model.language_model
        self.layers = llama.model.layers
        first = self.layers[0].self_attn
        self.attention_width = llama.config.num_attention_heads * first.head_dim
        self.key_width = llama.config.num_key_value_heads * first.head_dim
        self.element = self.model.dtype.itemsize

    @property
    def columns(self) -> int:
        """Columns of the sequence that an update evaluates; OFT decides with the same."""
        return self.before + self.tokens + (-1 if self.stop is None else int(self.stop))

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
        if self.stop is not None:
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
        causal, read = self.stop is None and not dense, columns if dense else self.tokens
        pairs = causal_pairs(columns) if causal else columns**2
        llama, patches = self.llama(columns, read, pairs), self.images * self.model.config.patches
        backbone, projector = self.model.vision_backbone, self.model.projector
        early = trains(backbone)
        middle = early or trains(projector) or trains(self.model.language_model.model.embed_tokens)
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
        trained = trains(self.model.language_model.lm_head)
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
