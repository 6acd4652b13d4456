"""The network of ACT (arXiv 2304.13705), whose tensors have the names of LeRobot's modeling_act.py.

    pictures -> ResNet --+
    state ---------------+-> encoder -> decoder -> chunk
    latent --------------+

The latent is zero when the policy acts. In supervised learning it is drawn from the distribution that the VAE's encoder
gives of the demonstrated chunk, and says which of several ways was demonstrated.

B rows, K cameras of H x W pixels, P numbers of a state, L of the latent, N predicted actions of A numbers, T tokens of
width D. Dropout is not applied.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

from policies.lerobot.network_folders import Network
from policies.resnet import ResNet, draw


@dataclass(frozen=True)
class ActSizes:
    """Sizes and variants of the network."""

    state_dim: int
    """P; 0: the network reads no state."""
    action_dim: int
    cameras: int
    chunk: int
    """N."""
    backbone: str
    backbone_width: int
    width: int
    """D."""
    heads: int
    feedforward: int
    activation: Literal["relu", "gelu"]
    encoder_layers: int
    decoder_layers: int
    norm_first: bool
    """True: norms come before attention and feed-forward layers; False: after what they are added to."""
    vae: bool
    latent: int
    """L."""
    vae_layers: int


@dataclass(frozen=True)
class Observation:
    """Normalised inputs of the network."""

    pixels: Tensor
    """[B, K, 3, H, W] float32."""
    state: Tensor
    """[B, P] float32."""


@dataclass(frozen=True)
class Encoded:
    """The encoder's tokens: the latent's, the state's, then the pictures'."""

    tokens: Tensor
    """[B, T, D]."""
    places: Tensor
    """[1, T, D] positions of the tokens."""


class Layer(nn.Module):
    """Self-attention and the feed-forward part of a transformer's layer, and its norms."""

    norm1: nn.LayerNorm
    norm2: nn.LayerNorm
    norm3: nn.LayerNorm
    """A decoder's."""

    def __init__(self, sizes: ActSizes, norms: int) -> None:
        super().__init__()
        self.norm_first = sizes.norm_first
        self.activation = functional.relu if sizes.activation == "relu" else functional.gelu
        self.self_attn = nn.MultiheadAttention(sizes.width, sizes.heads, batch_first=True)
        self.linear1 = nn.Linear(sizes.width, sizes.feedforward)
        self.linear2 = nn.Linear(sizes.feedforward, sizes.width)
        for number in range(1, norms + 1):
            self.add_module(f"norm{number}", nn.LayerNorm(sizes.width))

    def before(self, norm: nn.Module, x: Tensor) -> Tensor:
        """The input of attention or of the feed-forward part."""
        return norm(x) if self.norm_first else x

    def after(self, norm: nn.Module, x: Tensor) -> Tensor:
        """The sum, once something was added."""
        return x if self.norm_first else norm(x)

    def fed_forward(self, norm: nn.Module, x: Tensor) -> Tensor:
        hidden = self.activation(self.linear1(self.before(norm, x)))
        return self.after(norm, x + self.linear2(hidden))

    def attended(self, norm: nn.Module, x: Tensor, places: Tensor, absent: Tensor | None = None) -> Tensor:
        """Self-attention; `absent` [B, T] bool: tokens that none attends to."""
        seen = self.before(norm, x)
        placed = seen + places
        found, _ = self.self_attn(placed, placed, seen, key_padding_mask=absent, need_weights=False)
        return self.after(norm, x + found)


class EncoderLayer(Layer):
    def __init__(self, sizes: ActSizes) -> None:
        super().__init__(sizes, norms=2)

    def forward(self, x: Tensor, places: Tensor, absent: Tensor | None = None) -> Tensor:
        return self.fed_forward(self.norm2, self.attended(self.norm1, x, places, absent))


class DecoderLayer(Layer):
    def __init__(self, sizes: ActSizes) -> None:
        super().__init__(sizes, norms=3)
        self.multihead_attn = nn.MultiheadAttention(sizes.width, sizes.heads, batch_first=True)

    def forward(self, x: Tensor, places: Tensor, encoded: Encoded) -> Tensor:
        x = self.attended(self.norm1, x, places)
        query, key = self.before(self.norm2, x) + places, encoded.tokens + encoded.places
        found, _ = self.multihead_attn(query, key, encoded.tokens, need_weights=False)
        return self.fed_forward(self.norm3, self.after(self.norm2, x + found))


class Encoder(nn.Module):
    def __init__(self, sizes: ActSizes, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(EncoderLayer(sizes) for _ in range(layers))
        self.norm = nn.LayerNorm(sizes.width) if sizes.norm_first else nn.Identity()

    def forward(self, x: Tensor, places: Tensor, absent: Tensor | None = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, places, absent)
        return self.norm(x)


class Decoder(nn.Module):
    def __init__(self, sizes: ActSizes) -> None:
        super().__init__()
        self.layers = nn.ModuleList(DecoderLayer(sizes) for _ in range(sizes.decoder_layers))
        self.norm = nn.LayerNorm(sizes.width)

    def forward(self, places: Tensor, encoded: Encoded) -> Tensor:
        """`places` [1, N, D] to [B, N, D]."""
        x = torch.zeros_like(places).expand(len(encoded.tokens), -1, -1)
        for layer in self.layers:
            x = layer(x, places, encoded)
        return self.norm(x)


class ActNetwork(Network):
    """LeRobot's `model`."""

    vae_encoder_pos_enc: Tensor
    """[1, N + 2, D], or N + 1 of a network without a state."""

    def __init__(self, sizes: ActSizes) -> None:
        super().__init__()
        self.sizes = sizes
        width, has_state = sizes.width, sizes.state_dim > 0
        if sizes.vae:
            self.vae_encoder = Encoder(sizes, sizes.vae_layers)
            self.vae_encoder_cls_embed = nn.Embedding(1, width)
            if has_state:
                self.vae_encoder_robot_state_input_proj = nn.Linear(sizes.state_dim, width)
            self.vae_encoder_action_input_proj = nn.Linear(sizes.action_dim, width)
            self.vae_encoder_latent_output_proj = nn.Linear(width, 2 * sizes.latent)
            self.register_buffer("vae_encoder_pos_enc", places_in_line(1 + has_state + sizes.chunk, width)[None])
        self.backbone = ResNet(sizes.backbone, sizes.backbone_width)
        self.encoder = Encoder(sizes, sizes.encoder_layers)
        self.decoder = Decoder(sizes)
        if has_state:
            self.encoder_robot_state_input_proj = nn.Linear(sizes.state_dim, width)
        self.encoder_latent_input_proj = nn.Linear(sizes.latent, width)
        self.encoder_img_feat_input_proj = nn.Conv2d(self.backbone.channels, width, 1)
        self.encoder_1d_feature_pos_embed = nn.Embedding(1 + has_state, width)
        self.decoder_pos_embed = nn.Embedding(sizes.chunk, width)
        self.action_head = nn.Linear(width, sizes.action_dim)

    def draw(self) -> None:
        draw(self.backbone)
        for part in (self.encoder, self.decoder):
            for parameter in part.parameters():
                if parameter.dim() > 1:
                    nn.init.xavier_uniform_(parameter)

    def encode(self, seen: Observation, latent: Tensor) -> Encoded:
        """`latent` [B, L]."""
        tokens = [self.encoder_latent_input_proj(latent)[:, None]]
        if self.sizes.state_dim:
            tokens.append(self.encoder_robot_state_input_proj(seen.state)[:, None])
        grid = self.backbone(seen.pixels.flatten(0, 1))
        features = self.encoder_img_feat_input_proj(grid).flatten(2).transpose(1, 2)  # [B K, h w, D]
        tokens.append(features.reshape(len(latent), -1, self.sizes.width))
        rows, columns = grid.shape[2:]
        of_cell = places_in_grid(rows, columns, self.sizes.width, latent.device).repeat(self.sizes.cameras, 1)
        places = torch.cat([self.encoder_1d_feature_pos_embed.weight, of_cell])[None]
        return Encoded(self.encoder(torch.cat(tokens, 1), places), places)

    def decode(self, encoded: Encoded) -> Tensor:
        """[B, N, A] normalised actions."""
        return self.action_head(self.decoder(self.decoder_pos_embed.weight[None], encoded))

    def posterior(self, state: Tensor, actions: Tensor, counted: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and logarithm of the variance, [B, L] each, of the latent of a chunk [B, N, A], of which the `counted`
        actions [B, N] are attended to."""
        tokens = [self.vae_encoder_cls_embed.weight.expand(len(actions), 1, -1)]
        if self.sizes.state_dim:
            tokens.append(self.vae_encoder_robot_state_input_proj(state)[:, None])
        first = len(tokens)
        x = torch.cat([*tokens, self.vae_encoder_action_input_proj(actions)], 1)
        absent = functional.pad(~counted, (first, 0), value=False)
        found = self.vae_encoder(x, self.vae_encoder_pos_enc, absent)[:, 0]
        mean, log_variance = self.vae_encoder_latent_output_proj(found).chunk(2, 1)
        return mean, log_variance


def places_in_line(count: int, width: int) -> Tensor:
    """[count, width] float32: sine and cosine of i / 10000^(2 (j // 2) / width), in turn (arXiv 1706.03762)."""
    exponent = 2 * (torch.arange(width, dtype=torch.float64) // 2) / width
    angle = torch.arange(count, dtype=torch.float64)[:, None] / 10_000**exponent
    angle[:, 0::2], angle[:, 1::2] = angle[:, 0::2].sin(), angle[:, 1::2].cos()
    return angle.float()


def places_in_grid(rows: int, columns: int, width: int, device: torch.device) -> Tensor:
    """[rows * columns, width] float32: the row's place, then the column's, each of half the width. Places go from
    2 pi / rows to 2 pi."""
    half = width // 2
    exponent = 2 * (torch.arange(half, dtype=torch.float32, device=device) // 2) / half

    def along(count: int) -> Tensor:
        place = torch.arange(1, count + 1, dtype=torch.float32, device=device) / (count + 1e-6) * (2 * math.pi)
        angle = place[:, None] / 10_000**exponent
        return torch.stack([angle[:, 0::2].sin(), angle[:, 1::2].cos()], -1).flatten(1)

    down, across = along(rows), along(columns)
    both = torch.cat([down[:, None].expand(-1, columns, -1), across[None].expand(rows, -1, -1)], 2)
    return both.flatten(0, 1)
