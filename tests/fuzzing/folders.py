"""A folder of real files, damaged for one case and whole again for the next."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random

from tests.fuzzing import mutation

Damage = Callable[[Random, bytes], bytes]


class Damaged:
    """A copy of `source` in `folder`. Called with a case's `Random`, it damages one or two files, and returns it.

    `kinds` say by suffix how; other files have their bytes changed. Now and then a file is missing, or a folder stands
    in its place.
    """

    def __init__(self, source: Path, folder: Path, kinds: Mapping[str, Damage] = {}) -> None:
        shutil.copytree(source, folder)
        self.folder = folder
        self._kinds = {".json": as_json, ".safetensors": mutation.as_safetensors, **kinds}
        self._whole = {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
        self._changed: set[Path] = set()

    def __call__(self, rng: Random) -> Path:
        for path in self._changed:
            self._write(path, self._whole[path])
        self._changed.clear()
        for _ in range(rng.choice((1, 1, 1, 2))):
            self._damage(rng, rng.choice(list(self._whole)))
        return self.folder

    def _damage(self, rng: Random, path: Path) -> None:
        self._changed.add(path)
        way = rng.random()
        if way < 0.02:
            _remove(path)
        elif way < 0.04:
            _remove(path)
            path.mkdir()
        else:
            damage = self._kinds.get(path.suffix, mutation.content) if way < 0.8 else mutation.content
            self._write(path, damage(rng, self._whole[path]))

    def _write(self, path: Path, content: bytes) -> None:
        """Anew: readers may have mapped the old one."""
        _remove(path)
        path.write_bytes(content)


def _remove(path: Path) -> None:
    if path.is_dir():
        path.rmdir()
    else:
        path.unlink(missing_ok=True)


def as_json(rng: Random, original: bytes) -> bytes:
    return mutation.as_json(rng, json.loads(original))
