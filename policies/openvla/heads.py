"""Small networks beside the model: value head, and OpenVLA-OFT's proprioception projector and regression head.

Sources: RL4VLA's and RLinf's value heads; prismatic/models/{action_heads,projectors}.py of moojink/openvla-oft.
B rows, D the language model's width, C actions of a chunk, A action dimensions.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from policies.contract import PolicyError
from policies.files import check_tensors, read_state, write_tensors
from policies.layers import checked_widths

M = TypeVar("M", bound=nn.Module)


class ValueHead(nn.Module):
    """[B, D], the state that predicts the first action token, to float32 [B], or [B, C] with a value for each action.

    GELU between linear layers; the last has no bias and starts near zero. In float32 whatever the model's dtype.
    """

    def __init__(self, width: int, widths: Sequence[int], actions: int | None = None) -> None:
        """`actions` is C; None gives one value for the whole chunk."""
        super().__init__()
        self.per_action = actions is not None
        layers: list[nn.Module] = []
        for size in checked_widths("value_widths", widths):
            linear = nn.Linear(width, size)
            nn.init.kaiming_normal_(linear.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(linear.bias)
            layers += [linear, nn.GELU()]
            width = size
        last = nn.Linear(width, actions or 1, bias=False)
        nn.init.normal_(last.weight, std=0.02)
        self.layers = nn.Sequential(*layers, last)

    def forward(self, state: Tensor) -> Tensor:
        values = self.layers(state.float())
        return values if self.per_action else values.squeeze(-1)


class ProprioProjector(nn.Module):
    """[B, P] normalised proprioception to one token [B, D]."""

    def __init__(self, size: int, width: int) -> None:
        super().__init__()
        self.fc1 = nn.Linear(size, width)
        self.fc2 = nn.Linear(width, width)

    def forward(self, proprio: Tensor) -> Tensor:
        return self.fc2(functional.gelu(self.fc1(proprio)))

    @classmethod
    def read(cls, path: Path, size: int, width: int) -> ProprioProjector:
        """The module, read from the checkpoint's file. Raises `PolicyError`."""
        return _filled(cls(size, width), path, read_state(path))


class ResidualBlock(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.ffn = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ffn(x)


class ResidualMLP(nn.Module):
    def __init__(self, inputs: int, width: int, outputs: int, blocks: int) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(inputs)
        self.fc1 = nn.Linear(inputs, width)
        self.mlp_resnet_blocks = nn.ModuleList(ResidualBlock(width) for _ in range(blocks))
        self.layer_norm2 = nn.LayerNorm(width)
        self.fc2 = nn.Linear(width, outputs)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu(self.fc1(self.layer_norm1(x)))
        for block in self.mlp_resnet_blocks:
            x = block(x)
        return self.fc2(self.layer_norm2(x))


class ActionHead(nn.Module):
    """[B, C * A, D], the states that would predict the tokens of a chunk, to normalised actions [B, C, A]."""

    def __init__(self, action_dim: int, width: int, inner: int, blocks: int) -> None:
        super().__init__()
        self.action_dim = action_dim
        self.model = ResidualMLP(action_dim * width, inner, action_dim, blocks)

    def forward(self, states: Tensor) -> Tensor:
        rows, tokens, width = states.shape
        return self.model(states.reshape(rows, tokens // self.action_dim, self.action_dim * width))

    @classmethod
    def read(cls, path: Path, action_dim: int, width: int) -> ActionHead:
        """The module, read from the checkpoint's file, which also gives the inner sizes. Raises `PolicyError`."""
        state = read_state(path)
        if any(name.startswith("noise_predictor.") for name in state):
            raise PolicyError(f"{path} is a diffusion head; only L1 heads and action tokens are supported")
        inner = len(state["model.fc1.bias"]) if "model.fc1.bias" in state else width
        blocks = len({name.split(".")[2] for name in state if name.startswith("model.mlp_resnet_blocks.")})
        return _filled(cls(action_dim, width, inner, blocks), path, state)


def write_side_file(state: Mapping[str, Tensor], path: Path) -> None:
    """Write a state dict, as safetensors or, by the path's suffix, as the reference's own programs read it."""
    path.with_suffix(".pt").unlink(missing_ok=True)
    path.with_suffix(".safetensors").unlink(missing_ok=True)
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}
    if path.suffix == ".safetensors":
        write_tensors(path, ready)
    else:
        torch.save(ready, path)


def _filled(module: M, path: Path, state: Mapping[str, Tensor]) -> M:
    check_tensors(path, state, module.state_dict())
    module.load_state_dict(state)
    return module
