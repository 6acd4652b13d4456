"""Changes of drawn pictures: pure functions, each of a frame, its parameters and a generator.

A function sees the frame as the simulator's own environment returns it, whatever `TaskSpec.orientation` is. Its random
numbers come from the generator alone, which is keyed by (episode seed, env step, camera): every process draws the same,
and noise differs between env steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from sim_farm import corruptions
from sim_farm.contract import UInt8

Picture = Callable[[UInt8, Sequence[float], np.random.Generator], UInt8]
"""A function `(frame, values, draw) -> frame`; frames are uint8 [H, W, 3]. The input frame is contiguous, and the
function may change it."""


def gaussian_noise(frame: UInt8, values: Sequence[float], draw: np.random.Generator) -> UInt8:
    """Normal noise of the standard deviation `values[0]`, in grey levels, for each pixel and colour independently."""
    (deviation,) = values
    return _rounded(frame + deviation * draw.standard_normal(frame.shape, np.float32))


def brightness_contrast(frame: UInt8, values: Sequence[float], draw: np.random.Generator) -> UInt8:
    """Contrast times `values[1]` about mid-grey, and `values[0]` grey levels brighter."""
    brightness, contrast = values
    return _rounded((frame.astype(np.float32) - 127.5) * contrast + (127.5 + brightness))


def _rounded(values: npt.NDArray[np.floating]) -> UInt8:
    return np.clip(np.rint(values), 0, 255).astype(np.uint8)


PICTURES: dict[str, tuple[Picture, int]] = {
    "gaussian_noise": (gaussian_noise, 1),
    "brightness_contrast": (brightness_contrast, 2),
    "motion_blur": (corruptions.motion_blur, 1),
    "gaussian_blur": (corruptions.gaussian_blur, 1),
    "zoom_blur": (corruptions.zoom_blur, 1),
    "fog": (corruptions.fog, 1),
    "glass_blur": (corruptions.glass_blur, 1),
}
"""The functions by name, each with its number of parameters."""
