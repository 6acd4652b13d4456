"""Damaged recordings of other projects: refused by name, or read to the last episode without an error or a hang."""

from __future__ import annotations

import gzip
import io
import shutil
from pathlib import Path
from random import Random

import h5py
import numpy as np

from embodied.errors import UserError
from embodied_importers.formats import recognised
from embodied_importers.hdf5 import kind_of, open_recording
from sim_farm.contract import FarmError
from tests.fuzzing.folders import Damaged
from tests.fuzzing.law import few_or_many, holds

RECORDINGS = Path(__file__).parent / "recordings"


def as_hdf5(rng: Random, original: bytes) -> bytes:
    """A whole HDF5 file in which one member or attribute is missing, of another shape or type, or a link."""
    file = io.BytesIO(original)
    with h5py.File(file, "r+") as whole:
        places: list[str] = []
        whole.visit(places.append)
        place = rng.choice(places)
        parent, name = whole[place].parent, place.rpartition("/")[2]
        if len(parent[name].attrs) and rng.random() < 0.5:
            key = rng.choice(list(parent[name].attrs))
            parent[name].attrs[key] = rng.choice([3, "", "{", "[]", "{}", [1.0], "<a/>", h5py.Empty("f4")])
            return _closed(whole, file)
        values = parent[name][()] if isinstance(parent[name], h5py.Dataset) else np.zeros(3)
        del parent[name]
        change = rng.choice(["missing", "external", "soft", "shape", "type", "nan", "huge", "group"])
        if change == "external":
            parent[name] = h5py.ExternalLink("/etc/passwd", "/x")
        elif change == "soft":
            parent[name] = h5py.SoftLink(rng.choice(["/", "/" + place, "/nowhere"]))
        elif change == "shape":
            parent[name] = rng.choice([values[:0], values[None], values[:-1], values.ravel()])
        elif change == "type":
            parent[name] = rng.choice([np.array([b"x"] * 3), values.astype(np.int8), "text"])
        elif change == "nan":
            parent[name] = np.full(values.shape, rng.choice([np.nan, np.inf, 1e300]))
        elif change == "huge":
            parent.create_dataset(name, (2**40, 7), "f4", chunks=(1, 7))
        elif change == "group":
            parent.create_group(name)
        return _closed(whole, file)


def _closed(whole: h5py.File, file: io.BytesIO) -> bytes:
    whole.close()
    return file.getvalue()


def read_all(folder: Path) -> None:
    for path in folder.iterdir():
        if path.suffix != ".json":
            recognised(path)
            source = open_recording(path, None)
            assert kind_of(path) and source.task
            for name in source.episodes:
                recording = source.read(name)
                assert np.isfinite(recording.actions).all()


@few_or_many(15)
def test_damaged_recordings_of_maniskill(cases: range, tmp_path: Path) -> None:
    source = tmp_path / "whole"
    source.mkdir()
    for name in ("pushcube.h5", "pushcube.json"):
        shutil.copy(RECORDINGS / name, source)
    holds(cases, Damaged(source, tmp_path / "data", {".h5": as_hdf5}), read_all, (UserError, FarmError))


@few_or_many(7)
def test_damaged_recordings_of_libero(cases: range, tmp_path: Path) -> None:
    source = tmp_path / "whole"
    source.mkdir()
    (source / "demo.hdf5").write_bytes(gzip.decompress((RECORDINGS / "libero_spatial.hdf5.gz").read_bytes()))
    holds(cases, Damaged(source, tmp_path / "data", {".hdf5": as_hdf5}), read_all, (UserError, FarmError))
