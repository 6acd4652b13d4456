"""The loader of demonstrations beside the learner: rows per second of each alone, and of the learner that is fed.

    embodied record tabletop_scripted --env.task tabletop/reach_red --out demos/red --episodes 100
    embodied record tabletop_scripted --env.task tabletop/reach_blue --out demos/blue --episodes 100
    OMP_NUM_THREADS=1 python benchmarks/sft_loader.py demos/red demos/blue --json benchmarks/results/sft_loader.json

The recordings are read as video, and as a copy with PNGs. All of a configuration is measured in one process, in turn,
`rounds` times: other programs then slow all of it alike. Figures are medians: rows per second, and rows per second of
CPU time of this process, which other programs hardly change. The learner alone repeats one minibatch.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import tyro
from PIL import Image

from embodied.config.files import load_config
from embodied.config.schema import Config
from embodied.demonstrations import Batch, Dataset, layout
from embodied.demonstrations.augmentation import Augmentation
from embodied.demonstrations.loader import Loader, Request
from embodied.training.imitator import Imitator
from embodied.training.sft import read_demonstrations
from embodied.workflows.run_spec import task_spec
from embodied_bench.settings import show_and_write
from sim_farm.workers.hosts import InProcess


@dataclass(frozen=True)
class Arguments:
    """Rows per second of loader, learner, and both together."""

    data: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Recordings with video."""
    configs: tuple[str, ...] = ("openvla_small", "pi0_small")
    augments: tuple[str, ...] = ("none", "openpi", "oft", "lerobot")
    workers: tuple[int, ...] = (0, 1, 2)
    """Loader processes; 0: threads."""
    seconds: float = 2.0
    """Length of a measurement."""
    rounds: int = 3
    json: Path | None = None
    """Write the result to this file."""


class Repeats(Loader):
    """Gives the first minibatch again and again."""

    def __init__(self, own: Loader) -> None:
        self._own = own
        self._first: list[tuple[Any, Batch]] = []

    def read(self, requests: Iterable[Any]) -> Generator[tuple[Any, Batch], None, None]:
        if not self._first:
            for request, batch in self._own.read(requests):
                self._first.append((request, batch))
                if request.last:
                    break
        while True:
            yield from self._first


def as_pictures(folder: Path, out: Path) -> Path:
    """A copy of a recording with PNGs in its parquet files."""
    dataset = Dataset(folder)
    shutil.copytree(folder, out, ignore=shutil.ignore_patterns("videos"))
    info = json.loads((out / layout.INFO).read_text())
    kinds = pa.struct({"bytes": pa.binary(), "path": pa.string()})
    begin = 0
    for path in sorted((out / "data").rglob("*.parquet")):
        table = pq.read_table(path)
        for camera, name in dataset.cameras.items():
            cells = []
            for picture in dataset.frames(camera, np.arange(begin, begin + len(table))):
                png = io.BytesIO()
                Image.fromarray(picture).save(png, "PNG")
                cells.append({"bytes": png.getvalue(), "path": None})
            table = table.append_column(name, pa.array(cells, kinds))
            info["features"][name] = {"dtype": "image", "shape": list(dataset.features[name].shape), "names": None}
        begin += len(table)
        pq.write_table(table, path)
    (out / layout.INFO).write_text(json.dumps(info))
    return out


def rate(name: str, batch: int, once: Callable[[], object], seconds: float) -> dict[str, float]:
    """Rows per second of repeating `once`, which takes a minibatch; the first time is not counted."""
    once()
    began_s, began_cpu_s, count = time.perf_counter(), time.process_time(), 0
    while (took_s := time.perf_counter() - began_s) < seconds:
        once()
        count += batch
    return {name: count / took_s, f"{name}_cpu": count / (time.process_time() - began_cpu_s)}


def measured(config: Config, arguments: Arguments) -> dict[str, Any]:
    """Rows per second of a configuration with its demonstrations, by augmentation and number of processes."""
    info = InProcess().describe(task_spec(config))
    demonstrations = read_demonstrations(config, info)
    imitator = Imitator(config, info, demonstrations)
    imitator.begin()
    spec, batch = imitator.policy.spec, min(config.sft.batch, len(demonstrations.train))
    repeats = Repeats(imitator._loader)

    def stepped(name: str, loader: Loader) -> dict[str, float]:
        imitator._loader, imitator._ahead = loader, None
        found = rate(name, batch, imitator.step, arguments.seconds)
        imitator._ahead = None
        return found

    def requests() -> Iterator[Request]:
        draw = np.random.default_rng(0)
        while True:
            rows = draw.permutation(demonstrations.train)[:batch]
            yield from (Request(rows[places], 0) for places in demonstrations.by_dataset(rows))

    def measure(augment: str, workers: int) -> dict[str, float]:
        augmentation = None if augment == "none" else Augmentation(augment, 0)
        with Loader(
            demonstrations, chunk=spec.predicted, cameras=spec.cameras, augmentation=augmentation, workers=workers
        ) as loader:
            own = stepped("fed", loader) | stepped("learner", repeats)
            with closing(loader.read(requests())) as found:  # type: ignore[type-var]
                pieces = len(demonstrations.datasets)
                return own | rate("loader", batch, lambda: [next(found) for _ in range(pieces)], arguments.seconds)

    result = {}
    for augment, workers in product(arguments.augments, arguments.workers):
        rounds = [measure(augment, workers) for _ in range(arguments.rounds)]
        result[f"{augment}, {f'{workers} processes' if workers else 'threads'}"] = {
            **{key: round(median(each[key] for each in rounds)) for key in rounds[0]},
            **{
                f"{which}_of_{than}": round(median(each[which] / each[than] for each in rounds), 2)
                for which, than in (("loader", "learner"), ("fed", "learner"), ("fed_cpu", "learner_cpu"))
            },
        }
        print(result, file=sys.stderr)
    return result


def main() -> None:
    arguments = tyro.cli(Arguments)
    found = {}
    with tempfile.TemporaryDirectory() as scratch:
        pictures = tuple(as_pictures(folder, Path(scratch) / folder.name) for folder in arguments.data)
        for (kind, data), name in product({"video": arguments.data, "png": pictures}.items(), arguments.configs):
            base = load_config(name)
            learned = {"data": data, "steps": 10**6, "holdout": 0.0}
            config = base.model_copy(update={"sft": base.sft.model_copy(update=learned)})
            found[f"{name}, {kind}"] = measured(config, arguments)
    show_and_write({"rows_per_s": found}, arguments.json)


if __name__ == "__main__":
    main()
