"""HDF5 recordings of other projects."""

from __future__ import annotations

from pathlib import Path


def kind_of(path: Path) -> str | None:
    return None
