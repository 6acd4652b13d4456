"""Weights on their way from the learner to who acts: by any way, every tensor arrives as it left, or none does."""

from __future__ import annotations

import hashlib
import os
import re
import signal
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import policies
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import Affinity
from embodied.errors import PeerFailed, UserError
from embodied.execution.assignment import Assignment
from embodied.execution.iteration import OnPolicy, start_run
from embodied.execution.session import Session, open_session
from embodied.learning import weight_group, weight_sync
from embodied.learning.learner import Learner
from embodied.learning.weight_group import GpuTensors, WeightGroup
from embodied.learning.weight_sync import (
    Location,
    Transport,
    WrongWeights,
    check_weights,
    map_weights,
    trained,
    transport_between,
    transports_to,
)
from embodied.rollout.policy_worker import PolicyReplica, PolicyWorker
from embodied.runtime.handles import WorkerGroup
from embodied.runtime.ray.runtime import RayRuntime
from embodied.runtime.shared_tensors import Overwritten, SharedTensors, TensorPublisher
from embodied.workflows.context import WorkerContext
from embodied.workflows.recipes import PPO, Recipe
from embodied.workflows.run_spec import RunSpec
from policies.contract import Inputs, Policy, PolicySpec
from sim_farm.client.farm import WorkerFailed
from sim_farm.shared_memory.memory import FOLDER, PREFIX
from tests.embodied.rollout.test_policy_worker import worker
from tests.embodied.rollout.test_replicas import of, shared
from tests.embodied.support import runs
from tests.embodied.support.runs import STATES, assigned, inline
from tests.variants import often

# --- workers that say what they hold


def checksums(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()
        for name, tensor in tensors.items()
    }


class Replica(PolicyReplica):
    def holds(self) -> tuple[dict[str, str], int]:
        return checksums(trained(self.policy)), self.version

    def doom(self) -> None:
        """Be killed when everything has arrived, before the others know."""
        agree, agreed = WeightGroup._agree, list[bool]()

        def dying(member: WeightGroup, wrong: UserError | None = None) -> None:
            agreed.append(True)
            if len(agreed) == 2:
                os.kill(os.getpid(), signal.SIGKILL)
            agree(member, wrong)

        setattr(WeightGroup, "_agree", dying)  # noqa: B010


class Worker(PolicyWorker):
    @classmethod
    def make_replica(cls, context: WorkerContext) -> PolicyReplica:
        made = super().make_replica(context)
        made.__class__ = Replica
        return made

    def holds(self) -> tuple[dict[str, str], int]:
        return checksums(trained(self.policy)), self.version


class LearnerRole(Learner):
    requests = 0
    mistake = ""

    def weights(self) -> dict[str, Tensor]:
        self.requests += 1
        if self.mistake == "own":
            raise UserError("there are no weights")
        return {**super().weights(), **({self.mistake: torch.zeros(3)} if self.mistake else {})}

    def err(self, mistake: str) -> None:
        """Hand out a tensor of this name, too; `own`: nothing at all."""
        self.mistake = mistake

    def holds(self) -> tuple[dict[str, str], int]:
        """And how often it was asked for its weights."""
        return checksums(super().weights()), self.requests


class Barred(Worker):
    """In a container that may not map what others have on its GPU."""

    def can_map(self, sample: GpuTensors | None) -> bool:
        return sample is None


def telling(policy: type[Worker]) -> Recipe:
    classes = {"policy": policy, "learner": LearnerRole}
    components = (
        replace(c, worker=f"{__name__}:{classes[c.name].__name__}") if c.name in classes else c for c in PPO.components
    )
    return replace(PPO, components=tuple(components))


TELLING, BARRED = telling(Worker), telling(Barred)
APART = assigned("disaggregated", 4, (0,), policy=(), one_process=False)
WAYS: dict[str, tuple[str, Assignment, str, Transport | None]] = {
    "one process": ("inline", inline(APART), "by reference", None),
    "beside the learner": ("ray", replace(APART, hosts=(0,)), "the same policy", None),
    "to one process": ("ray", APART, "shared memory", None),
    "to three processes": ("ray", shared(3), "shared memory, one copy for 3 replicas", None),
    "broadcast to one": ("ray", APART, "broadcast to 1", Transport.BROADCAST),
    "broadcast to three": ("ray", shared(3), "broadcast to 3", Transport.BROADCAST),
    # Without a GPU what is shown is copied on its way, not mapped; who does what is the same.
    "shown to one": ("ray", APART, "GPU memory to 1", Transport.GPU_MEMORY),
}
"""Runtime, assignment, path, and the way where it is not what is chosen for processes without GPUs."""
OFTEN = ("one process",)
BESIDE_GPUS = {
    "on one GPU": (1, "cuda:0", "GPU memory to 1"),
    "from GPU to GPU": (2, "cuda:1", "broadcast to 1"),
}
"""GPUs that are needed, where who acts is, and the path."""


@pytest.fixture(scope="module")
def ray(ray_runtime: RayRuntime) -> Session:
    return Session(Config(), ray_runtime, tuple(runs.CORES))


@contextmanager
def run_by(way: str, ray: Session, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[OnPolicy]:
    mode, plan, path, forced = WAYS[way]
    if forced is not None:
        monkeypatch.setattr(weight_sync, "transports_to", lambda source, targets: (forced,) * len(targets))
    config = parse_config(of(STATES, workflow=f"{__name__}:TELLING", runtime={"mode": mode, "deadline_s": 120}), "test")
    with open_session(config) if mode == "inline" else nullcontext(ray) as session:
        with start_run(RunSpec.of(config), folder, session, plan) as workers:
            assert workers.weight_sync.path == path
            workers.begin(None, 0)
            yield workers


def conforms(workers: OnPolicy, asks: bool) -> None:
    """Every tensor arrives as it left, and the learner is asked once per version, however many act."""
    seen = set()
    for version in range(4):
        learner: WorkerGroup[Any] = workers.learner
        acting: WorkerGroup[Any] = workers.acting
        expected, requests = learner.call(LearnerRole.holds)
        assert acting.call_all(Worker.holds) == [(expected, version)] * acting.size
        assert requests == (version + 1 if asks else 0)
        seen.add(expected["log_std"])
        workers.iterate(version)
    assert len(seen) == 4, "nothing was learned"


@pytest.mark.parametrize("way", often(OFTEN, WAYS))
def test_every_tensor_arrives_as_it_left(
    way: str, ray: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    with run_by(way, ray, tmp_path, monkeypatch) as workers:
        conforms(workers, asks=way != "beside the learner")


@pytest.mark.slow
def test_what_cannot_be_mapped_goes_through_the_hosts_memory(
    ray: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(weight_sync, "transports_to", lambda source, targets: (Transport.GPU_MEMORY,) * len(targets))
    with start_run(
        RunSpec.of(parse_config(of(STATES, workflow=f"{__name__}:BARRED"), "test")), tmp_path, ray, APART
    ) as workers:
        assert workers.weight_sync.path == "shared memory"
        workers.begin(None, 0)
        conforms(workers, asks=True)


@pytest.mark.parametrize("way", BESIDE_GPUS)
def test_every_tensor_arrives_as_it_left_between_gpus(way: str, ray: Session, tmp_path: Path) -> None:
    count, device, path = BESIDE_GPUS[way]
    if torch.cuda.device_count() < count:
        pytest.skip(f"needs {count} GPUs")
    config = parse_config(of(STATES, workflow=f"{__name__}:TELLING", policy={"device": "cuda"}), "test")
    components = {"policy": (Affinity(device=device),), "learner": (Affinity(device="cuda:0"),)}
    with start_run(RunSpec.of(config), tmp_path, ray, replace(APART, components=components)) as workers:
        assert workers.weight_sync.path == path
        workers.begin(None, 0)
        conforms(workers, asks=True)


@pytest.mark.parametrize("way", often(("one process",), (way for way in WAYS if way != "beside the learner")))
def test_a_failure_leaves_the_old_version_acting(
    way: str, ray: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Everybody's; and what is right goes the same way afterwards."""
    with run_by(way, ray, tmp_path, monkeypatch) as workers:
        learner: WorkerGroup[Any] = workers.learner
        acting: WorkerGroup[Any] = workers.acting
        before = acting.call_all(Worker.holds)
        workers.iterate(0)
        after = acting.call_all(Worker.holds)
        assert after != before
        learner.call(LearnerRole.err, "log_stdd")
        with pytest.raises(WrongWeights, match=r"unknown log_stdd.*The old ones are kept"):
            workers.publish(2)
        assert acting.call_all(Worker.holds) == after
        learner.call(LearnerRole.err, "")
        workers.publish(2)
        assert acting.call_all(Worker.holds) == [(found, 2) for found, _ in after]
        learner.call(LearnerRole.err, "own")
        with pytest.raises(UserError, match="there are no weights"):
            workers.publish(3)
        assert acting.call_all(Worker.holds) == [(found, 2) for found, _ in after]
        learner.call(LearnerRole.err, "")


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


@pytest.mark.parametrize("message", mistakes(small().state_dict()))
def test_weights_that_are_not_the_policys_are_refused_and_the_old_ones_act_on(message: str) -> None:
    policy = small()
    before = checksums(policy.state_dict())
    with worker(policy) as made:
        made.at_version(3)
        with pytest.raises(WrongWeights) as refused:
            made.load_weights(mistakes(policy.state_dict())[message], 4)
        assert message in str(refused.value) and "The old ones are kept" in str(refused.value)
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


# --- which way


def test_the_way_is_the_shortest_between_both_ends() -> None:
    def on(process: int, device: str = "", node: str = "") -> Location:
        return Location(process, device, node)

    assert transport_between(on(1), on(1)) is Transport.REFERENCE
    assert transport_between(on(1, "a"), on(1, "a")) is Transport.REFERENCE
    assert transport_between(on(1), on(2)) is Transport.SHARED_MEMORY, "processes without GPUs never broadcast"
    assert transport_between(on(1, "a"), on(2)) is transport_between(on(1), on(2, "a")) is Transport.SHARED_MEMORY
    assert transport_between(on(1, "a"), on(2, "a")) is Transport.GPU_MEMORY
    assert transport_between(on(1, "a"), on(2, "b")) is Transport.BROADCAST
    for there in (on(1, "a", "far"), on(2, "a", "far"), on(2, "", "far")):  # numbers and GPUs of another machine
        assert transport_between(on(1, "a"), there) is Transport.RAY
    assert transport_between(on(1, "a", "far"), on(2, "b", "far")) is Transport.BROADCAST


def test_several_are_served_by_as_few_ways_as_reach_them() -> None:
    source = Location(1, "a")
    on_gpus = transports_to(source, [Location(2, "a"), Location(3, "b")])
    assert on_gpus == (Transport.GPU_MEMORY, Transport.BROADCAST)
    assert transports_to(source, [Location(2, "a"), Location(3, "b"), Location(4)]) == (Transport.SHARED_MEMORY,) * 3
    found = transports_to(source, [Location(2, "b"), Location(3, "b", "far")])
    assert found == (Transport.SHARED_MEMORY, Transport.RAY)
    assert transports_to(source, [Location(1, "a")]) == (Transport.REFERENCE,)


# --- what is broadcast


def together(members: Sequence[WeightGroup], *work: Callable[[WeightGroup], Any]) -> list[Any]:
    """What each member returns or raises, side by side in this process. The last work is that of all others."""
    found: list[Any] = [None] * len(members)

    def one(number: int) -> None:
        try:
            found[number] = work[min(number, len(work) - 1)](members[number])
        except Exception as error:
            found[number] = error

    threads = [threading.Thread(target=one, args=(number,)) for number in range(len(members))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def joined(size: int) -> list[WeightGroup]:
    names = ("learner", *(f"policy {rank}" for rank in range(size - 1)))
    members = [WeightGroup(rank=rank, size=size, names=names) for rank in range(size)]
    address = members[0].listen()
    assert together(members, lambda member: member.join(address, 20.0)) == [None] * size
    return members


def take(member: WeightGroup) -> dict[str, Tensor]:
    return member.receive(lambda layout: None)


@pytest.mark.parametrize("bucket", [1, 64, 2**20])
def test_tensors_of_every_kind_are_broadcast(bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_group, "BUCKET_BYTES", bucket)
    members = joined(3)
    for again in range(2):
        sent = {name: tensor + again if tensor.is_floating_point() else tensor for name, tensor in EVERY_KIND.items()}
        none, *found = together(members, partial(WeightGroup.send, tensors=sent), take)
        assert none is None
        for each in found:
            assert list(each) == list(sent)
            for name, tensor in sent.items():
                assert each[name].dtype == tensor.dtype and torch.equal(each[name], tensor), name
    for member in members:
        member.leave()


def test_a_learner_that_is_gone_half_way_has_sent_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody returns what did not arrive as a whole."""
    monkeypatch.setattr(weight_group, "BUCKET_BYTES", 1)
    members, broadcast, sent = joined(3), WeightGroup._broadcast, list[int]()

    def once(member: WeightGroup, flat: Tensor) -> None:
        if member.first:
            sent.append(len(flat))
            if len(sent) == 4:  # after the header's length, the header, and one bucket
                member.leave()
        broadcast(member, flat)

    monkeypatch.setattr(WeightGroup, "_broadcast", once)
    found = together(members, lambda member: member.send(EVERY_KIND), take)
    assert all(isinstance(each, PeerFailed) for each in found), found
    for number, each in enumerate(found[1:]):
        assert re.search(rf"policy {number} of 3 lost the others \(learner at 127.0.0.1", str(each)), str(each)
    with pytest.raises(PeerFailed, match="not connected"):
        members[0].send(EVERY_KIND)


def test_a_missing_rank_is_named() -> None:
    names = ("learner", "policy 0", "policy 1")
    members = [WeightGroup(rank=rank, size=3, names=names) for rank in (0, 1)]
    address = members[0].listen()
    found = together(members, lambda member: member.join(address, 60.0, 1.0))
    for name, each in zip(names, found, strict=False):
        assert isinstance(each, PeerFailed)
        assert re.search(rf"{name} .*waited 1 s at {address} for policy 1: not there", str(each)), str(each)


@pytest.mark.slow
def test_a_policy_worker_that_dies_with_all_weights_received_leaves_the_others_as_they_were(
    ray: Session, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last one to agree is killed before it does."""
    with pytest.raises(WorkerFailed, match="policy 2 died during 'load_published'"):
        with run_by("broadcast to three", ray, tmp_path, monkeypatch) as workers:
            acting: WorkerGroup[Any] = workers.acting
            before = acting.call_all(Worker.holds)
            acting.call_one(2, Replica.doom)
            try:
                workers.publish(1)
            finally:
                assert [acting.call_one(rank, Worker.holds) for rank in (0, 1)] == before[:2]


# --- what is lent


def sent(lent: SharedTensors) -> SharedTensors:
    """As another process maps it."""
    make, arguments = lent.__reduce__()
    found: SharedTensors = make(*arguments)
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
    lending = TensorPublisher()
    try:
        found = sent(lending.publish(EVERY_KIND))
        assert list(found) == list(EVERY_KIND)
        for name, tensor in EVERY_KIND.items():
            assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor), name
    finally:
        lending.close()


def test_what_was_lent_last_stays_while_the_next_is_written() -> None:
    lending = TensorPublisher()
    try:
        first = sent(lending.publish({"x": torch.full((4,), 1.0)}))
        taken = first["x"]
        second = sent(lending.publish({"x": torch.full((4,), 2.0)}))
        first.require_unchanged()
        assert taken.tolist() == [1.0] * 4 and second["x"].tolist() == [2.0] * 4
        third = lending.publish({"x": torch.full((4,), 3.0)})
        with pytest.raises(Overwritten):
            first.require_unchanged()
        with pytest.raises(Overwritten):
            sent(SharedTensors(third.layouts, third.memory, 1))["x"]
        second.require_unchanged()
    finally:
        lending.close()


def test_a_private_copy_is_written_for_itself_alone() -> None:
    lending = TensorPublisher()
    try:
        lent = lending.publish({"x": torch.zeros(3)})
        mine, other = sent(lent), sent(lent)
        mine["x"].fill_(5.0)
        assert not other["x"].any() and mine["x"].tolist() == [5.0] * 3
    finally:
        lending.close()


def test_memories_are_made_twice_and_removed() -> None:
    names = (f"{PREFIX}{os.getpid()}-0", f"{PREFIX}{os.getpid()}-1")
    lending = TensorPublisher(names)
    for number in range(5):
        size = 8 if number < 3 else 16
        assert lending.publish({"x": torch.full((size,), float(number))}).memory == names[number % 2]
    assert all((FOLDER / name).exists() for name in names)
    lending.close()
    assert not any((FOLDER / name).exists() for name in names)


def test_a_policy_computes_with_what_is_lent() -> None:
    """Without a copy, and to the last bit as with weights of its own."""
    policy, other = small([64, 64]), small([64, 64])
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.add_(0.1)
    lending = TensorPublisher()
    try:
        lent = sent(lending.publish({name: tensor.detach() for name, tensor in trained(other).items()}))
        map_weights(policy, lent)
        spread = {tensor.data_ptr() for tensor in trained(policy).values()}
        assert spread == {lent[name].data_ptr() for name in lent}
        inputs, noise = Inputs(state=torch.randn(5, 16)), torch.randn(5, policy.noise_dim)
        assert torch.equal(policy.act(inputs, noise).chunk, other.act(inputs, noise).chunk)
        assert torch.equal(policy.value(inputs), other.value(inputs))
    finally:
        lending.close()
