"""Weights of tests by a rule: NumPy's RandomState is frozen, and draws the same numbers with every version."""

from __future__ import annotations

import zlib
from functools import cache

import numpy as np


@cache
def drawn(name: str, shape: tuple[int, ...], seed: int) -> np.ndarray:
    """One tensor, float32: matrices and kernels of variance 1 / fan-in, scales near 1, the rest near 0."""
    draw = np.random.RandomState((seed * 1_000_003 + zlib.crc32(name.encode())) % 2**32).standard_normal(shape)
    if name.endswith("running_var"):
        return (1 + 0.1 * np.abs(draw)).astype(np.float32)
    if len(shape) >= 2:
        return (draw / np.prod(shape[1:]) ** 0.5).astype(np.float32)
    return ((1 if name.endswith("weight") else 0) + 0.1 * draw).astype(np.float32)
