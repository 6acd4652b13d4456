"""Parts of the laws of a simulator backend: episodes, actions and scenes to try, and comparisons."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np

from sim_farm.conformance.reporting import NotApplicable as NotApplicable
from sim_farm.contract import (
    EpisodeSpec,
    FarmError,
    Float32,
    Physics,
    PhysicsResult,
    Renderer,
    TaskInfo,
    TaskSpec,
    UInt8,
)
from sim_farm.registry import make_physics, make_renderer

Law = Callable[[TaskSpec], None]
T = TypeVar("T")
ONE, OTHER = EpisodeSpec(seed=11), EpisodeSpec(seed=12)
PER_STEP = ("reward", "success", "terminated", "truncated")
AFTER_LAST = ("proprio", "state", "scene")
ARRAYS = PER_STEP + AFTER_LAST


def name_of(parameter: Any) -> str:
    """A readable test id for a law or a task."""
    return parameter.name if isinstance(parameter, TaskSpec) else parameter.__name__


_kept: dict[tuple[Callable[[TaskSpec], Any], TaskSpec], list[Any]] = {}
"""Simulators that no law uses just now, by what made them."""


@contextmanager
def _lent(make: Callable[[TaskSpec], Any], spec: TaskSpec) -> Iterator[Any]:
    """A used simulator, or a new one, which takes seconds; kept until another task's turn comes or a law is broken."""
    close_kept(but=spec.name)
    free = _kept.setdefault((make, spec), [])
    simulator = free.pop() if free else make(spec)
    try:
        yield simulator
    except BaseException:
        simulator.close()
        raise
    free.append(simulator)


def close_kept(but: str = "") -> None:
    """Close the simulators that are kept, except the named task's, as after a module of tests."""
    for key in [(make, spec) for make, spec in _kept if spec.name != but]:
        for simulator in _kept.pop(key):
            simulator.close()


def physics_of(spec: TaskSpec) -> AbstractContextManager[Physics]:
    """For laws that hold in any environment, as a reused one equals a new one, which is another law."""
    return _lent(make_physics, spec)


def in_another_process(work: Callable[..., T], *arguments: Any) -> T:
    """The result of `work`, a function of a module, in a new process that shares nothing with this one."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(work, *arguments).result()


def rewards_of(spec: TaskSpec) -> list[Any]:
    """The kinds of reward that the task has, its spec's own first. One that it lacks is refused by name."""
    with physics_of(spec) as physics:
        own = str(physics.info.spec.reward)
    other: Any = "sparse" if own == "dense" else "dense"
    try:
        with physics_of(replace(spec, reward=other)):
            return [own, other]
    except FarmError as error:
        named = other in str(error) and own in str(error)
        assert named, f"the refusal of a {other} reward does not name it and the {own} one: {error}"
        return [own]


def renderer_of(spec: TaskSpec) -> AbstractContextManager[Renderer]:
    assert spec.cameras, "the laws of rendering need a task with at least one camera"
    return _lent(make_renderer, spec)


def random_actions(info: TaskInfo, count: int, seed: int = 0) -> Float32:
    """`count` actions drawn evenly between the bounds."""
    rng = np.random.default_rng(seed)
    return rng.uniform(info.action_low, info.action_high, (count, info.action_dim)).astype(np.float32)


def some_scenes(spec: TaskSpec) -> list[UInt8]:
    """Four scenes that differ: the beginning and a later moment of two episodes."""
    scenes = []
    with physics_of(spec) as physics:
        for episode in (ONE, OTHER):
            scenes += [physics.reset(episode).scene, physics.step(random_actions(physics.info, 5)).scene]
    return scenes


def assert_equal(one: PhysicsResult, two: PhysicsResult, law: str, names: tuple[str, ...] = ARRAYS) -> None:
    """The named arrays are equal bit for bit, NaN and the sign of zero included, and so the instructions."""
    assert one.instruction == two.instruction, f"{law}: {one.instruction!r}, {two.instruction!r}"
    for name in names:
        left, right = getattr(one, name), getattr(two, name)
        assert left.shape == right.shape, f"{law}: {name} has shapes {left.shape} and {right.shape}"
        for i in range(len(left)) if left.tobytes() != right.tobytes() else ():
            assert left[i].tobytes() == right[i].tobytes(), f"{law}: {name}[{i}], {left[i]} and {right[i]}"


def refusal(call: Callable[[], object], what: str, kind: type[FarmError] = FarmError) -> str:
    """The message with which `call` is refused; that it is not refused breaks the law."""
    try:
        call()
    except kind as error:
        return str(error)
    raise AssertionError(f"{what} is not refused with {kind.__name__}")


def check_result(result: PhysicsResult, info: TaskInfo, steps: int) -> None:
    """The arrays have the shapes that `info` promises and the dtypes of the contract, and every number is finite."""
    sizes = {"proprio": info.proprio_dim, "state": info.state_dim, "scene": info.scene_bytes}
    size = len(result.instruction.encode())
    assert 0 < size <= info.instruction_bytes, f"an instruction of {size} bytes: not in 1 to {info.instruction_bytes}"
    for name, length in (dict.fromkeys(PER_STEP, steps) | sizes).items():
        array = getattr(result, name)
        kind = np.dtype({"reward": "f4", "proprio": "f4", "state": "f4", "scene": "u1"}.get(name, "?"))
        assert array.shape == (length,), f"{name} has shape {array.shape}, info promises ({length},)"
        assert array.dtype == kind, f"{name} is {array.dtype}, the contract promises {kind}"
        assert np.isfinite(array).all(), f"{name} has a value that is not finite"
