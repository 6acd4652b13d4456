"""The network of Diffusion Policy (arXiv 2303.04137), whose tensors have the names of LeRobot's modeling_diffusion.py.

    pictures -> ResNet -> spatial softmax --+
    state ----------------------------------+-> condition --+
    noisy actions ------------------------------------------+-> 1-D U-Net -> prediction
    time of the noise --------------------------------------+

B rows, K observations of V pictures of h x w pixels and P numbers of a state, T actions of A numbers, F numbers of the
condition, C channels.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from policies.lerobot.network_folders import Network
from policies.resnet import ResNet, coarse, draw

FINAL_GROUPS = 8
"""Groups of the U-Net's last norm, whatever those of the others."""


@dataclass(frozen=True)
class DiffusionSizes:
    """Sizes and variants of the network."""

    state_dim: int
    """P."""
    action_dim: int
    """A."""
    cameras: int
    """V."""
    observations: int
    """K."""
    pictures: tuple[int, int]
    """h and w of what the ResNet is shown."""
    backbone: str
    backbone_width: int
    group_norm: bool
    """False: batch norms, whose statistics stay as they were read."""
    keypoints: int
    """Points of the spatial softmax."""
    separate_encoders: bool
    """True: each camera has a ResNet of its own."""
    widths: tuple[int, ...]
    """Channels of the U-Net's levels."""
    kernel: int
    groups: int
    step_width: int
    """Width of the embedding of a denoising step's time."""
    scale_modulation: bool
    """True: the condition scales a block's channels and shifts them; False: it only shifts them."""

    @property
    def condition(self) -> int:
        """F."""
        return self.observations * (self.state_dim + self.cameras * 2 * self.keypoints)


class StillBatchNorm(nn.BatchNorm2d):
    """A batch norm with trained weights, and statistics that stay: no row meets another."""

    def forward(self, input: Tensor) -> Tensor:
        return functional.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)


def group_norm(channels: int) -> nn.Module:
    """Groups of 16 channels."""
    return nn.GroupNorm(max(1, channels // 16), channels)


class SpatialSoftmax(nn.Module):
    """Where a picture's points lie: the means of its places, weighed by a softmax over them (arXiv 1504.00702)."""

    pos_grid: Tensor
    """[h * w, 2]: x and y of each place, from -1 to 1."""

    def __init__(self, channels: int, rows: int, columns: int, points: int) -> None:
        super().__init__()
        self.nets = nn.Conv2d(channels, points, 1)
        y, x = (torch.linspace(-1, 1, count, dtype=torch.float64) if count > 1 else -torch.ones(1, dtype=torch.float64)
                for count in (rows, columns))  # fmt: skip
        grid = torch.stack([x.expand(rows, -1), y[:, None].expand(-1, columns)], -1)
        self.register_buffer("pos_grid", grid.reshape(-1, 2).float())

    def forward(self, features: Tensor) -> Tensor:
        """[M, C, h, w] to [M, points * 2]."""
        return (self.nets(features).flatten(2).softmax(-1) @ self.pos_grid).flatten(1)


class Encoder(nn.Module):
    """Pictures to numbers."""

    def __init__(self, sizes: DiffusionSizes) -> None:
        super().__init__()
        resnet = ResNet(sizes.backbone, sizes.backbone_width, group_norm if sizes.group_norm else StillBatchNorm)
        # The numbers of these places are the names of torchvision's layers within LeRobot's nn.Sequential.
        self.backbone = nn.Sequential(
            resnet.conv1, resnet.bn1, nn.ReLU(), resnet.pool,
            resnet.layer1, resnet.layer2, resnet.layer3, resnet.layer4,
        )  # fmt: skip
        rows, columns = map(coarse, sizes.pictures)
        self.pool = SpatialSoftmax(resnet.channels, rows, columns, sizes.keypoints)
        self.out = nn.Linear(2 * sizes.keypoints, 2 * sizes.keypoints)

    def forward(self, pixels: Tensor) -> Tensor:
        """[M, 3, h, w] to [M, 2 * points]."""
        return torch.relu(self.out(self.pool(self.backbone(pixels))))


class TimeEmbedding(nn.Module):
    """Sines and cosines of a time (arXiv 1706.03762)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.waves = width // 2

    def forward(self, time: Tensor) -> Tensor:
        """int64 [B] to float32 [B, width]."""
        exponent = torch.arange(self.waves, device=time.device) * -(math.log(10_000) / (self.waves - 1))
        angle = time[:, None] * exponent.exp()
        return torch.cat([angle.sin(), angle.cos()], -1)


class ConvBlock(nn.Module):
    """A convolution along the actions, its norm and its activation."""

    def __init__(self, inputs: int, outputs: int, kernel: int, groups: int) -> None:
        super().__init__()
        conv = nn.Conv1d(inputs, outputs, kernel, padding=kernel // 2)
        self.block = nn.Sequential(conv, nn.GroupNorm(groups, outputs), nn.Mish())

    def forward(self, x: Tensor) -> Tensor:
        return self.block(x)


class ResidualBlock(nn.Module):
    """Two convolutions, between which the condition scales and shifts each channel (FiLM, arXiv 1709.07871)."""

    def __init__(self, inputs: int, outputs: int, condition: int, sizes: DiffusionSizes) -> None:
        super().__init__()
        self.scales = sizes.scale_modulation
        self.conv1 = ConvBlock(inputs, outputs, sizes.kernel, sizes.groups)
        self.cond_encoder = nn.Sequential(nn.Mish(), nn.Linear(condition, outputs * (1 + self.scales)))
        self.conv2 = ConvBlock(outputs, outputs, sizes.kernel, sizes.groups)
        self.residual_conv = nn.Conv1d(inputs, outputs, 1) if inputs != outputs else nn.Identity()

    def forward(self, x: Tensor, condition: Tensor) -> Tensor:
        """[B, C, T] under a condition [B, F']."""
        hidden, said = self.conv1(x), self.cond_encoder(condition)[..., None]
        if self.scales:
            scale, shift = said.chunk(2, 1)
            hidden = scale * hidden + shift
        else:
            hidden = hidden + said
        return self.conv2(hidden) + self.residual_conv(x)


class UNet(nn.Module):
    """Predicts from noisy actions, the time of their noise and the condition."""

    def __init__(self, sizes: DiffusionSizes) -> None:
        super().__init__()
        step, widths, last = sizes.step_width, sizes.widths, len(sizes.widths) - 1
        self.diffusion_step_encoder = nn.Sequential(
            TimeEmbedding(step), nn.Linear(step, 4 * step), nn.Mish(), nn.Linear(4 * step, step)
        )

        def block(inputs: int, outputs: int) -> ResidualBlock:
            return ResidualBlock(inputs, outputs, step + sizes.condition, sizes)

        self.down_modules, self.up_modules = nn.ModuleList(), nn.ModuleList()
        inputs = (sizes.action_dim, *widths[:-1])
        for place, (before, width) in enumerate(zip(inputs, widths, strict=True)):
            halved = nn.Conv1d(width, width, 3, 2, 1) if place < last else nn.Identity()
            self.down_modules.append(nn.ModuleList([block(before, width), block(width, width), halved]))
        self.mid_modules = nn.ModuleList([block(widths[-1], widths[-1]) for _ in range(2)])
        for width, before in zip(widths[-2::-1], widths[:0:-1], strict=True):
            doubled = nn.ConvTranspose1d(width, width, 4, 2, 1)
            self.up_modules.append(nn.ModuleList([block(2 * before, width), block(width, width), doubled]))
        self.final_conv = nn.Sequential(
            ConvBlock(widths[0], widths[0], sizes.kernel, FINAL_GROUPS), nn.Conv1d(widths[0], sizes.action_dim, 1)
        )

    def forward(self, actions: Tensor, time: Tensor, condition: Tensor) -> Tensor:
        """[B, T, A] of noisy actions [B, T, A], times int64 [B] and conditions [B, F]."""
        known = torch.cat([self.diffusion_step_encoder(time), condition], -1)
        x, skipped = actions.transpose(1, 2), []
        for first, second, halved in self.down_modules:  # type: ignore[misc]
            x = second(first(x, known), known)
            skipped.append(x)
            x = halved(x)
        for module in self.mid_modules:
            x = module(x, known)
        for first, second, doubled in self.up_modules:  # type: ignore[misc]
            x = doubled(second(first(torch.cat([x, skipped.pop()], 1), known), known))
        return self.final_conv(x).transpose(1, 2)


class DiffusionNetwork(Network):
    """LeRobot's `diffusion`."""

    def __init__(self, sizes: DiffusionSizes) -> None:
        super().__init__()
        self.sizes = sizes
        if sizes.separate_encoders:
            self.rgb_encoder: nn.Module = nn.ModuleList(Encoder(sizes) for _ in range(sizes.cameras))
        else:
            self.rgb_encoder = Encoder(sizes)
        self.unet = UNet(sizes)

    def draw(self) -> None:
        draw(self.rgb_encoder)

    def condition(self, pixels: Tensor, state: Tensor) -> Tensor:
        """[B, F] of pictures [B, K, V, 3, h, w] and states [B, K, P]: for each observation its state, then the numbers
        of each camera."""
        if isinstance(self.rgb_encoder, nn.ModuleList):
            seen = [encoder(pixels[:, :, place].flatten(0, 1)) for place, encoder in enumerate(self.rgb_encoder)]
            features = torch.cat(seen, -1)
        else:
            features = self.rgb_encoder(pixels.flatten(0, 2))
        return torch.cat([state, features.reshape(*state.shape[:2], -1)], -1).flatten(1)
