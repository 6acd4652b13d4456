"""The tasks of the simulators, without importing one: a mistyped name is refused in milliseconds."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata

from sim_farm.backends.maniskill.tasks import INSTRUCTIONS
from sim_farm.contract import FarmError, PerturbationSuite, TaskFiles
from sim_farm.registry import backend, module_first, nearest, simulators

LIBERO_SUITES = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}


@dataclass(frozen=True)
class Entry:
    """Description of a simulator that is not imported."""

    tasks: tuple[str, ...] | None
    """Names of its tasks, in the order of its backend's `tasks()`; None: its backend, which is quickly imported, knows
    them."""
    files: str | None = None
    """`module:function` that raises `FarmError` where files that all its tasks need are missing."""
    packages: tuple[str, ...] = ()
    """Distributions whose versions say which simulator it is."""
    quick: bool = False
    """True if an environment is made in a fraction of a second, in any process."""
    own_files: bool = False
    """True if its tasks are defined by files (`Backend.files`)."""
    other_suites: str = ""
    """Message for a suite that it does not have."""


CATALOGUE = {
    "gymnasium": Entry(None, packages=("gymnasium",), quick=True),
    "libero": Entry(
        tuple(f"{suite}/{index}" for suite, count in LIBERO_SUITES.items() for index in range(count)),
        "sim_farm.backends.libero.assets:assets",
        packages=("hf-libero", "robosuite", "mujoco"),
        own_files=True,
        other_suites="only LIBERO's own suites are known here, not those that others made of them (LIBERO-PRO, "
        "LIBERO-Plus), whose results are of other tasks",
    ),
    "maniskill": Entry(tuple(INSTRUCTIONS), packages=("mani-skill", "sapien")),
    "tabletop": Entry(("reach", "reach_red", "reach_blue", "push", "pick_and_place"), packages=("mujoco",), quick=True),
}
"""Description by simulator name. A simulator without an entry, as a user's own, is imported instead."""


def task_names(simulator: str) -> tuple[str, ...]:
    """The names of the simulator's tasks, without its own. Raises `FarmError` with the nearest if there is none."""
    known = CATALOGUE[simulator].tasks if simulator in CATALOGUE else None
    if known is not None:
        return known
    return tuple(backend(simulator).tasks())


def check_task(task: str) -> None:
    """Raise `FarmError` for a task that does not exist, naming the nearest, or whose simulator lacks its files."""
    simulator, slash, name = task.partition("/")
    if not slash:
        raise FarmError(
            f"a task is named <simulator>/<task>, got {task!r}{module_first(task) or nearest(task, simulators())}"
        )
    if name not in task_names(simulator):
        known = [f"{simulator}/{other}" for other in task_names(simulator)]
        raise FarmError(f"unknown task {task!r}{foreign_suite(task) or module_first(task) or nearest(task, known)}")
    entry = _served_by(simulator)
    if entry is not None and entry.files is not None:
        module, function = entry.files.split(":")
        getattr(importlib.import_module(module), function)()


def is_quick(task: str) -> bool:
    """True if the task's simulator makes an environment in a fraction of a second, in any process."""
    simulator = task.partition("/")[0]
    entry = _served_by(simulator)
    return (entry or backend(simulator)).quick


def is_shipped(task: str) -> bool:
    """True if the task's simulator is one of this project's."""
    return _served_by(task.partition("/")[0]) is not None


def has_cameras(task: str) -> bool:
    """True if the task's simulator can draw. Imports the simulator."""
    return backend(task.partition("/")[0]).make_renderer is not None


def exact_replay(task: str) -> bool:
    """True if the task's episodes can be replayed, for all that its simulator declares (`Backend.exact_replay`); of
    single tasks `TaskInfo.inexact` says more. Imports no simulator that is ours."""
    simulator = task.partition("/")[0]
    return simulator in CATALOGUE or backend(simulator).exact_replay


def success_ends(task: str) -> bool:
    """True if success ends the task's episodes (`Backend.success_ends`). Imports no simulator of `CATALOGUE`."""
    simulator = task.partition("/")[0]
    if simulator in CATALOGUE and CATALOGUE[simulator].tasks is not None:
        return True
    return backend(simulator).success_ends


def distinct_seeds(task: str) -> bool:
    """True if episodes of different seeds are different (`Backend.distinct_seeds`). Imports no simulator that is
    ours."""
    simulator = task.partition("/")[0]
    return simulator in CATALOGUE or backend(simulator).distinct_seeds


def exact_split(task: str) -> bool:
    """True if render workers may draw the task (`Backend.exact_split`). Imports no simulator that is ours."""
    simulator = task.partition("/")[0]
    return simulator in CATALOGUE or backend(simulator).exact_split


def foreign_suite(name: str) -> str:
    """The end of a message about an unknown task or suite of a simulator that has suites; else empty."""
    simulator, _, task = name.partition("/")
    said = CATALOGUE[simulator].other_suites if simulator in CATALOGUE else ""
    suites = dict.fromkeys(known.rpartition("/")[0] for known in task_names(simulator)) if said else {}
    if not said or not task or task.partition("/")[0] in suites:
        return ""
    return f": {said}; the suites are {', '.join(f'{simulator}/{suite}' for suite in suites)}"


def task_files(task: str) -> TaskFiles | None:
    """The files that define a task; None where its simulator has it in its code. Raises `FarmError`."""
    simulator = task.partition("/")[0]
    if simulator in CATALOGUE and not CATALOGUE[simulator].own_files:
        return None
    files = backend(simulator).files
    return None if files is None else files(task)


def problem_file(task: str) -> TaskFiles | None:
    """The file of problems that the task is made of (`TaskFiles.instructions`); None for another task. Raises
    `FarmError`."""
    if task.partition("/")[0] in CATALOGUE:
        return None
    found = task_files(task)
    return found if found is not None and found.instructions else None


def suites_of(task: str) -> Mapping[str, PerturbationSuite]:
    """The published suites of perturbations that the task's simulator has, by name. Imports the simulator."""
    return backend(task.partition("/")[0]).suites


def versions(simulator: str) -> str:
    """The simulator's packages with their versions, `hf-libero 0.1.4, ...`; empty where it names none."""
    packages = (_served_by(simulator) or backend(simulator)).packages
    found = {package: next(iter(metadata.Distribution.discover(name=package)), None) for package in packages}
    return ", ".join(f"{name} {dist.version if dist else '(not installed)'}" for name, dist in found.items())


def _served_by(simulator: str) -> Entry | None:
    """The entry of the simulator, or of that with which `package.module:NAME` registers its tasks."""
    return CATALOGUE.get(simulator.rpartition(":")[2])
