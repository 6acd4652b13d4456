"""RLDS datasets that TensorFlow Datasets wrote (rlds/make.py names its version): read as it does, and imported."""

from __future__ import annotations

import io
import json
import os
import shutil
import struct
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
from PIL import Image
from tensorboard.compat.tensorflow_stub.pywrap_tensorflow import crc32c as slow_crc32c

from embodied import cli
from embodied.demonstrations import Dataset, DatasetError
from embodied.demonstrations.layout import IMPORT
from embodied.errors import UserError
from embodied_importers.command import Arguments, run
from embodied_importers.formats import moving
from embodied_importers.rlds import RLDS, _masked, crc32c, records
from tests.fuzzing import mutation
from tests.fuzzing.folders import Damaged
from tests.fuzzing.law import few_or_many, holds

HERE = Path(__file__).parent / "rlds"
LIBERO, ARM = HERE / "libero_tiny_no_noops", HERE / "arm"
FIRST = "1.0.0/libero_tiny_no_noops-train.tfrecord-00000-of-00002"
JPEG_ERROR = 6
"""Of 255: TensorFlow decodes JPEG with another, faster transform than Pillow."""


def expected(name: str) -> Any:
    return np.load(HERE / f"expected/{name}.npz")


def imported(source: Path, out: Path, **options: Any) -> tuple[dict[str, Any], Dataset]:
    return run(Arguments(source, out=out, **options)), Dataset(out)


def framed(data: bytes) -> bytes:
    length = struct.pack("<Q", len(data))
    return b"".join((length, *(struct.pack("<I", _masked(crc32c(part))) for part in (length,)), data,
                     struct.pack("<I", _masked(crc32c(data)))))  # fmt: skip


def test_the_checksum_is_castagnolis() -> None:
    assert crc32c(b"123456789") == 0xE3069283  # RFC 3720's check value
    for size in (*range(6), 255, 256, 257, 511, 4096, 10_001):
        data = Random(size).randbytes(size)
        assert crc32c(data) == slow_crc32c(data), size


@pytest.mark.parametrize("name", ["libero_tiny_no_noops", "arm"])
def test_every_step_is_as_tensorflow_reads_it(name: str) -> None:
    dataset, rows = RLDS(HERE / name), expected(name)
    compared = 0
    place: dict[str, int] = {}
    for record in dataset.episodes():
        number = place[record.split] = place.get(record.split, -1) + 1
        for feature, found in record.values.items():
            wanted = rows[f"{record.split}/{number}/{feature}"]
            if isinstance(found, np.ndarray):
                assert found.dtype == wanted.dtype
                np.testing.assert_array_equal(found, wanted)
            elif dataset.steps[feature].kind == "text":
                assert [item.decode() for item in found] == wanted.tolist()
            else:
                pictures = np.stack([np.asarray(Image.open(io.BytesIO(item))) for item in found]).astype(int)
                assert np.abs(pictures - wanted).max() <= (JPEG_ERROR if name.startswith("libero") else 0)
            compared += 1
    assert compared == len(rows) - sum("depth" in key or "distance" in key for key in rows)


def test_liberos_layout_becomes_a_dataset_with_the_pictures_bytes(tmp_path: Path) -> None:
    result, dataset = imported(LIBERO, tmp_path / "out")
    rows, source = expected("libero_tiny_no_noops"), list(RLDS(LIBERO).episodes())
    assert (result["episodes"], result["env_steps"], dataset.fps) == (3, 15, 20)
    batch = dataset.batch(range(15))
    np.testing.assert_array_equal(batch.actions[:, 0], np.concatenate([rows[f"train/{i}/action"] for i in range(3)]))
    assert batch.proprio is not None
    np.testing.assert_array_equal(batch.proprio[4:10], rows["train/1/observation/state"])
    assert batch.instruction[3:5] == ("pick up the black bowl", "open the drawer")
    assert set(batch.frames) == {"image", "wrist_image"}
    cells = pq.ParquetFile(tmp_path / "out/data/chunk-000/file-000.parquet").read()["observation.images.image"]
    assert [cell["bytes"] for cell in cells.to_pylist()[4:10]] == source[1].values["observation/image"]
    assert [episode.row["success"] for episode in dataset.episodes] == [True, False, True]
    assert dataset.column("next.success").nonzero()[0].tolist() == [3, 14]
    assert dataset.column("next.done").nonzero()[0].tolist() == [3, 9, 14]
    assert [e.row["episode_metadata/file_path"] for e in dataset.episodes] == [f"demo_{i}.hdf5" for i in range(3)]
    about = json.loads((tmp_path / "out" / IMPORT).read_text())
    assert dataset.conventions["orientation"] == "rotated" and about["features_left_out"] == {}
    grey = np.stack([np.asarray(Image.open(io.BytesIO(f))) for r in source for f in r.values["observation/image"]])
    stats = json.loads((tmp_path / "out/meta/stats.json").read_text())["observation.images.image"]
    np.testing.assert_allclose(np.ravel(stats["mean"]), grey.reshape(-1, 3).mean(0) / 255)


def test_other_names_kinds_and_splits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result, dataset = imported(ARM, tmp_path / "out", fps=10)
    rows = expected("arm")
    assert dataset.info["splits"] == {"train": "0:2", "val": "2:3"}
    assert dataset.episodes[1].instructions == ("push 0", "push 1")
    batch = dataset.batch(range(15))
    assert batch.instruction[4:10] == ("push 0",) * 3 + ("push 1",) * 3
    np.testing.assert_array_equal(batch.actions[10:, 0], rows["val/0/action"].astype(np.float32))
    np.testing.assert_array_equal(batch.frames["raw"][10:], rows["val/0/observation/raw"])
    np.testing.assert_array_equal(batch.frames["rgb"][4:10], rows["train/1/observation/rgb"])
    np.testing.assert_array_equal(dataset.column("observation.force")[:4], rows["train/0/observation/force"])
    assert dataset.column("note")[:3].tolist() == ["é0", "é1", "é2"]
    assert sorted(result["features_left_out"]) == [f"observation/{name}" for name in ("depth", "distance", "points")]
    assert result["odd"]["the last action is zero"] == 3
    output = " ".join(capsys.readouterr().out.split())
    assert "left out: observation/depth" in output and "in 3 of 3 episodes the last action is zero" in output


def test_selected_solved_and_moving(tmp_path: Path) -> None:
    options: dict[str, Any] = {"only_successes": True, "drop_idle": True, "episodes": ("1-2",)}
    result, dataset = imported(LIBERO, tmp_path / "out", **options)
    # Episode 1 is not solved; of episode 2 step 2 does nothing, its last is solved.
    assert (result["episodes"], result["episodes_left_out"]["failed"], result["steps_dropped"]) == (1, 1, 2)
    kept = expected("libero_tiny_no_noops")["train/2/action"][[0, 1, 3, 4]]
    np.testing.assert_array_equal(dataset.batch(range(4)).actions[:, 0], kept)
    assert dataset.column("next.done").tolist() == [False, False, False, True]
    assert dataset.column("next.reward").sum() == 1
    with pytest.raises(UserError, match="no episode of .* is left of 1: 1 failed"):
        imported(LIBERO, tmp_path / "none", episodes=("1",), only_successes=True)
    assert not (tmp_path / "none").exists()


def test_idle_is_openvlas_filter() -> None:
    still, move = [0.0] * 6, [0.1] + [0.0] * 5
    actions = np.array([[*still, -1], [*move, -1], [*still, -1], [*still, 1], [*still, 1], [*move, 1]], np.float32)
    assert moving(actions).tolist() == [False, True, False, True, False, True]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({}, "arm/0.1.0: RLDS does not say how many steps a second .*--fps"),
        ({"fps": 0}, "--fps is of 1 to 1000"),
        ({"fps": 5, "action": ("world_vector",)}, "no vector of numbers 'world_vector'.*it has: 'action.*--action"),
        ({"fps": 5, "only_successes": True}, "no `reward`"),
        ({"fps": 5, "episodes": ("2-3",)}, "--episodes 2-3: the source has the episodes 0 to 2"),
        ({"fps": 5, "tolerance": 0.1}, "--tolerance is not for .*arm.*: --episodes, --drop-idle"),
    ],
)
def test_options_that_cannot_be(options: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        imported(ARM, tmp_path / "out", **options)


def test_parts_of_an_action_are_joined(tmp_path: Path) -> None:
    _, dataset = imported(ARM, tmp_path / "out", fps=5, action=("observation/packed", "action", "count"))
    rows = expected("arm")
    parts = [rows[f"train/0/{name}"].reshape(4, -1) for name in ("observation/packed", "action", "count")]
    np.testing.assert_array_equal(dataset.batch(range(4)).actions[:, 0], np.concatenate(parts, 1).astype(np.float32))
    assert "count" not in dataset.features


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    return Path(shutil.copytree(LIBERO, tmp_path / "libero"))


def rewrite(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def read(folder: Path) -> None:
    for _ in RLDS(folder).episodes():
        pass


def test_what_is_missing_cut_or_left_over_is_named(copy: Path) -> None:
    first, second = copy / FIRST, copy / FIRST.replace("0-of", "1-of")
    whole = first.read_bytes()
    first.write_bytes(whole[:-5])
    with pytest.raises(DatasetError, match="00000-of-00002: the record at byte .* the file ends before"):
        read(copy)
    damaged = bytearray(whole)
    damaged[2000] ^= 1
    first.write_bytes(damaged)
    with pytest.raises(DatasetError, match="another checksum"):
        read(copy)
    first.write_bytes(whole + whole)
    with pytest.raises(DatasetError, match=r"holds 4 records, and dataset_info.json says 2"):
        read(copy)
    first.write_bytes(framed(next(records(second))))
    with pytest.raises(DatasetError, match=r"holds 1 records, and dataset_info.json says 2"):
        read(copy)
    first.write_bytes(whole)
    shutil.copy(second, copy / "1.0.0/libero-train.tfrecord-00002-of-00003")
    with pytest.raises(DatasetError, match="libero-train.tfrecord-00002-of-00003 is not one of the shards"):
        read(copy)
    (copy / "1.0.0/libero-train.tfrecord-00002-of-00003").unlink()
    second.unlink()
    with pytest.raises(DatasetError, match="00001-of-00002 is missing"):
        read(copy)


def test_other_formats_and_several_datasets_are_refused_by_name(copy: Path) -> None:
    rewrite(copy / "1.0.0/dataset_info.json", fileFormat="array_record")
    with pytest.raises(DatasetError, match="'array_record', and tfrecord is read: .*convert_format"):
        read(copy)
    shutil.copytree(LIBERO / "1.0.0", copy / "1.1.0")
    with pytest.raises(UserError, match="holds 2 datasets: name one of them: 1.0.0, 1.1.0"):
        run(Arguments(copy, out=copy / "out"))


def test_the_command_line(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ["--out", str(out), "--episodes", "0", "2", "--json", str(tmp_path / "result.json")]
    assert cli.main(["import", str(LIBERO), *options]) == 0
    assert json.loads((tmp_path / "result.json").read_text())["episodes"] == len(Dataset(out).episodes) == 2
    assert cli.main(["import", str(LIBERO), *options]) == 2  # it is there already


def with_good_checksums(rng: Random, original: bytes) -> bytes:
    """Records whose contents are damaged and whose checksums are right."""
    found, at = [], 0
    while at < len(original):
        (length,) = struct.unpack("<Q", original[at : at + 8])
        found.append(original[at + 12 : at + 12 + length])
        at += length + 16
    place = rng.randrange(len(found))
    found[place] = mutation.content(rng, found[place])
    return b"".join(framed(data) for data in found)


@few_or_many(15)
@pytest.mark.parametrize("source", [LIBERO, ARM], ids=["libero", "arm"])
def test_damaged_rlds(source: Path, cases: range, tmp_path: Path) -> None:
    shards = {path.suffix: with_good_checksums for path in source.rglob("*.tfrecord*")}
    damaged = Damaged(source, tmp_path / "data", shards)

    def convert(folder: Path) -> None:
        out = tmp_path / "out"
        shutil.rmtree(out, ignore_errors=True)
        try:
            run(Arguments(folder, out=out, fps=5))
        finally:
            assert os.listdir(tmp_path) in (["data"], ["data", "out"], ["out", "data"])

    holds(cases, damaged, convert, (UserError,))
