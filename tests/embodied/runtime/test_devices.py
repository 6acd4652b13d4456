"""Policies on a GPU, checked without one: a device that may not be mixed with the CPU, and counts who waits for it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import policies
from embodied.config.files import parse_config
from embodied.config.schema import Config
from embodied.devices import (
    Affinity,
    available_threads,
    decide,
    device_of,
    find_device,
    settle,
    to_host,
    useful_threads,
    value_of,
)
from embodied.errors import UserError
from embodied.execution.assignment import HERE, Assignment, FarmAssignment
from embodied.execution.iteration import start_run
from embodied.execution.session import open_session
from embodied.learning.learner import Learner
from embodied.learning.offload import Offload
from embodied.rollout.policy_worker import PolicyWorker
from embodied.rollout.rollout_loop import RolloutSettings
from embodied.run import checkpoint
from embodied.runtime.ray.actors import _portable
from embodied.trajectories.batch import TensorDecisions, Trajectories
from embodied.trajectories.memory import MemoryLayout, MemoryShape, TrajectoryMemory
from embodied.workflows.context import make_policy
from embodied.workflows.run_spec import RunSpec
from policies.contract import Action, Evaluation, Inputs, Policy, PolicySpec
from policies.scripted.random_actions import RandomActions
from policies.small.gaussian_mlp import GaussianMLP
from sim_farm.client.farm import Farm
from sim_farm.contract import TaskSpec
from sim_farm.episodes import EndlessEpisodes
from sim_farm.shared_memory.frame_memory import FrameMemory
from sim_farm.shared_memory.slot_layout import FarmSpec
from sim_farm.workers.hosts import InProcess
from tests.embodied.support.pretend_device import DEVICE, Far, MixedDevices, PretendDevice
from tests.policies.openvla.tiny import write_tiny
from tests.variants import often

T, B, C, A, S = 6, 5, 2, 3, 16
SPEC = PolicySpec(action_dim=A, chunk=C, state_dim=S)
KINDS: dict[str, dict[str, Any]] = {
    "gaussian_mlp": {"widths": [16]},
    "flow": {"encoder": "state", "features": 8, "widths": [16], "steps": 3},
}


def make(kind: str = "gaussian_mlp") -> Policy:
    return policies.build(kind, SPEC, seed=1, **KINDS[kind])


def far(kind: str = "gaussian_mlp") -> Policy:
    return settle(make(kind), DEVICE)


def near(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.to("cpu") for name, tensor in tensors.items()}


def assert_equal(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert not isinstance(found[name], Far), f"{name} is still on the device"
        assert torch.equal(found[name], tensor), name


def make_inputs(rows: int, seed: int = 0) -> tuple[Inputs, Tensor]:
    g = torch.Generator().manual_seed(seed)
    return Inputs(state=torch.randn(rows, S, generator=g)), torch.randn(rows, make().noise_dim, generator=g)


# --- finding one


def test_auto_is_the_first_gpu_or_the_cpu(gpu: PretendDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_device("auto") == find_device("cuda") == find_device("cuda:0") == DEVICE
    assert find_device("cpu").type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert find_device("auto").type == "cpu"


def test_a_device_that_is_not_there_is_refused_with_those_that_are(
    gpu: PretendDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UserError, match=r"cuda:3, and there is cuda:0 \(Pretence\)"):
        find_device("cuda:3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(UserError, match=r"is cuda:3 and torch .* sees no GPU: set it to cpu or auto"):
        find_device("cuda:3")


def test_a_runs_policy_is_on_its_device(gpu: PretendDevice) -> None:
    for name, expected in (("auto", DEVICE), ("cuda:0", DEVICE), ("cpu", torch.device("cpu"))):
        config = parse_config({"policy": {"device": name, "options": KINDS["gaussian_mlp"]}}, "test")
        policy = make_policy(config, SPEC)
        assert {tensor.device for tensor in policy.state_dict().values()} == {expected}
        assert device_of(policy) == expected


def test_a_policy_without_tensors_computes_on_the_cpu() -> None:
    assert device_of(RandomActions(SPEC)).type == "cpu"


def test_the_pretence_refuses_what_cuda_refuses(gpu: PretendDevice) -> None:
    policy, (inputs, noise) = far(), make_inputs(4)
    with pytest.raises(MixedDevices):
        policy.act(inputs, noise)
    with pytest.raises(MixedDevices):
        torch.ones(3, device=DEVICE) + torch.ones(3)
    with pytest.raises(MixedDevices):
        torch.stack([torch.ones((), device=DEVICE), torch.ones(())])


def test_nothing_is_copied_on_a_cpu() -> None:
    policy, (inputs, noise) = make(), make_inputs(4)
    action = policy.act(inputs, noise)
    on_host = to_host({"chunk": action.chunk})
    assert on_host["chunk"] is action.chunk and inputs.to("cpu").state is inputs.state


# --- the policy worker


@pytest.mark.parametrize("kind", KINDS)
def test_decisions_are_those_of_the_cpu_and_there_and_waited_for_once(kind: str, gpu: PretendDevice) -> None:
    policy, other = far(kind), make(kind)
    inputs = make_inputs(7)[0]
    noise = torch.randn(7, other.noise_dim, generator=torch.Generator().manual_seed(2))
    gpu.waits.clear()
    found, expected = decide(policy, inputs, noise), other.act(inputs, noise)
    assert gpu.waits == ["synchronize"]
    assert_equal(
        {**found.trace, "chunk": found.chunk, "log_prob": found.log_prob, "value": found.value},
        {**expected.trace, "chunk": expected.chunk, "log_prob": expected.log_prob, "value": expected.value},
    )
    assert_equal({"value": value_of(policy, inputs)}, {"value": other.value(inputs)})


def rolled_out(policy: Policy | None, shared: Policy | None = None) -> Trajectories:
    task = TaskSpec("tabletop/reach", max_episode_steps=9)
    farm = Farm.create(FarmSpec(task, EndlessEpisodes(3), 4, C, 2, 1, final_frames="never"), InProcess())
    try:
        worker = PolicyWorker(policy, farm, RolloutSettings(("state",), (3,), "truncated", rounds=12))
        if shared is not None:
            worker.share(shared)
        worker.use(TrajectoryMemory.create(worker.layout(), farm.frames, shared=False))
        worker.begin()
        worker.rollout(12)
        return worker.trajectories()
    finally:
        farm.close()


@pytest.mark.parametrize("shares", [False, True])
def test_a_rollout_leaves_its_trajectories_in_the_hosts_memory(shares: bool, gpu: PretendDevice) -> None:
    found = rolled_out(None, shared=far()) if shares else rolled_out(far())
    expected = rolled_out(make())
    assert expected.truncated.any()
    assert_equal(tensors(found), tensors(expected))


def tensors(batch: Trajectories) -> dict[str, Tensor]:
    named = {name: value for name, value in vars(batch).items() if isinstance(value, Tensor)}
    assert batch.inputs.state is not None
    return {**named, **{f"trace.{key}": tensor for key, tensor in batch.trace.items()}, "state": batch.inputs.state}


# --- the learner


def make_batch(kind: str) -> Trajectories:
    """What an untrained policy would have gathered from a world of noise."""
    g = torch.Generator().manual_seed(0)
    policy, inputs = make(kind), make_inputs(T * B)[0]
    action = policy.act(inputs, torch.randn(T * B, policy.noise_dim, generator=g))
    draw = torch.rand(T, B, generator=g)
    terminated, truncated = draw < 0.1, draw > 0.9
    return Trajectories(
        decisions=TensorDecisions(inputs, action.trace),
        log_prob=action.log_prob.view(T, B, C, A),
        value=action.value.view(T, B),
        reward=torch.randn(T, B, generator=g),
        success=terminated,
        executed=torch.where(terminated | truncated, torch.randint(1, C + 1, (T, B), generator=g), C),
        mask=torch.ones(T, B, dtype=torch.bool),
        terminated=terminated,
        truncated=truncated,
        final_value=torch.randn(T, B, generator=g) * truncated,
        last_value=torch.randn(B, generator=g),
        version=0,
    )


def config_of(epochs: int = 2, unit: str = "action", **loss: Any) -> Config:
    optim = {"epochs": epochs, "minibatch": 8, "micro_batch": 3, "policy_lr": 3e-3}
    return parse_config({"optim": optim, "loss": {"ratio_unit": unit, "entropy_coef": 0.01, **loss}}, "test")


@pytest.mark.parametrize(
    ("lag", "kind", "unit"),
    often(
        [(0, "flow", "action")],
        [(lag, kind, unit) for lag in (0, 1) for kind in KINDS for unit in ("chunk", "action", "element")],
    ),
)
def test_an_update_is_that_of_the_cpu(kind: str, unit: str, lag: int, gpu: PretendDevice, tmp_path: Path) -> None:
    """To the last bit, since both are computed here."""
    config, batch = config_of(unit=unit), make_batch(kind)
    one, other = Learner(far(kind), RunSpec.of(config), tmp_path), Learner(make(kind), RunSpec.of(config), tmp_path)
    for iteration in range(2 if lag == 0 else 1):
        found, expected = one.update(batch, iteration + lag), other.update(batch, iteration + lag)
        assert {k: v for k, v in found.items() if k != "learner/update_s"} == pytest.approx(
            {k: v for k, v in expected.items() if k != "learner/update_s"}, rel=0, abs=0, nan_ok=True
        )
        one.policy.ratio_tolerance = other.policy.ratio_tolerance = 10.0
    assert all(isinstance(tensor, Far) for tensor in one.weights().values())
    assert_equal(near(one.weights()), other.weights())
    assert all(isinstance(state["exp_avg"], Far) for state in one.optimizer.state.values())


def test_an_optimiser_step_waits_for_the_device_once(gpu: PretendDevice, tmp_path: Path) -> None:
    learner, batch = Learner(far(), RunSpec.of(config_of()), tmp_path), make_batch("gaussian_mlp")
    gpu.waits.clear()
    steps = learner.update(batch, 0)["learner/steps"]
    observing = gpu.waits[int(steps) :]
    assert gpu.waits[: int(steps)] == ["synchronize"] * int(steps)
    assert len(observing) <= 3, f"once an iteration, for its statistics and its time: {observing}"


@pytest.mark.slow
def test_a_checkpoint_is_the_same_from_any_device_and_loads_onto_any(gpu: PretendDevice, tmp_path: Path) -> None:
    learner = Learner(far(), RunSpec.of(config_of()), tmp_path)
    learner.update(make_batch("gaussian_mlp"), 0)
    learner.save(tmp_path / "checkpoints", checkpoint.RunState(1, 0, 0.0, ()), {"episode": np.zeros(1)})
    learner.saved()
    folder = checkpoint.latest(tmp_path / "checkpoints")
    assert folder is not None
    on_cpu, back = Learner(make(), RunSpec.of(config_of()), tmp_path), Learner(far(), RunSpec.of(config_of()), tmp_path)
    for other in (on_cpu, back):
        other.load(folder)
        assert_equal(near(other.weights()), near(learner.weights()))
    for parameter, state in back.optimizer.state.items():
        assert {tensor.device for tensor in state.values()} == {parameter.device} == {DEVICE}
    batch = make_batch("gaussian_mlp")
    for other in (on_cpu, back, learner):
        other.policy.ratio_tolerance = 10.0
        other.update(batch, 1)
    assert_equal(near(back.weights()), on_cpu.weights())
    assert_equal(near(learner.weights()), on_cpu.weights())


# --- policies on images


def sighted(kind: str, checkpoint: Path) -> Policy:
    spec = PolicySpec(7, chunk=1, proprio_dim=8, cameras=("front",), image_size=32)
    if kind == "flow":
        return policies.build("flow", spec, seed=1, encoder="cnn", features=8, widths=[16], steps=3)
    spec = replace(spec, image_size=28) if kind == "openvla" else replace(spec, image_size=28, chunk=8)
    options: dict[str, Any] = {"checkpoint": str(checkpoint), "lora_rank": 2, "value_widths": [8]}
    return policies.build(kind, spec, seed=1, **options)


@pytest.mark.slow
@pytest.mark.parametrize("kind", often(["openvla"], ["flow", "openvla", "openvla_oft"]))
def test_policies_on_images_act_and_learn_there(kind: str, gpu: PretendDevice, tmp_path: Path) -> None:
    weights = write_tiny(tmp_path / "tiny")
    here = sighted(kind, weights)
    there, g, rows = settle(sighted(kind, weights), DEVICE), torch.Generator().manual_seed(0), 4
    size = here.spec.image_size
    inputs = Inputs(
        proprio=torch.randn(rows, 8, generator=g),
        frames={"front": torch.randint(0, 256, (rows, size, size, 3), generator=g, dtype=torch.uint8)},
        instruction=("reach", "push", "reach", "lift"),
    )
    noise = torch.randn(rows, here.noise_dim, generator=g)
    action, expected = decide(there, inputs, noise), here.act(inputs, noise)
    assert_equal({"chunk": action.chunk, "value": action.value}, {"chunk": expected.chunk, "value": expected.value})
    assert_equal(action.trace, expected.trace)
    assert_equal({"value": value_of(there, inputs)}, {"value": here.value(inputs)})
    chunk = here.spec.chunk
    batch = Trajectories(
        decisions=TensorDecisions(inputs, action.trace),
        log_prob=action.log_prob.view(2, 2, chunk, 7),
        value=action.value.view(2, 2),
        reward=torch.randn(2, 2, generator=g),
        success=torch.zeros(2, 2, dtype=torch.bool),
        executed=torch.full((2, 2), chunk),
        mask=torch.ones(2, 2, dtype=torch.bool),
        terminated=torch.zeros(2, 2, dtype=torch.bool),
        truncated=torch.zeros(2, 2, dtype=torch.bool),
        final_value=torch.zeros(2, 2),
        last_value=torch.randn(2, generator=g),
        version=0,
    )
    one, other = Learner(there, RunSpec.of(config_of()), tmp_path), Learner(here, RunSpec.of(config_of()), tmp_path)
    for learner in (one, other):
        assert learner.update(batch, 0)["learner/skipped_steps"] == 0
    assert_equal(near(one.weights()), other.weights())


# --- leaving the device


@pytest.mark.slow
def test_what_leaves_a_gpu_waits_in_the_hosts_memory_and_returns(gpu: PretendDevice, tmp_path: Path) -> None:
    learner, other = (
        Learner(far(), RunSpec.of(config_of()), tmp_path),
        Learner(make(), RunSpec.of(config_of()), tmp_path),
    )
    batch = make_batch("gaussian_mlp")
    for one in (learner, other):
        one.update(batch, 0)
        one.policy.ratio_tolerance = 10.0
    before = list(learner.policy.parameters())
    offload = Offload(tmp_path / "spill", learner.policy, learner.optimizer)
    assert offload.unload().bytes > 0
    assert not any(p.numel() or p.inner.numel() for p in before), "the device's memory is still held"  # type: ignore[attr-defined]
    assert not (tmp_path / "spill").exists()
    assert offload.load().bytes > 0
    assert all(now is p for now, p in zip(learner.policy.parameters(), before, strict=True))
    for one in (learner, other):
        one.update(batch, 1)
    assert_equal(near(learner.weights()), other.weights())


# --- what no weight enters


class Precomputing(GaussianMLP):
    """Doubles its states: by itself, or ahead."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.computed = 0
        """Rows that were doubled within `evaluate`."""
        self.ahead: list[int] = []
        """Rows of each call of `precompute`."""
        self.empty = False

    def precompute(self, inputs: Inputs) -> dict[str, Tensor]:
        assert inputs.state is not None and not torch.is_grad_enabled()
        self.ahead.append(len(inputs.state))
        return {} if self.empty else {"doubled": inputs.state * 2}

    def evaluate(self, inputs: Inputs, trace: Mapping[str, Tensor]) -> Evaluation:
        assert inputs.state is not None
        doubled = trace.get("doubled")
        if doubled is None:
            doubled, self.computed = inputs.state * 2, self.computed + len(inputs.state)
        return super().evaluate(Inputs(state=doubled / 2), trace)


def precomputing(device: str = "cpu", empty: bool = False) -> Precomputing:
    policy = Precomputing(SPEC, **KINDS["gaussian_mlp"])
    policy.load_state_dict(make().state_dict())
    policy.empty = empty
    settle(policy, torch.device(device))
    return policy


@pytest.mark.parametrize(("epochs", "lag"), often([(2, 0), (1, 1)], [(1, 0), (2, 0), (1, 1), (3, 1)]))
@pytest.mark.parametrize("device", often(["cuda:0"], ["cpu", "cuda:0"]))
def test_what_no_weight_enters_is_computed_once_if_it_is_needed_twice(
    device: str, epochs: int, lag: int, gpu: PretendDevice, tmp_path: Path
) -> None:
    config, batch = config_of(epochs=epochs), make_batch("gaussian_mlp")
    ahead = Learner(precomputing(device), RunSpec.of(config), tmp_path)
    plain = Learner(make(), RunSpec.of(config), tmp_path)
    for learner in (ahead, plain):
        learner.policy.ratio_tolerance = 1e-4
        learner.update(batch, lag)
    policy = ahead.policy
    assert isinstance(policy, Precomputing)
    twice = epochs + lag > 1
    assert policy.ahead == ([3] * 10 if twice else []), "not by micro-batches, or not once"
    judged = T * B if lag else 0  # the critic's pass over a rollout that was ahead comes before
    assert policy.computed == judged + (0 if twice else T * B)
    assert_equal(near(ahead.weights()), plain.weights())
    assert set(batch.trace) == {"action"}, "the trajectories were changed"


def test_a_policy_that_has_nothing_to_precompute_is_evaluated_as_it_is(tmp_path: Path) -> None:
    learner = Learner(precomputing(empty=True), RunSpec.of(config_of(epochs=2)), tmp_path)
    learner.update(make_batch("gaussian_mlp"), 0)
    assert isinstance(learner.policy, Precomputing) and learner.policy.computed == 2 * T * B


# --- whole runs


def run(device: str, folder: Path, one_process: bool, unload: bool) -> dict[str, bytes]:
    """The tensors of the checkpoint at the end of three iterations, as they are on the disk."""
    config = parse_config(
        {
            "seed": 5,
            "iterations": 3,
            "env": {"task": "tabletop/reach", "num_envs": 4, "max_episode_steps": 9},
            "policy": {"chunk": 2, "device": device, "options": {"widths": [16]}},
            "rollout": {"decisions": 8},
            "optim": {"epochs": 2, "minibatch": 8, "policy_lr": 3e-3},
            "runtime": {"mode": "inline"},
        },
        "test",
    )
    core = min(os.sched_getaffinity(0))
    farm = FarmAssignment(groups=2, physics=(core,), physics_nodes=(HERE,))
    components = {"policy": (Affinity(),), "learner": (Affinity(),)}
    assignment = Assignment("collocated", (farm,), components, (0,) if one_process else (), unload=unload)
    with open_session(config) as session, start_run(RunSpec.of(config), folder, session, assignment) as workers:
        workers.begin(None, 0)
        last = [workers.iterate(number) for number in range(3)][-1]
        workers.save(folder / "checkpoints", checkpoint.RunState(3, 0, 0.0, ()), last.environments)
    found = checkpoint.latest(folder / "checkpoints")
    assert found is not None
    checkpoint.verify(found)
    return {str(path.relative_to(found)): path.read_bytes() for path in sorted(found.rglob("*.safetensors"))}


@pytest.mark.parametrize(("one_process", "unload"), often([(True, True)], [(True, False), (True, True), (False, True)]))
def test_a_run_on_a_gpu_is_that_on_a_cpu(one_process: bool, unload: bool, gpu: PretendDevice, tmp_path: Path) -> None:
    found = run("auto", tmp_path / "gpu", one_process, unload)
    assert gpu.waits and found == run("cpu", tmp_path / "cpu", one_process, unload)


# --- frames on their way


def test_frames_go_to_a_gpu_from_where_they_were_drawn_and_are_pinned_while_they_are_there(
    gpu: PretendDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pinned once, and no longer than the memory: what is mapped at its address later has other pages."""
    pinned: dict[int, int] = {}
    driver = SimpleNamespace(
        cudaHostRegister=lambda pointer, size, flags: pinned.update({pointer: size}),
        cudaHostUnregister=lambda pointer: pinned.pop(pointer),
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: driver)
    frames = FrameMemory.create(12, 2, 8, shared=False)
    frames.frames[...] = np.random.default_rng(0).integers(0, 255, frames.frames.shape)
    chunk = torch.zeros(1, C, 3)
    shape = MemoryShape(3, 4, ("front", "wrist"))
    layout = MemoryLayout.of(shape, Inputs(), Action(chunk, chunk, torch.zeros(1), {}))
    memory = TrajectoryMemory.create(layout, frames, shared=False)
    rows = torch.tensor([7, 0, 7, 11])
    for _ in range(2):
        found, expected = memory.frames_at(rows, DEVICE), memory.frames_at(rows)
        assert all(tensor.is_cuda for tensor in found.values())
        assert_equal(near(found), expected)
    assert pinned == {frames.frames.ctypes.data: frames.frames.nbytes}
    assert memory.counts.copied == memory.counts.read == 16
    del memory
    assert not pinned, "pinned for ever"


# --- weights on their way


def test_weights_leave_the_gpu_for_another_process(gpu: PretendDevice, tmp_path: Path) -> None:
    weights = Learner(far(), RunSpec.of(config_of()), tmp_path).weights()
    gpu.waits.clear()
    sent = _portable(weights)
    assert gpu.waits == ["synchronize"]
    assert_equal(sent, make().state_dict())
    trajectories = make_batch("gaussian_mlp")
    assert _portable(trajectories) is trajectories


def test_what_is_frozen_is_not_sent(tmp_path: Path) -> None:
    policy = make()
    frozen = [name for name, parameter in policy.named_parameters() if name.startswith("actor.0")]
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(name not in frozen)
    learner = Learner(policy, RunSpec.of(config_of()), tmp_path)
    weights = learner.weights()
    assert frozen and set(weights) == set(policy.state_dict()) - set(frozen)


def test_a_small_network_is_updated_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    small = policies.build("gaussian_mlp", PolicySpec(action_dim=2, chunk=1, state_dim=8), 0, widths=[64, 64])
    large = policies.build("gaussian_mlp", PolicySpec(action_dim=2, chunk=1, state_dim=8), 0, widths=[1024, 1024])
    assert useful_threads(small, 128, 16) == 1
    assert 1 < useful_threads(large, 32, 16) < 16 == useful_threads(large, 4096, 16), "it grows with the work"
    cores = len(os.sched_getaffinity(0))
    for asked, given in (("1", 1), (str(cores + 1), cores), ("", cores), ("0", cores), ("2,1", cores)):
        monkeypatch.setenv("OMP_NUM_THREADS", asked)
        assert available_threads() == given


def test_a_learner_has_no_more_threads_than_its_network_can_use(tmp_path: Path) -> None:
    config = parse_config({"env": {"task": "tabletop/reach"}}, "test")
    for widths, expected in (([16], 1), ([1024, 1024], 3)):
        policy = policies.build("gaussian_mlp", PolicySpec(action_dim=2, chunk=1, state_dim=8), 0, widths=widths)
        assert Learner(policy, RunSpec.of(config), tmp_path, Affinity((), 3))._affinity.threads == expected
