"""Camera frames to pixel values: fitted into a square, black at the sides, in -1..1.

openpi has two ways. `pillow` is what its clients do to every frame (openpi_client/image_tools.py): Pillow's bilinear
filter, which averages where it makes frames smaller. `interpolate` is the training code's and LeRobot's
(models_pytorch/preprocessing_pytorch.py): bilinear samples without averaging, of floats. Pixels differ measurably; a
checkpoint wants the one that it was trained with. LeRobot 0.4 filled pictures of 0..1 up with -1, as openpi does those
of -1..1: in the network's units its sides are at -3. B frames of H x W pixels, S the side of the square.
"""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from policies.contract import PolicyError
from policies.resampling import resize

Resize = Literal["pillow", "interpolate"]
BLACK, OF_LEROBOT_04 = -1.0, -3.0
"""What pictures are filled up with, in the network's units."""


def pixel_values(frames: Tensor, size: int, way: Resize, sides: float = BLACK) -> Tensor:
    """uint8 [B, H, W, 3] to float32 [B, 3, S, S] in -1..1, filled up with `sides` where it is interpolated."""
    if frames.dtype != torch.uint8 or frames.dim() != 4 or frames.shape[-1] != 3:
        raise PolicyError(f"frames must be uint8 [B, H, W, 3], got {frames.dtype} {list(frames.shape)}")
    height, width = frames.shape[1:3]
    # The reference divides by the larger of the two ratios and cuts off what is behind the point.
    ratio = max(width / size, height / size)
    rows, columns = int(height / ratio), int(width / ratio)
    if way == "pillow":
        top, left = (size - rows) // 2, (size - columns) // 2
        square = frames.new_zeros(len(frames), size, size, 3)
        square[:, top : top + rows, left : left + columns] = resize(frames, rows, columns, "bilinear")
        return (square.float() / 255 * 2 - 1).permute(0, 3, 1, 2)
    pixels = (frames.float() / 255 * 2 - 1).permute(0, 3, 1, 2)
    pixels = functional.interpolate(pixels, (rows, columns), mode="bilinear", align_corners=False).clamp(-1, 1)
    above, beside = (size - rows) // 2, (size - columns) // 2
    return functional.pad(pixels, (beside, size - columns - beside, above, size - rows - above), value=sides)
