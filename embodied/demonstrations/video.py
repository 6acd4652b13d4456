"""Frames to H.264 in mp4 and back, with PyAV."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
from av.video.stream import VideoStream

from embodied.demonstrations.layout import DatasetError

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


class VideoReader:
    """Frames of one video file by their time. Raises `DatasetError` that names the file if it is damaged."""

    def __init__(self, path: Path, fps: float) -> None:
        self._path, self._fps = path, fps
        try:
            # As what it is to be: left to guess, FFmpeg takes a text for a list of other files, or of addresses.
            self._container = av.open(str(path), format="mp4", metadata_errors="replace")
            self._stream: VideoStream = self._container.streams.video[0]
            if self._stream.codec_context is None:
                raise self._damaged("no decoder knows what is in it")
            # A seek drains the decoder's threads: reading here and there takes 0.5 ms a frame without, 1.3 ms with.
            self._stream.thread_type = "NONE"
            # As the file says; the stream's own follow what is decoded.
            self.height, self.width = self._stream.height, self._stream.width
        except FileNotFoundError as error:
            raise DatasetError(f"{path} is missing: the dataset is not complete; copy or record it again") from error
        except (av.FFmpegError, IndexError) as error:
            raise self._damaged(error) from error

    def at(self, times: Sequence[float]) -> list[Frames]:
        """Frames uint8 [H, W, 3] nearest to the times in seconds, which must not fall."""
        found: list[Frames] = []
        shown: Iterator[av.VideoFrame] = iter(())
        last = -float("inf")
        half = 0.5 / self._fps
        try:
            for time in times:
                if time - last < half:
                    found.append(found[-1])
                    continue
                if (time - last) * self._fps > _SKIP:
                    self._container.seek(self._ticks(time), stream=self._stream)
                    shown = self._container.decode(self._stream)
                frame = next((f for f in shown if f.time is not None and f.time > time - half), None)
                if frame is None or frame.time is None or frame.time > time + half:
                    raise DatasetError(f"{self._path} has no frame at {time:.3f} s: it is cut short, or of other data")
                if (frame.height, frame.width) != (self.height, self.width):
                    raise DatasetError(f"{self._path} has a frame of another size at {time:.3f} s: it is damaged")
                last = frame.time
                found.append(np.asarray(frame.to_ndarray(format="rgb24"), np.uint8))
        except av.FFmpegError as error:
            raise self._damaged(error) from error
        return found

    def close(self) -> None:
        self._container.close()

    def _ticks(self, time: float) -> int:
        # Half a frame late, lest rounding make it the frame before; seeking goes back to a whole frame.
        return int((time + 0.5 / self._fps) / (self._stream.time_base or Fraction(1)))

    def _damaged(self, error: object) -> DatasetError:
        return DatasetError(f"{self._path} is not a whole video ({error}); copy or record the dataset again")
