"""The folder of files that can be made again."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path


def cache() -> Path:
    """The project's cache folder: `$XDG_CACHE_HOME/embodied`, usually `~/.cache/embodied`. Where that cannot be
    written, as in a home that is read-only, a folder of this user's among the temporary ones."""
    wanted = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "embodied"
    there = next(folder for folder in (wanted, *wanted.parents) if folder.exists())
    return wanted if os.access(there, os.W_OK | os.X_OK) else _temporary()


def _temporary() -> Path:
    """Raises `PermissionError` if somebody else has made the folder: its files would be theirs."""
    folder = Path(tempfile.gettempdir()) / f"embodied-cache-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    status = folder.lstat()
    if status.st_uid != os.getuid() or status.st_mode & 0o077 or folder.is_symlink():
        raise PermissionError(
            f"{folder} is not this user's alone: delete it, or set XDG_CACHE_HOME to a folder of yours"
        )
    return folder
