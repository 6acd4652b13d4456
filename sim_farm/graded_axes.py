"""Graded axes of perturbations that every simulator with the means for them has, in five levels each.

    camera      the world's cameras orbit to one side, drawn from the seed
    start       the arm's joints start elsewhere
    objects     the movable objects lie elsewhere
    noise       normal noise on the picture, new in every env step
    brightness  the picture is darker, and has less contrast
    words       the instruction stands among other words

The size of a level of the first three is the simulator's own (`Backend.axes`); level k is k times that.
"""

from __future__ import annotations

from sim_farm.contract import FarmError
from sim_farm.perturbations import CameraOrbit, ObjectOffset, Perturbation, PictureChange, RobotOffset
from sim_farm.registry import backend, nearest

LEVELS = (1, 2, 3, 4, 5)
NOISE = 10.0
"""Grey levels of noise's standard deviation, for each level."""
DARKER, FLATTER = -16.0, 0.12
"""Grey levels of brightness, and share of the contrast that is lost, for each level."""
WORDS = (
    "please {}",
    "could you {}, please",
    "it is your turn now, robot: {}, and take your time",
    "we have tidied up a little, and before anybody comes in i would like you to {}, if you can",
    "you need not mind what else is here or what was said before, since all that matters this time is that you {}, "
    "and when that is done you may rest",
)
"""Rewordings by level: the task's own words stay together, in more and more others."""
AXES = ("camera", "start", "objects", "noise", "brightness", "words")
SEEN = {"camera": "images", "noise": "images", "brightness": "images", "words": "instruction"}
"""Input that a policy has to read to notice the axis; every policy notices the consequences of the other axes."""


def axes_of(task: str, reads: tuple[str, ...]) -> tuple[str, ...]:
    """The axes that the task's simulator has and a policy that reads so notices. Imports the simulator."""
    own = backend(task.partition("/")[0]).axes
    there = (axis for axis in AXES if axis in own or axis in ("noise", "brightness", "words"))
    return tuple(axis for axis in there if SEEN.get(axis, "state") in (*reads, "state"))


def graded(task: str, axis: str, level: int, reads: tuple[str, ...], from_step: int = 0) -> Perturbation:
    """Level `level` of the axis for a task, from that env step on; noticed by a policy that `reads` so. Imports the
    simulator. Raises `FarmError` for an axis that its simulator lacks or the policy cannot notice, and for a level out
    of range."""
    if axis not in AXES:
        raise FarmError(f"no axis of perturbations is called {axis!r}{nearest(axis, list(AXES))}")
    if axis not in axes_of(task, reads):
        needs = SEEN.get(axis)
        why = f"needs a policy that reads {needs}, and this one reads {', '.join(reads)}"
        if axis not in axes_of(task, (*reads, "images", "instruction")):
            why = "is none of its simulator's"
        raise FarmError(
            f"{task} has no axis {axis} here: it {why}; there are {', '.join(axes_of(task, reads)) or 'none'}"
        )
    if level not in LEVELS:
        raise FarmError(f"the axis {axis} has the levels {LEVELS[0]} to {LEVELS[-1]}, got {level}")
    size = level * backend(task.partition("/")[0]).axes.get(axis, 0.0)
    if axis == "camera":
        return Perturbation(axis, level, cameras=(CameraOrbit(azimuth=size, either_side=True),), from_step=from_step)
    if axis == "start":
        return Perturbation(axis, level, scene=(RobotOffset(size),), from_step=from_step)
    if axis == "objects":
        return Perturbation(axis, level, scene=(ObjectOffset(size),), from_step=from_step)
    if axis == "words":
        return Perturbation(axis, level, words=WORDS[level - 1], from_step=from_step)
    change = PictureChange("gaussian_noise", (NOISE * level,))
    if axis == "brightness":
        change = PictureChange("brightness_contrast", (DARKER * level, 1.0 - FLATTER * level))
    return Perturbation(axis, level, picture=(change,), from_step=from_step)
