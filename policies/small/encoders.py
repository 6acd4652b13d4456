"""Encoders: raw inputs to a feature vector per row, and the running normalisation of vectors.

Rows never meet: no batch statistics anywhere. Of K > 1 observations (`PolicySpec.observations`) all are read, and the
statistics are of the present one alone: each observation is the present one of one decision.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from policies.capabilities import Normalised
from policies.contract import Inputs, PolicyError, PolicySpec
from policies.layers import HIDDEN_GAIN, MOST_LAYERS, checked_widths, mlp, orthogonal
from policies.policy_kind import PolicyFormat

EPS = 1e-8
CLIP = 10.0


class Normalizer(nn.Module):
    """(x - mean) / sqrt(var + 1e-8), clipped to +-10. Until the first `observe`: the identity, clipped alike.

    The statistics are float64 buffers: they are saved with the policy, and after millions of rows a small
    variance around a large mean is still right.
    """

    mean: Tensor
    """[S] float64."""
    var: Tensor
    """[S] float64, of the population (divided by the count)."""
    count: Tensor
    """[] float64, rows seen."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(size, dtype=torch.float64))
        self.register_buffer("var", torch.ones(size, dtype=torch.float64))
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        """[.., S] to float32 [.., S]."""
        return ((x - self.mean) * torch.rsqrt(self.var + EPS)).float().clamp(-CLIP, CLIP)

    def beside(self, name: str, x: Tensor) -> Normalised:
        """The numbers `x` [N, S] beside the statistics, which take a deviation from the mean to 1."""
        return Normalised(name, x, self.mean - self.var.sqrt(), self.mean + self.var.sqrt())

    @torch.no_grad()
    def observe(self, x: Tensor) -> None:
        """Merge the rows of [.., S] into the statistics; how they are split into calls does not matter.

        Formula: Chan, Golub, LeVeque, "Updating Formulae and a Pairwise Algorithm for Computing Sample
        Variances" (1979). Rows with a non-finite number raise `PolicyError`, since they would stay in the
        statistics for ever.
        """
        x = x.reshape(-1, x.shape[-1]).double()
        if len(x) == 0:
            return
        finite = x.isfinite().all(0)
        if not finite.all():
            columns = (~finite).nonzero().flatten().tolist()
            raise PolicyError(f"observations to normalise are not finite in columns {columns}")
        var, mean = torch.var_mean(x, 0, correction=0)
        total = self.count + len(x)
        delta = mean - self.mean
        within = self.var * self.count + var * len(x)
        between = delta.square() * self.count * len(x) / total
        self.mean += delta * len(x) / total
        self.var.copy_((within + between) / total)
        self.count.copy_(total)


CHANNELS = (32, 48, 64)
"""Channels of the small CNN's three levels."""
CONVOLUTIONS = ((4, 4, 0), (3, 2, 1), (3, 2, 1))
"""(kernel, stride, padding) of each level. Time goes where the grid is finest, so the first layer cuts the frame
into patches: a third of the time of overlapping 8 x 8 windows. 128 pixels become a grid of 8 x 8."""


class HistoryFormat(PolicyFormat):
    """This project's layout, of a policy whose options `observations` and `distance` say what it decides on."""

    def observations(self, architecture: Mapping[str, Any]) -> tuple[int, int]:
        return architecture.get("observations", 1), architecture.get("distance", 1)


def vector(inputs: Inputs, name: str, size: int, observations: int = 1) -> Tensor:
    """The field `name` of the inputs as [B, size], [B, K, size] for K > 1 observations. Raises `PolicyError` that names
    the shape that is there instead."""
    found = getattr(inputs, name)
    wanted = (size,) if observations == 1 else (observations, size)
    if found is None or found.shape[1:] != wanted:
        shape = "nothing" if found is None else list(found.shape)
        raise PolicyError(f"the policy reads {name} {shown_rows(*wanted)}, the inputs have {shape}")
    return found


def present(inputs: Inputs, name: str, size: int, observations: int = 1) -> Tensor:
    """[B, size]: the field `name` of the present observation."""
    found = vector(inputs, name, size, observations)
    return found if observations == 1 else found[:, -1]


def camera_frames(inputs: Inputs, name: str, shape: Sequence[int | str] = ("H", "W", 3)) -> Tensor:
    """The camera's frames uint8 [B, *shape], in which a letter stands for any number, or a `PolicyError` that says what
    is there instead."""
    frames = inputs.frames.get(name)
    if frames is None:
        given = ", ".join(inputs.frames) or "none"
        raise PolicyError(f"the policy reads the camera {name!r}, the inputs have: {given}")
    fits = frames.dim() == 1 + len(shape) and all(
        isinstance(wanted, str) or wanted == found for wanted, found in zip(shape, frames.shape[1:], strict=True)
    )
    if frames.dtype != torch.uint8 or not fits:
        dtype = str(frames.dtype).removeprefix("torch.")
        raise PolicyError(f"frames of {name!r} must be uint8 {shown_rows(*shape)}, got {dtype} {list(frames.shape)}")
    return frames


def shown_rows(*shape: int | str) -> str:
    """The shape of B rows in a message: `[B, 4, 7]`."""
    return f"[{', '.join(['B', *map(str, shape)])}]"


class Encoder(nn.Module):
    """Inputs to features, float32 [B, size]."""

    size: int

    def forward(self, inputs: Inputs) -> Tensor:
        raise NotImplementedError

    def observe(self, inputs: Inputs) -> None:
        """Update the normalisation statistics."""
        raise NotImplementedError

    def normalised_numbers(self, inputs: Inputs) -> Sequence[Normalised]:
        """Numbers that are read from the inputs, with their statistics."""
        raise NotImplementedError


class StateEncoder(Encoder):
    """The normalised state through two tanh layers. Reads `state` alone; several observations are joined."""

    def __init__(self, spec: PolicySpec, features: int) -> None:
        super().__init__()
        if spec.state_dim < 1:
            raise PolicyError("a policy on states needs spec.state_dim of at least 1, got 0")
        self.state_dim, self.observations = spec.state_dim, spec.observations
        self.size = features
        self.normalizer = Normalizer(spec.state_dim)
        self.net = nn.Sequential(
            mlp(spec.observations * spec.state_dim, [features], features, last_gain=HIDDEN_GAIN),
            nn.Tanh(),
        )

    def forward(self, inputs: Inputs) -> Tensor:
        return self.net(self.normalizer(vector(inputs, "state", self.state_dim, self.observations)).flatten(1))

    def observe(self, inputs: Inputs) -> None:
        self.normalizer.observe(present(inputs, "state", self.state_dim, self.observations))

    def normalised_numbers(self, inputs: Inputs) -> Sequence[Normalised]:
        return [self.normalizer.beside("state", vector(inputs, "state", self.state_dim))]


class CnnEncoder(Encoder):
    """The frames of all cameras through one small CNN, beside the normalised proprioception and state.

    The cameras' channels are concatenated, in the order of the spec, so that a further camera costs one wider
    first layer and no second network. So are the frames of several observations of one camera, the oldest first, as is
    usual since DQN. The grid is flattened into a linear layer, since where things are
    matters, then LayerNorm and tanh bound the features, as is usual for reinforcement learning from pixels
    (DrQ, arXiv 2004.13649). Proprioception and state join after that, at full precision. Reads `frames` and, where
    the spec has them, `proprio` and `state`.
    """

    def __init__(
        self, spec: PolicySpec, features: int, channels: Sequence[int] = CHANNELS, extra_layers: int = 0
    ) -> None:
        """`extra_layers` 3 x 3 convolutions follow at each level."""
        super().__init__()
        channels = checked_widths("channels", channels)
        if len(channels) != len(CONVOLUTIONS) or not 0 <= extra_layers <= MOST_LAYERS:
            raise PolicyError(
                f"the CNN has {len(CONVOLUTIONS)} levels: give as many channels and no negative extra_layers, "
                f"got {list(channels)} and {extra_layers}"
            )
        if not spec.cameras:
            raise PolicyError("a policy on images needs at least one camera in spec.cameras")
        self.cameras = spec.cameras
        self.image_size = spec.image_size
        self.proprio_dim, self.state_dim = spec.proprio_dim, spec.state_dim
        self.observations = spec.observations
        self.size = features + spec.observations * (spec.proprio_dim + spec.state_dim)
        layers: list[nn.Module] = []
        below, grid = 3 * spec.observations * len(spec.cameras), spec.image_size
        for width, (kernel, stride, padding) in zip(channels, CONVOLUTIONS, strict=True):
            layers += [orthogonal(nn.Conv2d(below, width, kernel, stride, padding)), nn.ReLU(inplace=True)]
            for _ in range(extra_layers):
                layers += [orthogonal(nn.Conv2d(width, width, 3, 1, 1)), nn.ReLU(inplace=True)]
            below, grid = width, (grid + 2 * padding - kernel) // stride + 1
        if grid < 1:
            raise PolicyError(f"images of {spec.image_size} pixels are too small for the CNN: at least 4")
        self.convolutions = nn.Sequential(*layers)
        self.head = nn.Sequential(
            orthogonal(nn.Linear(below * grid * grid, features)), nn.LayerNorm(features), nn.Tanh()
        )
        self.normalizer = Normalizer(spec.proprio_dim) if spec.proprio_dim else None
        self.state_normalizer = Normalizer(spec.state_dim) if spec.state_dim else None

    def forward(self, inputs: Inputs) -> Tensor:
        frames = [frame for name in self.cameras for frame in self._frames(inputs, name)]
        # Each frame's bytes are converted straight into its channels; joined as bytes they would be copied twice.
        pixels = torch.empty(*frames[0].shape[:3], 3 * len(frames), device=frames[0].device)
        for i, frame in enumerate(frames):
            pixels[..., 3 * i : 3 * i + 3] = frame
        # [B, H, W, channels] seen as [B, channels, H, W] is torch's channels_last format: nothing is copied,
        # neither here nor where the grid is flattened again.
        scaled = pixels.permute(0, 3, 1, 2).mul_(1 / 127.5).sub_(1)
        grid = self.convolutions(scaled).permute(0, 2, 3, 1)
        found = [self.head(grid.flatten(1))]
        if self.normalizer is not None:
            found.append(self.normalizer(vector(inputs, "proprio", self.proprio_dim, self.observations)).flatten(1))
        if self.state_normalizer is not None:
            found.append(self.state_normalizer(vector(inputs, "state", self.state_dim, self.observations)).flatten(1))
        return torch.cat(found, -1) if len(found) > 1 else found[0]

    def observe(self, inputs: Inputs) -> None:
        if self.normalizer is not None:
            self.normalizer.observe(present(inputs, "proprio", self.proprio_dim, self.observations))
        if self.state_normalizer is not None:
            self.state_normalizer.observe(present(inputs, "state", self.state_dim, self.observations))

    def normalised_numbers(self, inputs: Inputs) -> Sequence[Normalised]:
        parts = (("proprio", self.normalizer, self.proprio_dim), ("state", self.state_normalizer, self.state_dim))
        return [one.beside(name, vector(inputs, name, size)) for name, one, size in parts if one is not None]

    def _frames(self, inputs: Inputs, camera: str) -> Sequence[Tensor]:
        """K tensors uint8 [B, H, W, 3]: the camera's frames, the oldest first."""
        picture = (self.image_size, self.image_size, 3)
        frame = camera_frames(inputs, camera, picture if self.observations == 1 else (self.observations, *picture))
        return [frame] if self.observations == 1 else frame.unbind(1)


def _state(spec: PolicySpec, features: int, channels: Sequence[int], extra_layers: int) -> Encoder:
    """An encoder of states has no levels: what is said of the CNN's does not concern it."""
    return StateEncoder(spec, features)


ENCODERS: dict[str, Callable[[PolicySpec, int, Sequence[int], int], Encoder]] = {"state": _state, "cnn": CnnEncoder}
