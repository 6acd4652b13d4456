"""Decisions as Hugging Face's libraries make them, one row after the other: the peer of the project's own policies.

The language model is transformers' `LlamaForCausalLM`, which holds the very tensors of the policy that it is compared
with. Images, prompt and vision towers are the policy's, for one row.

OpenVLA's `predict_action` (openvla/openvla, prismatic/extern/hf/modeling_prismatic.py) calls the library's `generate`,
by default with SDPA, over a `forward` of its own: that hands embeddings to the language model and takes logits of the
whole vocabulary at all positions, a cache grows by concatenation, and only a batch of one is accepted. `loop` does the
same work step by step, with SDPA and with eager attention. `generate` is today's library's method on the same
embeddings and with SDPA, which takes the last position's logits alone. All choose among the action tokens, as RL4VLA's
logits processor does. For OpenVLA-OFT, which says everything in one pass, there is the loop alone.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn import functional

from policies.contract import Inputs
from policies.openvla.base import TokenPolicy
from policies.openvla.model import OpenVLAModel, Sequence
from policies.openvla.oft import STOP, OpenVLAOFT

Attention = Literal["eager", "sdpa"]


@dataclass(frozen=True)
class Way:
    """How the library is called."""

    method: Literal["loop", "generate"]
    attention: Attention

    @property
    def name(self) -> str:
        return f"{self.method} ({self.attention})"


LOOP = Way("loop", "eager")
"""What the figures' `ratio_to_peer` is to; those to the other ways stand beside it."""


def ways(policy: TokenPolicy) -> tuple[Way, ...]:
    """The ways there are of running the policy's network."""
    strongest = () if isinstance(policy, OpenVLAOFT) else (Way("generate", "sdpa"),)
    return (LOOP, Way("loop", "sdpa"), *strongest)


def rows_of(inputs: Inputs) -> list[Inputs]:
    """Inputs of one row each, without a look at the device."""
    return [
        Inputs(
            frames={name: frame[row : row + 1] for name, frame in inputs.frames.items()},
            proprio=None if inputs.proprio is None else inputs.proprio[row : row + 1],
            instruction=inputs.instruction[row : row + 1],
        )
        for row in range(len(inputs.instruction))
    ]


class OneAtATime:
    """A policy's greedy decisions by the library."""

    def __init__(self, policy: TokenPolicy, way: Way) -> None:
        self.policy, self.way = policy, way
        self.llama = share(policy.model, way.attention)
        config = policy.model.config
        self._actions = (config.first_action_token, config.action_vocab)

    @torch.no_grad()
    def tokens(self, inputs: Inputs) -> Tensor:
        """int64 [B, K]: the decisions of the rows, one after the other."""
        return torch.cat([self._row(row) for row in rows_of(inputs)])

    def _row(self, inputs: Inputs) -> Tensor:
        policy = self.policy
        count = policy.spec.chunk * policy.spec.action_dim
        sequence = policy.prepare(inputs, count)
        if isinstance(policy, OpenVLAOFT):
            return self._whole(sequence, count, policy.stop)
        return self._loop(sequence, count) if self.way.method == "loop" else self._generate(sequence, count)

    def _loop(self, sequence: Sequence, count: int) -> Tensor:
        from transformers import DynamicCache

        cache = DynamicCache(config=self.llama.config)
        mask = sequence.valid.long()
        out = self.llama(inputs_embeds=sequence.embeddings, attention_mask=mask, past_key_values=cache, use_cache=True)
        tokens = [self._choose(out.logits[:, -1:])]
        for _ in range(count - 1):
            mask = functional.pad(mask, (0, 1), value=1)
            out = self.llama(input_ids=tokens[-1], attention_mask=mask, past_key_values=cache, use_cache=True)
            tokens.append(self._choose(out.logits[:, -1:]))
        return torch.cat(tokens, 1)

    def _generate(self, sequence: Sequence, count: int) -> Tensor:
        return self.llama.generate(
            inputs_embeds=sequence.embeddings,
            attention_mask=sequence.valid.long(),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            logits_processor=[self._only_actions],
        )

    def _whole(self, sequence: Sequence, count: int, stop: bool) -> Tensor:
        """OpenVLA-OFT's one pass, in which every token sees every other."""
        whole = sequence.extended(sequence.embeddings.new_zeros(1, count, sequence.embeddings.shape[2]))
        if stop:
            ids = torch.full((1, 1), STOP, device=sequence.positions.device)
            whole = whole.extended(self.policy.model.embed_tokens(ids))
        mask = whole.embeddings.new_zeros(1, 1, whole.columns, whole.columns)
        logits = self.llama(inputs_embeds=whole.embeddings, attention_mask=mask, use_cache=False).logits
        return self._choose(logits[:, sequence.columns - 1 : sequence.columns - 1 + count])

    def _choose(self, logits: Tensor) -> Tensor:
        """int64 [1, K]: the likeliest action token of logits [1, K, V]."""
        first, end = self._actions
        return logits.float()[..., first:end].argmax(-1) + first

    def _only_actions(self, _: Tensor, scores: Tensor) -> Tensor:
        first, end = self._actions
        allowed = torch.full_like(scores, -torch.inf)
        allowed[:, first:end] = scores[:, first:end]
        return allowed


def share(model: OpenVLAModel, attention: Attention) -> Any:
    """A `LlamaForCausalLM` with that attention which holds the model's own tensors, without adapters."""
    from transformers import LlamaConfig, LlamaForCausalLM

    source = model.language_model
    with torch.device("meta"):
        llama = LlamaForCausalLM(LlamaConfig(**{**model.config.llama, "attn_implementation": attention}))
    llama.load_state_dict(source.state_dict(), assign=True)
    llama.model.rotary_emb = source.model.rotary_emb
    # Neither of them ends a text here, and the library would warn of it each time.
    llama.generation_config.eos_token_id, llama.generation_config.pad_token_id = None, model.config.pad_token
    return llama.eval()
