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
import tempfile
from pathlib import Path

import yaml

from sim_farm.cache_folder import cache
from sim_farm.contract import FarmError

SETTINGS_VARIABLE, SETTINGS = "LIBERO_CONFIG_PATH", "config.yaml"
"""LIBERO's own: the folder of its settings file, which says where task files, initial states and assets are."""


@functools.cache
def prepare() -> None:
    """Make the two packages importable. Raises `FarmError` where they are not installed."""
    spec = importlib.util.find_spec("libero")
    if spec is None or spec.submodule_search_locations is None or importlib.util.find_spec("robosuite") is None:
        raise FarmError("LIBERO's tasks need the packages hf-libero and robosuite: pip install 'embodied-farm[libero]'")
    _settle_settings(Path(next(iter(spec.submodule_search_locations))) / "libero")
    import_robosuite()


def settings_file() -> Path:
    """LIBERO's settings file: the user's, or that of `prepare`, which has been called."""
    return Path(os.environ[SETTINGS_VARIABLE]) / SETTINGS


def _settle_settings(root: Path) -> None:
    """Point LIBERO at the user's settings file. Where there is none, at one in the cache folder that names the
    package's own files: LIBERO would ask for it, and write it into the user's home.

    Raises `FarmError` if the user's file names missing folders.
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
    # Compiled functions are kept beside their source, or in the home: where it cannot be written numba raises.
    if not all(os.access(folder, os.W_OK) for folder in (path.parent, Path(__file__).parent)):
        os.environ.setdefault("NUMBA_CACHE_DIR", str(cache() / "numba"))
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
