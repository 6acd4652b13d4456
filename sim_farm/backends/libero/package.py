"""LIBERO and robosuite, imported so that nothing is asked, nothing is drawn, and no file is missing unnoticed.

`import libero.libero` asks questions on standard input where it has no settings file, and robosuite's import
binds an OpenGL platform for the life of the process. Both are settled here first, so every module of this
backend takes what it needs of the two packages after `prepare()`.
"""

from __future__ import annotations

import functools
import hashlib
import importlib
import importlib.util
import os
import sys
import tarfile
import tempfile
from pathlib import Path
from typing import Any

import yaml

from sim_farm.cache_folder import cache
from sim_farm.contract import FarmError

ASSETS_VARIABLE = "EMBODIED_LIBERO_ASSETS"
SETTINGS_VARIABLE, SETTINGS = "LIBERO_CONFIG_PATH", "config.yaml"
"""LIBERO's own: the folder of its settings file, which says where task files and initial states are."""
SOURCE_TREE = Path(__file__).resolve().parents[3]
ARCHIVES = (SOURCE_TREE / "assets" / "libero-assets.tar.xz", SOURCE_TREE.parent / "shared" / "libero-assets.tar.xz")
"""Places of an archive of the assets that are searched if no setting names one."""
PROBES = ("scenes", "articulated_objects", "stable_hope_objects", "stable_scanned_objects", "turbosquid_objects")
"""Folders that a complete set of assets has."""


@functools.cache
def prepare() -> None:
    """Make the two packages importable. Raises `FarmError` where they are not installed."""
    spec = importlib.util.find_spec("libero")
    if spec is None or spec.submodule_search_locations is None or importlib.util.find_spec("robosuite") is None:
        raise FarmError("LIBERO's tasks need the packages hf-libero and robosuite: pip install 'embodied-farm[libero]'")
    _settle_settings(Path(next(iter(spec.submodule_search_locations))) / "libero")
    import_robosuite()


def assets() -> Path:
    """The folder with LIBERO's meshes and textures, found and checked once.

    `EMBODIED_LIBERO_ASSETS` names it, or a .tar.xz of it; without it, LIBERO's own folder, an archive in the
    source tree, or LIBERO's own download are taken. Raises `FarmError` that says which file is missing.
    """
    return _assets(os.environ.get(ASSETS_VARIABLE))


@functools.cache
def _assets(named: str | None) -> Path:
    prepare()
    libero: Any = importlib.import_module("libero.libero")
    folder = _find_assets(named, Path(str(libero.__file__)).parent / "assets")
    missing = [name for name in PROBES if not (folder / name).is_dir()]
    if missing:
        raise FarmError(
            f"LIBERO's assets in {folder} are incomplete: {folder / missing[0]} is missing. Set {ASSETS_VARIABLE} to "
            "LIBERO's `assets` folder or to an archive of it"
        )
    libero._assets_path_cache = str(folder)
    return folder


def _find_assets(named: str | None, own: Path) -> Path:
    if named:
        path = Path(named).expanduser()
        if path.is_dir():
            return path
        if path.is_file():
            return unpack(path)
        raise FarmError(f"{ASSETS_VARIABLE} names {path}, which does not exist: name LIBERO's `assets` folder")
    if own.is_dir():
        return own
    for archive in ARCHIVES:
        if archive.is_file():
            return unpack(archive)
    return _download()


def unpack(archive: Path) -> Path:
    """The folder that holds the archive's content, unpacked once into the cache. Raises `FarmError` if damaged."""
    stat = archive.stat()
    key = hashlib.sha256(f"{archive.resolve()} {stat.st_size} {stat.st_mtime_ns}".encode()).hexdigest()[:16]
    target = cache() / f"libero-assets-{key}"
    if not target.is_dir():
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent) as folder:
            try:
                with tarfile.open(archive) as tar:
                    tar.extractall(folder, filter="data")
            except (tarfile.TarError, EOFError, OSError, ValueError) as error:
                raise FarmError(f"{archive} is damaged or incomplete ({error}): fetch it again") from error
            try:
                Path(folder).rename(target)  # complete or absent, also when several workers unpack at once
            except OSError:
                pass
            Path(folder).mkdir(exist_ok=True)
    inside = [path for path in target.iterdir() if path.is_dir()]
    return inside[0] if len(inside) == 1 else target


def _download() -> Path:
    try:
        module = importlib.import_module("libero.libero.utils.download_utils")
        return Path(module.download_assets_from_huggingface())
    except Exception as error:  # Whatever the hub's client raises, the remedy is the same.
        raise FarmError(
            f"LIBERO's assets are not on this machine and cannot be downloaded ({type(error).__name__}). Set "
            f"{ASSETS_VARIABLE} to LIBERO's `assets` folder or to an archive of it"
        ) from error


def settings_file() -> Path:
    """LIBERO's settings file: the user's, or that of `prepare`, which has been called."""
    return Path(os.environ[SETTINGS_VARIABLE]) / SETTINGS


def _settle_settings(root: Path) -> None:
    """Point LIBERO at the user's settings file. Where there is none, at one in the cache folder that names the
    package's own files: LIBERO would ask for it, and write it into the user's home.

    Raises `FarmError` where the user's names folders that are not there.
    """
    named = os.environ.get(SETTINGS_VARIABLE)
    folder = Path(named).expanduser().absolute() if named else Path.home() / ".libero"
    if (folder / SETTINGS).is_file():
        _check_settings(folder / SETTINGS)
    else:
        folder = _own_settings(root)
    os.environ[SETTINGS_VARIABLE] = str(folder)


def _own_settings(root: Path) -> Path:
    """Folder of a settings file for the package at `root`; another installation has another."""
    settings = {
        "benchmark_root": str(root),
        "bddl_files": str(root / "bddl_files"),
        "init_states": str(root / "init_files"),
        "datasets": str(root.parent / "datasets"),
        "assets": str(root / "assets"),
    }
    text = yaml.safe_dump(settings)
    folder = cache() / "libero" / f"settings-{hashlib.sha256(text.encode()).hexdigest()[:16]}"
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=folder, delete=False) as file:
        file.write(text)
    os.replace(file.name, folder / SETTINGS)
    return folder


def _check_settings(path: Path) -> None:
    remedy = f"correct it, or set {SETTINGS_VARIABLE} to a folder without {SETTINGS} to use the package's own files"
    try:
        found = yaml.safe_load(path.read_text())
    except (OSError, ValueError, yaml.YAMLError) as error:
        raise FarmError(f"LIBERO's settings file {path} cannot be read ({str(error)[:200]}): {remedy}") from error
    for key in ("bddl_files", "init_states"):
        folder = found.get(key) if isinstance(found, dict) else None
        if not isinstance(folder, str):
            raise FarmError(f"LIBERO's settings file {path} names no folder {key!r}: {remedy}")
        if not Path(folder).is_dir():
            raise FarmError(f"LIBERO's settings file {path} names {folder!r} as {key}, which is no folder: {remedy}")


def import_robosuite() -> None:
    """Make robosuite importable, where LIBERO is not wanted too.

    Its macros are loaded ahead of it, with drawing switched off, as its import already reads them.
    """
    if "robosuite" in sys.modules:
        return
    from sim_farm.backends.mujoco_gl import mujoco  # noqa: F401  (binds no platform either)

    root = importlib.util.find_spec("robosuite")
    assert root is not None and root.submodule_search_locations is not None
    path = Path(next(iter(root.submodule_search_locations))) / "macros.py"
    spec = importlib.util.spec_from_file_location("robosuite.macros", path)
    assert spec is not None and spec.loader is not None
    macros = importlib.util.module_from_spec(spec)
    sys.modules["robosuite.macros"] = macros
    spec.loader.exec_module(macros)
    macros.MUJOCO_GPU_RENDERING = False  # type: ignore[attr-defined]
    # Three lines of advice to its developers per process; and a log in /tmp, which belongs to whoever was first.
    macros.CONSOLE_LOGGING_LEVEL, macros.FILE_LOGGING_LEVEL = "ERROR", None  # type: ignore[attr-defined]
    before = os.environ.get("MUJOCO_GL")
    os.environ["MUJOCO_GL"] = "disable"
    try:
        importlib.import_module("robosuite")
    finally:
        if before is None:
            del os.environ["MUJOCO_GL"]
        else:
            os.environ["MUJOCO_GL"] = before
