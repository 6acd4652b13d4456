"""Resizing frames with Pillow's arithmetic: batched, on the frames' device.

For 8-bit images Pillow has coefficients with 22 fractional bits, and rounds and clips each of the two passes to a byte.
Here that is two matrix products in float64, in which every intermediate is a whole number below 2^53 and so exact:
pixels equal Pillow's to the last bit, on any device. Source: Pillow's src/libImaging/Resample.c. B frames of H x W
pixels.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
import torch
from torch import Tensor

Filter = Literal["bicubic", "bilinear", "lanczos"]
FRACTION_BITS = 22
"""Bits of Pillow's fixed-point coefficients."""


def resize(frames: Tensor, height: int, width: int, name: Filter) -> Tensor:
    """uint8 [B, H, W, 3] to [B, height, width, 3]: Pillow's filter of that name, with its rounding.

    The order of the two passes is that of Pillow 13 (python-pillow/Pillow#9549); before, width always came first.
    """
    narrowed, lowered = frames.shape[2] - width, frames.shape[1] - height
    passes = (1, height), (2, width)
    for axis, size in passes if lowered > max(2 * narrowed, 0) else reversed(passes):
        if frames.shape[axis] != size:
            weights = matrix(_fixed_point, frames.shape[axis], size, name, frames.device)
            # A whole number over 2^22 rounds half up, as adding half and shifting does.
            summed = along(weights, frames.double(), axis)
            frames = (summed / (1 << FRACTION_BITS) + 0.5).floor().clamp(0, 255).to(torch.uint8)
    return frames


def fitted_size(height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
    """Height and width of pictures fitted into `rows` x `columns`: openpi and LeRobot divide by the larger of the two
    ratios and cut off what is behind the point."""
    ratio = max(width / columns, height / rows)
    return int(height / ratio), int(width / ratio)


def fit_square(frames: Tensor, size: int, name: Filter) -> Tensor:
    """uint8 [B, H, W, 3] to [B, size, size, 3], fitted in by `resize` with black at the sides.

    As openpi's clients do it (openpi_client/image_tools.py, resize_with_pad).
    """
    height, width = frames.shape[1:3]
    if (height, width) == (size, size):
        return frames
    rows, columns = fitted_size(height, width, size, size)
    top, left = (size - rows) // 2, (size - columns) // 2
    square = frames.new_zeros(len(frames), size, size, 3)
    square[:, top : top + rows, left : left + columns] = resize(frames, rows, columns, name)
    return square


def pillow_resize(frames: Tensor, height: int, width: int, name: Filter) -> Tensor:
    """`resize` with Pillow itself, frame by frame on the CPU."""
    from PIL import Image

    resized = [
        np.asarray(Image.fromarray(frame).resize((width, height), Image.Resampling[name.upper()]))
        for frame in frames.cpu().numpy()
    ]
    return torch.from_numpy(np.stack(resized)).to(frames.device)


def pad(frames: Tensor, vertical: int, horizontal: int, fill: tuple[int, ...]) -> Tensor:
    """The frames with pixels of one colour added at both ends of each axis."""
    rows, height, width, _ = frames.shape
    padded = frames.new_tensor(fill).expand(rows, height + 2 * vertical, width + 2 * horizontal, 3).clone()
    padded[:, vertical : vertical + height, horizontal : horizontal + width] = frames
    return padded


def along(weights: Tensor, values: Tensor, axis: int) -> Tensor:
    """[out, in] times the axis 1 or 2 of [B, H, W, 3]."""
    rows, height, width, channels = values.shape
    if axis == 2:
        return weights.to(values.dtype) @ values
    return (weights.to(values.dtype) @ values.view(rows, height, -1)).view(rows, -1, width, channels)


def _cubic(x: float) -> float:
    x, a = abs(x), -0.5
    if x < 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return (((x - 5) * x + 8) * x - 4) * a if x < 2 else 0.0


def _lanczos(x: float) -> float:
    return float(np.sinc(x) * np.sinc(x / 3)) if abs(x) < 3 else 0.0


def _triangle(x: float) -> float:
    return max(1 - abs(x), 0.0)


FILTERS: Mapping[Filter, tuple[Callable[[float], float], float]] = {
    "bicubic": (_cubic, 2.0),
    "bilinear": (_triangle, 1.0),
    "lanczos": (_lanczos, 3.0),
}
"""Function and half width."""


@functools.lru_cache(maxsize=32)
def matrix(
    make: Callable[[int, int, Filter], Tensor], size: int, out: int, name: Filter, device: torch.device
) -> Tensor:
    """float64 [out, size] on the device; made once, since every decision needs the same."""
    return make(size, out, name).to(device)


def weights_of(size: int, out: int, name: Filter) -> Tensor:
    """float64 [out, size]: the weights of an antialiased filter, each row summing to one."""
    function, support = FILTERS[name]
    found = torch.zeros(out, size, dtype=torch.float64)
    scale = size / out
    stretch = max(scale, 1.0)
    for row in range(out):
        center = (row + 0.5) * scale
        first = max(int(center - support * stretch + 0.5), 0)
        last = min(int(center + support * stretch + 0.5), size)
        weights = [function((column - center + 0.5) * (1.0 / stretch)) for column in range(first, last)]
        found[row, first:last] = torch.tensor(weights, dtype=torch.float64) / sum(weights)
    return found


def _fixed_point(size: int, out: int, name: Filter) -> Tensor:
    """The weights as Pillow rounds them: whole numbers, half away from zero."""
    scaled = weights_of(size, out, name) * (1 << FRACTION_BITS)
    return torch.where(scaled < 0, scaled - 0.5, scaled + 0.5).trunc()
