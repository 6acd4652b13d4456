"""A folder's manifest: the sha256 of every file in it. A folder whose files are not exactly these is refused."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from embodied.errors import CheckpointError
from embodied.files import read_json, sync

MANIFEST = "manifest.json"
MOST_BYTES = 4 * 2**20
"""Of a manifest: tens of thousands of files."""
_DIGEST = re.compile("[0-9a-f]{64}")


def write(folder: Path) -> None:
    """Write the manifest of what is in the folder, and have all of it on the disk."""
    (folder / MANIFEST).write_text(json.dumps(_hashes(folder), indent=1))
    for path in (*folder.rglob("*"), folder):
        sync(path)


def verify(folder: Path) -> None:
    """Raise `CheckpointError` unless the files are there, are what was written, and there is nothing beside them."""
    expected = _read(folder)
    try:
        wrong = _unlisted(folder, expected) or _damaged(folder, expected)
    except OSError as error:
        raise CheckpointError(f"the checkpoint {folder} cannot be read ({error}); use an earlier one") from error
    if wrong:
        raise CheckpointError(f"the checkpoint {folder} is damaged: {wrong}; use an earlier one")


def _unlisted(folder: Path, expected: Mapping[str, str]) -> str:
    """Readers look at folders and at names that are there: none may be there that was not written."""
    folders = {str(parent) for name in expected for parent in PurePosixPath(name).parents}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if not (name in expected or name == MANIFEST or (name in folders and path.is_dir())):
            return f"{name} is not in its {MANIFEST}, so it was put there later"
    return ""


def _damaged(folder: Path, expected: Mapping[str, str]) -> str:
    for name, digest in expected.items():
        if not (folder / name).is_file():
            return f"{name} is missing"
        if _hash(folder / name) != digest:
            return f"{name} is not what was written"
    return ""


def _read(folder: Path) -> Mapping[str, str]:
    """What the manifest lists: files below the folder."""
    try:
        listed = read_json(folder / MANIFEST, MOST_BYTES)
        if not isinstance(listed, dict) or not listed:
            raise ValueError("it lists no files")
        for name, digest in listed.items():
            _check(name, digest)
    except (OSError, ValueError) as error:  # ValueError: not JSON, or not even text
        raise CheckpointError(
            f"{folder} is not a complete checkpoint: its {MANIFEST} cannot be read ({error}); use an earlier one"
        ) from error
    return listed


def _check(name: str, digest: Any) -> None:
    """Raise `ValueError` for what is no file below the folder, or no sha256."""
    path = PurePosixPath(name)
    below = not path.is_absolute() and bool(path.parts) and ".." not in path.parts
    if not below or str(path) != name or not name.isprintable() or name == MANIFEST:
        raise ValueError(f"{name[:80]!r} is no name of a file in the folder")
    if not isinstance(digest, str) or not _DIGEST.fullmatch(digest):
        raise ValueError(f"{name[:80]!r} has no sha256")


def _hashes(folder: Path) -> dict[str, str]:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and p != folder / MANIFEST)
    return {str(p.relative_to(folder)): _hash(p) for p in files}


def _hash(path: Path) -> str:
    with path.open("rb") as file:  # piece by piece: a file may be larger than the memory
        return hashlib.file_digest(file, "sha256").hexdigest()
