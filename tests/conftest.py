"""What every test starts from."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from sim_farm import memory

# A shell starts what it puts into the background with SIGINT ignored, and Python then leaves it so. Tests send
# it to themselves.
signal.signal(signal.SIGINT, signal.default_int_handler)

gc.disable()  # until `pytest_collection_finish`

LONGEST = (
    "tests/sim_farm/test_maniskill.py",
    "tests/embodied/test_runtime.py",
    "tests/embodied/test_cluster.py",
    "tests/embodied/test_cli.py",
    "tests/sim_farm/test_libero.py",
    # One after another, so that whoever is given several starts one Ray for them.
    "tests/embodied/test_learner_ranks.py",
    "tests/embodied/test_executor.py",
    "tests/embodied/test_planning.py",
    "tests/embodied/test_plans_in_runs.py",
    "tests/embodied/test_large_policies_on_ranks.py",
    "tests/embodied/test_instances.py",
    "tests/embodied/test_weights.py",
    "tests/embodied/test_worker_groups.py",
    "tests/embodied/test_render_plans.py",
    "tests/embodied/test_replicas.py",
    "tests/embodied/test_trajectory_memory.py",
    "tests/policies/openvla/test_openvla_policy.py",
    "tests/sim_farm/test_workers.py",
    "tests/embodied/test_evaluation.py",
    "tests/embodied/test_bench.py",
    "tests/embodied/test_devices.py",
    "tests/embodied/test_golden_parameters.py",
    "tests/embodied/test_doctor.py",
    "tests/embodied/test_bench_policy.py",
    "tests/embodied/test_openvla_end_to_end.py",
    "tests/embodied/test_replanning.py",
    "tests/embodied/test_interrupts.py",
    "tests/test_gpu_command.py",
)
"""Files that take longest. They begin first, so that no process of a run waits at its end for one that began late."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    rank = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: rank.get(item.location[0], len(rank)))  # stable: else as pytest has them


def pytest_collection_finish() -> None:
    """What was imported and collected is there to the end: looking at it again and again is a sixth of a run's time."""
    gc.freeze()
    gc.enable()


@pytest.fixture
def own_memory(monkeypatch: pytest.MonkeyPatch) -> Callable[[], set[Path]]:
    """Asked, the shared memory that this test has made and that is there: others on this machine make some too."""
    mine = f"{memory.PREFIX}{os.getpid()}-"
    monkeypatch.setattr(memory, "PREFIX", mine)
    return lambda: set(memory.FOLDER.glob(f"{mine}*"))
