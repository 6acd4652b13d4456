"""Camera frames to the pixel values of both vision towers: batched, on the frames' device.

B frames of H x W pixels, S the towers' image size. Resizing repeats Pillow's arithmetic for 8-bit images (coefficients
with 22 fractional bits, each of the two passes rounded and clipped to a byte), as two matrix products in float64,
in which every intermediate is a whole number below 2^53 and so exact: pixel values equal those of the reference
processor, which uses Pillow image by image on the CPU, to the last bit and on any device. `backend="pillow"` uses
Pillow itself.

Sources: prismatic/extern/hf/processing_prismatic.py (resizing strategies, normalisation), Pillow's
src/libImaging/Resample.c (coefficients), experiments/robot/openvla_utils.py (centre crop), openvla/openvla.
"""

from __future__ import annotations

import functools
import io
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional

from policies.contract import PolicyError
from policies.openvla.files import read_json

PREPROCESSOR = "preprocessor_config.json"
STRATEGIES = ("resize-naive", "letterbox", "resize-crop")
BACKENDS = ("device", "pillow")
CROP_AREA = 0.9
"""Share of the picture that the centre crop keeps: models trained on random crops of that area see it when acting."""
JPEG_QUALITY = 95
FRACTION_BITS = 22
"""Of Pillow's fixed-point coefficients."""


@dataclass(frozen=True)
class Preprocessing:
    """How frames become pixel values; recorded with a policy."""

    size: int
    """S."""
    means: tuple[tuple[float, ...], ...]
    """Of each tower, three numbers."""
    stds: tuple[tuple[float, ...], ...]
    strategy: str = "resize-naive"
    """`resize-naive` changes the aspect ratio, `letterbox` pads to a square first, `resize-crop` crops one out."""
    fill: tuple[int, ...] = (127, 127, 127)
    """Colour of letterbox's padding: for both towers the last tower's mean."""
    rotate: bool = False
    """Turn frames by 180 degrees first, as in LIBERO's training data."""
    environment_jpeg: bool = False
    """Then write and read frames as JPEG, as the training data were stored: on the CPU, frame by frame."""
    environment_resize: bool = False
    """Resize frames to S with Lanczos's filter first, as the training data were, instead of by `strategy`."""
    center_crop: bool = False
    """Keep the middle `CROP_AREA` of the picture, and resize that to S."""
    backend: str = "device"

    def __call__(self, frames: Tensor) -> Tensor:
        """uint8 [B, H, W, 3] to float32 [B, 6, S, S]: three channels normalised for each tower."""
        if frames.dtype != torch.uint8 or frames.dim() != 4 or frames.shape[-1] != 3:
            raise PolicyError(f"frames must be uint8 [B, H, W, 3], got {frames.dtype} {list(frames.shape)}")
        if self.rotate:
            frames = frames.flip(1, 2)
        if self.environment_jpeg:
            frames = jpeg(frames)
        if self.environment_resize:
            frames = lanczos(frames, self.size)
        if self.center_crop:
            frames = (center_crop(frames, self.size) * 255.5).to(torch.uint8)
        pixels = self._square(frames).permute(0, 3, 1, 2).float().div(255)
        towers = [
            (pixels - pixels.new_tensor(mean)[:, None, None]) / pixels.new_tensor(std)[:, None, None]
            for mean, std in zip(self.means, self.stds, strict=True)
        ]
        return torch.cat(towers, 1)

    def _square(self, frames: Tensor) -> Tensor:
        """uint8 [B, S, S, 3] by the strategy."""
        height, width = frames.shape[1:3]
        if self.strategy == "resize-naive":
            return self._resize(frames, self.size, self.size)
        if self.strategy == "letterbox":
            # An odd difference leaves the padded picture one pixel off a square: the crop below mends it.
            longest = max(height, width)
            frames = pad(frames, (longest - height) // 2, (longest - width) // 2, self.fill)
            height, width = frames.shape[1:3]
        if height < width:
            frames = self._resize(frames, self.size, int(self.size * width / height))
        else:
            frames = self._resize(frames, int(self.size * height / width), self.size)
        top, left = (round((extent - self.size) / 2) for extent in frames.shape[1:3])
        return frames[:, top : top + self.size, left : left + self.size]

    def _resize(self, frames: Tensor, height: int, width: int) -> Tensor:
        if tuple(frames.shape[1:3]) == (height, width):
            return frames
        return (pillow_resize if self.backend == "pillow" else resize)(frames, height, width)


def read_preprocessing(folder: Path, *, strategy: str | None = None, **options: Any) -> Preprocessing:
    """The preprocessing of a checkpoint. `strategy` and `options`, fields of `Preprocessing`, replace what it says.

    The reference's processor sets every entry of the file as an attribute after it has computed its own, so
    `tvf_normalize_params`, where present, wins over `means` and `stds`. Published files hold bfloat16-rounded
    numbers there: those are what the models were run with.
    """
    path = folder / PREPROCESSOR
    raw = read_json(path)
    try:
        sizes = {int(size) for shape in raw["input_sizes"] for size in shape[1:]}
        if len(sizes) != 1 or len(raw["input_sizes"]) != 2:
            raise PolicyError(f"{path}: two towers with square images of one size are supported")
        if set(raw.get("interpolations", ["bicubic"])) != {"bicubic"}:
            raise PolicyError(f"{path}: interpolations must be bicubic, they are {raw['interpolations']}")
        normalize = raw.get("tvf_normalize_params") or [
            {"mean": mean, "std": std} for mean, std in zip(raw["means"], raw["stds"], strict=True)
        ]
        means, stds = (tuple(tuple(map(float, tower[key])) for tower in normalize) for key in ("mean", "std"))
        strategy = strategy or raw["image_resize_strategy"]
        fill = raw.get("tvf_letterbox_fill") or [int(255 * mean) for mean in raw["means"][-1]]
    except (KeyError, TypeError, ValueError) as error:
        raise PolicyError(f"{path} lacks an entry or has one of the wrong type: {error!r}") from error
    for name, value, valid in (("strategy", strategy, STRATEGIES), ("backend", options.get("backend"), BACKENDS)):
        if value is not None and value not in valid:
            raise PolicyError(f"the image {name} must be one of {', '.join(valid)}, got {value!r}")
    return Preprocessing(sizes.pop(), means, stds, strategy or "", tuple(fill), **options)


def resize(frames: Tensor, height: int, width: int) -> Tensor:
    """uint8 [B, H, W, 3] to [B, height, width, 3]: Pillow's bicubic filter with its rounding."""
    for axis, size in ((2, width), (1, height)):  # Pillow's order
        if frames.shape[axis] != size:
            matrix = _matrix(_fixed_point, frames.shape[axis], size, frames.device)
            # A whole number over 2^22 rounds half up, as adding half and shifting does.
            summed = _along(matrix, frames.double(), axis)
            frames = (summed / (1 << FRACTION_BITS) + 0.5).floor().clamp(0, 255).to(torch.uint8)
    return frames


def pillow_resize(frames: Tensor, height: int, width: int) -> Tensor:
    """The same with Pillow itself, frame by frame on the CPU."""
    from PIL import Image

    resized = [
        np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC))
        for frame in frames.cpu().numpy()
    ]
    return torch.from_numpy(np.stack(resized)).to(frames.device)


def jpeg(frames: Tensor) -> Tensor:
    """uint8 [B, H, W, 3] written as JPEG and read again, with the settings of TensorFlow's encoder.

    Its decoder uses libjpeg's fast DCT, which Pillow does not offer: pixels differ by one level on average. The file
    itself, read so, gives TensorFlow's pixels to the last bit.
    """
    from PIL import Image

    read = []
    for frame in frames.cpu().numpy():
        file = io.BytesIO()
        Image.fromarray(frame).save(file, "JPEG", quality=JPEG_QUALITY, subsampling="4:2:0")
        read.append(np.asarray(Image.open(file)))
    return torch.from_numpy(np.stack(read)).to(frames.device)


def lanczos(frames: Tensor, size: int) -> Tensor:
    """uint8 [B, H, W, 3] to [B, size, size, 3] with Lanczos's filter, antialiased and rounded once.

    Within one level of TensorFlow's `resize(method="lanczos3", antialias=True)`, which made the training data.
    """
    values = frames.double()
    for axis in (1, 2):
        values = _along(_matrix(_lanczos_weights, frames.shape[axis], size, frames.device), values, axis)
    return values.round().clamp(0, 255).to(torch.uint8)


def center_crop(frames: Tensor, size: int) -> Tensor:
    """uint8 [B, H, W, 3] to float32 [B, size, size, 3] in 0..1: the middle `CROP_AREA`, bilinear without antialias.

    TensorFlow's `crop_and_resize`: output i samples at a (H - 1) + i (1 - 2 a) (H - 1) / (size - 1), with a the
    share that is cut off at each side.
    """
    values = frames.float() / 255
    for axis in (1, 2):
        values = _along(_matrix(_crop_weights, frames.shape[axis], size, frames.device), values, axis)
    return values.clamp(0, 1)


def pad(frames: Tensor, vertical: int, horizontal: int, fill: tuple[int, ...]) -> Tensor:
    """The frames with so many pixels of one colour at both ends of each axis."""
    rows, height, width, _ = frames.shape
    padded = frames.new_tensor(fill).expand(rows, height + 2 * vertical, width + 2 * horizontal, 3).clone()
    padded[:, vertical : vertical + height, horizontal : horizontal + width] = frames
    return padded


def _along(matrix: Tensor, values: Tensor, axis: int) -> Tensor:
    """[out, in] times the axis 1 or 2 of [B, H, W, 3]."""
    rows, height, width, channels = values.shape
    if axis == 2:
        return matrix.to(values.dtype) @ values
    return (matrix.to(values.dtype) @ values.view(rows, height, -1)).view(rows, -1, width, channels)


def _cubic(x: float) -> float:
    x, a = abs(x), -0.5
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0


def _lanczos(x: float) -> float:
    return float(np.sinc(x) * np.sinc(x / 3)) if abs(x) < 3 else 0.0


FILTERS: Mapping[str, tuple[Callable[[float], float], float]] = {"bicubic": (_cubic, 2.0), "lanczos": (_lanczos, 3.0)}
"""Function and half width."""


@functools.lru_cache(maxsize=32)
def _matrix(make: Callable[[int, int], Tensor], size: int, out: int, device: torch.device) -> Tensor:
    """float64 [out, size] on the device; made once, since every decision needs the same."""
    return make(size, out).to(device)


def _lanczos_weights(size: int, out: int) -> Tensor:
    return _coefficients(size, out, "lanczos")


def _coefficients(size: int, out: int, name: str) -> Tensor:
    """float64 [out, size]: the weights of an antialiased filter, each row summing to one."""
    function, support = FILTERS[name]
    matrix = torch.zeros(out, size, dtype=torch.float64)
    scale = size / out
    stretch = max(scale, 1.0)
    for row in range(out):
        center = (row + 0.5) * scale
        first = max(int(center - support * stretch + 0.5), 0)
        last = min(int(center + support * stretch + 0.5), size)
        weights = [function((column - center + 0.5) * (1.0 / stretch)) for column in range(first, last)]
        matrix[row, first:last] = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    return matrix


def _fixed_point(size: int, out: int) -> Tensor:
    """The bicubic weights as Pillow rounds them: whole numbers, half away from zero."""
    scaled = _coefficients(size, out, "bicubic") * (1 << FRACTION_BITS)
    return torch.where(scaled < 0, scaled - 0.5, scaled + 0.5).trunc()


def _crop_weights(size: int, out: int) -> Tensor:
    """float64 [out, size]: bilinear samples of the middle part of an axis."""
    cut = (1 - math.sqrt(CROP_AREA)) / 2
    at = cut * (size - 1) + torch.arange(out, dtype=torch.float64) * (1 - 2 * cut) * (size - 1) / max(out - 1, 1)
    below = at.floor().long().clamp(0, size - 1)
    above = (below + 1).clamp(max=size - 1)
    share = (at - below).unsqueeze(1)
    return (1 - share) * functional.one_hot(below, size) + share * functional.one_hot(above, size)
