"""Frames to H.264 in mp4 and back, with PyAV."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
from av.video.stream import VideoStream

from embodied.demonstrations.layout import DatasetError
from embodied.demonstrations.metadata import AGAIN, way_on

Frames = npt.NDArray[np.uint8]

ENCODING = {
    # The mean error of 64 x 64 pictures is 2.0 of 255 on tabletop/reach and 4.5 on PushCube-v1. Most of it (1.8 of
    # the 2.0) is from colour planes of half the size, which browsers insist on; this adds the rest.
    "crf": "18",
    "preset": "fast",
    "g": "2",  # every second frame stands alone, so that training can read any of them at the price of two
    "bf": "0",
}
_SKIP = 8
"""Frames that are rather decoded and dropped than jumped over."""
_MOST_FRAMES = 2**26
"""Limit of a file: hundreds of hours."""
_CONTAINERS = {".mkv": "matroska", ".webm": "matroska", ".avi": "avi"}
_LATEST_S = 1e9
"""Decades."""
TOLERANCE_S = 1e-4
"""Between a row's time and its frame's: LeRobot's default, `tolerance_s` of `LeRobotDataset`."""
_FRACTION = 0.25
"""Fraction of a frame's duration by which a frame may be off in a file that has more frames than rows."""


class VideoWriter:
    """One mp4 of `fps` frames per second; it can be read once it is closed."""

    def __init__(self, path: Path, fps: int, height: int, width: int) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.frames = self.bytes = 0
        self._fps = fps
        self._container = av.open(str(path), "w")
        self._stream = self._container.add_stream("libx264", rate=fps, options=ENCODING)
        self._stream.height, self._stream.width, self._stream.pix_fmt = height, width, "yuv420p"
        # The machine's number of cores must not show in the file.
        self._stream.thread_count = 1

    def write(self, frames: Frames) -> None:
        """Append frames uint8 [n, H, W, 3]."""
        for image in frames:
            frame = av.VideoFrame.from_ndarray(np.ascontiguousarray(image), format="rgb24")
            frame.pts, frame.time_base = self.frames, Fraction(1, self._fps)
            self._mux(frame)
            self.frames += 1

    def close(self) -> None:
        self._mux(None)
        self._container.close()

    def _mux(self, frame: av.VideoFrame | None) -> None:
        for packet in self._stream.encode(frame):
            self.bytes += packet.size
            self._container.mux(packet)


@dataclass(frozen=True)
class FrameTable:
    """The frames of a video file in the order in which they are shown, without having decoded any."""

    path: Path
    unit_s: float
    """Seconds of the stream's unit of time."""
    ticks: npt.NDArray[np.int64]
    """[n] when each is shown, in units."""
    keys: npt.NDArray[np.int32]
    """[n] for each frame, the number of the last one before it, or itself, that decoding can begin with; -1: none."""
    seeks: npt.NDArray[np.int64]
    """[n] decoding time of each frame, in units: what a file is searched by."""

    @property
    def seconds(self) -> npt.NDArray[np.float64]:
        """[n] when each is shown."""
        return self.ticks.astype(np.float64) * self.unit_s

    def __len__(self) -> int:
        return len(self.ticks)


class VideoReader:
    """Frames of one video file by their number. Not for several threads at once. Raises `DatasetError` that names the
    file if it is damaged, or if its pictures are no colours of 8 bits or a few more (a depth map).

    `table`: of another reader of the same file.
    """

    def __init__(self, path: Path, table: FrameTable | None = None) -> None:
        self._path = path
        try:
            # As what it is to be: left to guess, FFmpeg takes a text for a list of other files, or of addresses.
            kind = _CONTAINERS.get(path.suffix.lower(), "mp4")
            self._container = av.open(str(path), format=kind, metadata_errors="replace")
            self._stream: VideoStream = self._container.streams.video[0]
            if self._stream.codec_context is None:
                raise self._damaged("no decoder knows what is in it")
            # A seek drains the decoder's threads: reading here and there takes 0.5 ms a frame without, 1.3 ms with.
            self._stream.thread_type = "NONE"
            # As the file says; the stream's own follow what is decoded.
            self.height, self.width = self._stream.height, self._stream.width
            pixels = self._stream.codec_context.pix_fmt or ""
            if re.match(r"gray\w*\d\d", pixels):
                raise DatasetError(f"{path} holds pictures of {pixels}, more than 8 bits of grey: a depth map, not RGB")
            self.table = table if table is not None else self._read_table()
        except FileNotFoundError as error:
            raise DatasetError(f"{path} is missing: the dataset is not complete; {AGAIN}") from error
        except (av.FFmpegError, IndexError, OSError) as error:
            raise self._damaged(error) from error

    def frames(self, numbers: Sequence[int]) -> Iterator[Frames]:
        """Frames uint8 [H, W, 3] of the numbers, which must not fall."""
        table, reached = self.table, -1
        shown: Iterator[av.VideoFrame] = iter(())
        found = np.empty(0, np.uint8)
        try:
            for number in numbers:
                if number == reached:
                    yield found
                    continue
                key = int(table.keys[number])
                if key < 0:
                    raise self._damaged(f"nothing before {table.ticks[number] * table.unit_s:.3f} s stands alone")
                if reached < 0 or key > reached + _SKIP or reached > number:
                    self._container.seek(int(table.seeks[key]), stream=self._stream)
                    shown = self._container.decode(self._stream)
                wanted = int(table.ticks[number])
                frame = next((f for f in shown if f.pts is not None and f.pts >= wanted), None)
                if frame is None or frame.pts != wanted:
                    raise self._damaged(f"the frame at {table.ticks[number] * table.unit_s:.3f} s cannot be decoded")
                if (frame.height, frame.width) != (self.height, self.width):
                    raise self._damaged(f"the frame at {table.ticks[number] * table.unit_s:.3f} s is of another size")
                found, reached = np.asarray(frame.to_ndarray(format="rgb24"), np.uint8), number
                yield found
        except (av.FFmpegError, ValueError) as error:
            raise self._damaged(error) from error

    def close(self) -> None:
        self._container.close()

    def _read_table(self) -> FrameTable:
        found: list[tuple[int, int, bool]] = []
        for packet in self._container.demux(self._stream):
            if packet.pts is None or packet.is_discard:
                continue
            found.append((packet.pts, packet.pts if packet.dts is None else packet.dts, packet.is_keyframe))
            if len(found) > _MOST_FRAMES:
                raise self._damaged(f"more than {_MOST_FRAMES} frames")
        found.sort()
        unit_s = float(self._stream.time_base or Fraction(1))
        ticks, seeks = (np.array([each[column] for each in found], np.int64) for column in (0, 1))
        marks = np.array([each[2] for each in found], np.bool_)
        if not len(ticks) or (np.diff(ticks) == 0).any():
            raise self._damaged("its frames have no times of their own" if len(ticks) else "it has no frames")
        keys = np.maximum.accumulate(np.where(marks, np.arange(len(ticks)), -1))
        return FrameTable(self._path, unit_s, ticks, keys.astype(np.int32), seeks)

    def _damaged(self, error: object) -> DatasetError:
        return DatasetError(f"{self._path} is not a whole video ({error}); {way_on(self._path)}")


@dataclass(frozen=True)
class Match:
    """Frame of a video file for each row that refers to it."""

    numbers: npt.NDArray[np.int64]
    """[m] frame of each row."""
    odd: str | None
    """An oddity that was resolved; the same words for each kind."""
    extent: str
    """Extent of the oddity in this file."""


def match_frames(
    table: FrameTable, seconds: npt.NDArray[np.float64], episodes: npt.NDArray[np.int64], fps: float
) -> Match:
    """The frame that is shown at the time of each row, of all m rows that refer to the file.

    `seconds` [m]: when a row's frame is shown, by `from_timestamp` and the row's `timestamp`. `episodes` [m]: names of
    the rows' episodes, for messages; the rows of one lie together, in order. As LeRobot does, the nearest frame is
    taken if it is at most `TOLERANCE_S` away. Farther away it is taken where time and count agree: where the nearest
    frames are all frames of the file, in order, or, of a file that has more, the next frame for each next row of an
    episode and at most `_FRACTION` of a frame away. Raises `DatasetError` that names file, episode and deviation for
    all else, and where two rows have one frame, which LeRobot does not notice.
    """
    is_time = np.abs(seconds) < _LATEST_S  # not NaN either
    if not is_time.all():
        episode = int(episodes[int(is_time.argmin())])
        raise DatasetError(
            f"{table.path}: there is no time for frames of episode {episode} (`timestamp` of its rows, or "
            "from_timestamp in meta/episodes); copy or record the dataset again"
        )
    numbers, off = _nearest(table, seconds)
    odd, extent = None, ""
    # A single-precision number of that size is rounded by as much.
    allowed = TOLERANCE_S + np.spacing(np.float32(seconds.max()))
    if off.max() > allowed and abs(table.seconds[0]) > TOLERANCE_S and len(table) == len(seconds):
        shifted, now_off = _nearest(table, seconds + table.seconds[0])
        if now_off.max() <= allowed and (np.diff(np.sort(shifted)) == 1).all():
            numbers, off = shifted, now_off
            odd, extent = "the first frame is taken for time 0", f"is shown at {table.seconds[0]:.4f} s"
    counts = f"the file has {len(table)} frames, and {len(seconds)} rows refer to it"
    if off.max() > allowed:
        worst = int(off.argmax())
        late, episode = float(off[worst]), int(episodes[worst])
        far = f"{late:.4f} s ({late * fps:.2f} of a frame)"
        in_order = (np.diff(numbers)[np.diff(episodes) == 0] == 1).all()
        each_has_one = len(table) == len(seconds) and (numbers == np.arange(len(seconds))).all()
        if not each_has_one and (late * fps > _FRACTION or not in_order):
            raise DatasetError(
                f"{table.path}: the frames of episode {episode} are up to {far} away from the times of its rows: "
                f"frames and rows do not belong together, or from_timestamp in meta/episodes is wrong; {counts}. "
                f"LeRobot accepts {TOLERANCE_S} s. Delete the episode with LeRobot's "
                "delete_episodes, or record it again"
            )
        odd = (
            "frames are not shown at the times of their rows; each next row has the next frame, so they are taken in "
            "order, as LeRobot does with a larger tolerance_s"
        )
        extent = f"up to {far} in episode {episode}"
    order = np.argsort(numbers, kind="stable")
    twice = np.flatnonzero(np.diff(numbers[order]) == 0)
    if len(twice):
        first, second = (int(episodes[row]) for row in order[twice[0] : twice[0] + 2])
        raise DatasetError(
            f"{table.path}: the frame at {table.seconds[numbers[order[twice[0]]]]:.4f} s would belong to two rows, of "
            f"episodes {first} and {second}: from_timestamp in meta/episodes, or `timestamp` in the data, is wrong; "
            f"{counts}"
        )
    if odd is None and len(table) != len(seconds):
        odd, extent = "frames to which no row refers are not used", counts
    return Match(numbers, odd, extent)


def _nearest(
    table: FrameTable, seconds: npt.NDArray[np.float64]
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float64]]:
    """[m] number of the nearest frame, and its distance in seconds."""
    after = np.clip(np.searchsorted(table.seconds, seconds), 1, max(len(table) - 1, 1))
    after = np.minimum(after, len(table) - 1)
    before = np.maximum(after - 1, 0)
    is_before = np.abs(seconds - table.seconds[before]) <= np.abs(table.seconds[after] - seconds)
    numbers = np.where(is_before, before, after)
    return numbers, np.abs(table.seconds[numbers] - seconds)
