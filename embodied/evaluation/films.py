"""Films of evaluated episodes: selected episodes are replayed from their specs and actions, and tiled."""

from __future__ import annotations

import math
import os
import textwrap
from collections import defaultdict
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import imageio_ffmpeg
import numpy as np
import numpy.typing as npt
from PIL import Image, ImageDraw, ImageFont

from embodied.execution.session import Session
from embodied.reporting.live import steps
from embodied.rollout.evaluator import EpisodeOutcome
from sim_farm.client.episode_replay import FilmRequest
from sim_farm.contract import Float32, TaskSpec, UInt8

SIZE = 256
FRAMES = 60
"""Frames of a filmed episode, about; longer episodes are filmed every second, third, ... step."""


def stride(length: int) -> int:
    """Number of env steps between filmed frames, for an episode of that length."""
    return max(1, length // FRAMES)


def filmed_steps(length: int, every: int) -> list[int]:
    """The env steps after which the frames of `Replayer.film` were taken."""
    return [*range(0, length, every), length]


def worth_seeing(outcomes: Sequence[EpisodeOutcome], count: int) -> list[EpisodeOutcome]:
    """At most `count`: failures first, the first of each task before the second of any."""
    turns: dict[tuple[str, bool | None], int] = defaultdict(int)
    ranked: list[tuple[bool, int, int, EpisodeOutcome]] = []
    for place, outcome in enumerate(outcomes):
        turn = turns[outcome.task, outcome.success]
        turns[outcome.task, outcome.success] = turn + 1
        ranked.append((bool(outcome.success), turn, place, outcome))
    return [outcome for *_, outcome in sorted(ranked, key=lambda item: item[:3])[:count]]


def differing(
    first: Sequence[EpisodeOutcome], second: Sequence[EpisodeOutcome], count: int
) -> list[tuple[EpisodeOutcome, EpisodeOutcome]]:
    """At most `count` pairs of the same episode with different outcomes. Pairs come first that only the first side
    solved, and the first pair of each task before the second of any task."""
    pairs = {(mine.task, mine.trial): (mine, other) for mine, other in zip(first, second, strict=True)}
    # `worth_seeing` has failures first: here those of the second.
    unlike = [other for mine, other in pairs.values() if mine.success != other.success]
    return [pairs[other.task, other.trial] for other in worth_seeing(unlike, count)]


@dataclass(frozen=True)
class Shown:
    """An episode to film."""

    outcome: EpisodeOutcome
    actions: Float32
    """[length, A] as executed."""
    label: str
    """Text under the film beside task, steps and outcome."""
    task: TaskSpec
    """The task that is simulated, with the conventions of the actions."""


def write_film(path: Path, session: Session, episodes: Sequence[Shown], columns: int | None = None) -> None:
    """Replay the episodes, in as many simulators as cores, and tile them into one video, in rows of `columns` or with
    failures first. All are as fast as the longest, so that one can be compared with another."""
    # Episodes of a task next to each other: its scene is built once.
    ordered = sorted(range(len(episodes)), key=lambda place: episodes[place].outcome.task)
    every = stride(max((one.outcome.length for one in episodes), default=0))
    requests = [_request(episodes[place], every) for place in ordered]
    films: dict[int, list[UInt8]] = {}
    with steps("Filming", len(ordered)) as bar:
        drawn = session.runtime.host.films(requests, len(session.cores))
        for place, frames in zip(ordered, drawn, strict=True):
            films[place] = frames
            bar.advance()
    tiles = [
        EpisodeFrames(
            one.outcome.task, films[place], one.outcome.success, one.label, filmed_steps(one.outcome.length, every)
        )
        for place, one in enumerate(episodes)
    ]
    write_tiled(path, tiles, 15, columns)


def _request(shown: Shown, every: int) -> FilmRequest:
    task = replace(shown.task, cameras=1, image_size=SIZE, orientation="upright")
    return FilmRequest(task, shown.outcome.spec, shown.actions, every)


# --- Evaluation episodes side by side in one video that plays in a browser.


Frame = npt.NDArray[np.uint8]

GRID = 4
"""At most `GRID` x `GRID` episodes are shown."""
MIN_SIDE = 192
"""Frames are enlarged by a whole factor until their shorter side has this many pixels."""

_FONT_SIZE = 14
_LINE = 19
_MAX_TASK_LINES = 3
_GAP = 4
_BACKGROUND = (18, 20, 23)
_STRIP = (32, 36, 41)
_WHITE, _GREY = (236, 238, 240), (158, 166, 175)
_GREEN, _RED = (93, 222, 131), (255, 122, 112)
_CAPTIONS = {
    True: ("SUCCESS", _GREEN, (21, 74, 42)),
    False: ("FAILED", _RED, (102, 30, 27)),
    None: ("ENDED", _GREY, _STRIP),
}
"""By an episode's success: word, colour, and colour of the band behind the word."""


@dataclass(frozen=True)
class EpisodeFrames:
    """An episode to look at."""

    task: str
    """Instruction of the episode."""
    frames: Sequence[Frame]
    """uint8 [H, W, 3] each, all of one size, the first taken at reset."""
    success: bool | None
    """None: the task has no success."""
    label: str
    """Text that distinguishes this episode from others of the task, for example `seed 7`."""
    steps: Sequence[int] | None = None
    """The env step at which each frame was taken; None: one frame per env step, from 0."""


def write_tiled(
    path: str | os.PathLike[str], episodes: Sequence[EpisodeFrames], fps: float, columns: int | None = None
) -> None:
    """Write the episodes as one H.264 mp4: in rows of `columns`, as they come; None: at most 16 in a square, failures
    first.

    The video has as many frames as the longest episode shown, and then one second more in which the last
    outcome can be read. An episode that has ended holds its last frame. The file is complete or absent.
    """
    for episode in episodes:
        _check(episode)
    if not episodes:
        raise ValueError("no episodes: there is nothing to show")
    shown = episodes
    if columns is None:
        shown = sorted(episodes, key=lambda episode: bool(episode.success))[: GRID * GRID]
    wall = _Wall(shown, columns or math.ceil(math.sqrt(len(shown))))
    length = max(len(episode.frames) for episode in shown)

    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    aside = path.with_name(f".partial-{path.name}")
    encoding: dict[str, Any] = {"codec": "libx264", "pix_fmt_out": "yuv420p", "fps": fps}
    # faststart: the index stands at the front, so that a browser plays before it has read everything.
    output = ["-crf", "20", "-preset", "fast", "-movflags", "+faststart"]
    encoding |= {"macro_block_size": 2, "quality": None, "output_params": output}
    writer = imageio_ffmpeg.write_frames(str(aside), wall.size, **encoding)
    with closing(writer):
        writer.send(None)  # starts the encoder
        for index in range(length + max(1, round(fps))):
            writer.send(wall.at(index))
    aside.replace(path)


class _Wall:
    """The picture of all tiles. A tile is drawn anew only while its episode runs."""

    def __init__(self, episodes: Sequence[EpisodeFrames], columns: int) -> None:
        sizes = [_enlarged_size(episode.frames[0]) for episode in episodes]
        self._cell_w, self._cell_h = (max(size[axis] for size in sizes) for axis in (0, 1))
        self._captions = [_task_lines(episode.task, self._cell_w) for episode in episodes]
        self._strip_h = _LINE * (max(len(lines) for lines in self._captions) + 1) + 12
        self._episodes = episodes
        self._columns = columns
        rows = math.ceil(len(episodes) / self._columns)
        width = self._columns * (self._cell_w + _GAP) + _GAP
        height = rows * (self._cell_h + self._strip_h + _GAP) + _GAP
        # yuv420p halves the colour planes, so both sides must be even.
        self.size = (width + width % 2, height + height % 2)
        self._picture = Image.new("RGB", self.size, _BACKGROUND)

    def at(self, index: int) -> Frame:
        for tile, episode in enumerate(self._episodes):
            if index < len(episode.frames):
                self._draw(tile, index)
        return np.array(self._picture)

    def _draw(self, tile: int, index: int) -> None:
        episode = self._episodes[tile]
        row, column = divmod(tile, self._columns)
        x = _GAP + column * (self._cell_w + _GAP)
        y = _GAP + row * (self._cell_h + self._strip_h + _GAP)
        frame = Image.fromarray(episode.frames[index])
        frame = frame.resize(_enlarged_size(episode.frames[index]), Image.Resampling.NEAREST)
        offset = ((self._cell_w - frame.width) // 2, (self._cell_h - frame.height) // 2)
        self._picture.paste(frame, (x + offset[0], y + offset[1]))
        self._caption(tile, index, x, y + self._cell_h)

    def _caption(self, tile: int, index: int, x: int, y: int) -> None:
        episode, ended = self._episodes[tile], index == len(self._episodes[tile].frames) - 1
        outcome, colour, band = "running", _GREY, _STRIP
        if ended:
            outcome, colour, band = _CAPTIONS[episode.success]
        step = episode.steps[index] if episode.steps is not None else index

        draw = ImageDraw.Draw(self._picture)
        draw.rectangle((x, y, x + self._cell_w - 1, y + self._strip_h - 1), fill=_STRIP)
        for number, line in enumerate(self._captions[tile]):
            draw.text((x + 6, y + 5 + number * _LINE), line, _WHITE, font=_font())
        status_y = y + self._strip_h - _LINE - 3
        draw.rectangle((x, status_y - 2, x + self._cell_w - 1, y + self._strip_h - 1), fill=band)
        status = f"step {step}  {outcome}"
        draw.text((x + 6, status_y), status, colour, font=_font())
        room = self._cell_w - 12 - _font().getlength(status + "  ")
        label = _elided(episode.label, room)
        draw.text((x + self._cell_w - 6, status_y), label, _GREY, font=_font(), anchor="ra")


def _check(episode: EpisodeFrames) -> None:
    name = f"episode {episode.label!r} of {episode.task!r}"
    if not len(episode.frames):
        raise ValueError(f"{name} has no frames")
    shapes = {(frame.shape, str(frame.dtype)) for frame in episode.frames}
    (shape, dtype), *others = shapes
    if others or len(shape) != 3 or shape[2] != 3 or dtype != "uint8":
        raise ValueError(f"{name}: frames must all be uint8 [H, W, 3] of one size, got {sorted(shapes)}")
    if episode.steps is not None and len(episode.steps) != len(episode.frames):
        raise ValueError(f"{name}: {len(episode.frames)} frames but {len(episode.steps)} step numbers")


def _enlarged_size(frame: Frame) -> tuple[int, int]:
    height, width = frame.shape[:2]
    factor = max(1, math.ceil(MIN_SIDE / min(height, width)))
    return width * factor, height * factor


@cache
def _font() -> ImageFont.FreeTypeFont:
    font = ImageFont.load_default(size=_FONT_SIZE)  # Pillow's own: there is one on every machine
    if not isinstance(font, ImageFont.FreeTypeFont):
        raise RuntimeError("this Pillow was built without FreeType: `pip install --upgrade Pillow`")
    return font


def _task_lines(task: str, width: int) -> list[str]:
    """The task in at most `_MAX_TASK_LINES` lines that fit the width; what does not fit ends in `...`."""
    room = width - 12
    mean_letter = _font().getlength("the quick brown fox jumps over a lazy dog") / 41
    lines = textwrap.wrap(task, max(8, int(room / mean_letter))) or [""]
    if len(lines) > _MAX_TASK_LINES:
        lines = [*lines[: _MAX_TASK_LINES - 1], " ".join(lines[_MAX_TASK_LINES - 1 :])]
    return [_elided(line, room) for line in lines]


def _elided(text: str, room: float) -> str:
    if _font().getlength(text) <= room:
        return text
    while text and _font().getlength(text + "...") > room:
        text = text[:-1]
    return text.rstrip() + "..."
