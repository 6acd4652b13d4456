"""Policy replicas: several workers act, each for the groups of environments that it is handed. Nothing else changes."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import torch

from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.errors import UserError
from embodied.execution.assignment import Assignment, configured
from embodied.execution.iteration import OnPolicy, start_run
from embodied.execution.roles import PolicyRole
from embodied.execution.session import Session
from embodied.rollout.policy_worker import PolicyReplica, PolicyWorker
from embodied.runtime.deadlines import Deadline
from embodied.runtime.handles import WorkerGroup
from embodied.runtime.ray.actors import RayHandle
from embodied.runtime.ray.runtime import RayRuntime
from embodied.workflows.context import WorkerContext
from embodied.workflows.recipes import PPO, Recipe
from embodied.workflows.run_spec import RunSpec
from policies.contract import Action, Inputs
from sim_farm.client.farm import WorkerFailed
from sim_farm.contract import FarmError
from tests.embodied.conftest import SharedRay
from tests.embodied.support import runs
from tests.embodied.support.runs import GROUPS, IMAGES, STATES, Run, assert_equal, assert_was_a_test, assigned, inline
from tests.embodied.support.shared_blocks import mapped

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


@pytest.mark.slow
@pytest.mark.parametrize("replicas", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_episodes_are_equal_to_the_last_bit(replicas: int, ray: Session, reference: Any, tmp_path: Path) -> None:
    """Nothing is valued, so that every batch is a group's: three iterations, trajectories and parameters."""
    plan, settings = shared(replicas), of(GROUPS)
    found = runs.run(settings, ray, plan, tmp_path / "ray")
    assert_was_a_test(found)
    assert_equal(found, reference(settings, plan))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "replicas"),
    [
        pytest.param(STATES, 2, id="2"),
        pytest.param(STATES, 4, id="4", marks=pytest.mark.slow),
        pytest.param(IMAGES, 2, id="images", marks=pytest.mark.slow),
    ],
)
def test_replicas_change_no_more_than_the_rounding_of_values(
    settings: dict[str, Any], replicas: int, ray: Session, reference: Any, tmp_path: Path
) -> None:
    plan, settings = shared(replicas), of(settings)
    found = runs.run(settings, ray, plan, tmp_path / "ray")
    assert_was_a_test(found)
    assert_only_values_are_rounded(found, reference(settings, plan))
    paths = {span.args["path"] for one in found.iterations for span in one.spans if span.name == "publish weights"}
    assert paths == {f"shared memory, one copy for {replicas} replicas"}
    for one in found.iterations:
        acting = {s.track for s in one.spans if s.name.startswith("act for group")}
        assert acting == {f"policy {rank}" for rank in range(replicas)}, "a replica has not acted"
        clock = one.summary.clock
        busy = sum(s.end_ns - s.start_ns for s in one.spans if s.name.startswith("act for group")) / 1e9
        assert clock.policy == pytest.approx(busy) and clock.acting == pytest.approx(busy / replicas)


@pytest.mark.slow
def test_replicas_share_the_groups_of_several_tasks(ray: Session, reference: Any, tmp_path: Path) -> None:
    settings = {**IMAGES, "extra_tasks": [{"task": "tabletop/push", "num_envs": 4}]}
    settings["policy"] = {**IMAGES["policy"], "reads": ["images"]}
    plan = shared(2, assigned("disaggregated", 2, (0,), policy=(), one_process=False))
    plan = replace(plan, farms=plan.farms * 2)
    found = runs.run(settings, ray, plan, tmp_path / "ray")
    assert_was_a_test(found)
    assert_only_values_are_rounded(found, reference(settings, plan))


@pytest.mark.slow
def test_a_rollout_of_replicas_may_be_ahead(ray: Session, reference: Any, tmp_path: Path) -> None:
    plan, settings = shared(2, ahead=1), of(GROUPS)
    found = runs.run(settings, ray, plan, tmp_path / "ray")
    assert runs.lags(found) == [0, 1, 1]
    assert_equal(found, reference(settings, plan))


@pytest.mark.slow
def test_replicas_may_leave_the_memory(ray: Session, reference: Any, tmp_path: Path) -> None:
    plan, settings = replace(shared(2), unload=True), of(GROUPS)
    found = runs.run(settings, ray, plan, tmp_path / "ray")
    left = [s.args["bytes"] for one in found.iterations for s in one.spans if s.args.get("worker") == "policy"]
    assert len(left) == 2 * runs.ITERATIONS and len(set(left)) == 1, "each replica leaves and comes back"
    assert_equal(found, reference(settings, plan))
    assert not list((tmp_path / "ray").glob("unloaded-*")), "what was spilled is left behind"


@pytest.mark.slow
def test_replicas_with_weights_of_different_versions_are_refused(ray: Session, tmp_path: Path) -> None:
    config = parse_config(of(STATES, workflow="ppo"), "test")
    with (
        pytest.raises(WorkerFailed, match="different versions: policy 0 with 0, policy 1 with 7"),
        start_run(RunSpec.of(config), tmp_path, ray, shared(2)) as workers,
    ):
        workers.begin(None, 0)
        workers.acting.call_one(1, PolicyRole.at_version, 7)
        workers.iterate(0)


def test_in_one_process_there_is_one(here: Session, reference: Any, tmp_path: Path) -> None:
    settings = of(GROUPS, policy={**GROUPS["policy"], "replicas": 4}, runtime={**GROUPS["runtime"], "mode": "inline"})
    assignment = configured(RunSpec.of(parse_config(settings, "test")), here.cores)
    found = runs.run(settings, here, assignment, tmp_path / "here")
    assert found.iterations[0].summary.clock.replicas == 1
    assert_equal(found, reference(of(GROUPS), assignment))


# --- load is shared


def outcomes(workers: OnPolicy) -> torch.Tensor:
    """bool [rows, columns]: where the trajectory memory holds the outcome of a decision."""
    executed = workers.memory.column("executed").view(workers.memory.shape.rows, workers.memory.shape.columns)
    return (executed >= 0) & (executed <= STATES["policy"]["chunk"])


def pid_of(group: WorkerGroup[Any], rank: int) -> int:
    handle = group.handles[rank]
    assert isinstance(handle, RayHandle)
    return handle.process.pid


def until(condition: Callable[[], bool]) -> None:
    """Wait for it; a busy machine takes minutes."""
    end = time.monotonic() + 240
    while not condition():
        assert time.monotonic() < end, "it has not come about"
        time.sleep(0.01)  # other processes bring it about


@pytest.mark.slow
def test_a_slow_replica_does_not_hold_up_the_others(ray: Session, tmp_path: Path, reference: Any) -> None:
    plan, settings = shared(2), of(STATES)
    decisions = settings["rollout"]["decisions"]
    config = parse_config({**settings, "workflow": "ppo"}, "test")
    with start_run(RunSpec.of(config), tmp_path, ray, plan) as workers:
        workers.begin(None, 0)
        stopped = pid_of(workers.acting, 1)
        os.kill(stopped, signal.SIGSTOP)
        try:
            begun = workers.rollouts.start()
            until(lambda: int(outcomes(workers)[:decisions].all(0).sum()) == ENVS - 2)
            undecided = ~outcomes(workers)[:decisions].all(0)
            assert not outcomes(workers)[:, undecided].any(), "the group of the stopped replica was decided for"
        finally:
            os.kill(stopped, signal.SIGCONT)
        summary = workers.rollouts.wait(begun)
    expected = reference(settings, plan).iterations[0].summary
    assert summary.env_steps == expected.env_steps and summary.episodes == expected.episodes


@pytest.mark.slow
def test_a_group_that_is_ready_first_is_served_first(
    ray_runtime: RayRuntime, reference: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One policy worker, two tasks, and the first task's simulator stands still."""
    monkeypatch.setattr(ray_runtime, "deadline", Deadline(1200.0))
    monkeypatch.setattr(ray_runtime.host, "silent_s", 300.0)  # so that nobody is replaced
    settings = {**STATES, "extra_tasks": [{"num_envs": 4}]}
    plan = assigned("disaggregated", 2, (0,), policy=(), one_process=False)
    plan = replace(plan, farms=plan.farms * 2)
    config = parse_config({**settings, "workflow": "ppo"}, "test")
    with start_run(RunSpec.of(config), tmp_path, Session(config, ray_runtime, tuple(runs.CORES)), plan) as workers:
        decisions = config.rollout.decisions
        workers.begin(None, 0)
        stopped = ray_runtime.host.pids()[0]
        os.kill(stopped, signal.SIGSTOP)
        try:
            begun = workers.rollouts.start()
            until(lambda: bool(outcomes(workers)[:decisions, 4:].all()))
            assert not outcomes(workers)[:decisions, :4].all(0).any()
        finally:
            os.kill(stopped, signal.SIGCONT)
        summary = workers.rollouts.wait(begun)
    expected = reference(settings, plan).iterations[0].summary
    assert summary.env_steps == expected.env_steps and summary.episodes == expected.episodes


# --- what is refused


def test_more_replicas_than_groups_are_refused(ray: Session, tmp_path: Path) -> None:
    with (
        pytest.raises(UserError, match="5 policy replicas would share 4 groups .* set policy.replicas to 4 or less"),
        start_run(RunSpec.of(parse_config(of(STATES), "test")), tmp_path, ray, shared(5)),
    ):
        pass


# --- what goes wrong: each of these ends the run, with one message that names the replica


class Unbuildable(PolicyWorker):
    @classmethod
    def make_replica(cls, context: WorkerContext) -> PolicyReplica:
        if context.rank == 1:
            raise UserError("its weights are not there")
        return super().make_replica(context)


class Confused(Exception):
    """What a policy may raise."""


class Raising(PolicyWorker):
    """The last replica's policy raises at its second decision."""

    @classmethod
    def make_replica(cls, context: WorkerContext) -> PolicyReplica:
        made = super().make_replica(context)
        act, calls = made.policy.act, [0]

        def raising(inputs: Inputs, noise: torch.Tensor | None) -> Action:
            calls[0] += 1
            if calls[0] > 2:  # the first is of the memory's layout, or none
                raise Confused("it does not know what to do")
            return act(inputs, noise)

        if context.rank == context.ranks - 1:
            made.policy.act = raising  # type: ignore[method-assign]
        return made


def with_worker(worker: type) -> Recipe:
    components = tuple(
        replace(c, worker=f"{__name__}:{worker.__name__}") if c.name == "policy" else c for c in PPO.components
    )
    return replace(PPO, components=components)


UNBUILDABLE, RAISING = with_worker(Unbuildable), with_worker(Raising)


@pytest.mark.slow
def test_a_replica_that_cannot_be_built_is_named(ray: Session, tmp_path: Path) -> None:
    config = parse_config(of(STATES, workflow=f"{__name__}:UNBUILDABLE"), "test")
    with (
        pytest.raises(UserError, match="^policy 1: its weights are not there$"),
        start_run(RunSpec.of(config), tmp_path, ray, shared(2)),
    ):
        pass


@pytest.mark.slow
def test_the_exception_of_a_replicas_policy_arrives_with_its_name(ray: Session, tmp_path: Path) -> None:
    config = parse_config(of(STATES, workflow=f"{__name__}:RAISING"), "test")
    with start_run(RunSpec.of(config), tmp_path, ray, shared(3)) as workers:
        workers.begin(None, 0)
        with pytest.raises(Confused, match="^policy 2: it does not know what to do$"):
            workers.iterate(0)


EACH_BLOW = pytest.mark.parametrize(
    ("blow", "message"),
    [
        pytest.param(signal.SIGKILL, "^policy 1 died during 'decide_request'", id="killed"),
        pytest.param(
            signal.SIGSTOP, "^policy 1 did not answer within 5 s: it has been deciding for group [0-3] for ",
            id="stopped", marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
"""What ends a replica, and what is said then."""


@pytest.mark.slow
@EACH_BLOW
def test_a_lost_replica_is_named_and_nothing_is_left(
    blow: signal.Signals, message: str, tmp_path: Path, shared_ray: SharedRay
) -> None:
    shared_ray.close()
    config = parse_config(of(STATES, workflow="ppo"), "test")
    runtime = RayRuntime("local", 600.0)
    pids: list[int] = []
    memories: set[Path] = set()
    try:
        with (
            pytest.raises(FarmError, match=message),
            start_run(RunSpec.of(config), tmp_path, Session(config, runtime, tuple(runs.CORES)), shared(2)) as workers,
        ):
            workers.farm_deadline_s = 5.0  # of the rollout_worker, which it gives replicas too
            workers.begin(None, 0)
            pids = [process.pid for process in runtime._processes if process.pid]
            memories = mapped([os.getpid(), *pids])
            assert len(memories) >= 4 + len(pids), "slots, bell, trajectories, weights, each process's progress"
            os.kill(pid_of(workers.acting, 1), blow)
            workers.iterate(0)
    finally:
        runtime.close()
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    assert not [path for path in memories if path.exists()], "shared memory is left behind"
