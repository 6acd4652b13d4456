"""LIBERO's suites: a task's name, its instruction, its files, and its recorded initial states."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib
import io
import itertools
import json
import os
import pickletools
import re
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from sim_farm.backends.libero.assets import foreign_assets
from sim_farm.backends.libero.package import prepare, settings_file
from sim_farm.cache_folder import cache
from sim_farm.contract import FarmError, TaskFiles

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
LIMITS = {"libero_spatial": 220, "libero_object": 280, "libero_goal": 300, "libero_10": 520, "libero_90": 400}
"""Env steps of an episode where the user says nothing: those of OpenVLA-OFT and openpi."""
OWN_LIMIT = max(LIMITS.values())
"""The same in a suite of the user's own."""
PUBLISHED = Path(__file__).with_name("published.json")
"""LIBERO's own tasks as hf-libero 0.1.4 has them: for `<suite>/<index>` the sha256 of the task file, of the initial
states, and of all (`TaskFiles.digest`). The files equal those of
github.com/Lifelong-Robot-Learning/LIBERO (8f1084e)."""


@dataclass(frozen=True)
class LiberoTask:
    """One task and where its files are."""

    suite: str
    index: int
    name: str
    """LIBERO's own name, for example `open_the_middle_drawer_of_the_cabinet`."""
    instruction: str
    bddl: Path
    initial: Path | None
    """LIBERO's pickle of recorded initial states; None in a task of the user's own that has none."""

    @property
    def limit(self) -> int:
        return LIMITS.get(self.suite, OWN_LIMIT)


def task_names() -> list[str]:
    """LIBERO's own 130 tasks, then the tasks of suites that modules registered in this process, as
    `<suite>/<index>`."""
    return [f"{suite}/{index}" for suite in (*SUITES, *_own_suites()) for index in range(len(_suite(suite)))]


def _own_suites() -> dict[str, Any]:
    """Classes by suite name, for the benchmarks that other modules registered with LIBERO (`register_benchmark`)."""
    prepare()
    known = importlib.import_module("libero.libero.benchmark").get_benchmark_dict()
    return {suite: cls for suite, cls in known.items() if cls.__module__.partition(".")[0] != "libero"}


def task_count(suite: str) -> int:
    """Number of the suite's tasks."""
    return len(_suite(suite))


def spoken_name(name: str) -> str:
    """The text from which LIBERO's code makes an instruction: the task file's name, without the scene, with blanks."""
    if name[0].isupper():
        name = name[name.find("SCENE") + (8 if "SCENE10" in name else 7) :]
    return " ".join(name.split("_"))


def instruction_of(bddl: Path) -> str:
    """The instruction that a task file states, in lower case, as LIBERO reads task files."""
    found = re.search(r"\(:language\s+([^()]*)\)", bddl.read_text())
    if found is None:
        raise FarmError(f"{bddl} states no instruction")
    return " ".join(found[1].lower().split())


def find_task(name: str) -> LiberoTask:
    """The task called `libero/<suite>/<index>`, or `my_package.my_tasks:libero/<suite>/<index>`."""
    _, suite, index = name.split("/")
    return _suite(suite)[int(index)]


@functools.cache
def _suite(suite: str) -> tuple[LiberoTask, ...]:
    prepare()
    libero = importlib.import_module("libero.libero")
    if suite in SUITES:
        known = list(importlib.import_module("libero.libero.benchmark").task_maps.get(suite, {}).values())
        own = sum(name.startswith(f"{suite}/") for name in _published())
        if len(known) != own:
            raise FarmError(
                f"the LIBERO installed here ({libero.__file__}) has {len(known)} tasks in {suite}, LIBERO's own has "
                f"{own}: install LIBERO's own (pip install hf-libero)"
            )
    else:
        known = _tasks_of(_own_suites()[suite])
    states = Path(libero.get_libero_path("init_states"))
    return tuple(
        LiberoTask(
            suite,
            index,
            task.name,
            task.language,
            Path(libero.get_libero_path("bddl_files")) / task.problem_folder / task.bddl_file,
            states / task.problem_folder / task.init_states_file if task.init_states_file else None,
        )
        for index, task in enumerate(known)
    )


def _tasks_of(cls: Any) -> list[Any]:
    """The tasks of a benchmark class of the user's own. Raises `FarmError` where it cannot be made."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # LIBERO's base class prints the order of its tasks
            return list(cls().tasks)
    except Exception as error:  # whatever the class raises is its author's to mend
        raise FarmError(
            f"the benchmark {cls.__module__}.{cls.__name__} gives no tasks ({type(error).__name__}: {error}): it is "
            "made without arguments, and has a list of libero.libero.benchmark.Task called tasks"
        ) from error


def task_files(name: str) -> TaskFiles:
    """The files of the task `libero/<suite>/<index>`, beside those that LIBERO's authors published, if they did.

    Raises `FarmError` where one is missing.
    """
    task = find_task(name)
    bddl = hashlib.sha256(_content(task.bddl)).hexdigest()
    initial = None if task.initial is None else hashlib.sha256(_content(task.initial)).hexdigest()
    digest = hashlib.sha256(json.dumps([task.instruction, bddl, initial]).encode()).hexdigest()
    published = _published().get(f"{task.suite}/{task.index}")
    if published is None or digest == published["digest"]:
        return TaskFiles(digest, foreign_assets())
    foreign = [
        f"{path} is not LIBERO's own file (named by {settings_file()})"
        for path, found, own in ((task.bddl, bddl, published["bddl"]), (task.initial, initial, published["initial"]))
        if found != own
    ]
    foreign = foreign or [f"the instruction {task.instruction!r} is not LIBERO's own"]
    return TaskFiles(digest, (*foreign, *foreign_assets()))


@functools.cache
def _published() -> dict[str, dict[str, str]]:
    return json.loads(PUBLISHED.read_text())


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise FarmError(
            f"LIBERO's file {path} cannot be read ({error.strerror}); {settings_file()} says where its files are"
        ) from error


@functools.lru_cache(maxsize=16)
def initial_states(task: LiberoTask) -> npt.NDArray[np.float64]:
    """[N, 1 + nq + nv]: time, positions and velocities of the recorded initial states.

    LIBERO ships them as pickles. They are converted once, into an .npz in the cache beside its checksum, by a
    reader that executes nothing; later only that file is read. A task without them has none of them, N = 0. Raises
    `FarmError` where it is damaged.
    """
    if task.initial is None:
        return np.empty((0, 0))
    source = _content(task.initial)
    if task.initial.suffix == ".npz":
        with np.load(io.BytesIO(source), allow_pickle=False) as data:
            return np.atleast_2d(data["states"].astype(np.float64))
    digest = hashlib.sha256(source).hexdigest()
    path = cache() / "libero" / "initial_states" / f"{task.suite}-{task.index}-{digest[:16]}.npz"
    if not path.is_file():
        _convert(read_pickled_array(source, task.initial), path)
    with np.load(path, allow_pickle=False) as data:
        states = data["states"]
        if hashlib.sha256(states.tobytes()).hexdigest() != str(data["sha256"]):
            raise FarmError(f"{path} is damaged: remove it, it will be made again")
    return states


def _convert(states: npt.NDArray[np.float64], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
        np.savez(file, states=states, sha256=hashlib.sha256(states.tobytes()).hexdigest())
    os.replace(file.name, path)


def read_pickled_array(source: bytes, path: Path) -> npt.NDArray[np.float64]:
    """The one float64 matrix in a file that `torch.save` wrote of a NumPy array, without unpickling it.

    The pickle's opcodes are only listed (`pickletools.genops`): the array's shape and raw bytes are among their
    arguments. Raises `FarmError` for a file of any other kind.
    """
    try:
        with zipfile.ZipFile(io.BytesIO(source)) as archive:
            name = next(n for n in archive.namelist() if n.endswith("data.pkl"))
            opcodes = [(code.name, argument) for code, argument, _ in pickletools.genops(archive.read(name))]
    except (zipfile.BadZipFile, StopIteration, ValueError) as error:
        raise FarmError(f"{path} is damaged or not a file of LIBERO's initial states ({error})") from error
    raw = [argument for _, argument in opcodes if isinstance(argument, str) and len(argument) > 100]
    shape = _shape(opcodes)
    # Pickles of protocol 2 hold bytes as text in Latin-1.
    data = raw[0].encode("latin-1") if len(raw) == 1 else b""
    if not data or "f8" not in [argument for _, argument in opcodes] or shape[0] * shape[1] * 8 != len(data):
        raise FarmError(f"{path} is damaged or not a file of LIBERO's initial states")
    return np.frombuffer(data, np.float64).reshape(shape).copy()


def _shape(opcodes: list[tuple[str, object]]) -> tuple[int, int]:
    """Rows and columns: the only pair of integers that the pickle makes a tuple of; a vector is one row."""
    for (one, rows), (two, columns), (name, _) in zip(opcodes, opcodes[1:], opcodes[2:], strict=False):
        if name == "TUPLE2" and one.startswith("BININT") and two.startswith("BININT"):
            assert isinstance(rows, int) and isinstance(columns, int)
            return rows, columns
    for (one, length), (name, _) in itertools.pairwise(opcodes):
        if name == "TUPLE1" and one.startswith("BININT") and isinstance(length, int) and length > 0:
            return 1, length
    return 0, 0
