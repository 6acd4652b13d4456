"""Frames of one camera at given rows: from encoded pictures in the data, or from video files.

Both have `at(rows)`, which yields a frame uint8 [H, W, 3] for each of the rows, which do not fall. Threads may share
them.
"""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from embodied.demonstrations import layout
from embodied.demonstrations.data_files import DataFiles, Pictures
from embodied.demonstrations.episodes import RecordedEpisode
from embodied.demonstrations.layout import DatasetError, Feature
from embodied.demonstrations.metadata import AGAIN, Metadata
from embodied.demonstrations.video import Frames, FrameTable, VideoReader, match_frames

Index = npt.NDArray[np.int64]

LARGEST_PICTURE = 2**26
"""Pixels."""
_OPEN_VIDEOS = 32
"""Video files of a camera held open; opening one anew takes a millisecond."""
_TABLES = 2**22
"""Frames of a camera of which it is remembered where in their files they are, 20 bytes each."""
_DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
"""Pillow's modes of pictures with more than 8 bits of grey."""


class PictureFrames:
    """Frames of a camera whose pictures lie encoded in the data."""

    def __init__(self, data: DataFiles, name: str, feature: Feature) -> None:
        self._data, self._name, self._feature = data, name, feature
        self._pictures = Pictures(data, name)

    def at(self, rows: Index) -> Iterator[Frames]:
        for row, encoded in zip(rows.tolist(), self._pictures.at(rows), strict=True):
            yield self._decoded(f"{self._data.where(row)}: {self._name!r}", encoded)

    def depth(self) -> str | None:
        """Why the first picture is no RGB picture; None if it is one, or cannot be read at all."""
        try:
            first = self._pictures.first()
            mode = Image.open(io.BytesIO(first)).mode if first is not None else ""
        except Exception:  # reading the frames raises it again, by row
            return None
        return f"its pictures have more than 8 bits of grey ({mode})" if mode in _DEEP else None

    def _decoded(self, where: str, encoded: bytes) -> Frames:
        """uint8 [H, W, 3] of a picture, turned as its camera says."""
        try:
            with Image.open(io.BytesIO(encoded)) as picture:
                if picture.width * picture.height > LARGEST_PICTURE:
                    raise DatasetError(f"{where} has a picture of {picture.height} x {picture.width}: too large")
                if picture.mode in _DEEP:
                    raise DatasetError(
                        f"{where} has a picture with more than 8 bits of grey ({picture.mode}): a depth map, not RGB"
                    )
                picture.load()
                upright = ImageOps.exif_transpose(picture)
                _check_size(where, self._feature, upright.height, upright.width)
                return np.asarray(upright.convert("RGB"))
        except DatasetError:
            raise
        except Exception as error:  # Pillow's decoders raise all kinds
            raise DatasetError(f"{where} has a picture that is none ({str(error)[:300]}); {AGAIN}") from error


class VideoFrames:
    """Frames of a camera in video files. A file's frames are compared with all rows that refer to it before one of
    them is used (`match_frames`)."""

    def __init__(
        self, said: Metadata, data: DataFiles, episodes: Sequence[RecordedEpisode], name: str, feature: Feature
    ) -> None:
        self._said, self._data, self._episodes = said, data, episodes
        self._name, self._feature = name, feature
        self._begins = np.array([episode.begin for episode in episodes], np.int64)
        self._frame_of = np.full(len(data), -1, np.int64)
        """[rows] which frame of its file belongs to each row; -1: the file was not opened."""
        self._open = OpenVideos()
        self._lock = threading.Lock()
        self.odd: dict[str, dict[Path, str]] = {}
        """Sentences about files whose frames deviate from their rows, with the file and the deviation."""

    @cached_property
    def files(self) -> dict[Path, list[RecordedEpisode]]:
        """The video files, and the episodes whose frames each holds."""
        found: dict[Path, list[RecordedEpisode]] = {}
        for episode in self._episodes:
            found.setdefault(self._said.video_path(episode.index, self._name), []).append(episode)
        return found

    @cached_property
    def _paths(self) -> list[Path]:
        """[episodes] the file of each."""
        of = {episode.begin: path for path, episodes in self.files.items() for episode in episodes}
        return [of[episode.begin] for episode in self._episodes]

    def at(self, rows: Index) -> Iterator[Frames]:
        numbers = np.searchsorted(self._begins, rows, side="right") - 1
        paths = [self._paths[number] for number in numbers.tolist()]
        begin = 0
        while begin < len(rows):
            path = paths[begin]
            end = next((n for n in range(begin, len(rows)) if paths[n] != path), len(rows))
            self.compare(path)
            with self._reader(path) as video:
                # Episodes of a file need not lie there in their order.
                wanted = self._frame_of[rows[begin:end]]
                order = np.argsort(wanted, kind="stable")
                frames = dict(zip(order.tolist(), video.frames(wanted[order].tolist()), strict=True))
            yield from (frames[place] for place in range(end - begin))
            begin = end

    def compare(self, path: Path) -> None:
        """Find the frame of each row that refers to a file, if that was not done."""
        episodes = self.files[path]
        if self._frame_of[episodes[0].begin] >= 0:
            return
        with self._reader(path) as video:
            table = video.table
        begins_s = {episode.begin: self._said.begin_s(episode.index, self._name) for episode in episodes}
        in_order = sorted(episodes, key=lambda episode: begins_s[episode.begin])
        rows = [np.arange(episode.begin, episode.end) for episode in in_order]
        seconds = [begins_s[int(part[0])] + self._times(part) for part in rows]
        joined = np.concatenate(rows)
        match = match_frames(table, np.concatenate(seconds), self._data.episode[joined], self._said.info.fps)
        with self._lock:
            self._frame_of[joined] = match.numbers
            if match.odd is not None:
                self.odd.setdefault(match.odd, {})[path] = match.said

    def _times(self, rows: Index) -> npt.NDArray[np.float64]:
        """Seconds since the episode's begin, as its rows say; where they say nothing, by count."""
        if self._data.timestamp is not None:
            return self._data.timestamp[rows]
        return np.arange(len(rows)) / self._said.info.fps

    @contextmanager
    def _reader(self, path: Path) -> Iterator[VideoReader]:
        with self._open.reader(path) as video:
            _check_size(str(path), self._feature, video.height, video.width)
            yield video


class OpenVideos:
    """Video files that are open, for several threads: each has a reader to itself while it decodes."""

    def __init__(self) -> None:
        self._free: list[tuple[Path, VideoReader]] = []
        self._tables: dict[Path, FrameTable] = {}
        self._frames = 0
        self._lock = threading.Lock()

    @contextmanager
    def reader(self, path: Path) -> Iterator[VideoReader]:
        with self._lock:
            place = next((n for n, (held, _) in enumerate(self._free) if held == path), None)
            video = self._free.pop(place)[1] if place is not None else None
            table = self._tables.get(path)
        if video is None:
            video = VideoReader(path, table)
        try:
            yield video
        except BaseException:
            video.close()
            raise
        with self._lock:
            self._remember(path, video.table)
            self._free.append((path, video))
            old = self._free.pop(0)[1] if len(self._free) > _OPEN_VIDEOS else None
        if old is not None:
            old.close()

    def _remember(self, path: Path, table: FrameTable) -> None:
        if path not in self._tables:
            self._tables[path] = table
            self._frames += len(table)
            while self._frames > _TABLES and len(self._tables) > 1:
                self._frames -= len(self._tables.pop(next(iter(self._tables))))


def _check_size(where: str, feature: Feature, height: int, width: int) -> None:
    """Raise `DatasetError` unless a picture is as large as `info.json` says."""
    said = feature.picture[:2]
    if (height, width) != said:
        raise DatasetError(
            f"{where} has pictures of {height} x {width}, and {layout.INFO} says {said[0]} x {said[1]}: mend the shape "
            "there if the pictures are right"
        )
