"""Action tokens. Source: prismatic/vla/action_tokenizer.py of openvla/openvla."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from policies.openvla.config import BINS


def token_of(actions: Tensor, action_vocab: int, bins: int = BINS) -> Tensor:
    """[..] numbers, clipped to -1..1, to int64 token ids: -1 is the vocabulary's last token, 1 the `bins`-th last."""
    edges = torch.from_numpy(np.linspace(-1, 1, bins)).to(actions.device)
    return action_vocab - torch.bucketize(actions.double().clamp(-1, 1), edges, right=True)


def action_of(tokens: Tensor, action_vocab: int, bins: int = BINS) -> Tensor:
    """int64 [..] token ids to float64 bin centres. There are `bins - 1`: the two lowest tokens share the last."""
    edges = np.linspace(-1, 1, bins)
    centres = torch.from_numpy((edges[:-1] + edges[1:]) / 2).to(tokens.device)
    return centres[(action_vocab - tokens - 1).clamp(0, bins - 2)]
