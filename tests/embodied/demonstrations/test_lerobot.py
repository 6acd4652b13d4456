"""What LeRobot wrote, converted, cut and merged is read as LeRobot's own loader reads it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from embodied.demonstrations import Dataset

FOLDER = Path(__file__).parent / "lerobot"
"""Datasets that make.py there wrote with LeRobot, and beside each its rows as LeRobot's loader returns them."""
WRITTEN = json.loads((FOLDER / "written.json").read_text())
Rows = dict[str, npt.NDArray[np.generic]]


def expected(name: str) -> Rows:
    with np.load(FOLDER / f"{name}.npz") as rows:
        return {key: rows[key] for key in rows.files}


def columns(rows: Rows, kind: str) -> Iterator[tuple[str, npt.NDArray[np.generic]]]:
    return ((key.removeprefix(f"{kind}/"), values) for key, values in rows.items() if key.startswith(f"{kind}/"))


@pytest.mark.parametrize("name", WRITTEN)
def test_numbers_and_episodes_are_those_of_lerobots_loader(name: str) -> None:
    dataset, rows = Dataset(FOLDER / name), expected(name)
    assert len(dataset) == len(rows["task"])
    for key, values in columns(rows, "column"):
        assert np.array_equal(dataset.column(key), values), key
    episodes = dataset.episode_of(np.arange(len(dataset)))
    assert np.array_equal(episodes, rows["column/episode_index"])
    for number, episode in enumerate(dataset.episodes):
        inside = rows["column/episode_index"] == number
        assert inside[episode.begin : episode.end].all() and inside.sum() == episode.length
        assert set(episode.instructions) == set(rows["task"][inside].tolist())


@pytest.mark.parametrize("name", WRITTEN)
def test_instructions_and_frames_are_those_of_lerobots_loader(name: str) -> None:
    dataset, rows = Dataset(FOLDER / name), expected(name)
    order = np.random.default_rng(0).permutation(len(dataset))
    batch = dataset.batch(order) if "column/action" in rows else None
    if batch is not None:
        assert batch.instruction == tuple(rows["task"][order].tolist())
        assert np.array_equal(batch.actions[:, 0], rows["column/action"][order])
    cameras = {feature: camera for camera, feature in dataset.cameras.items()}
    assert set(cameras) == {key for key, _ in columns(rows, "frames")}
    for feature, frames in columns(rows, "frames"):
        found = dataset.frames(cameras[feature], order)
        assert found.dtype == np.uint8 and np.array_equal(found, frames[order]), feature
