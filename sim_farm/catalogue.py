"""The tasks of the simulators, without importing one: a mistyped name is refused in milliseconds."""

from __future__ import annotations

import importlib
from dataclasses import dataclass

from sim_farm.backends.maniskill_instructions import INSTRUCTIONS
from sim_farm.contract import FarmError
from sim_farm.registry import BACKENDS, backend, nearest

LIBERO_SUITES = {"libero_spatial": 10, "libero_object": 10, "libero_goal": 10, "libero_10": 10, "libero_90": 90}


@dataclass(frozen=True)
class Entry:
    """What is known of a simulator that is not imported."""

    tasks: tuple[str, ...]
    """As its backend's `tasks()`, in the same order."""
    files: str | None = None
    """`module:function` that raises `FarmError` where files that all its tasks need are missing."""


CATALOGUE = {
    "libero": Entry(
        tuple(f"{suite}/{index}" for suite, count in LIBERO_SUITES.items() for index in range(count)),
        "sim_farm.backends.libero.package:assets",
    ),
    "maniskill": Entry(tuple(INSTRUCTIONS)),
    "tabletop": Entry(("reach", "reach_red", "reach_blue", "push", "pick_and_place")),
}
"""By the name of the simulator. One of your own works without an entry: it is imported to be asked."""


def task_names(simulator: str) -> tuple[str, ...]:
    """The names of the simulator's tasks, without its own. Raises `FarmError` with the nearest if there is none."""
    if simulator in CATALOGUE:
        return CATALOGUE[simulator].tasks
    return tuple(backend(simulator).tasks())


def check_task(task: str) -> None:
    """Raise `FarmError` for a task that does not exist, naming the nearest, or whose simulator lacks its files."""
    simulator, slash, name = task.partition("/")
    if not slash:
        raise FarmError(f"a task is named <simulator>/<task>, got {task!r}{nearest(task, list(BACKENDS))}")
    if name not in task_names(simulator):
        known = [f"{simulator}/{other}" for other in task_names(simulator)]
        raise FarmError(f"unknown task {task!r}{nearest(task, known)}")
    files = CATALOGUE[simulator].files if simulator in CATALOGUE else None
    if files is not None:
        module, function = files.split(":")
        getattr(importlib.import_module(module), function)()
