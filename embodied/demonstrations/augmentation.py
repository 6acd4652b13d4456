"""Pictures of demonstrations changed at random, by the recipes of published trainings.

A row's pixels depend on the seed, the epoch, the row and the camera alone: every rank and every loader process makes
the same, and so does a resumed run (docs/decisions/0195).
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn import functional

from embodied.demonstrations.mixture import WRIST, Index
from embodied.trajectories.random_streams import AUGMENTATION, generator
from policies.torchvision_operators import import_torchvision

Frames = npt.NDArray[np.uint8]
Draw = np.random.Generator


@dataclass(frozen=True)
class Augmentation:
    """Changes frames by a recipe of `RECIPES`. Random numbers differ between rows and between cameras.

    The K observations of a row are changed by the same numbers: between them nothing moves but what the robot and the
    objects did.
    """

    recipe: str
    seed: int

    def __post_init__(self) -> None:
        _torchvision()  # whoever has none is told before anything is read

    def applied(self, frames: Mapping[str, Frames], rows: Index, epoch: int) -> dict[str, Frames]:
        """The frames uint8 [B, H, W, 3], or [B, K, H, W, 3], of each camera, changed; `rows` [B] and `epoch` key the
        random numbers."""

        def changed(picture: Frames, camera: str, number: int, row: int) -> Frames:
            if picture.ndim == 4:
                return np.stack([changed(each, camera, number, row) for each in picture])
            return augmented(picture, self.recipe, generator(AUGMENTATION, self.seed, number, epoch, row), camera)

        return {
            camera: np.stack(
                [changed(picture, camera, number, row) for picture, row in zip(pictures, rows.tolist(), strict=True)]
            )
            for number, (camera, pictures) in enumerate(frames.items())
        }


def augmented(picture: Frames, recipe: str, draw: Draw, camera: str) -> Frames:
    """uint8 [H, W, 3]: the picture of the camera, changed by the recipe with numbers from `draw`."""
    values = torch.from_numpy(picture).permute(2, 0, 1).float() / 255
    values = RECIPES[recipe](values, draw, WRIST.search(camera) is not None)
    return (values * 255).round().clamp(0, 255).to(torch.uint8).permute(1, 2, 0).numpy()


def _openpi(picture: Tensor, draw: Draw, is_wrist: bool) -> Tensor:
    """A crop of 95% of each side and a rotation by up to 5 degrees, not for cameras at a wrist; then colours.

    Source: openpi at 15a9616a, `preprocess_observation_pytorch`, which draws once for a batch; we draw for each
    picture, as its `preprocess_observation` does. The latter's colours are augmax's: for half of the pictures, and
    without saturation, since augmax 0.4.1 drops its result.
    """
    if not is_wrist:
        size = picture.shape[1:]
        height, width = (int(0.95 * side) for side in size)
        top, left = (int(draw.integers(0, each, endpoint=True)) for each in (size[0] - height, size[1] - width))
        cut = picture[:, top : top + height, left : left + width]
        picture = _sampled(cut, [[1, 0, 0], [0, 1, 0]], picture.shape, align_corners=False)
        bilinear = _torchvision().InterpolationMode.BILINEAR
        picture = _torchvision().rotate(picture, draw.uniform(-5, 5), interpolation=bilinear)
    picture = picture * draw.uniform(0.7, 1.3)
    picture = torch.lerp(_mean(picture, (0, 1, 2)), picture, draw.uniform(0.6, 1.4))
    return torch.lerp(picture.mean(0, keepdim=True), picture, draw.uniform(0.5, 1.5)).clamp(0, 1)


def _oft(picture: Tensor, draw: Draw, is_wrist: bool) -> Tensor:
    """A crop of 90% of the area, then colours: of every camera. Such a policy acts on the centre crop.

    Source: OpenVLA and OpenVLA-OFT, `image_augment_kwargs` in prismatic/vla/datasets/datasets.py, with dlimp's
    `random_resized_crop` and TensorFlow's brightness (a sum), contrast (of each channel) and saturation (of HSV). dlimp
    gives all of them one seed, so that its crops lie on a diagonal; ours are drawn independently.
    """
    side = math.sqrt(0.9)
    y, x = (2 * draw.uniform(0, 1 - side) + side - 1 for _ in range(2))
    picture = _sampled(picture, [[side, 0, x], [0, side, y]], picture.shape, align_corners=True)
    picture = (picture + draw.uniform(-0.2, 0.2)).clamp(0, 1)
    picture = torch.lerp(_mean(picture, (1, 2)), picture, draw.uniform(0.8, 1.2)).clamp(0, 1)
    brightest, darkest = picture.amax(0), picture.amin(0)
    most = torch.nan_to_num(brightest / (brightest - darkest), nan=1.0)  # here one channel reaches zero
    picture = brightest + (picture - brightest) * most.clamp(max=draw.uniform(0.8, 1.2))
    return _torchvision().adjust_hue(picture, draw.uniform(-0.05, 0.05)).clamp(0, 1)


def _lerobot(picture: Tensor, draw: Draw, is_wrist: bool) -> Tensor:
    """Three of six changes, in this order, of every camera: brightness, contrast, saturation, hue, sharpness, and a
    rotation with a shift.

    Source: LeRobot at 7427f318, `ImageTransformsConfig` in src/lerobot/transforms/transforms.py.
    """
    for number in sorted(draw.choice(6, 3, replace=False).tolist()):
        match number:
            case 0:
                picture = _torchvision().adjust_brightness(picture, draw.uniform(0.8, 1.2))
            case 1:
                grey = _mean(_torchvision().rgb_to_grayscale(picture), (0, 1, 2))
                picture = torch.lerp(grey, picture, draw.uniform(0.8, 1.2)).clamp(0, 1)
            case 2:
                picture = _torchvision().adjust_saturation(picture, draw.uniform(0.5, 1.5))
            case 3:
                picture = _torchvision().adjust_hue(picture, draw.uniform(-0.05, 0.05))
            case 4:
                picture = _torchvision().adjust_sharpness(picture, draw.uniform(0.5, 1.5))
            case 5:
                height, width = picture.shape[1:]
                shift = [round(draw.uniform(-0.05 * side, 0.05 * side)) for side in (width, height)]
                picture = _torchvision().affine(picture, draw.uniform(-5, 5), shift, scale=1.0, shear=[0.0, 0.0])
    return picture


CROPS = frozenset({"oft"})
"""Recipes whose crop takes the place of the centre crop that the policy acts on."""
RECIPES: Mapping[str, Callable[[Tensor, Draw, bool], Tensor]] = {"openpi": _openpi, "oft": _oft, "lerobot": _lerobot}
"""Recipes by their names in `sft.augment`: of a picture float32 [3, H, W] in 0..1, with random numbers, and whether its
camera is at a wrist."""


@cache
def _torchvision() -> Any:
    """torchvision's functions on pictures."""
    import_torchvision()
    return importlib.import_module("torchvision.transforms.v2.functional")


def _sampled(picture: Tensor, matrix: list[list[float]], shape: torch.Size, *, align_corners: bool) -> Tensor:
    """The picture in another shape [3, H, W], bilinear: pixel (x, y), both in -1..1, is from where `matrix` [2, 3]
    takes it. The last digits of torch's own resizing depend on the number of threads."""
    places = functional.affine_grid(
        torch.tensor([matrix], dtype=torch.float32), [1, *shape], align_corners=align_corners
    )
    found = functional.grid_sample(picture[None], places, padding_mode="border", align_corners=align_corners)
    return found[0]


def _mean(picture: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The mean over axes, kept as axes of size 1. The last digits of torch's own depend on the number of threads."""
    return torch.from_numpy(picture.numpy().mean(axes, np.float64, keepdims=True).astype(np.float32))
