"""Action tokens, and what a gripper command means.

Source: prismatic/vla/action_tokenizer.py and experiments/robot/robot_utils.py of openvla/openvla. A action dimensions.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from policies.contract import PolicyError
from policies.openvla.config import BINS

GRIPPERS = ("raw", "libero", "maniskill")


def token_of(actions: Tensor, action_vocab: int, bins: int = BINS) -> Tensor:
    """[..] numbers, clipped to -1..1, to int64 token ids: -1 is the vocabulary's last token, 1 the `bins`-th last."""
    edges = torch.from_numpy(np.linspace(-1, 1, bins)).to(actions.device)
    return action_vocab - torch.bucketize(actions.double().clamp(-1, 1), edges, right=True)


def action_of(tokens: Tensor, action_vocab: int, bins: int = BINS) -> Tensor:
    """int64 [..] token ids to float64 bin centres. There are `bins - 1`: the two lowest tokens share the last."""
    edges = np.linspace(-1, 1, bins)
    centres = torch.from_numpy((edges[:-1] + edges[1:]) / 2).to(tokens.device)
    return centres[(action_vocab - tokens - 1).clamp(0, bins - 2)]


def convert_gripper(chunk: Tensor, convention: str) -> Tensor:
    """[.., A] with the last number, the gripper's, as an environment takes it. The model says 0 closed, 1 open.

    `raw` leaves it. `libero`: -1 open, 1 closed, nothing between. `maniskill` (and SimplerEnv's WidowX): 1 open,
    -1 closed, nothing between.
    """
    if convention == "raw":
        return chunk
    gripper = chunk[..., -1:]
    if convention == "libero":
        command = -torch.sign(2 * gripper - 1)
    else:
        command = 2 * (gripper > 0.5).to(chunk.dtype) - 1
    return torch.cat([chunk[..., :-1], command], -1)


def read_gripper(chunk: Tensor, convention: str) -> Tensor:
    """The other way round: [.., A] as an environment takes it to what the model should say, 0 or 1. A command between
    the two ends, which the model cannot give, is the end that it leans to."""
    if convention == "raw":
        return chunk
    command = chunk[..., -1:]
    is_open = command < 0 if convention == "libero" else command > 0
    return torch.cat([chunk[..., :-1], is_open.to(chunk.dtype)], -1)


def check_gripper(convention: str) -> str:
    if convention not in GRIPPERS:
        raise PolicyError(f"gripper must be one of {', '.join(GRIPPERS)}, got {convention!r}")
    return convention
