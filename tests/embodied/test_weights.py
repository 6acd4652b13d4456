"""Weights on their way from the learner to who acts: by any way, every tensor arrives as it left, or none does."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import policies
from embodied.config import Config, parse_config
from embodied.execution.assignment import Assignment
from embodied.execution.executor import executor
from embodied.execution.session import Session, open_session
from embodied.runtime.groups import WorkerGroup
from embodied.runtime.ray_runtime import RayRuntime
from embodied.workers.context import WorkerContext
from embodied.workers.learner import Learner
from embodied.workers.lent_tensors import Lender, LentOver, LentTensors
from embodied.workers.policy_replica import PolicyReplica
from embodied.workers.policy_worker import PolicyWorker
from embodied.workers.weights import WrongWeights, check_weights, map_weights, trained
from embodied.workflows.recipes import PPO
from policies.contract import Inputs, Policy, PolicySpec
from sim_farm.memory import FOLDER
from tests.embodied import test_executor as runs
from tests.embodied.test_executor import STATES, assigned, inline
from tests.embodied.test_policy_worker import worker
from tests.embodied.test_replicas import of, shared

# --- workers that say what they hold


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
        for name, tensor in tensors.items()
    }


class Replica(PolicyReplica):
    def holds(self) -> tuple[dict[str, str], int]:
        return checksums(trained(self.policy)), self._actor.version


class Worker(PolicyWorker):
    @classmethod
    def make_replica(cls, context: WorkerContext) -> PolicyReplica:
        made = super().make_replica(context)
        made.__class__ = Replica
        return made

    def holds(self) -> tuple[dict[str, str], int]:
        return checksums(trained(self.policy)), self._actor.version


class Trainer(Learner):
    asked = 0

    def weights(self) -> dict[str, Tensor]:
        self.asked += 1
        return super().weights()

    def holds(self) -> tuple[dict[str, str], int]:
        """And how often it was asked for its weights."""
        return checksums(super().weights()), self.asked


CLASSES = {"policy": Worker, "learner": Trainer}
TELLING = replace(
    PPO,
    components=tuple(
        replace(c, worker=f"{__name__}:{CLASSES[c.name].__name__}") if c.name in CLASSES else c for c in PPO.components
    ),
)
APART = assigned("disaggregated", 4, (0,), policy=(), one_process=False)
WAYS: dict[str, tuple[str, Assignment, str]] = {
    "one process": ("inline", inline(APART), "by reference"),
    "beside the learner": ("ray", replace(APART, hosts=(0,)), "the same policy"),
    "to one process": ("ray", APART, "shared memory"),
    "to three processes": ("ray", shared(3), "shared memory, one copy for 3 replicas"),
}


@pytest.fixture(scope="module")
def ray(ray_runtime: RayRuntime) -> Session:
    return Session(Config(), ray_runtime, tuple(runs.CORES))


@pytest.mark.parametrize("way", WAYS)
def test_every_tensor_arrives_as_it_left(way: str, ray: Session, tmp_path: Path) -> None:
    """And the learner is asked once per version, however many act."""
    mode, plan, path = WAYS[way]
    config = parse_config(of(STATES, workflow=f"{__name__}:TELLING", runtime={"mode": mode, "deadline_s": 120}), "test")
    with open_session(config) if mode == "inline" else nullcontext(ray) as session:
        with executor(config, tmp_path, session, plan) as workers:
            assert workers.weights_path == path
            workers.begin(None, 0)
            seen = set()
            for version in range(4):
                trainer: WorkerGroup[Any] = workers.trainer
                acting: WorkerGroup[Any] = workers.acting
                expected, asked = trainer.call(Trainer.holds)
                held = acting.call_all(Worker.holds)
                assert held == [(expected, version)] * len(plan.components["policy"])
                assert asked == (0 if plan.hosts else version + 1)
                seen.add(expected["log_std"])
                workers.iterate(version)
            assert len(seen) == 4, "nothing was learned"


# --- weights of another policy


def small(widths: list[int] | None = None) -> Policy:
    spec = PolicySpec(action_dim=3, chunk=2, state_dim=16)
    return policies.build("gaussian_mlp", spec, seed=1, widths=widths or [8])


def without(state: dict[str, Tensor], name: str) -> dict[str, Tensor]:
    return {key: tensor for key, tensor in state.items() if key != name}


def mistakes(state: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    changed = {name: tensor + 1 for name, tensor in state.items()}
    return {
        "missing log_std": without(changed, "log_std"),
        "unknown log_stdd": {**changed, "log_stdd": torch.zeros(3)},
        "log_std is float64 [2, 3] instead of float32 [2, 3]": {**changed, "log_std": state["log_std"].double()},
        "log_std is float32 [4] instead of float32 [2, 3]": {**changed, "log_std": torch.zeros(4)},
    }


@pytest.mark.parametrize("said", mistakes(small().state_dict()))
def test_weights_that_are_not_the_policys_are_refused_and_the_old_ones_act_on(said: str) -> None:
    policy = small()
    before = checksums(policy.state_dict())
    with worker(policy) as made:
        made.at_version(3)
        with pytest.raises(WrongWeights) as refused:
            made.load_weights(mistakes(policy.state_dict())[said], 4)
        assert said in str(refused.value) and "The old ones are kept" in str(refused.value)
        made.rollout(2)
        assert made.trajectories().version == 3
    assert checksums(policy.state_dict()) == before


def test_frozen_parameters_are_nobodys_business() -> None:
    policy = small()
    policy.value_head.requires_grad_(False)
    state = {name: tensor for name, tensor in policy.state_dict().items() if not name.startswith("value_head")}
    check_weights(policy, state)
    with pytest.raises(WrongWeights, match="unknown value_head"):
        check_weights(policy, policy.state_dict())


# --- what is lent


def lender() -> Lender:
    return Lender(np.zeros((2, 64), np.uint8))


def sent(lent: LentTensors) -> LentTensors:
    """As another process maps it."""
    make, arguments = lent.__reduce__()
    found: LentTensors = make(*arguments)
    return found


EVERY_KIND = {
    "float": torch.randn(3, 5),
    "brain": torch.randn(7).bfloat16(),
    "half": torch.randn(2, 1, 3).half(),
    "whole": torch.tensor(41),
    "mask": torch.tensor([True, False, True]),
    "none": torch.zeros(0, 4),
    "turned": torch.randn(4, 6).T,
}


def test_tensors_of_every_kind_are_lent() -> None:
    lending = lender()
    try:
        found = sent(lending.lend(EVERY_KIND))
        assert list(found) == list(EVERY_KIND)
        for name, tensor in EVERY_KIND.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    finally:
        lending.close()


def test_what_was_lent_last_stays_while_the_next_is_written() -> None:
    lending = lender()
    try:
        first = sent(lending.lend({"x": torch.full((4,), 1.0)}))
        taken = first["x"]
        second = sent(lending.lend({"x": torch.full((4,), 2.0)}))
        first.require_unchanged()
        assert taken.tolist() == [1.0] * 4 and second["x"].tolist() == [2.0] * 4
        third = lending.lend({"x": torch.full((4,), 3.0)})
        with pytest.raises(LentOver):
            first.require_unchanged()
        with pytest.raises(LentOver):
            sent(LentTensors(third.places, third._name, 1))
        second.require_unchanged()
    finally:
        lending.close()


def test_who_borrows_writes_for_himself_alone() -> None:
    lending = lender()
    try:
        lent = lending.lend({"x": torch.zeros(3)})
        mine, other = sent(lent), sent(lent)
        mine["x"].fill_(5.0)
        assert not other["x"].any() and mine["x"].tolist() == [5.0] * 3
    finally:
        lending.close()


def test_memories_are_made_twice_and_removed() -> None:
    names = np.zeros((2, 64), np.uint8)
    lending = Lender(names)
    places = set()
    for number in range(5):
        places.add(str(lending.lend({"x": torch.full((8,), float(number))})._name))
    told = {bytes(name).rstrip(b"\0").decode() for name in names}
    assert len(places) == 2 and told == places
    assert all((FOLDER / place).exists() for place in places)
    lending.close()
    assert not any((FOLDER / place).exists() for place in places) and not names.any()


def test_a_policy_computes_with_what_is_lent() -> None:
    """Without a copy, and to the last bit as with weights of its own."""
    policy, other = small([64, 64]), small([64, 64])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    lending = lender()
    try:
        lent = sent(lending.lend({name: tensor.detach() for name, tensor in trained(other).items()}))
        map_weights(policy, lent)
        spread = {tensor.data_ptr() for tensor in trained(policy).values()}
        assert spread == {lent[name].data_ptr() for name in lent}
        inputs, noise = Inputs(state=torch.randn(5, 16)), torch.randn(5, policy.noise_dim)
        assert torch.equal(policy.act(inputs, noise).chunk, other.act(inputs, noise).chunk)
        assert torch.equal(policy.value(inputs), other.value(inputs))
    finally:
        lending.close()
