"""`make wheelhouse`: what is left out, what is built, and that parts are no larger than asked for.

Real pip, on packages of some kilobytes that are made here, so that no network is asked."""

from __future__ import annotations

import base64
import hashlib
import os
import random
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
VERSION = f"{sys.version_info[0]}.{sys.version_info[1]}"
PYPROJECT = """
[build-system]
requires = ["setuptools"]
build-backend = "setuptools.build_meta"
[project]
name = "embodied-farm"
version = "0.1.0"
[project.optional-dependencies]
all = ["whl-large", "whl-small", "src-pure", "src-compiled", "whl-there"]
dev = ["whl-unwanted"]
[tool.setuptools]
py-modules = []
"""
NEEDED = ("src-compiled", "src-pure", "whl-below", "whl-large", "whl-small", "whl-there")
SETUP = "from setuptools import Extension, setup\nsetup(name={name!r}, version='1.0', py_modules=[], {more})\n"


def write_wheel(folder: Path, name: str, size: int, requires: str = "") -> None:
    """A wheel that holds `size` bytes which do not compress."""
    module, info = name.replace("-", "_"), f"{name.replace('-', '_')}-1.0.dist-info"
    files = {
        f"{module}.py": b"# " + base64.b64encode(random.Random(name).randbytes(size)) + b"\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{requires}".encode(),
        f"{info}/WHEEL": b"Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    digests = {
        path: base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=") for path, data in files.items()
    }
    lines = [f"{path},sha256={digest.decode()},{len(files[path])}" for path, digest in digests.items()]
    files[f"{info}/RECORD"] = "\n".join([*lines, f"{info}/RECORD,,\n"]).encode()
    with zipfile.ZipFile(folder / f"{module}-1.0-py3-none-any.whl", "w", zipfile.ZIP_STORED) as wheel:
        for path, data in files.items():
            wheel.writestr(path, data)


def write_sources(folder: Path, name: str, more: str) -> None:
    where = folder / "unpacked" / f"{name}-1.0"
    where.mkdir(parents=True)
    (where / "setup.py").write_text(SETUP.format(name=name, more=more))
    (where / "PKG-INFO").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    (where / "broken.c").write_text("#error this machine has no compiler for it\n")
    with tarfile.open(folder / f"{name}-1.0.tar.gz", "w:gz") as archive:
        archive.add(where, f"{name}-1.0")


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All that pip finds."""
    folder = tmp_path_factory.mktemp("index")
    write_wheel(folder, "whl-large", 70_000)
    write_wheel(folder, "whl-small", 9_000, "Requires-Dist: whl-below\nRequires-Dist: whl-there\n")
    for name in ("whl-below", "whl-there", "whl-unwanted"):
        write_wheel(folder, name, 9_000)
    write_sources(folder, "src-pure", "")
    write_sources(folder, "src-compiled", "ext_modules=[Extension('compiled', ['broken.c'])]")
    return folder


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """A source tree with small needs."""
    folder = tmp_path / "tree"
    shutil.copytree(ROOT / "setup", folder / "setup")
    shutil.copy(ROOT / "Makefile", folder)
    (folder / "pyproject.toml").write_text(PYPROJECT)
    (folder / "constraints.txt").write_text(
        "# pins\n" + "".join(f"{name}==1.0\n" for name in (*NEEDED, "whl-unwanted"))
    )
    (folder / ".venv").symlink_to(sys.prefix)
    return folder


def make(tree: Path, index: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    given = {"PYTHON": VERSION, "DIR": "wheels here"} | variables
    # PIP_NO_BUILD_ISOLATION=0 is how pip is told not to isolate: nothing is fetched for building.
    pip = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(index), "PIP_NO_BUILD_ISOLATION": "0", "PIP_NO_CACHE_DIR": "1"}
    inherited = {key: value for key, value in os.environ.items() if key not in ("MAKEFLAGS", "MAKELEVEL")}
    command = ["make", "wheelhouse", *(f"{name}={value}" for name, value in given.items())]
    return subprocess.run(command, cwd=tree, capture_output=True, text=True, env=inherited | pip)


@pytest.mark.slow
def test_it_holds_what_is_needed_and_not_there_in_parts_of_the_size_that_was_requested(tree: Path, index: Path) -> None:
    made = make(tree, index, HAVE="Whl_There, something-else", PART="40K")
    assert made.returncode == 0, made.stderr
    folder = tree / "wheels here"
    wanted = [f"{name}==1.0" for name in NEEDED if name not in ("whl-there", "src-compiled")]
    assert (folder / "requirements.txt").read_text().split() == wanted
    assert "not needed here anyway: something-else" in made.stdout
    assert "not pure Python: src-compiled==1.0" in made.stdout
    contents = (folder / "INSTALL.txt").read_text()
    assert "because the machine has them: whl-there." in contents and "src-compiled==1.0" in contents

    parts = sorted(folder.glob("part-*"))
    sizes = [sum(file.stat().st_size for file in part.iterdir()) for part in parts]
    assert len(parts) > 1 and max(sizes) <= 40 * 1024
    assert len(list(folder.glob("part-*/whl_large-1.0-py3-none-any.whl.piece-*"))) == 3
    assert {path.name for path in folder.iterdir()} == {
        *(p.name for p in parts),
        *("INSTALL.txt", "install.sh", "requirements.txt"),
    }

    site = tree / "site"
    installed = subprocess.run(
        ["sh", str(folder / "install.sh"), "--target", str(site)],
        capture_output=True, text=True, env=os.environ | {"PYTHON": sys.executable},
    )  # fmt: skip
    assert installed.returncode == 0, installed.stderr
    assert sorted(path.stem for path in site.glob("whl_*.py")) == ["whl_below", "whl_large", "whl_small"]


def test_a_folder_that_is_there_is_not_touched(tree: Path, index: Path) -> None:
    (tree / "wheels here").mkdir()
    made = make(tree, index)
    assert made.returncode != 0 and "wheels here is there already: delete it, or name another" in made.stderr
    assert not list((tree / "wheels here").iterdir())


@pytest.mark.parametrize("size", ["60X", "M", "0", "-1"])
def test_a_size_that_is_none_is_refused_before_anything_is_fetched(size: str, tree: Path, index: Path) -> None:
    made = make(tree, index, PART=size)
    assert made.returncode != 0 and f"PART is a size such as 60M or 1G, got '{size}'" in made.stderr
    assert not (tree / "wheels here").exists()
