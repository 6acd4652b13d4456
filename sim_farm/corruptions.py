"""The five corruptions of pictures that LIBERO-Plus (arXiv:2510.13626) has, each of a severity from 1 to 10.

Given the same draws they equal LIBERO-Plus's own to the last bit (tests/sim_farm/test_libero_plus.py). There every
frame draws from NumPy's global generator, so that no two runs see the same noise; here the generator is the caller's.

Motion blur is that of ImageMagick's MotionBlurImage with 16 bits a colour; the others follow ImageNet-C (Hendrycks and
Dietterich 2019, arXiv:1903.12261), from which LIBERO-Plus has them with severities of its own.
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

UInt8 = npt.NDArray[np.uint8]
Float64 = npt.NDArray[np.float64]

MOTION = ((5, 2), (8, 3), (10, 4), (12, 5), (15, 6), (18, 8), (20, 10), (25, 12), (30, 15), (35, 20))
"""Radius and sigma in pixels."""
ZOOM = (
    (1.11, 0.01),
    (1.16, 0.01),
    (1.21, 0.02),
    (1.26, 0.02),
    (1.31, 0.03),
    (1.36, 0.01),
    (1.41, 0.01),
    (1.46, 0.02),
    (1.51, 0.02),
    (1.56, 0.03),
)
"""End and step of the magnifications, which begin at 1."""
FOG = ((0.5, 3), (1, 2.8), (1.5, 2.5), (2, 2.2), (2.5, 2), (3, 1.8), (3.5, 1.6), (4, 1.5), (4.5, 1.4), (5, 1.3))
"""Strength, and how fast the fog's roughness falls from one scale to the next finer one."""
GLASS = (
    (0.5, 1, 3),
    (0.7, 1, 3),
    (0.9, 2, 3),
    (1.0, 2, 2),
    (1.1, 3, 2),
    (1.3, 3, 2),
    (1.5, 4, 2),
    (1.8, 4, 2),
    (2.2, 5, 1),
    (2.5, 5, 1),
)
"""Sigma in pixels, reach of a displacement in pixels, and passes."""
GLASS_SIZE = 224
"""Rows and columns that glass displaces; a larger frame keeps the rest."""
FOG_SIZE = 256
ANGLE = 45.0
"""Largest angle of motion to the horizontal, in degrees."""


def motion_blur(frame: UInt8, values: Sequence[float], draw: Any) -> UInt8:
    """Blur along a line from each pixel, at an angle that is drawn."""
    radius, sigma = MOTION[_severity(values)]
    angle = math.radians(draw.uniform(-ANGLE, ANGLE))
    width = 2 * radius + 1
    kernel = [math.exp(-(i * i) / (2.0 * sigma * sigma)) / (math.sqrt(2.0 * math.pi) * sigma) for i in range(width)]
    total = sum(kernel)
    across, along = width * math.sin(angle), width * math.cos(angle)
    length = math.hypot(across, along)
    padded = np.pad(frame.astype(np.float64) * 257.0, ((width, width), (width, width), (0, 0)), mode="edge")
    blurred = np.zeros(frame.shape)
    for i, weight in enumerate(kernel):
        row, column = width + math.ceil(i * across / length - 0.5), width + math.ceil(i * along / length - 0.5)
        blurred += (weight / total) * padded[row : row + frame.shape[0], column : column + frame.shape[1]]
    return (np.clip(blurred + 0.5, 0, 65535).astype(np.uint16) // 257).astype(np.uint8)


def gaussian_blur(frame: UInt8, values: Sequence[float], draw: Any) -> UInt8:
    """Gaussian blur with a deviation of 1 pixel at the lowest severity, and 1 more at each further one."""
    return _to_uint8(_smooth(frame / 255.0, _severity(values) + 1.0))


def zoom_blur(frame: UInt8, values: Sequence[float], draw: Any) -> UInt8:
    """Mean of the frame and of magnifications about its centre."""
    end, step = ZOOM[_severity(values)]
    original = (frame / 255.0).astype(np.float32)
    factors = np.arange(1, end, step)
    total = np.zeros_like(original)
    for factor in factors:
        total += _magnified(original, factor)
    return _to_uint8((original + total) / (len(factors) + 1))


def fog(frame: UInt8, values: Sequence[float], draw: Any) -> UInt8:
    """A cloud of fractal noise over the frame, of at most 256 rows and columns."""
    strength, decay = FOG[_severity(values)]
    bright = frame / 255.0
    most = bright.max()
    bright += strength * _plasma(decay, draw)[: frame.shape[0], : frame.shape[1], None]
    return _to_uint8(bright * most / (most + strength))


def glass_blur(frame: UInt8, values: Sequence[float], draw: Any) -> UInt8:
    """Each pixel takes the colour of a near one that is drawn, between two Gaussian blurs."""
    sigma, reach, passes = GLASS[_severity(values)]
    smooth = (_smooth(frame / 255.0, sigma) * 255).astype(np.uint8)
    height, width = smooth.shape[:2]
    rows = np.arange(min(GLASS_SIZE, height) - reach, reach, -1)
    columns = np.arange(min(GLASS_SIZE, width) - reach, reach, -1)
    own = (rows[:, None] * width + columns[None, :]).ravel().tolist()
    source = list(range(height * width))
    for _ in range(passes):
        moves = draw.integers(-reach, reach, (len(own), 2))
        near = (np.array(own) + moves[:, 1] * width + moves[:, 0]).tolist()
        # One after the other: a pixel may take what another has taken before.
        for pixel, other in zip(own, near, strict=True):
            source[pixel] = source[other]
    displaced = smooth.reshape(-1, 3)[source].reshape(smooth.shape)
    return _to_uint8(_smooth(displaced / 255.0, sigma))


def _severity(values: Sequence[float]) -> int:
    """Index of the severity, from 0."""
    return int(values[0]) - 1


def _to_uint8(values: npt.NDArray[Any]) -> UInt8:
    return (np.clip(values, 0, 1) * 255).astype(np.uint8)


def _smooth(values: Float64, sigma: float) -> Float64:
    """[H, W, 3] each colour separately."""
    return _ndimage().gaussian_filter(values, (sigma, sigma, 0), mode="nearest", truncate=4.0)


def _magnified(values: npt.NDArray[np.float32], factor: float) -> npt.NDArray[np.float32]:
    size = values.shape[0]
    part = math.ceil(size / float(factor))
    top = (size - part) // 2
    large = _ndimage().zoom(values[top : top + part, top : top + part], (factor, factor, 1), order=1)
    trim = (large.shape[0] - size) // 2
    return large[trim : trim + size, trim : trim + size]


def _plasma(decay: float, draw: Any) -> Float64:
    """[256, 256] in [0, 1]: a height map by the diamond-square algorithm, periodic at its edges."""
    heights = np.zeros((FOG_SIZE, FOG_SIZE))
    step, roughness = FOG_SIZE, 100.0

    def rough(total: Float64) -> Float64:
        return total / 4 + roughness * draw.uniform(-roughness, roughness, total.shape)

    while step >= 2:
        half = step // 2
        corners = heights[::step, ::step]
        square = corners + np.roll(corners, -1, axis=0)
        square += np.roll(square, -1, axis=1)
        heights[half::step, half::step] = rough(square)
        centres, corners = heights[half::step, half::step], heights[::step, ::step]
        heights[::step, half::step] = rough(
            (centres + np.roll(centres, 1, axis=0)) + (corners + np.roll(corners, -1, axis=1))
        )
        heights[half::step, ::step] = rough(
            (centres + np.roll(centres, 1, axis=1)) + (corners + np.roll(corners, -1, axis=0))
        )
        step, roughness = half, roughness / decay
    heights -= heights.min()
    return heights / heights.max()


def _ndimage() -> Any:
    """SciPy comes with LIBERO, not with the farm."""
    return importlib.import_module("scipy.ndimage")
