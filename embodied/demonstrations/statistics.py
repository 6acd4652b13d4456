"""The statistics of each feature in `stats.json` and in the episodes' rows, for normalisation.

Exact, of all rows and all pixels: LeRobot samples the pixels, and averages the episodes' quantiles.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

QUANTILES = {"q01": 0.01, "q10": 0.10, "q50": 0.50, "q90": 0.90, "q99": 0.99}
Statistics = dict[str, npt.NDArray[Any]]


def of_rows(rows: npt.NDArray[Any]) -> Statistics:
    """Of an array [n] or [n, d], element by element: float64 [1] or [d] each; `count` is int64 [1]."""
    rows = rows.reshape(len(rows), -1).astype(np.float64)
    found = {"min": rows.min(0), "max": rows.max(0), "mean": rows.mean(0), "std": rows.std(0)}
    found["count"] = np.array([len(rows)])
    return found | dict(zip(QUANTILES, np.quantile(rows, list(QUANTILES.values()), axis=0), strict=True))


def pixel_counts(frames: npt.NDArray[np.uint8]) -> npt.NDArray[np.int64]:
    """[3, 256] how often each value occurs in each channel of the frames [n, H, W, 3]. Counts of episodes add up."""
    return sum(
        (np.stack([np.bincount(frame[..., c].ravel(), minlength=256) for c in range(3)]) for frame in frames),
        np.zeros((3, 256), np.int64),
    )


def of_pixels(counts: npt.NDArray[np.int64], frames: int) -> Statistics:
    """Per channel, of values in [0, 1]: float64 [3, 1, 1] each; `count` is the number of frames."""
    values = np.arange(256) / 255
    total = counts.sum(1, keepdims=True)
    seen = counts > 0
    mean = (counts * values).sum(1, keepdims=True) / total
    found = {
        "min": values[seen.argmax(1)],
        "max": values[255 - seen[:, ::-1].argmax(1)],
        "mean": mean,
        "std": np.sqrt((counts * (values - mean) ** 2).sum(1, keepdims=True) / total),
    }
    below = counts.cumsum(1)
    found |= {name: values[(below >= q * total).argmax(1)] for name, q in QUANTILES.items()}
    return {name: value.reshape(3, 1, 1) for name, value in found.items()} | {"count": np.array([frames])}


def as_lists(statistics: Statistics) -> dict[str, Any]:
    return {name: value.tolist() for name, value in statistics.items()}
