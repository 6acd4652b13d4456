"""Memory and speed of reading random minibatches of a large dataset, beside a small one.

    python benchmarks/data.py --json benchmarks/results/data.json

Datasets of 200 and of 20,000 frames of 256 x 256 are written in LeRobot's layout: PNGs in parquet, with row groups as
LeRobot and `datasets` write them (an episode, 100 rows, a file of about 100 MB), and video. Each is read in a process
of its own: the same number of random minibatches, read ahead by threads as `embodied sft` reads them. Small and large
are read in turn, `rounds` times; the ratio is of the medians. Memory is the most that the process ever held,
interpreter and libraries included.
"""

from __future__ import annotations

import io
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from PIL import Image

from embodied.demonstrations import Dataset, layout
from embodied.demonstrations.data_files import read_ahead
from embodied.demonstrations.layout import Feature
from embodied.demonstrations.video import VideoWriter
from embodied_bench.settings import show_and_write

Kind = Literal["png, a row group per episode", "png, row groups of 100", "png, a row group per file", "video"]
SIZE, FPS, EPISODE, PICTURES = 256, 10, 200, 64
FILE_ROWS = 2_000
"""Rows of a parquet file, about 100 MB."""
KINDS: tuple[Kind, ...] = (
    *("png, a row group per episode", "png, row groups of 100", "png, a row group per file"),
    "video",
)  # fmt: skip


@dataclass(frozen=True)
class Data:
    """Reading random minibatches."""

    frames: tuple[int, int] = (200, 20_000)
    batch: int = 64
    minibatches: int = 300
    rounds: int = 3
    kinds: tuple[Kind, ...] = KINDS
    folder: Path | None = None
    """Keep the datasets in this folder, for another measurement; without it they are removed."""
    measure: Path | None = None
    """Read this dataset and print what was measured: a process of the benchmark."""
    json: Path | None = None
    """Write the result to this file."""


def pictures() -> np.ndarray:
    """uint8 [PICTURES, SIZE, SIZE, 3]: shades with some noise, whose PNGs are as large as those of camera pictures."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:SIZE, :SIZE]
    shades = np.stack([(x + y) / 4, x / 2, y / 2], -1)
    shift = np.arange(PICTURES)[:, None, None, None]
    noise = rng.random((PICTURES, SIZE, SIZE, 3)) < 0.15
    return np.clip(shades + shift + noise, 0, 255).astype(np.uint8)


def write(folder: Path, frames: int, kind: Kind) -> None:
    """A dataset of version 3.0 with one camera."""
    camera = layout.IMAGES + "front"
    video = kind == "video"
    features = {
        layout.PROPRIO: Feature("float32", (8,)),
        layout.ACTION: Feature("float32", (7,)),
        "timestamp": Feature("float32", (1,)),
        **{name: Feature("int64", (1,)) for name in ("frame_index", "episode_index", "index", "task_index")},
    }
    index = np.arange(frames)
    columns: dict[str, np.ndarray] = {
        layout.PROPRIO: np.random.default_rng(1).random((frames, 8), np.float32),
        layout.ACTION: np.random.default_rng(2).random((frames, 7), np.float32),
        "timestamp": (index % EPISODE / FPS).astype(np.float32),
        "frame_index": index % EPISODE,
        "episode_index": index // EPISODE,
        "index": index,
        "task_index": np.zeros(frames, np.int64),
    }
    schema = layout.data_schema(features)
    table = pa.table([layout.to_arrow(columns[field.name], field) for field in schema], schema=schema)
    if not video:
        encoded = []
        for picture in pictures():
            png = io.BytesIO()
            Image.fromarray(picture).save(png, "PNG")
            encoded.append(png.getvalue())
        # A number after its end makes each picture another one, as those of a camera are.
        cells = [encoded[row % PICTURES] + row.to_bytes(4, "big") for row in range(frames)]
        kinds = pa.struct({"bytes": pa.binary(), "path": pa.string()})
        structs = pa.StructArray.from_arrays(
            [pa.array(cells, pa.binary()), pa.array([f"frame-{row:06d}.png" for row in range(frames)])],
            fields=list(kinds),
        )
        table = table.append_column(camera, structs)
    group = {"png, a row group per episode": EPISODE, "png, row groups of 100": 100}.get(kind, FILE_ROWS)
    for file, begin in enumerate(range(0, frames, FILE_ROWS)):
        path = folder / layout.DATA_PATH.format(chunk_index=0, file_index=file)
        path.parent.mkdir(parents=True, exist_ok=True)
        pq.write_table(table.slice(begin, FILE_ROWS), path, row_group_size=group)
    if video:
        path = folder / layout.VIDEO_PATH.format(video_key=camera, chunk_index=0, file_index=0)
        writer = VideoWriter(path, FPS, SIZE, SIZE)
        shown = pictures()
        for row in range(frames):
            writer.write(shown[row % PICTURES][None])
        writer.close()
    described = {
        **{name: layout.feature_json(feature, FPS) for name, feature in features.items()},
        camera: {"dtype": "video" if video else "image", "shape": [SIZE, SIZE, 3], "names": None},
    }
    episodes = [
        {
            "episode_index": number, "tasks": ["move"], "length": EPISODE,
            "dataset_from_index": number * EPISODE, "dataset_to_index": (number + 1) * EPISODE,
            "data/chunk_index": 0, "data/file_index": number * EPISODE // FILE_ROWS,
            f"videos/{camera}/chunk_index": 0, f"videos/{camera}/file_index": 0,
            f"videos/{camera}/from_timestamp": number * EPISODE / FPS,
        }
        for number in range(frames // EPISODE)
    ]  # fmt: skip
    path = folder / layout.EPISODES_PATH.format(chunk_index=0, file_index=0)
    path.parent.mkdir(parents=True)
    pq.write_table(pa.Table.from_pylist(episodes), path)
    pq.write_table(layout.tasks_table(["move"]), folder / layout.TASKS)
    info = {"codebase_version": "v3.0", "fps": FPS, "total_frames": frames, "features": described}
    (folder / layout.INFO).write_text(json.dumps(info))


def measure(folder: Path, batch: int, minibatches: int) -> dict[str, float]:
    """Read random minibatches in this process."""
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    dataset = Dataset(folder)
    opened_s = time.perf_counter()
    rng = np.random.default_rng(0)
    keys = [rng.integers(0, len(dataset), batch) for _ in range(minibatches)]
    first_s = 0.0
    for done in read_ahead(lambda rows: dataset.batch(rows, chunk=8), keys):
        assert done.frames["front"].shape == (batch, SIZE, SIZE, 3)
        first_s = first_s or time.perf_counter() - opened_s
    seconds = time.perf_counter() - opened_s
    return {
        "opening_s": opened_s - began_s,
        "first_minibatch_s": first_s,
        "samples_per_s": batch * minibatches / seconds,
        "samples_per_cpu_s": batch * minibatches / (time.process_time() - began_cpu_s),
        "peak_mb": _peak_mb(),
    }


def _peak_mb() -> float:
    """The most memory that this process held; `getrusage` would begin with what its parent held."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("VmHWM:"))) / 1024


def _measured(folder: Path, settings: Data) -> dict[str, float]:
    """`measure` in a process of its own."""
    command = [sys.executable, __file__, "--measure", str(folder), "--batch", str(settings.batch)]
    command += ["--minibatches", str(settings.minibatches)]
    found: dict[str, float] = json.loads(subprocess.run(command, check=True, stdout=subprocess.PIPE).stdout)
    return found


def main(settings: Data) -> None:
    if settings.measure is not None:
        print(json.dumps(measure(settings.measure, settings.batch, settings.minibatches)))
        return
    with tempfile.TemporaryDirectory() as scratch:
        found: dict[str, Any] = {}
        for kind in settings.kinds:
            folders = []
            for frames in settings.frames:
                name = f"{kind.replace(', ', '_').replace(' ', '_')}_{frames}"
                folders.append((settings.folder or Path(scratch)) / name)
                if not (folders[-1] / layout.INFO).exists():
                    write(folders[-1], frames, kind)
            runs = [[_measured(folder, settings) for folder in folders] for _ in range(settings.rounds)]
            sizes = [sum(path.stat().st_size for path in each.rglob("*") if path.is_file()) for each in folders]
            small, large = (
                {key: median(run[which][key] for run in runs) for key in runs[0][which]} for which in (0, 1)
            )
            found[kind] = {
                "small": {"folder_mb": sizes[0] / 2**20, **small},
                "large": {"folder_mb": sizes[1] / 2**20, **large},
                "samples_per_s_of_rounds": [[run[which]["samples_per_s"] for run in runs] for which in (0, 1)],
                "more_memory_mb": large["peak_mb"] - small["peak_mb"],
                "speed_ratio": large["samples_per_s"] / small["samples_per_s"],
                "speed_ratio_by_cpu_time": large["samples_per_cpu_s"] / small["samples_per_cpu_s"],
            }
            print(kind, json.dumps(found[kind]), file=sys.stderr, flush=True)
    figures = {**asdict(settings), "kinds": found, "folder": None, "measure": None, "json": None}
    show_and_write(figures, settings.json)


if __name__ == "__main__":
    main(tyro.cli(Data, description=__doc__))
