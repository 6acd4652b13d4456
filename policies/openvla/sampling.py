"""Choosing among the 256 action tokens, and scoring the choice. [..] any batch shape, logits float32 [.., 256]."""

from __future__ import annotations

import torch
from torch import Tensor

from policies.openvla.config import BINS


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
    return BINS - 1 - (rising <= uniform).sum(-1).clamp(max=BINS - 1)


def log_probs(logits: Tensor, temperature: float) -> Tensor:
    """[.., 256]: the log-probabilities of all tokens at the temperature that they are drawn with."""
    return torch.log_softmax(logits / temperature, -1)


def score(logits: Tensor, choice: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    """[..] the log-probability of the choice, and [..] the entropy in nats."""
    every = log_probs(logits, temperature)
    return every.gather(-1, choice[..., None]).squeeze(-1), -(every.exp() * every).sum(-1)
