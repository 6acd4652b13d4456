"""The laws of perturbations, as functions that take a task and assert: a perturbed episode is as determined as any."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import closing
from dataclasses import replace

import numpy as np

from sim_farm.conformance.checks import (
    AFTER_LAST,
    ONE,
    Law,
    NotApplicable,
    assert_equal,
    in_another_process,
    physics_of,
    random_actions,
    renderer_of,
)
from sim_farm.contract import FarmError, TaskSpec, UInt8
from sim_farm.graded_axes import LEVELS, axes_of, graded
from sim_farm.perturbations import MARK, Perturbation
from sim_farm.registry import make_physics

EVENT = 3
"""Env steps before the change, of those perturbations that are events."""
EVERYTHING = ("state", "images", "instruction")


def perturbations_are_a_function_of_seed_and_actions(spec: TaskSpec) -> None:
    """Perturbed episodes agree bit for bit in a used and in a new environment, whatever the chunks.

    An episode without a perturbation is that of the plain task, and one with an event is, until then.
    """
    perturbed = _perturbed(spec)
    with physics_of(perturbed) as used, closing(make_physics(perturbed)) as new, physics_of(spec) as plain:
        actions = random_actions(plain.info, EVENT + 2)
        bare = [plain.reset(ONE), *(plain.step(actions[i : i + 1]) for i in range(EVENT - 1))]
        same = ("proprio", "state")
        for index in (None, *range(len(perturbed.perturbations))):
            change = None if index is None else perturbed.perturbations[index]
            what = "an unperturbed episode" if change is None else f"an episode perturbed by {change.axis}"
            episode = replace(ONE, perturbation=index)
            seen = [used.reset(episode)]
            assert_equal(seen[0], new.reset(episode), f"{what} begins otherwise in a new environment")
            for action in actions:
                seen.append(used.step(action[None]))
                if seen[-1].ended:
                    break
            whole = new.step(actions)
            assert_equal(whole, seen[-1], f"{what} depends on its chunks", AFTER_LAST)
            if change is None or change.from_step:
                for step, (mine, other) in enumerate(zip(seen, bare, strict=False)):
                    assert_equal(mine, other, f"{what} differs at step {step} from the plain task's", same)
                    scene = mine.scene[: -MARK.itemsize] if plain.info.cameras else mine.scene
                    assert np.array_equal(scene, other.scene), what


def perturbed_pictures_are_the_same_in_another_process(spec: TaskSpec) -> None:
    """A perturbed scene gives the same bytes in another process, and an unperturbed one those of the plain task."""
    perturbed = _perturbed(spec)
    with physics_of(perturbed) as physics:
        indices = (None, *range(len(perturbed.perturbations)))
        scenes = [physics.reset(replace(ONE, perturbation=index)).scene for index in indices]
    here, there = _frames(perturbed, scenes), in_another_process(_frames, perturbed, scenes[::-1])
    bare = _frames(spec, [scenes[0][: -MARK.itemsize]])
    for name, frames in here.items():
        assert np.array_equal(frames[0], bare[name][0]), f"{name}: an unperturbed picture differs from the plain task's"
        for index, (frame, other) in enumerate(zip(frames, there[name][::-1], strict=True)):
            which = "unperturbed" if not index else perturbed.perturbations[index - 1].axis
            assert frame.tobytes() == other.tobytes(), f"{name}, {which}: the picture of another process differs"


def _perturbed(spec: TaskSpec) -> TaskSpec:
    """The task with the highest level of every axis that it has, from the beginning and as an event."""
    found: list[Perturbation] = []
    for axis in axes_of(spec.name, EVERYTHING):
        one = graded(spec.name, axis, LEVELS[-1], EVERYTHING)
        try:
            with closing(make_physics(replace(spec, perturbations=(one,)))):
                found += [one, replace(one, from_step=EVENT)]
        except FarmError:  # the task has nothing that the axis changes
            continue
    if not found:
        raise NotApplicable("the task has no axis of perturbations")
    return replace(spec, perturbations=tuple(found))


def _frames(spec: TaskSpec, scenes: list[UInt8]) -> Mapping[str, UInt8]:
    with renderer_of(spec) as renderer:
        return renderer.render(scenes, renderer.info.cameras)


PERTURBATION_LAWS: list[Law] = [
    perturbations_are_a_function_of_seed_and_actions,
    perturbed_pictures_are_the_same_in_another_process,
]
