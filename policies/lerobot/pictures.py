"""Cameras' frames as networks of LeRobot's read them: numbers in 0..1, normalised, colours first."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from policies.contract import Inputs
from policies.small.encoders import camera_frames
from policies.transforms import Transforms


def normalised_frames(
    inputs: Inputs, cameras: Sequence[str], transforms: Transforms, pictures: Tensor, observations: int = 1
) -> Tensor:
    """[B, cameras, 3, H, W] float32 of each camera's uint8 [B, H, W, 3]; of K > 1 observations [B, K, cameras, 3, H, W]
    of [B, K, H, W, 3].

    `pictures` [cameras, 2, 3] are centre and scale of the units. Raises `PolicyError` for frames that are missing or of
    another layout.
    """
    shape = ("H", "W", 3) if observations == 1 else (observations, "H", "W", 3)
    found = []
    for name, (centre, scale) in zip(cameras, pictures.float(), strict=True):
        seen = camera_frames(inputs, name, shape)
        turned = transforms.frames(seen.flatten(0, -4)).permute(0, 3, 1, 2)
        pixels = (turned.float() / 255 - centre[:, None, None]) / scale[:, None, None]
        found.append(pixels.unflatten(0, seen.shape[:-3]))
    return torch.stack(found, -4)
