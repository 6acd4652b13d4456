"""Policy replicas on other nodes than the frames: where one is changes nothing of what is computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.config import Config
from embodied.execution.assignment import Assignment
from embodied.execution.session import Session
from embodied.workers.affinity import Affinity
from tests.embodied import test_executor as runs
from tests.embodied import test_learner_ranks as ranked
from tests.embodied.ray_nodes import Machines, started
from tests.embodied.test_executor import CORES, GROUPS, IMAGES, STATES, Run, assert_equal, assert_was_a_test, assigned
from tests.embodied.test_replicas import of, shared


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with started("near", "far") as found:
        yield found


@pytest.fixture(scope="module")
def ray(machines: Machines) -> Session:
    return Session(Config(), machines.runtime, tuple(CORES))


@pytest.mark.parametrize(
    ("settings", "nodes"),
    [
        pytest.param(STATES, ("", "far"), id="states"),
    ],
)
def test_where_a_replica_is_changes_nothing(
    settings: dict[str, Any], nodes: tuple[str, ...], machines: Machines, ray: Session, tmp_path: Path
) -> None:
    plan, settings = shared(len(nodes)), of(settings)
    away = tuple(Affinity(node=machines.node(name).id if name else "") for name in nodes)
    apart = replace(plan, components={**plan.components, "policy": away})
    found = runs.run(settings, ray, apart, tmp_path / "apart")
    assert_was_a_test(found)
    assert_equal(found, runs.run(settings, ray, plan, tmp_path / "here"))
