"""Action tokens: numbers to tokens and back, choosing among them, and scoring the choice.

Source: prismatic/vla/action_tokenizer.py of openvla/openvla. [..] any batch shape, logits float32 [.., bins].
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from policies.cuda_graphs import replayed
from policies.openvla.config import BINS
from policies.openvla.model import KeyValueCache, OpenVLAModel, Sequence


def token_of(actions: Tensor, action_vocab: int, bins: int = BINS) -> Tensor:
    """[..] numbers, clipped to -1..1, to int64 token ids: -1 is the vocabulary's last token, 1 the `bins`-th last."""
    edges = torch.from_numpy(np.linspace(-1, 1, bins)).to(actions.device)
    return action_vocab - torch.bucketize(actions.double().clamp(-1, 1), edges, right=True)


def action_of(tokens: Tensor, action_vocab: int, bins: int = BINS) -> Tensor:
    """int64 [..] token ids to float64 bin centres. There are `bins - 1`: the two lowest tokens share the last."""
    edges = np.linspace(-1, 1, bins)
    centres = torch.from_numpy((edges[:-1] + edges[1:]) / 2).to(tokens.device)
    return centres[(action_vocab - tokens - 1).clamp(0, bins - 2)]


@dataclass(frozen=True)
class Decoded:
    """Tokens said one after the other."""

    tokens: Tensor
    """int64 [B, K]: ids."""
    log_prob: Tensor
    """float32 [B, K]."""
    state: Tensor
    """[B, D]: the state that predicts the first of them."""


@torch.no_grad()
@replayed
def decode(
    model: OpenVLAModel, sequence: Sequence, count: int, noise: Tensor | None, temperature: float = 1.0
) -> Decoded:
    """K = `count` action tokens after the sequence, with noise [B, K] or the likeliest ones, and a static cache."""
    # The last token is not fed back, so it needs no place.
    cache = KeyValueCache(sequence.columns + count - 1)
    state = first = model.states(sequence, sequence, 1, cache=cache)[:, 0]
    tokens: list[Tensor] = []
    log_probs: list[Tensor] = []
    for k in range(count):
        if k:
            sequence = sequence.extended(model.embed_tokens(tokens[-1])[:, None])
            state = model.next_hidden(sequence, cache)
        logits = model.action_logits(state)
        choice = choose(logits, None if noise is None else noise[:, k], temperature)
        log_probs.append(score(logits, choice, temperature)[0])
        tokens.append(choice + model.config.first_action_token)
    return Decoded(torch.stack(tokens, 1), torch.stack(log_probs, 1), first)


def choose(logits: Tensor, noise: Tensor | None, temperature: float) -> Tensor:
    """int64 [..]: the index of a token drawn with softmax(logits / temperature), or the likeliest without noise.

    `noise` [..] is standard normal. Its distribution function is a uniform number, which the cumulative
    probabilities, taken from the least action to the greatest, turn into a token: one number decides, and a greater
    one never gives a lesser action. Action tokens are numbered from the greatest action to the least.
    """
    if noise is None:
        return logits.argmax(-1)
    # In float64, so that the sum's rounding does not depend on how rows are batched.
    rising = torch.softmax(logits.double() / temperature, -1).flip(-1).cumsum(-1)
    uniform = torch.special.ndtr(noise.double())[..., None] * rising[..., -1:]
    last = logits.shape[-1] - 1
    return last - (rising <= uniform).sum(-1).clamp(max=last)


def log_probs(logits: Tensor, temperature: float) -> Tensor:
    """[.., bins]: the log-probabilities of all tokens at the temperature that they are drawn with."""
    return torch.log_softmax(logits / temperature, -1)


def score(logits: Tensor, choice: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """[..] the log-probability of the choice, and [..] the entropy in nats."""
    every = log_probs(logits, temperature)
    return every.gather(-1, choice[..., None]).squeeze(-1), -(every.exp() * every).sum(-1)
