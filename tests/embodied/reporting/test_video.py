"""The tiled video, read back: its size and length, and what its tiles say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import imageio.v2 as imageio
import numpy as np
import pytest

from embodied.evaluation.films import EpisodeFrames, write_tiled
from tests.embodied.reporting.synthetic import episode

FPS = 10


def black(side: int) -> Any:
    return np.zeros((side, side, 3), np.uint8)


def read_back(path: Path) -> tuple[np.ndarray, dict[str, Any]]:
    reader: Any = imageio.get_reader(path)
    frames = np.stack([frame for frame in reader])
    meta = reader.get_meta_data()
    reader.close()
    return frames, meta


def band_colour(tile: np.ndarray) -> str:
    """The colour behind the outcome: that of the tile's bottom right corner."""
    red, green, blue = tile[-12:-8, -12:-8].reshape(-1, 3).mean(0)
    if abs(red - green) < 12:
        return "grey"
    return "green" if green > red else "red"


def tiles(frame: np.ndarray, rows: int, columns: int) -> list[np.ndarray]:
    return [tile for strip in np.array_split(frame, rows) for tile in np.array_split(strip, columns, axis=1)]


def test_the_video_plays_in_a_browser_and_lasts_as_long_as_its_longest_episode(tmp_path: Path) -> None:
    write_tiled(tmp_path / "v.mp4", [episode(9, True, "seed 0"), episode(23, False, "seed 1")], FPS)
    frames, meta = read_back(tmp_path / "v.mp4")
    assert len(frames) == 23 + FPS
    assert meta["codec"] == "h264" and meta["pix_fmt"].startswith("yuv420p") and meta["fps"] == FPS
    assert frames.shape[1] % 2 == 0 and frames.shape[2] % 2 == 0
    assert [file.name for file in tmp_path.iterdir()] == ["v.mp4"]


@pytest.mark.parametrize("side", [64, 84, 128, 256])
def test_small_frames_are_enlarged(tmp_path: Path, side: int) -> None:
    write_tiled(tmp_path / "v.mp4", [episode(3, True, "seed 0", side=side)], FPS)
    frames, _ = read_back(tmp_path / "v.mp4")
    assert frames.shape[2] >= 192 and frames.shape[1] > frames.shape[2] + 30


def test_failures_come_first_and_outcomes_show_at_the_end(tmp_path: Path) -> None:
    episodes = [episode(8, True, "seed 0"), episode(12, False, "seed 1"), episode(20, True, "seed 2")]
    write_tiled(tmp_path / "v.mp4", episodes, FPS)
    frames, _ = read_back(tmp_path / "v.mp4")
    colours = [[band_colour(tile) for tile in tiles(frame, 2, 2)[:3]] for frame in frames]
    assert colours[0] == ["grey", "grey", "grey"]
    assert colours[9] == ["grey", "green", "grey"]
    assert colours[13] == ["red", "green", "grey"]
    assert colours[-1] == ["red", "green", "green"]


def test_an_ended_episode_holds_its_last_frame(tmp_path: Path) -> None:
    write_tiled(tmp_path / "v.mp4", [episode(6, False, "seed 0"), episode(30, True, "seed 1")], FPS)
    frames, _ = read_back(tmp_path / "v.mp4")
    ended, last = (np.array_split(frames[index], 2, axis=1)[0].astype(int) for index in (6, -1))
    assert np.abs(ended - last).mean() < 2
    running, last = (np.array_split(frames[index], 2, axis=1)[1].astype(int) for index in (6, -1))
    assert np.abs(running - last).mean() > 2


def test_at_most_sixteen_episodes_are_shown(tmp_path: Path) -> None:
    episodes = [episode(3, n >= 2, f"seed {n}") for n in range(20)]
    write_tiled(tmp_path / "v.mp4", episodes, FPS)
    frames, _ = read_back(tmp_path / "v.mp4")
    colours = [band_colour(tile) for tile in tiles(frames[-1], 4, 4)]
    assert colours == ["red"] * 2 + ["green"] * 14


def test_a_long_instruction_does_not_leave_its_tile(tmp_path: Path) -> None:
    long = replace(episode(3, True, "a label that is too long for its place"), task="put the bowl on " * 20)
    write_tiled(tmp_path / "v.mp4", [long, episode(3, True, "seed 1")], FPS)
    frames, _ = read_back(tmp_path / "v.mp4")
    gap = frames[-1][220:, frames.shape[2] // 2 - 1 : frames.shape[2] // 2 + 1]
    assert gap.mean() < 60  # nothing bright is written between the tiles


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (EpisodeFrames("reach", [], True, "seed 7"), "'seed 7' of 'reach' has no frames"),
        (EpisodeFrames("reach", [black(8)[..., 0]], True, "seed 7"), "uint8"),
        (EpisodeFrames("reach", [black(8).astype(np.float32)], True, "seed 7"), "float32"),
        (EpisodeFrames("reach", [black(8), black(9)], True, "seed 7"), "one size"),
        (EpisodeFrames("reach", [black(8)], True, "seed 7", steps=(0, 5)), "2 step numbers"),
    ],
)
def test_broken_episodes_are_refused_by_name(tmp_path: Path, broken: EpisodeFrames, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        write_tiled(tmp_path / "v.mp4", [broken], FPS)
    assert not list(tmp_path.iterdir())


def test_no_episodes_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no episodes"):
        write_tiled(tmp_path / "v.mp4", [], FPS)
