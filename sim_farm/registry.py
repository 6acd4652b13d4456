"""The registry of simulators: from a task name such as `tabletop/reach` to its backend."""

from __future__ import annotations

import difflib
import importlib
from dataclasses import replace

from sim_farm.contract import Backend, FarmError, Renderer, TaskSpec
from sim_farm.conventions import TaskPhysics, TaskRenderer, check_task, plain

BACKENDS = {
    "gymnasium": "sim_farm.backends.gymnasium",
    "libero": "sim_farm.backends.libero",
    "maniskill": "sim_farm.backends.maniskill.simulator",
    "tabletop": "sim_farm.backends.tabletop",
}
"""Name to module; each module defines `BACKEND`. A module is imported when one of its tasks is asked for."""


def backend(name: str) -> Backend:
    """The backend called `name`. Raises `FarmError` with the nearest names if there is none."""
    if name not in BACKENDS:
        raise FarmError(f"unknown simulator {name!r}{nearest(name, list(BACKENDS))}")
    try:
        module = importlib.import_module(BACKENDS[name])
    except ModuleNotFoundError as error:
        raise FarmError(
            f"the simulator {name!r} needs the Python package {error.name!r}: pip install 'embodied-farm[{name}]'"
        ) from error
    return module.BACKEND


def resolve(task: str) -> tuple[Backend, str]:
    """`maniskill/PushCube-v1` to its backend and the task's own name; raises `FarmError` naming the nearest."""
    simulator, slash, name = task.partition("/")
    if not slash:
        raise FarmError(f"a task is named <simulator>/<task>, got {task!r}{nearest(task, list(BACKENDS))}")
    found = backend(simulator)
    tasks = list(found.tasks())
    if name not in tasks:
        raise FarmError(f"unknown task {task!r}{nearest(task, [f'{simulator}/{t}' for t in tasks])}")
    return found, name


def make_physics(spec: TaskSpec) -> TaskPhysics:
    """One environment of the task, without pictures. Raises `FarmError` for a task that cannot be."""
    found = resolve(spec.name)[0]
    check_task(spec)
    return TaskPhysics(spec, found.make_physics(_requested(spec, found)))


def make_renderer(spec: TaskSpec) -> Renderer:
    """A renderer of the task's scenes. Raises `FarmError` for a task that cannot be."""
    found = resolve(spec.name)[0]
    check_task(spec)
    return TaskRenderer(spec, found.make_renderer(_requested(spec, found)))


def _requested(spec: TaskSpec, found: Backend) -> TaskSpec:
    """The task as the backend is asked for it."""
    return replace(plain(spec), reward=spec.reward or found.rewards[0])


def nearest(given: str, valid: list[str]) -> str:
    """The end of an error message: the valid names that `given` may have meant, or all of them."""
    near = difflib.get_close_matches(given, valid, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; valid: {', '.join(sorted(valid))}"
