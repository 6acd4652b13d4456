"""Prompts as a network reads them: rows of tokens of one length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from policies.contract import PolicyError


def filled_up(
    instructions: Sequence[str], prompts: Sequence[Sequence[int]], length: int, pad: int = 0
) -> tuple[Tensor, Tensor]:
    """Tokens of the instructions' prompts, filled up with `pad` to int64 [B, L], and bool [B, L] which of them are the
    prompt's. Raises `PolicyError` for a prompt that is longer: what would be cut off is the instruction."""
    tokens = torch.full((len(prompts), length), pad, dtype=torch.long)
    counted = torch.zeros(tokens.shape, dtype=torch.bool)
    for row, (instruction, found) in enumerate(zip(instructions, prompts, strict=True)):
        if len(found) > length:
            raise PolicyError(f"the prompt {instruction!r} has {len(found)} tokens, the checkpoint {length}")
        tokens[row, : len(found)] = torch.tensor(found)
        counted[row, : len(found)] = True
    return tokens, counted
