"""Damaged HDF5 recordings: refused by name, or replayed; no other error, no hang, no end of the process."""

from __future__ import annotations

import io
import lzma
import shutil
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from random import Random
from typing import Any

import h5py
import numpy as np
import pytest

from embodied.demonstrations.importer import moving
from embodied.demonstrations.recordings import open_recording
from embodied.demonstrations.sources import recognised
from embodied.errors import UserError
from sim_farm.contract import TaskSpec
from sim_farm.replay import Recording, Replayer
from tests import libero_assets
from tests.embodied.demonstrations.test_fuzzed_datasets import many
from tests.fuzzing import mutation
from tests.fuzzing.folders import Damaged
from tests.fuzzing.law import holds

libero_assets.require()

RECORDINGS = Path(__file__).parent / "recordings"
PUSH = TaskSpec("maniskill/PushCube-v1", "pd_ee_delta_pose", max_episode_steps=100_000)
VALUES: tuple[Any, ...] = (
    0, -1, 1e30, np.nan, "x", b"\xff", "é" * 1000, "{}", "[]", np.zeros(0), np.zeros((3, 0)), np.zeros((1, 1, 1)),
    np.ones((12, 7), np.float16), np.ones((13, 13), np.complex64), np.array(["demo_0", "demo_9"], "S"),
    h5py.Empty("f4"), h5py.SoftLink("/"), h5py.SoftLink("/nowhere"), h5py.ExternalLink("/etc/passwd", "/"),
    np.dtype("f4"),
)  # fmt: skip


def as_hdf5(rng: Random, original: bytes) -> bytes:
    """A whole HDF5 file with other members, arrays or attributes."""
    held = io.BytesIO(original)
    with h5py.File(held, "r+") as file:
        names: list[str] = []
        file.visit(names.append)
        for _ in range(rng.choice((1, 1, 2))):
            name = rng.choice(names)
            if name in file:
                _change(rng, file, name)
    return held.getvalue()


def _change(rng: Random, file: h5py.File, name: str) -> None:
    place, way = file[name], rng.randrange(6)
    if way == 0:
        del file[name]
    elif way == 1:
        file.move(name, f"{name}_")
    elif way == 2 and place.attrs:
        key = rng.choice(list(place.attrs))
        place.attrs[key] = rng.choice([value for value in VALUES[:9] if not isinstance(value, np.ndarray)])
    elif way <= 4 and isinstance(place, h5py.Dataset) and place.size:
        values = place[()]
        flat = values.reshape(-1)
        flat[rng.randrange(flat.size)] = rng.choice((0, 1, flat[0]))
        values = values[: rng.randrange(len(values) + 1)] if way == 4 and values.ndim else values
        del file[name]
        file[name] = values
    else:
        del file[name]
        file[name] = rng.choice(VALUES)


def read_all(path: Path, task: str | None = None) -> list[Recording]:
    recognised(path)
    source = open_recording(path, task)
    recordings = [source.read(name) for name in source.episodes]
    for recording in recordings:
        moving(recording.actions)
    return recordings


@pytest.fixture(scope="module")
def replayer() -> Iterator[Replayer]:
    with closing(Replayer(PUSH)) as replayer:
        yield replayer


@many(25)
def test_damaged_trajectories_are_refused_or_replayed(cases: range, tmp_path: Path, replayer: Replayer) -> None:
    kinds = {".h5": lambda rng, data: (as_hdf5 if rng.random() < 0.7 else mutation.content)(rng, data)}
    damaged = Damaged(RECORDINGS / "push_ee", tmp_path / "push", kinds)

    def follow(folder: Path) -> None:
        for recording in read_all(folder / "trajectory.h5")[:1]:
            if recording.actions.shape[1] == 7 and len(recording.actions) <= 12:
                assert replayer.follow(recording, 1e-3).why_not is not None

    holds(cases, damaged, follow, (UserError,))


@many(25)
@pytest.mark.parametrize(("name", "task"), [("dataset", None), ("robomimic", "libero/libero_spatial/0")])
def test_damaged_demonstrations_are_refused_or_read(cases: range, name: str, task: str | None, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "demo.hdf5").write_bytes(lzma.decompress((RECORDINGS / f"libero/{name}.hdf5.xz").read_bytes()))
    kinds = {".hdf5": lambda rng, data: (as_hdf5 if rng.random() < 0.7 else mutation.content)(rng, data)}
    damaged = Damaged(source, tmp_path / "damaged", kinds)
    shutil.rmtree(source)
    holds(cases, damaged, lambda folder: read_all(folder / "demo.hdf5", task), (UserError,))
