"""Law 1: a plan changes when and where, never what. One workflow by many assignments, in this process and on Ray."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import pytest
import torch

from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.execution.assignment import Assignment
from embodied.execution.session import Session
from embodied.runtime.ray.runtime import RayRuntime
from embodied.workflows.context import make_policy
from policies.contract import PolicySpec
from tests.embodied.support import text_runs
from tests.embodied.support.runs import (
    CORES,
    GROUPS,
    IMAGES,
    ITERATIONS,
    LIBERO,
    MANISKILL,
    STATES,
    Run,
    assert_equal,
    assert_was_a_test,
    assigned,
    inline,
    lags,
    run,
)
from tests.variants import often

TOLERANCE = 1e-4
"""Of every number where plans batch the policy's rows differently: matrix products over 4 and over 2 rows round
differently, by 1e-7 of what they add up; the simulator and Adam, which divides by the size of gradients, carry that
on. What is counted (steps, ends, episodes) is equal all the same."""


PLANS = {
    "collocated": assigned(physics=(0, 1)),
    "collocated, groups share the cores": assigned(groups=2, physics=(0, 1), policy=()),
    "disaggregated, 2 splits": assigned("disaggregated", physics=(0,), policy=(1,), learner=(1,)),
    "disaggregated, 2 splits, 2 groups": assigned("disaggregated", 2, (0,), (), (1,), (1,)),
    "disaggregated, 3 splits": assigned("disaggregated", 2, (0, 0), (), (1,), (0,), one_process=False),
    "hybrid": assigned("hybrid", 1, (0, 0), (), (1,), (0, 1)),
    "hybrid, 2 groups": assigned("hybrid", 2, (0,), (), (1,), (0, 1)),
    "context switches": replace(assigned(), unload=True),
    "context switches of two processes": replace(assigned(one_process=False), unload=True),
}
SWITCHES = ("context switches", "context switches of two processes")
APART = "disaggregated, 3 splits"
DRAWING = {
    "fused": assigned(physics=(0,)),
    "fused, 2 workers": assigned("hybrid", 1, (0, 1), (), (1,), (0, 1)),
    "split": assigned("disaggregated", 1, (0,), (0,), (1,), (1,)),
    "split in 4, 2 groups": assigned("disaggregated", 2, (0,), (0,), (1,), (0,), one_process=False),
    "fused, context switches": replace(assigned(physics=(0, 1)), unload=True),
    "split, context switches": replace(assigned(render=(1,), one_process=False), unload=True),
}


@pytest.fixture(scope="module")
def ray(ray_runtime: RayRuntime) -> Session:
    """One Ray for all assignments."""
    ray_runtime.prepare(2)
    return Session(Config(), ray_runtime, tuple(CORES))


class Reference(Protocol):
    def __call__(self, settings: dict[str, Any], assignment: Assignment, drains: tuple[int, ...] = ()) -> Run: ...


@pytest.fixture(scope="module")
def reference(here: Session, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    """Runs in this process, by the same batches as the assignment's. Each is computed once: many plans share one."""
    known: dict[str, Run] = {}

    def of(settings: dict[str, Any], assignment: Assignment, drains: tuple[int, ...] = ()) -> Run:
        plan = inline(assignment)
        key = f"{settings} {plan} {drains}"
        if key not in known:
            known[key] = run(settings, here, plan, tmp_path_factory.mktemp("reference"), drains)
        return known[key]

    return of


# --- the same batches: bit for bit


@pytest.mark.parametrize("name", often(("collocated", "hybrid, 2 groups", SWITCHES[1]), PLANS))
def test_every_plan_computes_what_one_process_computes(
    name: str, ray: Session, reference: Reference, tmp_path: Path
) -> None:
    found = run(STATES, ray, PLANS[name], tmp_path / "ray")
    assert_was_a_test(found)
    assert_equal(found, reference(STATES, PLANS[name]))


@pytest.mark.parametrize("name", often(("split in 4, 2 groups",), DRAWING))
def test_the_process_that_draws_does_not_change_what_is_computed(
    name: str, ray: Session, reference: Reference, tmp_path: Path
) -> None:
    found = run(IMAGES, ray, DRAWING[name], tmp_path / "ray")
    assert_was_a_test(found)
    assert found.gathered[0]["frames.front"].float().std() > 1, "the pictures are empty"
    assert_equal(found, reference(IMAGES, DRAWING[name]))
    assert_renderers_left(found, DRAWING[name].unload)


def assert_renderers_left(run: Run, unload: bool, task: str = "tabletop/reach") -> None:
    """Before each update, and back before each rollout but the first; with what an OpenGL context takes."""
    freed = [
        [span.args["bytes"] for span in one.spans if span.args.get("worker") == f"renderers of {task}"]
        for one in run.iterations
    ]
    assert [len(found) for found in freed] == ([1, 2, 2] if unload else [0, 0, 0])
    assert all(found > 5e6 for each in freed for found in each), freed


@pytest.mark.parametrize("name", often((APART,), ("collocated", APART, *SWITCHES)))
def test_episodes_in_groups_too(name: str, ray: Session, reference: Reference, tmp_path: Path) -> None:
    found = run(GROUPS, ray, PLANS[name], tmp_path / "ray")
    assert_was_a_test(found)
    assert_equal(found, reference(GROUPS, PLANS[name]))
    informative = [one.learned["learner/informative_groups"] for one in found.iterations]
    assert informative == [4.0] * ITERATIONS, "all four episode groups differ in their returns"


@pytest.fixture(scope="module")
def answering(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Answers in tokens, in up to three turns, by a language model."""
    model = text_runs.few_tokens(tmp_path_factory.mktemp("answering") / "model")
    changes: dict[str, Any] = {"env": {"num_envs": 8, "max_episode_steps": 24}, "runtime": {"mode": "ray"}}
    return text_runs.settings(model, "turns", workflow=GROUPS["workflow"], **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_answers_in_tokens_too(
    name: str, answering: dict[str, Any], ray: Session, reference: Reference, tmp_path: Path
) -> None:
    found = run(answering, ray, PLANS[name], tmp_path / "ray")
    assert_was_a_test(found)
    assert_equal(found, reference(answering, PLANS[name]))


# --- other batches: within rounding


def shapes() -> dict[str, Assignment]:
    """Every number of groups and of physics workers, all drawn by the physics workers or by a render worker."""
    return {
        f"{groups} groups, {workers} workers": assigned(groups=groups, physics=(0,) * workers)
        for groups in (1, 2)
        for workers in (1, 2)
    }


@pytest.mark.parametrize(
    "settings",
    [STATES, pytest.param(IMAGES, marks=pytest.mark.slow), GROUPS],
    ids=["states", "images", "groups"],
)
def test_groups_and_workers_change_no_more_than_the_rounding(settings: dict[str, Any], reference: Reference) -> None:
    runs = {name: reference(settings, plan) for name, plan in shapes().items()}
    expected = runs["1 groups, 1 workers"]
    assert_was_a_test(expected)
    assert_equal(runs["1 groups, 2 workers"], expected)
    for name in ("2 groups, 1 workers", "2 groups, 2 workers"):
        assert_equal(runs[name], expected, TOLERANCE)


@pytest.mark.slow
def test_one_process_or_several_and_one_renderer_or_none_change_nothing(
    here: Session, reference: Reference, tmp_path: Path
) -> None:
    free = inline(assigned())
    expected = reference(IMAGES, free)
    assert_equal(run(IMAGES, here, replace(free, hosts=(0,)), tmp_path / "together"), expected)
    apart = replace(free, farms=(replace(free.farms[0], render=(None,)),))
    assert_equal(reference(IMAGES, apart), expected)


@pytest.mark.parametrize("settings", [STATES, IMAGES], ids=["states", "images"])
def test_a_policy_begins_with_the_same_weights_whatever_the_process_has_threads(settings: dict[str, Any]) -> None:
    """An orthogonal matrix is the result of a decomposition, which rounds by the number of threads."""
    config = parse_config(settings, "test")
    spec = PolicySpec(action_dim=3, chunk=2, state_dim=16, proprio_dim=10, cameras=("front",), image_size=32)
    found = []
    for threads in (1, 2, 3):
        with Affinity(threads=threads).applied():
            found.append(make_policy(config, spec).state_dict())
    for state in found[1:]:
        for name, tensor in found[0].items():
            assert torch.equal(state[name], tensor), name


# --- one step ahead


AHEAD = assigned("disaggregated", 2, (0,), (), (1,), (0,), one_process=False, ahead=1)


@pytest.mark.parametrize(
    "settings", [STATES, pytest.param(GROUPS, marks=pytest.mark.slow)], ids=["decisions", "episodes"]
)
def test_a_rollout_that_is_ahead_is_one_update_behind_and_the_same_everywhere(
    settings: dict[str, Any], ray: Session, reference: Reference, tmp_path: Path
) -> None:
    found = run(settings, ray, AHEAD, tmp_path / "ray")
    expected = reference(settings, AHEAD)
    assert lags(expected) == lags(found) == [0, 1, 1]
    assert_was_a_test(found)
    assert_equal(found, expected)
    punctual = reference(settings, replace(AHEAD, ahead=0))
    assert lags(punctual) == [0, 0, 0]
    assert torch.equal(expected.gathered[0]["log_prob"], punctual.gathered[0]["log_prob"])
    assert not torch.equal(expected.gathered[-1]["log_prob"], punctual.gathered[-1]["log_prob"])
    assert not torch.equal(expected.parameters["log_std"], punctual.parameters["log_std"])


@pytest.mark.slow
@pytest.mark.parametrize("settings", [STATES, GROUPS], ids=["decisions", "episodes"])
def test_after_a_drain_nothing_is_ahead(
    settings: dict[str, Any], ray: Session, reference: Reference, tmp_path: Path
) -> None:
    found = run(settings, ray, AHEAD, tmp_path / "ray", drains=(0,))
    assert lags(found) == [0, 0, 1]
    assert_equal(found, reference(settings, AHEAD, drains=(0,)))
    always = reference(settings, AHEAD, drains=(0, 1, 2))
    assert lags(always) == [0, 0, 0]
    assert_equal(always, reference(settings, replace(AHEAD, ahead=0)))


def test_the_snapshot_of_environments_is_of_before_the_rollout_that_is_ahead(reference: Reference) -> None:
    """What a checkpoint would hold belongs to the iterations that are finished."""
    ahead = reference(STATES, AHEAD)
    punctual = reference(STATES, replace(AHEAD, ahead=0))
    for name, expected in punctual.iterations[0].environments.items():
        assert ahead.iterations[0].environments[name].tobytes() == expected.tobytes(), name


def test_a_rollout_that_is_ahead_needs_a_policy_of_its_own() -> None:
    with pytest.raises(ValueError, match="ahead of the update needs a policy of its own"):
        assigned(one_process=True, ahead=1)


# --- other simulators


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_every_plan_computes_the_same_on_maniskill(
    name: str, ray: Session, reference: Reference, tmp_path: Path
) -> None:
    found = run(MANISKILL, ray, PLANS[name], tmp_path / "ray")
    assert_was_a_test(found)
    assert_equal(found, reference(MANISKILL, PLANS[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fused, context switches", "split, context switches"])
def test_renderers_of_maniskill_may_leave(name: str, ray: Session, reference: Reference, tmp_path: Path) -> None:
    """SAPIEN compiles its shaders anew at each return."""
    drawn = {**IMAGES["env"], "task": "maniskill/PushCube-v1", "max_episode_steps": 9}
    settings = {**IMAGES, "env": drawn, "rollout": {"decisions": 5}}
    found = run(settings, ray, DRAWING[name], tmp_path / "ray")
    assert_was_a_test(found)
    assert_renderers_left(found, True, "maniskill/PushCube-v1")
    assert_equal(found, reference(settings, DRAWING[name]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fused", "split", "split in 4, 2 groups", "hybrid", "split, context switches"])
def test_every_plan_computes_the_same_on_libero(name: str, ray: Session, reference: Reference, tmp_path: Path) -> None:
    plan = {**PLANS, **DRAWING}[name]
    found = run(LIBERO, ray, plan, tmp_path / "ray")
    assert_was_a_test(found)
    assert_equal(found, reference(LIBERO, plan))
