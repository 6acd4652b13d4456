"""The parts of an observation: pictures are cameras, a text is the instruction, and everything else is the state."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from gymnasium import spaces
from PIL import Image

from sim_farm.contract import INSTRUCTION_BYTES, FarmError, Float32, UInt8

WHOLE = "observation"
"""Name of the camera whose picture is the whole observation."""
RENDER = "render"
"""Name of the camera that shows what the environment's `render` draws."""
SMALLEST = 8
"""Least height and width of a picture in pixels. A smaller grid is numbers: MiniGrid's view is 7 x 7 cells."""
CERTAIN = 32
"""Height and width in pixels from which on numbers that are bounded as pictures are, are one: smaller ones may be a
grid of codes, a map of heights or of odds."""
MOST_CODES = 15
"""Greatest number of a grid of codes. A picture goes beyond it."""
MOST_ARRANGED = 1000
"""Most numbers of an array of several axes that are taken as the state: more of them are a picture in disguise."""
EXCESS = 0.01
"""Share of a picture's range by which rounding may leave it."""
MOST_CHANNELS = 16
"""Most channels of a picture, frames of a stack included."""

Path = tuple[str | int, ...]


@dataclass(frozen=True)
class Picture:
    """A part of the observation that is a picture, or a stack of some."""

    path: Path
    shape: tuple[int, ...]
    order: tuple[int, ...]
    """Axes of the part in the order height, width, channels; a stack's frames come before its channels."""
    channels: int
    """Channels of one frame: 3, or 1 for shades of grey."""
    low: float
    high: float
    """Bounds of the part's numbers: black and white."""
    whole: bool
    """True if they are whole ones."""
    names: tuple[str, ...]
    """Name of each frame's camera."""

    def frames(self, observation: Any) -> dict[str, UInt8]:
        """By camera uint8 [H, W, 3], in their own size. Raises `FarmError` for another shape, or numbers that are not
        those of its space."""
        part = self.part(observation)
        pixels = part
        if (self.low, self.high) != (0, 255) or part.dtype.kind == "f":
            pixels = np.rint((np.clip(part, self.low, self.high) - self.low) * (255 / (self.high - self.low)))
        height, width = self.size
        frames = pixels.transpose(self.order).reshape(height, width, len(self.names), self.channels)
        return {
            name: np.broadcast_to(frames[:, :, i], (height, width, 3)).astype(np.uint8)
            for i, name in enumerate(self.names)
        }

    @property
    def size(self) -> tuple[int, int]:
        """Height and width in pixels."""
        return self.shape[self.order[0]], self.shape[self.order[1]]

    def part(self, observation: Any) -> np.ndarray:
        """The part as it is, which is checked."""
        part = np.asarray(_at(observation, self.path))
        if part.shape != self.shape:
            raise FarmError(f"the picture {self.names[0]} has shape {list(part.shape)}, its space {list(self.shape)}")
        if part.dtype.kind not in ("iu" if self.whole else "iuf"):
            raise FarmError(
                f"the picture {self.names[0]} has numbers of {part.dtype}, and those of its space are "
                f"{'whole' if self.whole else 'floating-point'}: give them as its space says, or register it with "
                "gymnasium.wrappers.TransformObservation and the space that fits"
            )
        excess = EXCESS * (self.high - self.low)
        for value in (part.min(), part.max()):  # NaN if one of them is
            if not self.low - excess <= value <= self.high + excess:
                raise FarmError(
                    f"the picture {self.names[0]} has the number {value:g}, and its space is from {self.low:g} to "
                    f"{self.high:g}: give numbers within it, or register it with "
                    "gymnasium.wrappers.TransformObservation and the space that fits"
                )
        return part


@dataclass(frozen=True)
class Observation:
    """The parts of an observation space."""

    state: tuple[tuple[Path, spaces.Space[Any], int], ...]
    """Parts that are numbers, and how many each has once it is flat."""
    pictures: tuple[Picture, ...]
    text: Path | None
    """The part that is the instruction."""
    instruction_bytes: int
    grids: tuple[str, ...] = ()
    """Names of the parts of the state that are grids of codes, and could be pictures by their space."""

    @property
    def cameras(self) -> tuple[str, ...]:
        return tuple(name for picture in self.pictures for name in picture.names)

    @property
    def state_dim(self) -> int:
        return sum(size for *_, size in self.state)

    def state_of(self, observation: Any) -> Float32:
        """[S] all that is neither picture nor text, flattened as Gymnasium does, as one new array. Raises `FarmError`
        for a part that is missing, or of another size than its space."""
        parts = [np.zeros(0)]
        for path, space, size in self.state:
            value = _at(observation, path)
            _require_choices(path, space, value)
            flat: Any = spaces.flatten(space, value)
            part = np.ravel(flat)
            if len(part) != size:
                raise FarmError(f"the {_named(path)} has {len(part)} numbers, and its space {space} {size}")
            parts.append(part)
        return np.concatenate(parts, dtype=np.float64).astype(np.float32)

    def frames_of(self, observation: Any) -> dict[str, UInt8]:
        """By camera uint8 [H, W, 3], each in its own size."""
        return {name: frame for picture in self.pictures for name, frame in picture.frames(observation).items()}

    def text_of(self, observation: Any) -> str:
        """The text; empty where there is none."""
        return "" if self.text is None else str(_at(observation, self.text))


def read_space(space: spaces.Space[Any], codes: Collection[Path] = ()) -> Observation:
    """The parts of observations of the space. `codes` are parts that could be pictures, and are grids of codes: state.
    Raises `FarmError` for a part that is none of them."""
    state, pictures, texts = [], [], []
    for path, part in _leaves(space, ()):
        if path not in codes and (picture := _picture(path, part)) is not None:
            pictures.append(picture)
        elif path not in codes and isinstance(part, spaces.Box) and _is_too_large(part):
            raise FarmError(
                f"observations of {space}, whose {_named(path)} has {math.prod(part.shape)} numbers in "
                f"{list(part.shape)}, and is no picture by its bounds: register it with "
                "gymnasium.wrappers.TransformObservation that gives a picture (whole numbers from 0 to 255, or "
                "floating-point ones from 0 to 1), or, if it is the state, with gymnasium.wrappers.FlattenObservation"
            )
        elif isinstance(part, spaces.Text) or (not _is_flat(part) and isinstance(part.sample(), str)):
            texts.append((path, part))
        elif _is_flat(part):
            state.append((path, part, spaces.flatdim(part)))
        else:
            raise FarmError(
                f"observations of {space}, whose {_named(path)} has no fixed length: an observation is made of boxes, "
                "choices, pictures and one text, in dictionaries and tuples; register it with a wrapper that gives "
                "these (gymnasium.wrappers.TransformObservation, FilterObservation)"
            )
    if len(texts) > 1:
        raise FarmError(
            f"observations with {len(texts)} texts, {' and '.join(_named(path) for path, _ in texts)}, and an "
            "instruction is one: register it with gymnasium.wrappers.FilterObservation"
        )
    path, text = texts[0] if texts else (None, None)
    longest = 4 * text.max_length if isinstance(text, spaces.Text) else 0  # bytes of a character in UTF-8
    grids = tuple(_named(path) for path, *_ in state if path in codes)
    return Observation(tuple(state), tuple(pictures), path, max(INSTRUCTION_BYTES, longest), grids)


def resized(frame: UInt8, size: int) -> UInt8:
    """[size, size, 3]: the frame [H, W, 3], stretched to a square."""
    return np.array(Image.fromarray(frame).resize((size, size), Image.Resampling.BILINEAR))


def _leaves(space: spaces.Space[Any], path: Path) -> Iterator[tuple[Path, spaces.Space[Any]]]:
    """The parts that have no parts, in the order in which Gymnasium flattens them."""
    if isinstance(space, spaces.Dict):
        parts: Sequence[tuple[str | int, spaces.Space[Any]]] = list(space.spaces.items())
    elif isinstance(space, spaces.Tuple):
        parts = list(enumerate(space.spaces))
    else:
        yield path, space
        return
    for key, part in parts:
        yield from _leaves(part, (*path, key))


def _is_flat(space: spaces.Space[Any]) -> bool:
    try:
        return space.is_np_flattenable
    except NotImplementedError:  # a space of a package's own
        return False


def _picture(path: Path, space: spaces.Space[Any]) -> Picture | None:
    """The part as a picture: numbers from 0 to 255, or floating-point ones from 0 or -1 to 1, in [H, W], [H, W, C] or
    [C, H, W], or a stack [K, ...] of RGB or grey ones. None where it is none."""
    if not isinstance(space, spaces.Box) or not 2 <= len(space.shape) <= 4:
        return None
    found = _axes(space.shape)
    whole = not np.issubdtype(space.dtype, np.floating)
    low, high = float(space.low.flat[0]), float(space.high.flat[0])
    if found is None or np.any(space.low != low) or np.any(space.high != high):
        return None
    if (low, high) not in (((0, 255),) if whole else ((0, 255), (0, 1), (-1, 1))):
        return None
    order, count, channels = found
    plain = low == 0 and (high == 255 or (count == 1 and len(space.shape) > 2))
    if not plain and min(space.shape[axis] for axis in order[:2]) < CERTAIN:
        return None  # a map of heights or odds, for all that is known
    name = "_".join(map(str, path if path and isinstance(path[0], str) else (WHOLE, *path)))
    name += "_observation" if name == RENDER else ""
    names = (name,) if count == 1 else tuple(f"{name}_{i}" for i in range(count))
    return Picture(path, space.shape, order, channels, low, high, whole, names)


def _is_too_large(space: spaces.Box) -> bool:
    """True of an array that is read for a picture where it has no axes, or no bounds, of one."""
    board = not np.issubdtype(space.dtype, np.floating) and bool(np.all(np.abs(space.high) <= MOST_CODES))
    return len(space.shape) > 1 and math.prod(space.shape) > MOST_ARRANGED and not board


def _require_choices(path: Path, space: spaces.Space[Any], value: Any) -> None:
    """Raise `FarmError` for a choice that its space does not have."""
    if isinstance(space, spaces.Discrete | spaces.MultiDiscrete) and not _has(space, value):
        first = np.asarray(space.start)
        last = first + np.asarray(space.n if isinstance(space, spaces.Discrete) else space.nvec) - 1
        raise FarmError(
            f"the {_named(path)} is {value}, and the choices of its space {space} are whole numbers from "
            f"{first.tolist()} to {last.tolist()}: give one of them, or register it with the space that fits"
        )


def _has(space: spaces.Discrete | spaces.MultiDiscrete, value: Any) -> bool:
    """True of a choice of the space, of whatever whole type."""
    given = np.asarray(value)
    if given.dtype.kind not in "biu" or given.size != math.prod(space.shape or ()):
        return False
    if isinstance(space, spaces.Discrete):
        return bool(space.start <= given.item() < space.start + space.n)
    whole = given.reshape(space.shape).astype(np.int64)
    return bool(np.all((space.start <= whole) & (whole < space.start + space.nvec)))


def _axes(shape: tuple[int, ...]) -> tuple[tuple[int, ...], int, int] | None:
    """The axes in the order height, width, channels, the number of frames, and the channels of one. None where two axes
    cannot be a picture's height and width beside those of its channels."""
    axes = tuple(range(len(shape)))
    if len(shape) == 4:
        last = shape[3] in (1, 3)
        order = (1, 2, 0, 3) if last else (2, 3, 0, 1)
        frames, channels = shape[0], shape[order[3]]
        fits = channels in (1, 3) and frames * channels <= MOST_CHANNELS
    elif len(shape) == 3:
        order = axes if shape[2] <= shape[0] else (1, 2, 0)
        channels = 1 if shape[order[2]] % 3 else 3
        frames = shape[order[2]] // channels
        fits = shape[order[2]] <= MOST_CHANNELS
    else:
        order, frames, channels, fits = axes, 1, 1, True
    height, width = (shape[axis] for axis in order[:2])
    beside = max([shape[axis] for axis in order[2:]], default=1)
    fits = fits and min(height, width) >= max(SMALLEST, beside)
    return (order, frames, channels) if fits else None


def _at(observation: Any, path: Path) -> Any:
    for depth, key in enumerate(path, start=1):
        try:
            observation = observation[key]
        except (KeyError, IndexError, TypeError):
            raise FarmError(f"the {_named(path[:depth])} of its space is missing in the observation") from None
    return observation


def _named(path: Path) -> str:
    return f"part {'.'.join(map(str, path))}" if path else "observation"
