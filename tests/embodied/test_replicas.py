"""Policy replicas: several workers act, each for the groups of environments that it is handed. Nothing else changes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.config import Config, parse_config
from embodied.execution.assignment import Assignment
from embodied.execution.session import Session, open_session
from embodied.runtime.ray_runtime import RayRuntime
from embodied.workers.affinity import Affinity
from tests.embodied import test_executor as runs
from tests.embodied.test_executor import GROUPS, IMAGES, STATES, Run, assert_equal, assert_was_a_test, assigned, inline

ENVS = 8
TOLERANCE = 1e-5
"""Of values at the ends of rollouts and episodes, which replicas share out by rows, and of what is learned from them:
one policy values all of them in one batch."""


def of(settings: dict[str, Any], **changes: Any) -> dict[str, Any]:
    """The settings with as many environments as four groups of two take."""
    return {**settings, "env": {**settings["env"], "num_envs": ENVS}, **changes}


def shared(replicas: int, like: Assignment | None = None, **options: Any) -> Assignment:
    """So many policy workers share four groups."""
    plan = like or assigned("disaggregated", 4, (0, 1), policy=(), one_process=False, **options)
    return replace(plan, components={**plan.components, "policy": (Affinity(),) * replicas})


@pytest.fixture(scope="module")
def ray(ray_runtime: RayRuntime) -> Session:
    ray_runtime.prepare(2)
    return Session(Config(), ray_runtime, tuple(runs.CORES))


@pytest.fixture(scope="module")
def here() -> Iterator[Session]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    with open_session(parse_config({"runtime": {"mode": "inline"}}, "test")) as session:
        yield session
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def reference(here: Session, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Runs of one policy in this process, by the same batches. Each is computed once."""
    known: dict[str, Run] = {}

    def run_of(settings: dict[str, Any], plan: Assignment) -> Run:
        alone = inline(plan)
        alone = replace(alone, components={name: (Affinity(),) for name in alone.components})
        key = f"{settings} {alone}"
        if key not in known:
            inside = {**settings, "runtime": {**settings["runtime"], "mode": "inline"}}
            known[key] = runs.run(inside, here, alone, tmp_path_factory.mktemp("reference"))
        return known[key]

    return run_of


def assert_only_values_are_rounded(found: Run, expected: Run) -> None:
    """The first rollouts are equal to the last bit, but for values at ends; everything is within the tolerance."""
    parts = len(found.gathered) // len(found.iterations)
    for tensors, others in zip(found.gathered[:parts], expected.gathered[:parts], strict=True):
        for name, tensor in others.items():
            if name not in ("last_value", "final_value"):
                assert torch.equal(tensors[name], tensor), name
    assert_equal(found, expected, TOLERANCE)


@pytest.mark.parametrize("replicas", [2, 4])
def test_episodes_are_equal_to_the_last_bit(replicas: int, ray: Session, reference: Any, tmp_path: Path) -> None:
    """Nothing is valued, so that every batch is a group's: three iterations, trajectories and parameters."""
    plan, settings = shared(replicas), of(GROUPS)
    found = runs.run(settings, ray, plan, tmp_path / "ray")
    assert_was_a_test(found)
    assert_equal(found, reference(settings, plan))
