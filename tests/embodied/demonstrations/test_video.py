"""Frames of video files: whatever encoded them, and whichever rows they belong to."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest

from embodied.demonstrations import Dataset, DatasetError
from embodied.demonstrations.video import FrameTable, VideoReader, match_frames
from tests.embodied.demonstrations.examples import FOREIGN
from tests.embodied.demonstrations.foreign import LEROBOT, change_info, change_tables, copy, with_column

FRAMES = 40
SHADES = 20 + 5 * np.arange(FRAMES)
TOP = "observation.images.top"


def encode(
    path: Path,
    codec: str,
    options: dict[str, str],
    times: Sequence[int] | None = None,
    unit: Fraction = Fraction(1, 10),
) -> Path:
    """A video of `FRAMES` shades, shown at the `times` in units."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with _scheduled_as_before(), av.open(str(path), "w") as container:
        stream: Any = container.add_stream(codec, rate=10, options=options)
        stream.width = stream.height = 64
        stream.pix_fmt = {"h264_10bit.mp4": "yuv420p10le", "mjpeg.mp4": "yuvj420p"}.get(path.name, "yuv420p")
        stream.thread_count, stream.codec_context.time_base = 1, unit
        for number, shade in enumerate(SHADES):
            frame = av.VideoFrame.from_ndarray(np.full((64, 64, 3), shade, np.uint8), format="rgb24")
            frame.pts, frame.time_base = number if times is None else times[number], unit
            container.mux(stream.encode(frame))
        container.mux(stream.encode(None))
    return path


@contextmanager
def _scheduled_as_before() -> Iterator[None]:
    """SVT-AV1 makes the thread that opens it a real-time one if root runs it, and what that thread starts later is
    real-time too: the rest of a test run, with its browser and its Ray, would take the core from everything else."""
    policy, parameters = os.sched_getscheduler(0), os.sched_getparam(0)
    try:
        yield
    finally:
        os.sched_setscheduler(0, policy, parameters)


ENCODERS: dict[str, tuple[str, dict[str, str]]] = {
    "h264.mp4": ("libx264", {"bf": "3", "g": "12"}),
    "h264_open.mp4": ("libx264", {"x264-params": "open-gop=1:bframes=3:b-pyramid=normal:keyint=12"}),
    "h264_one_key.mp4": ("libx264", {"g": "250", "bf": "0"}),
    "hevc_open.mp4": ("libx265", {"x265-params": "log-level=none:keyint=12:bframes=4:open-gop=1"}),
    "av1.mp4": ("libsvtav1", {"g": "2", "crf": "30", "svtav1-params": "lp=1"}),
    "vp9.mp4": ("libvpx-vp9", {"g": "30", "lag-in-frames": "16", "auto-alt-ref": "1"}),
    "h264.mkv": ("libx264", {"bf": "3", "g": "12"}),
    "h264_10bit.mp4": ("libx264", {"g": "6"}),
    "mjpeg.mp4": ("mjpeg", {}),
}


@pytest.mark.parametrize("name", ENCODERS)
def test_any_encoders_frames_are_found_by_number(name: str, tmp_path: Path) -> None:
    scheduled = os.sched_getscheduler(0)
    video = VideoReader(encode(tmp_path / name, *ENCODERS[name]))
    assert os.sched_getscheduler(0) == scheduled
    assert np.allclose(video.table.seconds, np.arange(FRAMES) / 10, atol=2e-3)
    rng = np.random.default_rng(0)
    for count in (1, 3, 8, FRAMES):
        for _ in range(5):
            numbers = np.sort(rng.choice(FRAMES, count, replace=False))
            found = [frame.mean() for frame in video.frames(numbers.tolist())]
            assert np.abs(np.array(found) - SHADES[numbers]).max() < 2.4


@pytest.mark.parametrize("late", [0, 7])
def test_times_that_vary_and_begin_late_are_read(late: int, tmp_path: Path) -> None:
    times = late + np.cumsum(np.random.default_rng(0).integers(3, 9, FRAMES))
    path = encode(tmp_path / "v.mp4", "libx264", {"bf": "2"}, times.tolist(), Fraction(1, 60))
    video = VideoReader(path)
    # A container says when its first frame is shown in thousandths of a second.
    assert np.allclose(video.table.seconds, times / 60, atol=5e-4)
    found = [frame.mean() for frame in video.frames([0, 11, 39])]
    assert np.abs(np.array(found) - SHADES[[0, 11, 39]]).max() < 2.4


def test_a_depth_video_is_no_rgb(tmp_path: Path) -> None:
    with av.open(str(tmp_path / "depth.mkv"), "w") as container:
        stream = container.add_stream("ffv1", rate=10)
        stream.width = stream.height = 16
        stream.pix_fmt = "gray16le"
        container.mux(stream.encode(av.VideoFrame.from_ndarray(np.full((16, 16), 3000, np.uint16), format="gray16le")))
        container.mux(stream.encode(None))
    with pytest.raises(DatasetError, match=r"depth.mkv holds pictures of gray16le, more than 8 bits of grey"):
        VideoReader(tmp_path / "depth.mkv")


# --- frames to rows


def table(seconds: Any) -> FrameTable:
    ticks = np.round(np.asarray(seconds, np.float64) * 10**6).astype(np.int64)
    numbers = np.arange(len(ticks))
    return FrameTable(Path("file.mp4"), 1e-6, ticks, numbers.astype(np.int32), numbers)


EPISODES = np.repeat([3, 4, 5], [5, 8, 7])
TIMES = np.arange(20) / 10


def late(episode: int, frames: float) -> np.ndarray:
    return np.where(episode == EPISODES, TIMES + frames / 10, TIMES)


def test_frames_are_those_of_the_rows_times() -> None:
    match = match_frames(table(TIMES), TIMES + 5e-5, EPISODES, 10)
    assert match.numbers.tolist() == list(range(20)) and match.odd is None


@pytest.mark.parametrize("frames", [0.6, -0.6, 1.0, -1.0, 3.0])
def test_an_episode_that_begins_elsewhere_is_refused_by_file_episode_and_deviation(frames: float) -> None:
    """Both ways: its time is said too late, or its frames are shown too late."""
    for shown, timestamps in ((TIMES, late(4, frames)), (np.sort(late(4, frames)), TIMES)):
        if len(np.unique(np.round(shown, 6))) < 20:
            continue  # no file has two frames at one time
        with pytest.raises(DatasetError, match=r"file.mp4: .*(episode|episodes 3 and|episodes) 4") as refused:
            match_frames(table(shown), timestamps, EPISODES, 10)
        assert "the file has 20 frames, and 20 rows refer to it" in str(refused.value)


def test_the_deviation_is_reported() -> None:
    with pytest.raises(DatasetError, match=r"frames of episode 5 are up to 0.6000 s \(6.00 of a frame\) away"):
        match_frames(table(TIMES), late(5, 6), EPISODES, 10)


@pytest.mark.parametrize("jitter", [0.002, 0.04])
def test_times_that_drift_are_read_where_time_and_count_agree(jitter: float) -> None:
    off = np.random.default_rng(0).uniform(-jitter, jitter, 20)
    match = match_frames(table(TIMES), TIMES + off, EPISODES, 10)
    assert match.numbers.tolist() == list(range(20)) and match.odd is not None and "larger tolerance_s" in match.odd
    assert f"up to {np.abs(off).max():.4f} s" in match.extent


def test_times_that_drift_by_more_than_a_frame_are_refused() -> None:
    with pytest.raises(DatasetError, match=r"episode 5 are up to 0.0\d+ s"):
        match_frames(table(TIMES), TIMES * 1.03, EPISODES, 10)


def test_a_file_with_more_frames_than_rows_is_read_by_time() -> None:
    match = match_frames(table(np.arange(30) / 10), TIMES + 0.3, EPISODES, 10)
    assert match.numbers.tolist() == list(range(3, 23))
    assert match.odd is not None and match.extent == "the file has 30 frames, and 20 rows refer to it"
    assert match_frames(table(np.arange(30) / 10), TIMES + 0.32, EPISODES, 10).numbers[0] == 3
    with pytest.raises(DatasetError, match=r"0.40 of a frame"):
        match_frames(table(np.arange(30) / 10), TIMES + 0.34, EPISODES, 10)


def test_a_file_with_fewer_frames_than_rows_is_refused() -> None:
    with pytest.raises(DatasetError, match=r"episode 5 .*the file has 19 frames, and 20 rows refer to it"):
        match_frames(table(TIMES[:-1]), TIMES, EPISODES, 10)


def test_rows_that_would_share_a_frame_are_refused() -> None:
    """LeRobot reads these without a word: every episode is said to begin at 0."""
    timestamps = np.concatenate([np.arange(n) / 10 for n in (5, 8, 7)])
    with pytest.raises(DatasetError, match=r"the frame at 0.0000 s would belong to two rows, of episodes 3 and 4"):
        match_frames(table(TIMES), timestamps, EPISODES, 10)


def test_a_file_that_begins_late_as_a_whole_is_read_from_its_first_frame() -> None:
    match = match_frames(table(TIMES + 0.15), TIMES, EPISODES, 10)
    assert match.numbers.tolist() == list(range(20))
    assert match.odd == "the first frame is taken for time 0" and match.extent == "is shown at 0.1500 s"
    # Not where another episode begins elsewhere, or the file has other frames.
    with pytest.raises(DatasetError, match=r"episode 3 are up to 0.1500 s"):
        match_frames(table(np.sort(late(4, 0.6) + 0.15)), TIMES, EPISODES, 10)
    with pytest.raises(DatasetError, match="0.1500 s"):
        match_frames(table(np.arange(21) / 10 + 0.15), TIMES, EPISODES, 10)


def test_rows_may_leave_frames_out() -> None:
    """Of every second frame, by their timestamps."""
    match = match_frames(table(TIMES), TIMES[::2], EPISODES[::2], 10)
    assert match.numbers.tolist() == list(range(0, 20, 2)) and match.odd is not None


# --- in a dataset


def shifted(frames: float) -> Callable[[list[float]], list[float]]:
    return lambda values: [values[0], values[1] + frames / 10, *values[2:]]


@pytest.mark.parametrize("frames", [0.6, 1, -1])
def test_a_dataset_whose_frames_do_not_belong_to_its_rows_is_refused(frames: float, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    side = "observation.images.side"
    change_tables(folder / "meta/episodes", with_column(f"videos/{side}/from_timestamp", shifted(frames)))
    dataset = Dataset(folder)
    assert dataset.frames("top", [5]).shape == (1, 32, 48, 3)
    for rows in ([0], [5]):  # also for a row that would be right
        with pytest.raises(DatasetError, match=r"images.side/chunk-000/file-000.mp4: .*episodes? (1|0 and 1|1 and 2)"):
            dataset.frames("side", rows)
    with pytest.raises(DatasetError, match=r"images.side/chunk-000/file-000.mp4"):
        dataset.check_frames()


def test_a_stale_file_of_frames_is_refused(tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_tables(folder / "meta/episodes", with_column(f"videos/{TOP}/file_index", lambda v: [v[0]] * len(v)))
    with pytest.raises(DatasetError, match=r"images.top/chunk-000/file-000.mp4"):
        Dataset(folder).check_frames(["top"])


@pytest.mark.parametrize("key", ["file_index", "chunk_index", "from_timestamp"])
def test_a_camera_whose_place_is_not_given_is_refused_when_it_is_requested(key: str, tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_tables(folder / "meta/episodes", lambda table: table.drop_columns([f"videos/{TOP}/{key}"]))
    dataset = Dataset(folder)
    assert dataset.frames("side", [4]).shape == (1, 32, 32, 3)
    with pytest.raises(DatasetError, match="episode 0"):
        dataset.frames("top", [4])


def test_rows_without_timestamps_are_read_by_count(tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_tables(folder / "data", lambda table: table.drop_columns(["timestamp"]))
    assert np.array_equal(Dataset(folder).frames("top", range(15)), Dataset(FOREIGN).frames("top", range(15)))


def test_another_rate_than_that_of_the_rows_is_reported(tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_info(folder, lambda info: info.update(fps=30))
    dataset = Dataset(folder)
    assert np.array_equal(dataset.frames("top", range(15)), Dataset(FOREIGN).frames("top", range(15)))
    assert re.search(r"info.json says 30 frames per second, and the rows' `timestamp` runs at 10", dataset.notes[0])


def test_a_video_of_another_size_is_refused(tmp_path: Path) -> None:
    folder = copy(tmp_path / "data")
    change_info(folder, lambda info: info["features"][TOP].update(shape=[48, 32, 3]))
    with pytest.raises(DatasetError, match=r"file-000.mp4 has pictures of 32 x 48, and meta/info.json says 48 x 32"):
        Dataset(folder).frames("top", [0])


@pytest.mark.parametrize("frames", [-1, 1])
def test_a_file_per_episode_is_compared_too(frames: int, tmp_path: Path) -> None:
    """Version 2.1: with a frame too few it is refused, with one more it is read and said."""
    folder = copy(tmp_path / "data", LEROBOT / "v21")
    dataset = Dataset(folder)
    video, episode = sorted(folder.glob("videos/*/*/episode_000001.mp4"))[0], dataset.episodes[1]
    camera = video.parent.name.removeprefix("observation.images.")
    kept = list(dataset.frames(camera, range(episode.begin, episode.end)))
    kept = kept[:frames] if frames < 0 else [*kept, kept[-1]]
    with av.open(str(video), "w") as container:
        stream = container.add_stream("libx264", rate=int(dataset.fps))
        stream.height, stream.width = kept[0].shape[:2]
        stream.pix_fmt = "yuv420p"
        for picture in kept:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode(None))
    again = Dataset(folder)
    if frames < 0:
        with pytest.raises(DatasetError, match=r"episode_000001.mp4: .*episode 1.*"):
            again.check_frames()
    else:
        again.check_frames()
        assert len(again.notes) == 1 and "episode_000001.mp4: frames to which no row refers" in again.notes[0]


def test_whatever_lerobot_wrote_has_its_frames() -> None:
    for name in set(json.loads((LEROBOT / "written.json").read_text())) - {"ours_and_cut"}:
        dataset = Dataset(LEROBOT / name)
        dataset.check_frames()
        assert not any("no row refers" in note for note in dataset.notes), dataset.notes
