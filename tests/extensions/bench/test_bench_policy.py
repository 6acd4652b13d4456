"""`embodied bench policy|learner` run, count work rightly and compare equals. Their figures are in `benchmarks/`; no
test asserts on time."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from embodied.cli import main
from embodied.learning.update import LossSums, MicroBatchLoss, read_losses
from embodied_bench.learner import Case, Update
from embodied_bench.machine import Machine, measure_machine
from embodied_bench.measured_policy import OneAtATime, build, make_inputs, peer_calls
from embodied_bench.policy import share_of_equal_rows
from embodied_bench.settings import BenchLearner, BenchPolicy
from policies.openvla import sizes
from policies.openvla.config import read_config
from policies.openvla.model import build_empty, load_model
from policies.openvla.policy import TokenPolicy
from policies.pi0.costs import Pi0Costs
from policies.pi0.policy import Pi0
from policies.random_weights import INSTRUCTION
from policies.work import Work
from tests.variants import often

CPU = torch.device("cpu")
MODELS = ("openvla-tiny", "openvla-oft-tiny")
ROWS = 3


def bench(tmp_path: Path, *arguments: str) -> dict[str, Any]:
    result = tmp_path / "result.json"
    assert main(["bench", *arguments, "--device", "cpu", "--seconds", "0.01", "--json", str(result)]) == 0
    return json.loads(result.read_text())


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One test measures what the machine can do; threads of networks so small would only wait for each other."""
    for bench in ("policy", "learner"):
        # Measuring takes seconds each time; `test_the_machines_limits_are_measured` does it for real.
        monkeypatch.setattr(f"embodied_bench.{bench}.measure_machine", lambda device, dtype: Machine(1e11, 1e10))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def tiny(model: str, **options: Any) -> TokenPolicy:
    policy = build(BenchPolicy(model=model, random_weights=True, device="cpu"), **options)
    assert isinstance(policy, TokenPolicy)
    return policy


def tiny_flow(model: str, **options: Any) -> Pi0:
    policy = build(BenchPolicy(model=model, random_weights=True, device="cpu"), **options)
    assert isinstance(policy, Pi0)
    return policy


@pytest.mark.parametrize("model", often(MODELS[:1], MODELS))
def test_bench_policy_measures_batches_peer_and_limits(tmp_path: Path, model: str) -> None:
    found = bench(tmp_path, "policy", "--model", model, "--random-weights", "--batches", "2", "1", "3")
    assert [batch["batch"] for batch in found["batches"]] == [1, 2, 3]
    for batch in found["batches"]:
        assert batch["decisions_per_s"] > 0 and batch["peak_memory_bytes"] > 0
        assert 0 < batch["limit_decisions_per_s"] <= batch["limit_by_flops_decisions_per_s"] * (1 + 1e-9)
        assert batch["mfu"] <= batch["share_of_limit"] * (1 + 1e-9)
    rate = "actions_per_s" if model == "openvla-tiny" else "chunks_per_s"
    assert found[rate] == max(batch["decisions_per_s"] for batch in found["batches"])
    assert found["time_to_first_action_s"] > 0 and found["time_to_first_token_s"] > 0
    assert found["date"] and found["hardware"] and found["command"]
    assert all(peer["rows_with_equal_tokens"] == 1 and peer["decisions_per_s"] > 0 for peer in found["peers"].values())


@pytest.mark.slow
@pytest.mark.parametrize("model", often(MODELS[1:], MODELS))
def test_bench_learner_measures_micro_batches_with_and_without_recomputation(tmp_path: Path, model: str) -> None:
    arguments = ("--model", model, "--random-weights", "--micro-batches", "1", "2", "--minibatch", "3")
    found = bench(tmp_path, "learner", *arguments, "--lora-rank", "2")
    seen = {(case["micro_batch"], case["recomputed"]) for case in found["cases"]}
    assert seen == {(1, False), (2, False), (1, True), (2, True)}
    assert all(case["samples_per_s"] > 0 and case["limit_samples_per_s"] > 0 for case in found["cases"])
    assert found["off_policy"] < 1e-4
    assert found["date"] and found["hardware"] and found["command"]
    memory = found["memory"]
    # Adam holds two numbers for each that is trained, the gradient is a third; base and adapter are there once.
    assert memory["optimizer_bytes"] == pytest.approx(2 * memory["of_which_trained_bytes"], rel=0.01)
    assert memory["two_copies_bytes"] - memory["one_copy_bytes"] == memory["weights_bytes"]


@pytest.mark.slow
@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("model", MODELS)
def test_the_measured_update_is_one_whatever_the_micro_batch_and_waits_once(
    monkeypatch: pytest.MonkeyPatch, model: str, cached: bool
) -> None:
    reads: list[int] = []

    def counting(shares: Sequence[MicroBatchLoss], norm: torch.Tensor | None = None) -> tuple[LossSums, float]:
        reads.append(len(shares))
        return read_losses(shares, norm)

    # It reads as ever and is counted: each read waits for the device.
    monkeypatch.setattr("embodied_bench.learner.read_losses", counting)
    gradients = []
    for micro_batch in (1, ROWS):
        policy = tiny(model, lora_rank=2)
        Update(policy, ROWS, 0).step(Case(micro_batch, False, cached))
        gradients.append(torch.cat([p.grad.flatten() for p in policy.parameters() if p.grad is not None]))
    assert reads == [ROWS, 1]
    assert float(gradients[0].norm()) > 0
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("model", often(["pi0-tiny"], ["pi0-tiny", "pi05-tiny"]))
def test_flow_policies_are_measured(model: str, tmp_path: Path) -> None:
    """Acting, and the update with the prefix's keys and values given, and without."""
    found = bench(tmp_path, "policy", "--model", model, "--random-weights", "--batches", "1", "3")
    assert [batch["batch"] for batch in found["batches"]] == [1, 3]
    assert all(batch["mfu"] <= batch["share_of_limit"] * (1 + 1e-9) for batch in found["batches"])
    assert found["chunks_per_s"] > 0 and found["time_to_first_action_s"] > 0 and "peers" not in found
    arguments = ("--model", model, "--random-weights", "--micro-batches", "2", "--minibatch", "3")
    learned = bench(tmp_path, "learner", *arguments)
    assert {case["cached_features"] for case in learned["cases"]} == {False, True}
    assert learned["trained"] == "what is not frozen" and learned["off_policy"] < 1e-4
    assert {case["recomputed"] for case in learned["cases"]} == {False, True}
    plain, cached = (case["model_flops"] for case in learned["cases"] if not case["recomputed"])
    assert cached < plain, "the prefix is counted where it is given"


@pytest.mark.parametrize("model", ["pi0-tiny", "pi05-tiny"])
@pytest.mark.parametrize(
    "options", often([{}], [{}, {"train": "all"}, {"scored": "all"}, {"critic": "suffix"}]), ids=str
)
def test_the_work_of_a_flow_policy_is_what_torch_counts(model: str, options: dict[str, Any]) -> None:
    policy = tiny_flow(model, **options)
    inputs = make_inputs(policy, ROWS, 0, CPU)
    costs, trace = Pi0Costs(policy), policy.act(inputs, None).trace

    def update(given: dict[str, torch.Tensor]) -> None:
        new = policy.evaluate(inputs, {**trace, **given})
        (new.log_prob.sum() + new.value.sum()).backward()

    calls: list[tuple[Any, Work]] = [(lambda: policy.act(inputs, None), sum(costs.decision(ROWS), Work()))]
    calls.append((lambda: update({}), costs.update(ROWS, cached=False, dense=True)))
    if features := policy.precompute(inputs):
        calls.append((lambda: update(features), costs.update(ROWS, cached=True, dense=True)))
        assert costs.update(ROWS, cached=True).attention < 0.9 * calls[-1][1].attention
    for call, work in calls:
        linear, attention = counted(call)
        # What keeps them apart: rotary frequencies, which are a product too.
        assert work.linear == pytest.approx(linear, rel=1e-3)
        assert work.attention == pytest.approx(attention, rel=0.02)


@pytest.mark.slow
def test_the_machines_limits_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    # One group of repetitions: that rates come out is what is looked at, not how steady they are.
    monkeypatch.setattr("embodied_bench.machine.GROUPS", 1)
    machine = measure_machine(CPU, "float32")
    assert machine.flops_per_s > 1e8 and machine.bytes_per_s > 1e8
    assert machine.seconds(2 * machine.flops_per_s, machine.bytes_per_s) == pytest.approx(2.0)
    assert machine.seconds(machine.flops_per_s, 3 * machine.bytes_per_s) == pytest.approx(3.0)


def counted(call: Any) -> tuple[float, float]:
    """FLOPs that torch counts: linear layers and convolutions, and attention's batched products."""
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        call()
    flops = {str(op): float(count) for op, count in counter.get_flop_counts()["Global"].items()}
    attention = flops.pop("aten.bmm", 0.0)
    return sum(flops.values()), attention


@pytest.mark.parametrize("model", MODELS)
def test_the_work_of_a_decision_is_what_torch_counts(model: str) -> None:
    policy = tiny(model)
    inputs = make_inputs(policy, ROWS, 0, CPU)
    costs = policy.costs(INSTRUCTION)
    work, dense = (sum(costs.decision(ROWS, dense), Work()) for dense in (False, True))
    linear, attention = counted(lambda: policy.act(inputs, None))
    # The policy may or may not leave out the last layer's states that nothing reads.
    assert pytest.approx(linear, rel=1e-9) in (work.linear, dense.linear)
    # A static cache and a mask: torch computes every pair of its columns, of which a causal model needs half.
    assert 0.4 * attention < work.attention <= attention
    if model == "openvla-oft-tiny":
        assert work.attention == pytest.approx(attention, rel=0.01)  # rotary frequencies are a product too


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize(
    "options",
    [
        {"lora_rank": 2},
        {"lora_rank": 2, "lora_parts": ("language",)},
        {"lora_rank": 2, "lora_parts": ("language", "projector", "vision")},
        {},
    ],
    ids=["language and projector", "language", "everything", "every weight"],
)
def test_the_work_of_an_update_is_what_torch_counts(model: str, options: dict[str, Any]) -> None:
    policy = tiny(model, **options)
    inputs = make_inputs(policy, ROWS, 0, CPU)
    costs = policy.costs(INSTRUCTION)
    trace = policy.act(inputs, None).trace

    def update() -> None:
        new = policy.evaluate(inputs, trace)
        (new.log_prob.sum() + new.value.sum()).backward()

    linear, attention = counted(update)
    work, dense = (costs.update(ROWS, cached=False, dense=dense) for dense in (False, True))
    assert pytest.approx(linear, rel=1e-9) in (work.linear, dense.linear)
    assert dense.attention == pytest.approx(attention, rel=0.01)


@pytest.mark.slow
@pytest.mark.parametrize("model", MODELS)
def test_hugging_faces_loop_says_the_same_tokens(model: str) -> None:
    policy = tiny(model)
    inputs = make_inputs(policy, 8, 1, CPU)
    tokens = policy.act(inputs, None).trace["tokens"]
    assert len(tokens.unique(dim=0)) > 1
    for call in peer_calls(policy):
        assert torch.equal(OneAtATime(policy, call).tokens(inputs), tokens), call.name
    assert share_of_equal_rows(tokens, tokens.roll(1, 0)) < 1


def test_the_peer_holds_the_policys_own_tensors() -> None:
    policy = tiny("openvla-tiny")
    own = {p.data_ptr() for p in policy.parameters()}
    assert {p.data_ptr() for p in OneAtATime(policy, peer_calls(policy)[0]).llama.parameters()} <= own


def test_a_seed_decides_the_random_weights(tmp_path: Path) -> None:
    states = [load_model(sizes.write_random(tmp_path / str(i), "openvla-tiny", i // 2)).state_dict() for i in range(3)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not torch.equal(states[0]["projector.fc3.weight"], states[2]["projector.fc3.weight"])


@pytest.mark.parametrize(
    ("size", "parameters"), [("7b", 7_541_237_184), ("100m", 98_415_204), ("100m-deep", 101_964_900)]
)
def test_a_named_size_has_its_parameters(tmp_path: Path, size: str, parameters: int) -> None:
    config = read_config(sizes.write_random(tmp_path, f"openvla-{size}"))
    model = build_empty(config)
    unread = sum(tensor.numel() for tensor in model.unused.values())
    assert sum(p.numel() for p in model.parameters()) + unread == parameters
    assert config.patches == 256


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (("policy", "--model", "openvla-7", "--random-weights"), "did you mean openvla-7b"),
        (("policy", "--model", "openvla-tiny"), "--random-weights, or --checkpoint DIR"),
        (("learner", "--model", "openvla-tiny"), "--random-weights, or --checkpoint DIR"),
        (
            ("policy", "--model", "openvla-tiny", "--random-weights", "--batches", "0"),
            "--batches.0: it should be at",
        ),
        (
            ("learner", "--model", "openvla-tiny", "--random-weights", "--micro-batches", "-1"),
            "--micro-batches.0: it",
        ),
        (
            ("learner", "--model", "openvla-tiny", "--random-weights", "--micro-batches", "4", "--minibatch", "2"),
            "minibatch 2 is smaller than the micro-batch 4",
        ),
        (("policy", "--checkpoint", "/nowhere", "--model", "openvla-7b"), "/nowhere/config.json is missing"),
        (("policy", "--model", "openvla-tiny", "--random-weights", "--dtype", "int8"), "dtype must be auto"),
    ],
)
def test_a_mistake_is_one_clear_message(
    arguments: tuple[str, ...], expected: str, capsys: pytest.CaptureFixture
) -> None:
    assert main(["bench", *arguments]) == 2
    message = capsys.readouterr().err
    assert expected in " ".join(message.split()) and "Traceback" not in message


def test_both_benches_take_the_same_words() -> None:
    """What names and places the model is the same for rollout and learner."""
    shared = {"model", "random_weights", "checkpoint", "unnorm_key", "device", "dtype", "seconds", "seed", "json"}
    for settings in (BenchPolicy(), BenchLearner()):
        assert shared <= set(vars(settings))
