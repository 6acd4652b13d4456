"""LIBERO-Plus (Fei et al. 2025, arXiv:2510.13626) as perturbations of LIBERO's own tasks.

Its four suites list 10,030 variants of LIBERO's 40 tasks, each by a name that describes the change:

    <task>_view_<H>_<V>_<S>_<R>_<P>_initstate_<N>            the camera's pose (N = 0), or the arm's home posture
    <task>_view_0_0_100_0_0_initstate_0_noise_<K>            the picture of `agentview`
    <task>_language_<N>_view_0_0_100_0_0_initstate_0         the instruction
    <task>[_moved]_level<L>_sample<N>                        where the objects lie
    <task>_add_<N>, _light_<N>, _table_<N>, _tb_<N>          needs files that the package does not have: left out

Names, texts, postures, task files and initial states are read from the package's wheel (`data_wheels`). None of its
code is run: what that code makes of them is written here anew, and compared with it to the last bit
(tests/sim_farm/libero_suites.py). Three things that one would not expect are reproduced:

- `agentview` stands where LIBERO has it, rounded to four decimals, in every variant, whatever the axis.
- The arm of a start variant begins where the recorded initial state has it: restoring that state undoes the reset. What
  stays is the controller's: it turns the hand to, and bends the arm towards, the posture of the reset.
- Except on the language axis, the policy is told the variant's name with blanks for underscores (`published`).
"""

from __future__ import annotations

import ast
import functools
import math
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sim_farm.backends.libero.data_wheels import PLUS, task_file, unpacked
from sim_farm.backends.libero.tasks import LiberoTask, find_task, instruction_of, spoken_name, task_count
from sim_farm.contract import FarmError, PerturbationSuite, Prompt
from sim_farm.perturbations import CameraPose, HomePosture, Perturbation, PictureChange, SceneChange

SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
ROOT = "liberoplus/liberoplus"
"""The package's own folder in its wheel."""
AXES = ("camera", "start", "words", "noise", "objects")
LEFT_OUT = {
    "add": "distractors: objects that only a download of LIBERO-Plus has",
    "light": "light: scenes that only a download of LIBERO-Plus has",
    "table": "background: textures that only a download of LIBERO-Plus has",
    "tb": "background: textures that only a download of LIBERO-Plus has",
}
FILE_NAME = "its own code tells the policy the variant's name, with blanks for underscores, in place of the instruction"
RESTORED = "the arm begins where the recorded initial state has it: only its controller has the other posture"
UNSEEDED = (
    "its own noise is drawn from NumPy's global generator, new in every run; here it is keyed by episode and env step"
)
BLURS = ("motion_blur", "gaussian_blur", "zoom_blur", "fog", "glass_blur")
"""Functions of pictures in the order of LIBERO-Plus's noise codes: 1 to 10 are the first one's severities."""
STARTS_PER_LEVEL = 100
"""Start postures 1 to 100 are 0.1 rad from LIBERO's, 101 to 200 are 0.2 rad from it, and so on to 0.5 rad."""


@dataclass(frozen=True)
class Variant:
    """One entry of LIBERO-Plus."""

    suite: str
    index: int
    """Its place in the suite, from 0: the `task_id` of LIBERO-Plus's benchmark classes."""
    name: str
    task: int
    """Index of LIBERO's task in the suite of the same name."""
    perturbation: Perturbation | None
    """The change, with the intended instruction; None: left out."""
    left_out: str | None
    published: str
    """Instruction that LIBERO-Plus's code gives the policy."""

    @property
    def defects(self) -> tuple[str, ...]:
        """Differences between LIBERO-Plus's own code and its paper."""
        found = []
        if self.perturbation is not None and self.perturbation.axis != "words":
            found.append(FILE_NAME)
        if self.perturbation is not None and self.perturbation.axis == "start":
            found.append(RESTORED)
        if self.perturbation is not None and self.perturbation.axis == "noise":
            found.append(UNSEEDED)
        return tuple(found)

    def told(self, prompt: Prompt) -> Perturbation:
        """The perturbation with the instruction `intended` or `published`."""
        if self.perturbation is None:
            raise FarmError(f"{self.suite}/{self.index} of LIBERO-Plus is left out ({self.left_out})")
        if prompt == "intended":
            return self.perturbation
        return replace(self.perturbation, words=self.published)


_NAME = re.compile(
    r"(?P<task>.+?)(?:_language_(?P<language>\d+))?"
    r"(?:_view_(?P<view>\d+_\d+_\d+_-?\d+_-?\d+)_initstate_(?P<start>\d+)(?:_noise_(?P<noise>\d+))?"
    r"|(?:_moved)?_level(?P<level>\d+)_sample\d+"
    r"|_(?P<other>add|light|table|tb)_\d+)$"
)


@functools.cache
def variants(suite: str) -> tuple[Variant, ...]:
    """All variants of the suite, in LIBERO-Plus's order. Raises `FarmError` if the package's wheel is missing."""
    return tuple(_variant(suite, index, name) for index, name in enumerate(_names()[suite]))


def table(task: str, prompt: Prompt, axes: Sequence[str], levels: Sequence[int]) -> tuple[Perturbation, ...]:
    """The perturbations of `libero/<suite>/<index>` on these axes, at these levels, in LIBERO-Plus's order."""
    return tuple(
        variant.told(prompt)
        for variant in _of(task)
        if variant.perturbation is not None
        and variant.perturbation.axis in axes
        and variant.perturbation.level in levels
    )


def _of(task: str) -> list[Variant]:
    """The variants of a task of LIBERO's."""
    found = find_task(task)
    if found.suite not in SUITES:
        raise FarmError(f"LIBERO-Plus has no variants of {task}: it has those of {', '.join(SUITES)}")
    return [variant for variant in variants(found.suite) if variant.task == found.index]


def _notes(tasks: Sequence[str]) -> list[str]:
    every = [variant for task in tasks for variant in _of(task)]
    reasons = Counter(variant.left_out for variant in every if variant.left_out is not None)
    defects = Counter(defect for variant in every for defect in variant.defects)
    left_out = [
        f"{count} of LIBERO-Plus's {len(every)} variants are left out ({why})" for why, count in reasons.items()
    ]
    return left_out + [f"in {count} of LIBERO-Plus's variants {what}" for what, count in defects.items()]


SUITE = PerturbationSuite(AXES, table, _notes)


def _variant(suite: str, index: int, name: str) -> Variant:
    parts = _NAME.fullmatch(name)
    if parts is None or parts["task"] not in _tasks(suite):
        raise FarmError(f"LIBERO-Plus's {suite} has the entry {name!r}, which is not of a known kind")
    task = find_task(f"libero/{suite}/{_tasks(suite)[parts['task']]}")
    source = f"{suite}/{index}"
    told = spoken_name(name)
    if parts["language"]:
        told = instruction_of(_file(suite, name.partition("_view_")[0]))
    if parts["other"]:
        return Variant(suite, index, name, task.index, None, LEFT_OUT[parts["other"]], told)
    axis, level, words = "objects", int(parts["level"] or 0), None
    scene: tuple[SceneChange, ...] = ()
    picture: tuple[PictureChange, ...] = ()
    view = tuple(map(int, parts["view"].split("_"))) if parts["view"] else (0, 0, 100, 0, 0)
    start, noise = int(parts["start"] or 0), int(parts["noise"] or 0)
    if parts["level"]:
        states = f"{ROOT}/init_files/libero_newobj/{suite}/{name}.pruned_init"
        scene = (task_file(PLUS, f"{ROOT}/bddl_files/{suite}/{name}.bddl", states),)
    elif parts["language"]:
        axis, level, words = "words", 1, told
    elif noise:
        severity = (noise - 1) % 10 + 1
        axis, level = "noise", (severity + 1) // 2
        picture = (PictureChange(BLURS[(noise - 1) // 10], (float(severity),), ("agentview",)),)
    elif start:
        axis, level = "start", (start - 1) // STARTS_PER_LEVEL + 1
        scene = (HomePosture(_postures(task)[start]),)
    else:
        axis, level = "camera", _camera_level(*view)
    position, quaternion = camera_pose(_kind(task), *view)
    perturbation = Perturbation(
        axis,
        level,
        scene=scene,
        cameras=(CameraPose("agentview", position, quaternion),),
        picture=picture,
        words=words,
        source=source,
    )
    return Variant(suite, index, name, task.index, perturbation, None, told)


def _camera_level(azimuth: int, elevation: int, distance: int, roll: int, tilt: int) -> int:
    """1 to 5, by size: azimuth to 15, 30, .. 75 degrees; distance to 1.2, 1.4, .. 2.0 times; the camera's own rotation
    by 2, 4, .. 10 degrees. The package does not say LIBERO-Plus's own difficulty."""
    orbit = max(min(azimuth, 360 - azimuth), elevation)
    return max(math.ceil(orbit / 15), math.ceil((distance - 100) / 20), *(_half_turn(x) // 2 for x in (roll, tilt)))


def _half_turn(degrees: int) -> int:
    return min(abs(degrees), abs(360 - abs(degrees)))


# --- where the camera stands

Vector = npt.NDArray[np.float64]
PIVOT = np.array([0.0, 0.0, 0.8])
"""Distance and elevation are about this point, in m; azimuth is about the vertical through the world's origin."""
_TABLE = (0.6380177736282349, 0.3048497438430786, 0.30484986305236816, 0.6380177736282349)
_FLOOR = (0.6182166934013367, 0.3432307541370392, 0.3432314395904541, 0.6182177066802979)
AGENTVIEW = {
    "tabletop": ((0.6586131746834771, 0.0, 1.6103500240372423), _TABLE),
    "kitchen_tabletop": ((0.6586131746834771, 0.0, 1.6103500240372423), _TABLE),
    "study_tabletop": ((0.4586131746834771, 0.0, 1.6103500240372423), _TABLE),
    "living_room_tabletop": ((0.6065773716836134, 0.0, 0.96), _FLOOR),
    "floor": ((0.8965773716836134, 5.216182733499864e-07, 0.65), _FLOOR),
}
"""LIBERO's own pose of `agentview` by kind of scene: position in m, quaternion (w, x, y, z)."""


@functools.cache
def camera_pose(
    kind: str, azimuth: int, elevation: int, distance: int, roll: int, tilt: int
) -> tuple[tuple[float, float, float], tuple[float, float, float, float]]:
    """Position and quaternion of `agentview`, each rounded to four decimals after every turn, as LIBERO-Plus does.

    `azimuth` and `elevation` are degrees about the workspace, `distance` is hundredths of the distance to it, `roll`
    and `tilt` are degrees by which the camera turns where it stands, about the world's vertical and its y axis.
    """
    position, quaternion = (np.array(part) for part in AGENTVIEW[kind])
    if elevation:
        turn = _turn((0.0, 1.0, 0.0), -elevation)
        position, quaternion = _rounded(_turned(position - PIVOT, turn) + PIVOT), _rounded(_product(turn, quaternion))
    turn = _turn((0.0, 0.0, 1.0), azimuth)
    position, quaternion = _rounded(_turned(position, turn)), _rounded(_product(turn, quaternion))
    if distance != 100:
        position = _rounded(PIVOT + (position - PIVOT) * (distance / 100))
    for axis, degrees in (((0.0, 0.0, 1.0), roll), ((0.0, 1.0, 0.0), -tilt)):
        if degrees:
            quaternion = _rounded(_product(_turn(axis, degrees), quaternion))
    x, y, z = position.tolist()
    w, *imaginary = quaternion.tolist()
    return (x, y, z), (w, imaginary[0], imaginary[1], imaginary[2])


def _rounded(values: Vector) -> Vector:
    return np.array([round(float(value), 4) for value in values])


def _turn(axis: tuple[float, float, float], degrees: float) -> Vector:
    half = math.radians(degrees) / 2
    return np.array([math.cos(half), *(math.sin(half) * part for part in axis)])


def _product(left: Vector, right: Vector) -> Vector:
    """The unit quaternion of two turns, `right` first."""
    right = right / np.linalg.norm(right)
    scalar = left[0] * right[0] - left[1:] @ right[1:]
    return np.array([scalar, *(left[0] * right[1:] + right[0] * left[1:] + np.cross(left[1:], right[1:]))])


def _turned(point: Vector, turn: Vector) -> Vector:
    twice = 2 * np.cross(turn[1:], point)
    return point + turn[0] * twice + np.cross(turn[1:], twice)


# --- the package's files


def _folder() -> Path:
    return unpacked(PLUS) / ROOT


def _file(suite: str, name: str) -> Path:
    return _folder() / "bddl_files" / suite / f"{name}.bddl"


@functools.cache
def _names() -> dict[str, list[str]]:
    """The variants' names by suite."""
    path = _folder() / "benchmark" / "libero_suite_task_map.py"
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign):
            return ast.literal_eval(statement.value)
    raise FarmError(f"{path} has no list of variants")


@functools.cache
def _tasks(suite: str) -> dict[str, int]:
    """LIBERO's tasks by name."""
    return {find_task(f"libero/{suite}/{index}").name: index for index in range(task_count(suite))}


@functools.cache
def _kind(task: LiberoTask) -> str:
    """Kind of the task's scene: a key of `AGENTVIEW`."""
    found = re.search(r"\(problem\s+LIBERO_(\w+)_Manipulation\)", task.bddl.read_text(), re.IGNORECASE)
    if found is None or found[1].lower() not in AGENTVIEW:
        raise FarmError(f"{task.bddl} is of no kind of scene that LIBERO-Plus has")
    return found[1].lower()


def _postures(task: LiberoTask) -> Mapping[int, tuple[float, ...]]:
    return _all_postures("on_the_ground_panda" if _kind(task) == "floor" else "mounted_panda")


@functools.cache
def _all_postures(robot: str) -> Mapping[int, tuple[float, ...]]:
    """The robot's start postures by number, seven joint angles in rad, read from the source of the classes
    `...Panda<N>`."""
    postures: dict[int, tuple[float, ...]] = {}
    for robot_class in ast.parse((_folder() / "envs" / "robots" / f"{robot}.py").read_text()).body:
        number = re.search(r"\d+$", robot_class.name) if isinstance(robot_class, ast.ClassDef) else None
        if number is None:
            continue
        call = next(node for node in ast.walk(robot_class) if isinstance(node, ast.Call))
        postures[int(number[0])] = tuple(float(joint) for joint in ast.literal_eval(call.args[0]))
    return postures
