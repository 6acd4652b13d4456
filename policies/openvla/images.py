"""Camera frames to the pixel values of both vision towers: batched, on the frames' device.

B frames of H x W pixels, S the towers' image size. Frames are resized as Pillow does (`policies.resampling`): pixel
values equal those of the reference processor, which uses Pillow image by image on the CPU, to the last bit and on any
device.
`backend="pillow"` uses Pillow itself.

Sources: prismatic/extern/hf/processing_prismatic.py (resizing strategies, normalisation),
experiments/robot/openvla_utils.py (centre crop), openvla/openvla.
"""

from __future__ import annotations

import io
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, Field
from torch import Tensor
from torch.nn import functional

from policies.contract import PolicyError
from policies.files import checked, read_json
from policies.resampling import Filter, along, matrix, pad, pillow_resize, resize, weights_of

PREPROCESSOR = "preprocessor_config.json"
STRATEGIES = ("resize-naive", "letterbox", "resize-crop")
BACKENDS = ("device", "pillow")
CROP_AREA = 0.9
"""Share of the picture that the centre crop keeps: models trained on random crops of that area see it when acting."""
JPEG_QUALITY = 95
_Size = Annotated[int, Field(gt=0, le=4096)]
_Level = Annotated[int, Field(ge=0, le=255)]
_Number = Annotated[float, Field(ge=-1e6, le=1e6, allow_inf_nan=False)]
_Positive = Annotated[float, Field(ge=1e-6, le=1e6, allow_inf_nan=False)]


@dataclass(frozen=True)
class Preprocessing:
    """Steps from frames to pixel values; recorded with a policy."""

    size: int
    """S."""
    means: tuple[tuple[float, ...], ...]
    """Three numbers per vision tower."""
    stds: tuple[tuple[float, ...], ...]
    strategy: str = "resize-naive"
    """`resize-naive` changes the aspect ratio, `letterbox` pads to a square first, `resize-crop` crops one out."""
    fill: tuple[int, ...] = (127, 127, 127)
    """Colour of letterbox's padding: for both towers the last tower's mean."""
    environment_jpeg: bool = False
    """First write and read frames as JPEG, as the training data were stored: on the CPU, frame by frame."""
    environment_resize: bool = False
    """Then resize frames to S with Lanczos's filter, as the training data were, instead of by `strategy`."""
    center_crop: bool = False
    """Keep the middle `CROP_AREA` of the picture, and resize that to S."""
    backend: str = "device"

    def __call__(self, frames: Tensor, cropped: bool = False) -> Tensor:
        """uint8 [B, H, W, 3] to float32 [B, 6, S, S]: three channels normalised for each tower. Frames that are
        `cropped` already get no centre crop."""
        if frames.dtype != torch.uint8 or frames.dim() != 4 or frames.shape[-1] != 3:
            raise PolicyError(f"frames must be uint8 [B, H, W, 3], got {frames.dtype} {list(frames.shape)}")
        if self.environment_jpeg:
            frames = jpeg(frames)
        if self.environment_resize:
            frames = lanczos(frames, self.size)
        if self.center_crop and not cropped:
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
        return (pillow_resize if self.backend == "pillow" else resize)(frames, height, width, "bicubic")


Channels = tuple[_Number, _Number, _Number]


class _Tower(BaseModel):
    """Normalisation of a tower's pixels."""

    mean: Channels
    std: tuple[_Positive, _Positive, _Positive]


class _Said(BaseModel):
    """preprocessor_config.json, as far as it is read."""

    input_sizes: Annotated[list[tuple[_Size, _Size, _Size]], Field(min_length=2, max_length=2)]
    interpolations: list[Literal["bicubic"]] = ["bicubic"]
    means: list[Channels] = []
    stds: list[tuple[_Positive, _Positive, _Positive]] = []
    tvf_normalize_params: list[_Tower] | None = None
    tvf_letterbox_fill: tuple[_Level, _Level, _Level] | None = None
    image_resize_strategy: str


def read_preprocessing(folder: Path, *, strategy: str | None = None, **options: Any) -> Preprocessing:
    """The preprocessing of a checkpoint. `strategy` and `options`, fields of `Preprocessing`, replace what it says.

    The reference's processor sets every entry of the file as an attribute after it has computed its own, so
    `tvf_normalize_params`, where present, wins over `means` and `stds`. Published files hold bfloat16-rounded
    numbers there: those are what the models were run with.
    """
    path = folder / PREPROCESSOR
    said = checked(path, _Said, read_json(path))
    towers = said.tvf_normalize_params or [
        _Tower(mean=mean, std=std) for mean, std in zip(said.means, said.stds, strict=False)
    ]
    sizes = {size for shape in said.input_sizes for size in shape[1:]}
    if len(sizes) != 1 or len(towers) != 2 or not said.means:
        raise PolicyError(f"{path}: two towers with square images of one size are supported")
    strategy = strategy or said.image_resize_strategy
    fill = said.tvf_letterbox_fill or tuple(int(255 * mean) for mean in said.means[-1])
    for name, value, valid in (("strategy", strategy, STRATEGIES), ("backend", options.get("backend"), BACKENDS)):
        if value is not None and value not in valid:
            raise PolicyError(f"the image {name} must be one of {', '.join(valid)}, got {value!r}")
    means, stds = tuple(tower.mean for tower in towers), tuple(tower.std for tower in towers)
    return Preprocessing(sizes.pop(), means, stds, strategy, fill, **options)


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
        values = along(matrix(weights_of, frames.shape[axis], size, "lanczos", frames.device), values, axis)
    return values.round().clamp(0, 255).to(torch.uint8)


def center_crop(frames: Tensor, size: int) -> Tensor:
    """uint8 [B, H, W, 3] to float32 [B, size, size, 3] in 0..1: the middle `CROP_AREA`, bilinear without antialias.

    TensorFlow's `crop_and_resize`: output i samples at a (H - 1) + i (1 - 2 a) (H - 1) / (size - 1), with a the
    share that is cut off at each side.
    """
    values = frames.float() / 255
    for axis in (1, 2):
        values = along(matrix(_crop_weights, frames.shape[axis], size, "bilinear", frames.device), values, axis)
    return values.clamp(0, 1)


def _crop_weights(size: int, out: int, _: Filter) -> Tensor:
    """float64 [out, size]: bilinear samples of the middle part of an axis."""
    cut = (1 - math.sqrt(CROP_AREA)) / 2
    at = cut * (size - 1) + torch.arange(out, dtype=torch.float64) * (1 - 2 * cut) * (size - 1) / max(out - 1, 1)
    below = at.floor().long().clamp(0, size - 1)
    above = (below + 1).clamp(max=size - 1)
    share = (at - below).unsqueeze(1)
    return (1 - share) * functional.one_hot(below, size) + share * functional.one_hot(above, size)
