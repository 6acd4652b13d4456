"""The folder of files that can be made again."""

from __future__ import annotations

import os
from pathlib import Path


def cache() -> Path:
    """The project's cache folder: `$XDG_CACHE_HOME/embodied`, usually `~/.cache/embodied`."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embodied"
