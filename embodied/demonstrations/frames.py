"""Frames of one camera at given rows: from encoded pictures in the data, or from video files."""

from __future__ import annotations

import io
import mmap
import os
import tempfile
import threading
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image, ImageOps

from embodied.demonstrations import layout, metadata
from embodied.demonstrations.data_files import BUFFER, DataFiles, RecordedEpisode, check_rows
from embodied.demonstrations.layout import DatasetError, Feature
from embodied.demonstrations.metadata import AGAIN, Metadata
from embodied.demonstrations.video import Frames, FrameTable, VideoReader, match_frames
from embodied.files import is_plain

Index = npt.NDArray[np.int64]

LARGEST_PICTURE = 2**26
"""Pixels."""
_OPEN_VIDEOS = 32
"""Video files of a camera that are kept open; opening one anew takes a millisecond."""
_TABLES = 2**22
"""Frames per camera whose offsets in their files are cached, 20 bytes each."""
_DEEP = ("I", "I;16", "I;16B", "I;16L", "I;16N", "F")
"""Pillow's modes of pictures with more than 8 bits of grey."""
KEPT_BYTES = 2**30
"""Limit of the encoded pictures from parquet that a process holds in memory, in bytes, over all its datasets."""
_PICTURES_AT_ONCE = 64
"""Rows of encoded pictures in memory while a row group is read."""
_BUFFER_OF_PICTURES = 2**26
"""Bytes of memory that are taken at once; what is not filled is not used."""


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


class Pictures:
    """Encoded pictures of one feature. Threads may share it.

    Parquet cannot read one row: a row group is unpacked as a whole. So each is unpacked once, when one of its
    rows is first read, and kept: in memory up to `KEPT_BYTES`, beyond that in a temporary file without a name (in
    TMPDIR), from which any picture is read alone.
    """

    _kept = 0
    """Bytes of encoded pictures that the process's datasets hold in memory."""

    def __init__(self, data: DataFiles, name: str) -> None:
        self._data, self._name = data, name
        self._source = np.full(len(data), -1, np.int64)
        """[places] which of the buffers holds each picture; -1: it was not unpacked, or the row has none."""
        self._begins, self._sizes = np.zeros(len(data), np.int64), np.zeros(len(data), np.int64)
        self._buffers: list[mmap.mmap | None] = [None]
        """Memory, but the first: that is the temporary file."""
        self._filled = 0
        """Bytes of the last buffer."""
        self._done: set[tuple[int, int]] = set()
        self._lock = threading.Lock()
        self._file: Any = None
        self._end = 0

    def at(self, rows: Index) -> Iterator[bytes]:
        """The encoded picture of each row. Raises `DatasetError` for one that has none."""
        places = self._data.places[rows]
        self._unpack(places)
        parts = (self._source[places], self._begins[places], self._sizes[places])
        for row, source, begin, size in zip(rows.tolist(), *(part.tolist() for part in parts), strict=True):
            if source < 0:
                raise DatasetError(f"{self._data.where(row)}: {self._name!r} has no picture; {AGAIN}")
            held = self._buffers[source]
            yield os.pread(self._file.fileno(), size, begin) if held is None else held[begin : begin + size]

    def first(self) -> bytes | None:
        """The first picture that lies in the files; None where there is none."""
        for file in self._data.files:
            for array in self._arrays(file.path, int((file.group_ends > 0).argmax()), 1):
                encoded, _ = self._encoded(file.path, array.slice(0, 1))
                return bytes(encoded) or None
        return None

    def _unpack(self, places: Index) -> None:
        """Unpack all row groups that hold some of the places."""
        numbers = np.searchsorted(self._data.ends, places, side="right")
        for number in np.unique(numbers).tolist():
            file = self._data.files[number]
            begin = int(self._data.ends[number]) - file.rows
            groups = np.searchsorted(file.group_ends, places[numbers == number] - begin, side="right")
            for group in np.unique(groups).tolist():
                if (number, group) not in self._done:
                    with self._lock:
                        if (number, group) not in self._done:
                            first = begin + (int(file.group_ends[group - 1]) if group else 0)
                            self._unpack_group(file.path, group, first, begin + int(file.group_ends[group]))
                            self._done.add((number, group))

    def _unpack_group(self, path: Path, group: int, first: int, end: int) -> None:
        """Unpack a row group, which holds the places `first` to `end`."""
        begin_of_group = first
        for array in self._arrays(path, group, _PICTURES_AT_ONCE):
            encoded, sizes = self._encoded(path, array)
            check_rows(path, min(first + len(sizes), end), first + len(sizes))
            source, begin = self._keep(path, encoded)
            rows = slice(first, first + len(sizes))
            self._sizes[rows] = sizes
            self._begins[rows] = begin + np.cumsum(sizes) - sizes
            self._source[rows] = np.where(sizes > 0, source, -1)
            first += len(sizes)
        check_rows(path, first - begin_of_group, end - begin_of_group)

    def _keep(self, path: Path, encoded: memoryview) -> tuple[int, int]:
        """Keep encoded pictures: the buffer, and where in it they begin."""
        size = len(encoded)
        if Pictures._kept + size <= KEPT_BYTES:
            if len(self._buffers) == 1 or self._filled + size > len(self._buffers[-1] or b""):
                # In large pages: the machine hands out memory in small ones more slowly than parquet is unpacked.
                memory = mmap.mmap(-1, max(size, _BUFFER_OF_PICTURES))
                with suppress(OSError):  # some kernels have none
                    memory.madvise(mmap.MADV_HUGEPAGE)
                self._buffers.append(memory)
                self._filled = 0
            last, begin = self._buffers[-1], self._filled
            assert last is not None
            last[begin : begin + size] = encoded
            self._filled += size
            Pictures._kept += size
            weakref.finalize(self, Pictures._give_back, size)
            return len(self._buffers) - 1, begin
        try:
            if self._file is None:
                self._file = tempfile.TemporaryFile(buffering=0)  # noqa: SIM115 (closed when the dataset is dropped)
            begin = self._end
            while encoded:
                written = os.pwrite(self._file.fileno(), encoded, self._end)
                self._end, encoded = self._end + written, encoded[written:]
        except OSError as error:
            raise DatasetError(
                f"the pictures of {path} cannot be unpacked into {tempfile.gettempdir()} ({error.strerror}): make room "
                "there, or name another folder by the environment's TMPDIR"
            ) from error
        return 0, begin

    @staticmethod
    def _give_back(size: int) -> None:
        Pictures._kept -= size

    def _arrays(self, path: Path, group: int, rows: int) -> Iterator[pa.Array]:
        """Yield the column of a row group in batches of rows."""
        with metadata.parquet_errors(path), pq.ParquetFile(path, buffer_size=BUFFER, pre_buffer=False) as file:
            for batch in file.iter_batches(rows, [group], [self._name], use_threads=False):
                if batch.schema.names.count(self._name) != 1:
                    raise DatasetError(f"{path} has not one column {self._name!r}, which {layout.INFO} names; {AGAIN}")
                yield layout.plain(batch.column(batch.schema.names.index(self._name)))

    def _encoded(self, path: Path, array: pa.Array) -> tuple[memoryview, npt.NDArray[np.int64]]:
        """The pictures of some rows, one after the other, and the size of each in bytes (0: there is none)."""
        if pa.types.is_struct(array.type):
            parts = zip(array.type, array.flatten(), strict=True)
            fields = {field.name: layout.plain(part) for field, part in parts}
            held, paths = fields.get("bytes"), fields.get("path")
        elif pa.types.is_string(array.type) or pa.types.is_large_string(array.type):
            held, paths = None, array
        else:
            held, paths = array, None
        if held is not None and pa.types.is_null(held.type):
            held = None
        if held is not None and not (pa.types.is_binary(held.type) or pa.types.is_large_binary(held.type)):
            raise DatasetError(
                f"{path}: {self._name!r} is of {array.type}, and encoded pictures are needed (bytes, or a struct of "
                f"bytes and path); {AGAIN}"
            )
        if held is not None and not held.null_count and len(held):
            kind = np.int64 if pa.types.is_large_binary(held.type) else np.int32
            offsets = np.frombuffer(held.buffers()[1], kind)[held.offset : held.offset + len(held) + 1].astype(np.int64)
            data = memoryview(held.buffers()[2] or b"")[int(offsets[0]) : int(offsets[-1])]
            return data, np.diff(offsets)
        bytes_of, names = ([None] * len(array) if part is None else part.to_pylist() for part in (held, paths))
        pictures = [
            self._beside(path, name) if encoded is None else encoded
            for encoded, name in zip(bytes_of, names, strict=True)
        ]
        return memoryview(b"".join(pictures)), np.array([len(picture) for picture in pictures], np.int64)

    def _beside(self, path: Path, relative: Any) -> bytes:
        """The picture in a separate file, which the data name by its path below the dataset's folder."""
        if not isinstance(relative, str) or not relative:
            return b""
        if Path(relative).is_absolute() or ".." in Path(relative).parts or not is_plain(relative):
            raise DatasetError(
                f"{path}: {self._name!r} names the picture {relative[:200]!a}, which leads out of the dataset's folder"
            )
        try:
            return (self._data.folder / relative).read_bytes()
        except OSError as error:
            raise DatasetError(
                f"{path}: {self._name!r} names the picture {relative[:200]!a}, which cannot be read "
                f"({error.strerror}); {AGAIN}"
            ) from error


class VideoFrames:
    """Frames of a camera in video files. A file's frames are compared with all rows that refer to it before one of
    them is used (`match_frames`)."""

    def __init__(
        self, meta: Metadata, data: DataFiles, episodes: Sequence[RecordedEpisode], name: str, feature: Feature
    ) -> None:
        self._meta, self._data, self._episodes = meta, data, episodes
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
            found.setdefault(self._meta.video_path(episode.index, self._name), []).append(episode)
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
        begins_s = {episode.begin: self._meta.begin_s(episode.index, self._name) for episode in episodes}
        in_order = sorted(episodes, key=lambda episode: begins_s[episode.begin])
        rows = [np.arange(episode.begin, episode.end) for episode in in_order]
        seconds = [begins_s[int(part[0])] + self._times(part) for part in rows]
        joined = np.concatenate(rows)
        match = match_frames(table, np.concatenate(seconds), self._data.episode[joined], self._meta.info.fps)
        with self._lock:
            self._frame_of[joined] = match.numbers
            if match.odd is not None:
                self.odd.setdefault(match.odd, {})[path] = match.extent

    def _times(self, rows: Index) -> npt.NDArray[np.float64]:
        """Seconds since the episode's begin, as its rows say; where they say nothing, by count."""
        if self._data.timestamp is not None:
            return self._data.timestamp[rows]
        return np.arange(len(rows)) / self._meta.info.fps

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
    stated = feature.picture[:2]
    if (height, width) != stated:
        raise DatasetError(
            f"{where} has pictures of {height} x {width}, and {layout.INFO} says {stated[0]} x {stated[1]}: mend the "
            "shape there if the pictures are right"
        )
