"""Policy replicas on other nodes than the frames: where one is changes nothing of what is computed."""

from __future__ import annotations

import os
import pickle
import signal
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil  # type: ignore[import-untyped]
import pytest
import torch

from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.execution.assignment import Assignment
from embodied.execution.iteration import OnPolicy, start_run
from embodied.execution.session import Session
from embodied.rollout.environment_groups import DecisionRequest
from embodied.rollout.replicas import Message, Reply
from embodied.runtime.handles import WorkerGroup
from embodied.runtime.remote import CALL_BYTES
from embodied.runtime.shared_tensors import Overwritten, TensorPublisher
from embodied.workflows.run_spec import RunSpec
from policies.contract import Action, Inputs
from sim_farm.contract import FarmError
from tests.embodied.learning import test_learner_ranks as ranked
from tests.embodied.learning import test_weights
from tests.embodied.rollout import test_replicas
from tests.embodied.rollout.test_replicas import EACH_BLOW, of, shared, until
from tests.embodied.support import runs
from tests.embodied.support.ray_nodes import Machines, started
from tests.embodied.support.runs import CORES, GROUPS, IMAGES, STATES, assert_equal, assert_was_a_test
from tests.embodied.support.shared_blocks import mapped


@pytest.fixture(scope="module")
def machines() -> Iterator[Machines]:
    with started("near", "far") as found:
        yield found


@pytest.fixture
def ray(machines: Machines) -> Iterator[Session]:
    """With no worker of an earlier test."""
    runtime = machines.runtime
    yield Session(Config(), runtime, tuple(CORES))
    for process in [process for process in runtime._processes if process not in runtime._spare]:
        runtime._end(process)


def at(machines: Machines, *nodes: str, **changes: Any) -> Assignment:
    """A replica on each of these nodes; '' is the one with the frames."""
    plan = shared(len(nodes))
    return replace(plan, components={**plan.components, "policy": on(machines, *nodes)}, **changes)


def on(machines: Machines, *nodes: str) -> tuple[Affinity, ...]:
    return tuple(Affinity(node=machines.node(name).id if name else "") for name in nodes)


def processes_of(machines: Machines, name: str) -> list[int]:
    """Of the workers on another node."""
    raylet = psutil.Process(machines.raylets[name])
    return [child.pid for child in raylet.children(recursive=True) if "_FarActor" in "".join(child.cmdline())]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("settings", "nodes", "way"),
    [
        pytest.param(IMAGES, ("far", ""), "Ray, between machines and shared memory", id="images"),
        pytest.param(STATES, ("", "far"), "shared memory and Ray, between machines", id="states"),
        pytest.param(GROUPS, ("far", "far", ""), "Ray, between machines and shared memory", id="episodes"),
    ],
)
def test_where_a_replica_is_changes_nothing(
    settings: dict[str, Any], nodes: tuple[str, ...], way: str, machines: Machines, ray: Session, tmp_path: Path
) -> None:
    """To the last bit: trajectories with their frames and values, and what is learned from them."""
    settings = of(settings)
    found = runs.run(settings, ray, at(machines, *nodes), tmp_path / "away")
    assert_was_a_test(found)
    assert_equal(found, runs.run(settings, ray, shared(len(nodes)), tmp_path / "here"))
    acting = {s.track for one in found.iterations for s in one.spans if s.name.startswith("act for group")}
    assert acting == {f"policy {rank}" for rank in range(len(nodes))}, "a replica has not acted"
    paths = {span.args["path"] for one in found.iterations for span in one.spans if span.name == "publish weights"}
    assert paths == {f"{way}, one copy on each node for {len(nodes)} replicas"}


@pytest.mark.slow
def test_the_only_policy_worker_may_be_on_another_node(machines: Machines, ray: Session, tmp_path: Path) -> None:
    """Somebody at home goes round with the farm then; the batches are those of one policy worker."""
    plan, settings = at(machines, "far"), of(STATES)
    found = runs.run(settings, ray, plan, tmp_path / "away")
    assert_was_a_test(found)
    alone = replace(plan, components={**plan.components, "policy": (Affinity(),)})
    expected = runs.run(settings, ray, alone, tmp_path / "here")
    test_replicas.assert_only_values_are_rounded(found, expected)


@pytest.mark.slow
def test_the_learner_may_be_on_the_other_node(machines: Machines, ray: Session, tmp_path: Path) -> None:
    """Weights come home then: to two replicas there, and to one beside the learner."""
    plan, settings = at(machines, "", "far", ""), of(STATES)
    plan = replace(plan, components={**plan.components, "learner": on(machines, "far")})
    found = runs.run(settings, ray, plan, tmp_path / "away")
    assert_equal(found, runs.run(settings, ray, shared(3), tmp_path / "here"))


@pytest.mark.slow
def test_replicas_share_the_policies_of_ranks_on_other_nodes(machines: Machines, ray: Session, tmp_path: Path) -> None:
    """Each pair is one process and takes turns."""
    runs_of = {}
    for name, nodes in {"away": ("", "far", "far"), "here": ("", "", "")}.items():
        plan = at(machines, *nodes, hosts=tuple(range(len(nodes))), unload=True)
        plan = replace(plan, components={**plan.components, "learner": on(machines, *nodes)})
        runs_of[name] = ranked.run(of(ranked.STATES), ray, plan, tmp_path / name)
    ranked.assert_same(runs_of["away"], runs_of["here"])
    paths = {s.args["path"] for one in runs_of["away"].iterations for s in one.spans if s.name == "publish weights"}
    assert paths == {"the same policy"}


WIDE = {**STATES["policy"], "options": {"widths": [2048, 2048]}}
"""Weights of more than one part."""


@pytest.mark.slow
def test_nothing_but_messages_leaves_a_node(machines: Machines, ray: Session, tmp_path: Path) -> None:
    """Replicas elsewhere map no memory of home; all of a node map one copy of the weights, whose every bit arrives."""
    settings = of(STATES, workflow=f"{test_weights.__name__}:TELLING", policy=WIDE)
    with start_run(
        RunSpec.of(parse_config(settings, "test")), tmp_path, ray, at(machines, "far", "", "far")
    ) as workers:
        workers.begin(None, 0)
        for version in range(3):
            learner: WorkerGroup[Any] = workers.learner
            acting: WorkerGroup[Any] = workers.acting
            sums, requests = learner.call(test_weights.LearnerRole.holds)
            assert acting.call_all(test_weights.Worker.holds) == [(sums, version)] * 3
            assert requests == version + 1, "the learner is asked once, however many nodes there are"
            workers.iterate(version)
        pids = processes_of(machines, "far")
        assert len(pids) == 2
        first, second = (mapped([pid]) for pid in pids)
        here = mapped([os.getpid(), *(p.pid for p in ray.runtime._processes if not p.node and p.pid)])  # type: ignore[attr-defined]
        assert len(here) > 5 and not (first | second) & here
        assert len(first | second) == 2 and first & second, "two memories take turns, and both act with the newest"
        assert all(path.stat().st_size > CALL_BYTES for path in first)
    assert not any(path.exists() for path in first), "shared memory is left behind"


# --- what goes wrong


def begun(workers: OnPolicy) -> None:
    workers.farm_deadline_s = 5.0
    workers.begin(None, 0)


@pytest.mark.slow
@EACH_BLOW
def test_a_lost_replica_is_named_and_nothing_is_left(
    blow: signal.Signals, message: str, machines: Machines, ray: Session, tmp_path: Path
) -> None:
    config = parse_config(of(STATES, workflow="ppo"), "test")
    pids: list[int] = []
    with (
        pytest.raises(FarmError, match=message),
        start_run(RunSpec.of(config), tmp_path, ray, at(machines, "", "far")) as workers,
    ):
        begun(workers)
        pids = processes_of(machines, "far")
        memories = mapped(pids)
        assert len(pids) == 1 and memories
        os.kill(pids[0], blow)
        workers.iterate(0)
    for process in list(machines.runtime._processes):
        machines.runtime._end(process)
    until(lambda: not any(psutil.pid_exists(pid) for pid in pids))
    if blow is signal.SIGKILL:  # nobody there can do it for one that is stopped
        assert not any(path.exists() for path in memories), "shared memory is left behind"


@pytest.mark.slow
def test_the_exception_of_a_policy_arrives_with_its_replicas_name(
    machines: Machines, ray: Session, tmp_path: Path
) -> None:
    config = parse_config(of(STATES, workflow=f"{test_replicas.__name__}:RAISING"), "test")
    with start_run(RunSpec.of(config), tmp_path, ray, at(machines, "", "", "far")) as workers:
        begun(workers)
        with pytest.raises(test_replicas.Confused, match="^policy 2: it does not know what to do$"):
            workers.iterate(0)


# --- messages, and what is lent again: no Ray


def crossed(content: Any) -> Any:
    return pickle.loads(pickle.dumps(Message(content))).content


def test_what_crosses_arrives_as_it_was() -> None:
    frames = torch.randint(0, 256, (3, 2, 8, 8, 3), dtype=torch.uint8)
    names = torch.arange(9).view(3, 3)
    inputs = Inputs(None, torch.randn(3, 4), {"a": frames[:, 0], "b": frames[:, 1]}, ("go", "on", "ü"), names)
    request = DecisionRequest(1, np.arange(3), np.arange(3) + 5, np.arange(3) + 7, inputs)
    found = crossed(request)
    assert found.task == 1 and found.frame_rows is None
    assert [getattr(found, key).tolist() for key in ("envs", "episode", "step")] == [[0, 1, 2], [5, 6, 7], [7, 8, 9]]
    for mine in (found.inputs, crossed(inputs)):
        assert mine.state is None and mine.instruction == inputs.instruction
        assert mine.episode.equal(names) and mine.proprio.equal(inputs.proprio)
        assert list(mine.frames) == ["a", "b"] and all(torch.equal(mine.frames[k], inputs.frames[k]) for k in "ab")
    trace = {"tokens": torch.arange(6).view(3, 2), "short": torch.randn(3, 5).bfloat16()}
    action = Action(torch.randn(3, 2, 4), torch.randn(3, 2, 4), torch.randn(3), trace)
    reply = crossed(Reply(action, 4, 7))
    assert isinstance(reply.answer, Action) and (reply.version, reply.spent_ns) == (4, 7)
    for name in ("chunk", "log_prob", "value"):
        assert torch.equal(getattr(reply.answer, name), getattr(action, name))
    assert all(torch.equal(reply.answer.trace[name], tensor) for name, tensor in trace.items())
    assert torch.equal(crossed(Reply(action.value, 4, 7)).answer, action.value)


def test_what_is_lent_again_is_whole_or_not_there() -> None:
    lender, other = (TensorPublisher() for _ in range(2))
    tensors = {"x": torch.randn(1000), "y": torch.arange(3), "none": torch.empty(0)}
    try:
        lent = lender.publish(tensors)
        parts = [lender.part(lent.version, n, min(n + 100, lent.nbytes)) for n in range(0, lent.nbytes, 100)]
        again = pickle.loads(pickle.dumps(other.publish_copy(lent, parts)))
        assert list(again) == list(tensors) and all(torch.equal(again[name], tensors[name]) for name in tensors)
        with pytest.raises(ZeroDivisionError):
            other.publish_copy(lent, (part if n < 20 else part[: 1 // 0] for n, part in enumerate(parts)))
        again.require_unchanged()  # the other memory is half written
        other.publish_copy(lent, parts)
        with pytest.raises(Overwritten):
            again.require_unchanged()
        lender.publish(tensors)
        lender.publish(tensors)
        with pytest.raises(Overwritten, match="version 1 of the shared tensors has been overwritten"):
            lender.part(lent.version, 0, 10)
    finally:
        lender.close()
        other.close()
