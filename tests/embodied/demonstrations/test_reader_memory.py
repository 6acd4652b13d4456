"""What of a dataset's pictures is kept in memory, and that it is what is decoded."""

from __future__ import annotations

import gc
from pathlib import Path

import numpy as np
import pytest

from embodied.demonstrations import Dataset, reader
from tests.embodied.test_cli import here


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("demos") / "red"
    status, said = here(
        "record", "tabletop_scripted", "--out", str(out), "--episodes", "3", "--runtime.mode", "inline",
        "--farm.groups", "1", "--env.num-envs", "2",
    )  # fmt: skip
    assert status == 0, said
    return out


def test_kept_pictures_are_the_decoded_ones_in_any_order(folder: Path) -> None:
    dataset = Dataset(folder)
    every = dataset._decoded(dataset.cameras["front"], np.arange(len(dataset)))
    random = np.random.default_rng(0)
    for _ in range(5):
        rows = random.integers(0, len(dataset), 7)
        assert np.array_equal(dataset.frames("front", rows), every[rows])
    _, known = dataset._kept[dataset.cameras["front"]]
    assert 0 < known.sum() <= len(dataset)


def test_no_more_is_kept_than_there_is_room_for_and_it_is_given_back(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gc.collect()
    before = Dataset._promised
    size = len(Dataset(folder)) * 56 * 56 * 3
    monkeypatch.setattr(reader, "KEPT_BYTES", before + size)
    first, second = Dataset(folder), Dataset(folder)
    frames = [dataset.frames("front", [0, 3]) for dataset in (first, second)]
    assert np.array_equal(frames[0], frames[1]) and first._kept and not second._kept
    assert Dataset._promised == before + size
    del first
    gc.collect()
    assert Dataset._promised == before
    second.frames("front", [0])
    assert second._kept
