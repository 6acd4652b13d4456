"""A recording that robomimic's own tool converted (recordings/README.md), replayed and imported."""

from __future__ import annotations

import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

from embodied.config.schema import RuntimeConfig
from embodied.demonstrations import Dataset, DatasetError
from embodied.errors import UserError
from embodied_importers.command import run
from embodied_importers.formats import ImportRequest, Observations
from embodied_importers.hdf5 import RobosuiteFile, kind_of
from embodied_importers.hdf5_importer import chosen

RECORDINGS = Path(__file__).parent / "recordings"
TASK = "libero/libero_spatial/0"


@pytest.fixture
def opened(tmp_path: Path) -> Callable[[str], Path]:
    def unpack(name: str) -> Path:
        path = tmp_path / f"{name}.hdf5"
        path.write_bytes(lzma.decompress((RECORDINGS / f"{name}.hdf5.xz").read_bytes()))
        return path

    return unpack


def imported(source: Path, out: Path, **options: Any) -> tuple[dict[str, Any], Dataset]:
    settings: dict[str, Any] = {"env": Observations(cameras=0), "runtime": RuntimeConfig(mode="inline"), **options}
    return run(ImportRequest(source, out=out, **settings)), Dataset(out)


def test_robomimics_recording_needs_its_task_named(opened: Callable[[str], Path], tmp_path: Path) -> None:
    source = opened("robomimic")
    assert kind_of(source) == "robomimic"
    with pytest.raises(DatasetError, match="names no .bddl file.*--task libero/SUITE/NUMBER"):
        imported(source, tmp_path / "out")
    file = RobosuiteFile(source, TASK)
    assert file.subsets == {"train": ("demo_2",), "valid": ()} and chosen(file, ("train",)) == ("demo_2",)
    recording = file.read("demo_2")
    with h5py.File(source) as original:
        np.testing.assert_array_equal(recording.states["state"], original["data/demo_2/states"][1:])
        np.testing.assert_array_equal(recording.start["state"], original["data/demo_2/states"][0])
    with pytest.raises(UserError, match=r"the task's \d+: it is a recording of another task or robot"):
        imported(source, tmp_path / "out", task="libero/libero_goal/0")


@pytest.mark.slow
def test_it_comes_out_as_recorded(opened: Callable[[str], Path], tmp_path: Path) -> None:
    """It was recorded on another processor, and drifts on some: there recorded states take the place of those."""
    source = opened("robomimic")
    result, dataset = imported(source, tmp_path / "out", task=TASK, drift="correct")
    assert result["reproduced"] == 1 and result["largest_deviation"] > 0
    assert (result["corrected_states"] > 0) == (result["largest_deviation"] > 1e-2)
    assert result["format"] == "robomimic's demonstrations" and dataset.column("next.success")[-1]


@pytest.mark.slow
def test_a_drifting_recording_is_left_out_or_goes_on_from_recorded_states(
    opened: Callable[[str], Path], tmp_path: Path
) -> None:
    source, tolerance = opened("robomimic"), 1e-12
    with pytest.raises(UserError, match=r"a state is .* from the recorded one.*--drift correct"):
        imported(source, tmp_path / "left_out", task=TASK, tolerance=tolerance)
    result, dataset = imported(source, tmp_path / "out", task=TASK, tolerance=tolerance, drift="correct")
    steps = len(dataset)
    assert result["reproduced"] == 1 and steps // 2 < result["corrected_states"] <= steps
    assert tolerance < result["largest_deviation"] < 1e-3, "one env step from a recorded state leads to the next one"
    with pytest.raises(UserError, match="leave out --drop-idle"):
        imported(source, tmp_path / "idle", task=TASK, drop_idle=True, drift="correct")
