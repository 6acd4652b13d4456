"""Replicas and ranks in one run: how many there are of each, and where, changes rounding and nothing else."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.execution.assignment import Assignment, assign
from embodied.execution.iteration import Iteration, start_run
from embodied.execution.session import Session, open_session
from embodied.runtime.handles import rank_names
from embodied.runtime.ray.runtime import RayRuntime
from embodied.workflows.run_spec import RunSpec
from schedulers.plan import DeviceRange, Phase, Placement, Plan
from tests.embodied.learning.test_learner_ranks import GROUPS, STATES, Run, assert_near, run, with_optim
from tests.embodied.support.runs import CORES, assigned, inline

APART = assigned("disaggregated", 4, (0, 1), policy=(), one_process=False)
"""Four groups of two environments each."""
ENVS = {"env": {**STATES["env"], "num_envs": 8}}


def of(replicas: int, ranks: int, **changes: Any) -> Assignment:
    components = {"policy": (Affinity(),) * replicas, "learner": (Affinity(),) * ranks}
    return replace(APART, components=components, **changes)


@pytest.fixture(scope="module")
def ray(ray_runtime: RayRuntime) -> Session:
    return Session(Config(), ray_runtime, tuple(CORES))


def assert_learned_alike(found: Run, expected: Run) -> None:
    """The same episodes, the first trajectories bit for bit but for values that replicas share out by rows."""
    assert found.episodes == expected.episodes
    shared_out = {"last_value", "final_value"}
    for name, tensor in expected.gathered[0].items():
        if name not in shared_out:
            assert torch.equal(found.gathered[0][name], tensor), name
    for name in shared_out:
        assert torch.allclose(found.gathered[0][name], expected.gathered[0][name], atol=1e-5), name
    # Adam divides by a gradient's size, so that what rounds differently in other batches grows with each iteration.
    assert_near(found.parameters, expected.parameters, 3e-5)


def acting(one: Iteration) -> set[str]:
    """The tracks of those who acted."""
    return {span.track for span in one.spans if span.name.startswith("act ")}


def computed_here(settings: dict[str, Any], plan: Assignment, folder: Path) -> Run:
    with open_session(parse_config({"runtime": {"mode": "inline"}}, "test")) as here:
        return run(settings, here, inline(plan), folder / "here")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "plan"),
    [
        pytest.param({**STATES, **ENVS}, of(2, 2), id="apart", marks=pytest.mark.slow),
        pytest.param(
            with_optim({**STATES, **ENVS}, sharding="sharded"), of(2, 4), id="apart, shards", marks=pytest.mark.slow
        ),
        pytest.param({**STATES, **ENVS}, of(2, 2, hosts=(0, 1)), id="one process each"),
        pytest.param({**GROUPS, **ENVS}, of(2, 2, hosts=(0, 1), unload=True), id="in turns", marks=pytest.mark.slow),
        pytest.param({**GROUPS, **ENVS}, of(4, 2, unload=True), id="hybrid", marks=pytest.mark.slow),
    ],
)
def test_replicas_and_ranks_learn_what_one_process_learns(
    settings: dict[str, Any], plan: Assignment, ray: Session, tmp_path: Path
) -> None:
    found = run(settings, ray, plan, tmp_path / "ray")
    assert_learned_alike(found, computed_here(settings, plan, tmp_path))
    for one in found.iterations:
        assert acting(one) == {f"policy {replica}" for replica in range(len(plan.components["policy"]))}
        assert one.learned["learner/ranks"] == len(plan.components["learner"])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("policy", "learner", "hosts", "path"),
    [
        pytest.param((1, 1), (0, 2), (1,), "the same policy", id="some ranks act"),
        pytest.param((0, 2), (1, 1), (None, 0), "; the same policy for 1", id="all ranks act", marks=pytest.mark.slow),
    ],
)
def test_a_rank_that_waits_acts_with_its_own_policy(
    policy: tuple[int, int],
    learner: tuple[int, int],
    hosts: tuple[int | None, ...],
    path: str,
    ray: Session,
    tmp_path: Path,
) -> None:
    """Who shares a process, and who unloads, changes no bit of what is rolled out and learned."""
    gpus = [(DeviceRange("here", "accelerators", *where),) for where in (policy, learner)]
    physics = Placement(("physics",), (DeviceRange("here", "cores", 0, 2),))
    rolling = Phase((physics, Placement(("policy",), gpus[0])), 8)
    plan = Plan("ppo", "collocated", (rolling, Phase((Placement(("learner",), gpus[1]),), 8)), (2,), unload=True)
    settings = {**STATES, **ENVS, "policy": {**STATES["policy"], "device": "cpu"}}
    config = parse_config(settings, "test")
    placed = assign(plan, RunSpec.of(config), tuple(CORES))
    assert placed.hosts == hosts
    with start_run(RunSpec.of(config), tmp_path, ray, placed) as workers:
        assert workers.weight_sync.path.endswith(path)
        for replica, host in enumerate(hosts):
            mine, ranks = workers.acting.some([replica]), [workers.learner.some([i]) for i in range(learner[1])]
            beside = [mine.path_from(rank) == "by reference" for rank in ranks]
            assert beside == [i == host for i in range(learner[1])]
    found = run(settings, ray, placed, tmp_path / "together")
    expected = run(settings, ray, replace(placed, hosts=(), unload=False), tmp_path / "apart")
    assert found.episodes == expected.episodes
    for part, its in zip([*found.gathered, found.parameters], [*expected.gathered, expected.parameters], strict=True):
        assert part.keys() == its.keys() and all(torch.equal(part[name], tensor) for name, tensor in its.items())
    for one, other in zip(found.iterations, expected.iterations, strict=True):
        assert acting(one) == acting(other) == set(rank_names("policy", len(hosts)))
        # Of the policies only those that nobody else holds leave the memory, and come back.
        away = [span.args["worker"] for span in one.spans if span.name == "switch"]
        assert away.count("policy") == (2 if None in hosts else 0)
