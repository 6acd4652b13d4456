"""The registry of simulators: from a task name such as `tabletop/reach` to its backend.

A simulator that is not one of ours is named by its module (`my_package.my_sim:BACKEND/reach`), or by the entry point of
an installed package. It is imported in each process that asks for it.
"""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Sequence
from dataclasses import replace

from sim_farm.contract import Backend, FarmError, Renderer, TaskSpec
from sim_farm.conventions import TaskBatch, TaskPhysics, TaskRenderer, check_perturbations, check_task, plain
from sim_farm.failures import failures_of
from sim_farm.named_code import entry_point, entry_point_names, module_of, named

BACKENDS = {
    "gymnasium": "sim_farm.backends.gymnasium",
    "libero": "sim_farm.backends.libero",
    "maniskill": "sim_farm.backends.maniskill.simulator",
    "tabletop": "sim_farm.backends.tabletop",
}
"""Name to module; each module defines `BACKEND`. A module is imported when one of its tasks is asked for."""


ENTRY_POINTS = "embodied_farm.simulators"
"""Group in which packages offer simulators, name to `module:BACKEND`. A name of `BACKENDS` cannot be replaced."""


def backend(name: str) -> Backend:
    """The backend called `name`, or what `package.module:NAME` names: a `Backend`, or a registered backend that is to
    serve the tasks which the module registers. Raises `FarmError` with the nearest names if there is none."""
    if ":" in name:
        return _named(name)
    if name in BACKENDS:
        return _shipped(name)
    found = entry_point(ENTRY_POINTS, name, FarmError)
    if found is None:
        raise FarmError(
            f"unknown simulator {name!r}{nearest(name, simulators())}; your own is named package.module:BACKEND"
        )
    return _checked(found, f"the entry point {name!r}")


def simulators() -> list[str]:
    """The names of the simulators: ours, and those that installed packages offer."""
    return [*BACKENDS, *(name for name in entry_point_names(ENTRY_POINTS) if name not in BACKENDS)]


def _shipped(name: str) -> Backend:
    try:
        module = importlib.import_module(BACKENDS[name])
    except ModuleNotFoundError as error:
        raise FarmError(
            f"the simulator {name!r} needs the Python package {error.name!r}: pip install 'embodied-farm[{name}]'"
        ) from error
    return module.BACKEND


def _named(reference: str) -> Backend:
    """A backend by its module, or a registered one after a module that registers tasks with it was imported."""
    name = reference.partition(":")[2]
    registered = _shipped(name) if name in BACKENDS else None
    if registered is not None:
        registered.prepare()  # the module is going to import what it registers its tasks with
    found = getattr(module_of(reference, FarmError), name, None)
    if not isinstance(found, Backend):  # `import libero` in the module binds that name too
        found = registered or entry_point(ENTRY_POINTS, name, FarmError)
    return _checked(named(reference, FarmError, simulators()) if found is None else found, reference)


def _checked(found: object, name: str) -> Backend:
    if not isinstance(found, Backend):
        what = f"the class {found.__name__}" if isinstance(found, type) else f"a {type(found).__name__}"
        raise FarmError(
            f"{name} is {what}, not a sim_farm.contract.Backend: name one, as "
            "BACKEND = Backend(name, make_physics, make_renderer, tasks)"
        )
    return found


def resolve(task: str) -> tuple[Backend, str]:
    """`maniskill/PushCube-v1` to its backend and the task's own name; raises `FarmError` naming the nearest."""
    simulator, slash, name = task.partition("/")
    if not slash:
        raise FarmError(
            f"a task is named <simulator>/<task>, got {task!r}{module_first(task) or nearest(task, simulators())}"
        )
    found = backend(simulator)
    tasks = list(found.tasks())
    if name not in tasks:
        raise FarmError(
            f"unknown task {task!r}{module_first(task) or nearest(task, [f'{simulator}/{t}' for t in tasks])}"
        )
    return found, name


def make_physics(spec: TaskSpec) -> TaskPhysics:
    """One environment of the task, without pictures. Raises `FarmError` for a task that cannot be."""
    found = resolve(spec.name)[0]
    check_task(spec)
    check_perturbations(spec, found)
    with failures_of(spec.name, "its making"):
        physics = TaskPhysics(spec, found.make_physics(_requested(spec, found)))
    if not found.exact_replay:
        physics.info = replace(physics.info, inexact="the simulator declares exact_replay=False")
    return physics


def make_batch(spec: TaskSpec, physics: Sequence[TaskPhysics]) -> TaskBatch:
    """The environments of the task, for a worker that steps several of them at once."""
    make = resolve(spec.name)[0].make_batch
    return TaskBatch(physics, make([one.backend for one in physics]) if make and len(physics) > 1 else None)


def make_renderer(spec: TaskSpec) -> Renderer:
    """A renderer of the task's scenes. Raises `FarmError` for a task that cannot be."""
    found = resolve(spec.name)[0]
    check_task(spec)
    check_perturbations(spec, found)
    with failures_of(spec.name, "the making of its renderer"):
        return TaskRenderer(spec, found.make_renderer(_requested(spec, found)))


def _requested(spec: TaskSpec, found: Backend) -> TaskSpec:
    """The task as the backend is asked for it. Raises `FarmError` for an option that it does not have, and for
    terminations that cannot be ignored."""
    for name in spec.options:
        if name not in found.options:
            hint = nearest(name, [*found.options]) if found.options else ": its simulator has none"
            raise FarmError(f"{spec.name} has no option {name!r} (env.options){hint}")
    if spec.ignore_terminations:
        check_terminations(spec.name, found)
    return replace(plain(spec), reward=spec.reward or found.rewards[0])


def check_terminations(task: str, found: Backend) -> None:
    """Raise `FarmError` if episodes of the backend's tasks cannot continue after they have terminated."""
    if not found.ignores_terminations:
        raise FarmError(
            f"{task} cannot go on once it has terminated, nor can its simulator: set eval.ignore_terminations to False"
        )


def module_first(task: str) -> str:
    """The end of a message about `my_module:Id-v0` or `gymnasium/my_module:Id-v0`, as Gymnasium names a module that
    registers environments; else empty."""
    before, _, name = task.rpartition("/")
    module, colon, own = name.partition(":")
    simulator = before or "<simulator>"
    return f"; a module that registers tasks is named first: {module}:{simulator}/{own}" if colon else ""


def nearest(given: str, valid: list[str]) -> str:
    """The end of an error message: the valid names that `given` may have meant, or all of them."""
    near = difflib.get_close_matches(given, valid, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; valid: {', '.join(sorted(valid))}"
