"""The laws that hold across processes, as functions that take a task and assert.

A lost worker's successor, and a render worker beside a physics worker, are other processes. Each law starts one, which
takes as long as the simulator's import.
"""

from __future__ import annotations

from collections.abc import Mapping

from sim_farm.conformance.checks import (
    ONE,
    Law,
    assert_equal,
    in_another_process,
    physics_of,
    random_actions,
    renderer_of,
    some_scenes,
)
from sim_farm.contract import PhysicsResult, TaskSpec, UInt8

STEPS = 12


def episode_is_the_same_in_another_process(spec: TaskSpec) -> None:
    """The same episode and actions give the same results, bit for bit, in a process that has just begun."""
    for t, (here, there) in enumerate(zip(_episode(spec), in_another_process(_episode, spec), strict=True)):
        what = f"step {t} of" if t else "the beginning of"
        assert_equal(here, there, f"{what} the same episode differs in another process")


def picture_is_the_same_in_another_process(spec: TaskSpec) -> None:
    """A scene of this process gives the same bytes in a process that has simulated and drawn nothing before."""
    scenes = some_scenes(spec)
    here, there = _frames(spec, scenes), in_another_process(_frames, spec, scenes)
    for name, frames in here.items():
        for i, frame in enumerate(frames):
            same = frame.tobytes() == there[name][i].tobytes()
            assert same, f"scene {i}, camera {name}: drawn from the same scene, the picture of another process differs"


def _episode(spec: TaskSpec) -> list[PhysicsResult]:
    with physics_of(spec) as physics:
        seen = [physics.reset(ONE)]
        for action in random_actions(physics.info, STEPS):
            seen.append(physics.step(action[None]))
            if seen[-1].ended:
                break
        return seen


def _frames(spec: TaskSpec, scenes: list[UInt8]) -> Mapping[str, UInt8]:
    with renderer_of(spec) as renderer:
        return renderer.render(scenes, renderer.info.cameras)


PROCESS_LAWS: list[Law] = [episode_is_the_same_in_another_process, picture_is_the_same_in_another_process]
