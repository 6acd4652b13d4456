"""ResNet-18 and ResNet-34 (He et al. 2016, arXiv 1512.03385) without the classifier.

The tensors have torchvision's names. B pictures of H x W pixels, W the width of the first layers, 64 as published.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

BLOCKS: Mapping[str, tuple[int, int, int, int]] = {"resnet18": (2, 2, 2, 2), "resnet34": (3, 4, 6, 3)}
"""Blocks of each of the four layers."""
EPS = 1e-5


class FrozenBatchNorm(nn.Module):
    """Scales and shifts each channel by statistics and weights that are never trained: no row meets another."""

    weight: Tensor
    bias: Tensor
    running_mean: Tensor
    running_var: Tensor

    def __init__(self, channels: int) -> None:
        super().__init__()
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((channels,), value))

    def forward(self, x: Tensor) -> Tensor:
        """[B, C, H, W] to the same shape."""
        scale = self.weight * torch.rsqrt(self.running_var + EPS)
        shift = self.bias - self.running_mean * scale
        return x * scale[:, None, None] + shift[:, None, None]


class Block(nn.Module):
    """Two 3 x 3 convolutions and what they are added to."""

    def __init__(self, inputs: int, outputs: int, stride: int, norm: Callable[[int], nn.Module]) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, padding=1, bias=False)
        self.bn1 = norm(outputs)
        self.conv2 = nn.Conv2d(outputs, outputs, 3, padding=1, bias=False)
        self.bn2 = norm(outputs)
        self.downsample: nn.Module | None = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(inputs, outputs, 1, stride, bias=False), norm(outputs))

    def forward(self, x: Tensor) -> Tensor:
        found = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(found + (x if self.downsample is None else self.downsample(x)))


class ResNet(nn.Module):
    """Pictures to a grid of features, 32 times as coarse."""

    layer1: nn.Module
    layer2: nn.Module
    layer3: nn.Module
    layer4: nn.Module

    def __init__(self, name: str, width: int, norm: Callable[[int], nn.Module] = FrozenBatchNorm) -> None:
        """`norm` makes a norm of so many channels."""
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, 7, 2, padding=3, bias=False)
        self.bn1 = norm(width)
        self.pool = nn.MaxPool2d(3, 2, padding=1)
        inputs = width
        for place, blocks in enumerate(BLOCKS[name]):
            outputs = width * 2**place
            first = Block(inputs, outputs, 1 if place == 0 else 2, norm)
            further = (Block(outputs, outputs, 1, norm) for _ in range(blocks - 1))
            self.add_module(f"layer{place + 1}", nn.Sequential(first, *further))
            inputs = outputs
        self.channels = inputs
        """Channels of the features."""

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] to [B, 8 W, H / 32, W / 32], rounded up (`coarse`)."""
        x = self.pool(torch.relu(self.bn1(self.conv1(pixels))))
        return self.layer4(self.layer3(self.layer2(self.layer1(x))))


@torch.no_grad()
def draw(backbone: nn.Module) -> None:
    """Draw new weights of a ResNet with torch's default generator (He et al. 2015, arXiv 1502.01852).

    Frozen norms are the identity in a network without published weights. Each block's last convolution is therefore
    scaled down, so that the sums over the blocks do not grow.
    """
    blocks = [module for module in backbone.modules() if isinstance(module, Block)]
    for module in backbone.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    for block in blocks:
        block.conv2.weight.mul_(len(blocks) ** -0.5)


def coarse(side: int) -> int:
    """Side of the grid of features of pictures with this side: halved five times, rounded up."""
    for _ in range(5):
        side = (side + 1) // 2
    return side
