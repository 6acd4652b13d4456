"""Datasets as other people have them: copies of what LeRobot wrote, changed as their tools change them."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from PIL import Image

from tests.embodied.demonstrations.examples import FOREIGN

VIDEOS = "observation.images.top"
Change = Callable[[pa.Table], pa.Table]
LEROBOT = Path(__file__).parent / "lerobot"
"""Datasets that LeRobot's own tools made (make.py there)."""


def copy(folder: Path, source: Path = FOREIGN) -> Path:
    shutil.copytree(source, folder)
    return folder


def change_tables(folder: Path, change: Change) -> None:
    """Change every parquet file below the folder, or the one that it is."""
    for path in [folder] if folder.is_file() else sorted(folder.rglob("*.parquet")):
        table = pq.ParquetFile(path).read()
        pq.write_table(change(table), path)


def change_info(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "meta/info.json"
    info = json.loads(path.read_text())
    change(info)
    path.write_text(json.dumps(info))


def with_column(name: str, make: Callable[[list[Any]], pa.Array | list[Any]]) -> Change:
    """Replace a column by what is made of its values."""

    def change(table: pa.Table) -> pa.Table:
        made = make(table[name].to_pylist())
        column = made if isinstance(made, pa.Array) else pa.array(made)
        return table.set_column(table.column_names.index(name), name, column)

    return change


def without(*names: str) -> Change:
    return lambda table: table.drop_columns([name for name in names if name in table.column_names])


def encoded(picture: Image.Image, kind: str = "PNG") -> bytes:
    sink = io.BytesIO()
    picture.save(sink, kind)
    return sink.getvalue()


def with_pictures(pictures: Iterable[Image.Image], kind: str = "PNG") -> Change:
    """The still camera has these pictures in turn."""
    drawn = iter(pictures)
    return with_column(
        "observation.still", lambda cells: [{"bytes": encoded(next(drawn), kind), "path": "x.png"} for _ in cells]
    )


def grey(value: int, size: tuple[int, int] = (8, 8)) -> Image.Image:
    return Image.fromarray(np.full(size, value, np.uint8))
