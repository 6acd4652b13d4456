"""Recorded calls, dropped recordings and what callers get of them, as far as all that can be seen without a GPU.

In place of a graph stands one that runs the function again on the recording's own tensors, as a graph's kernels would.
Graphs themselves are measured, and compared to the last bit, by `python benchmarks/gpu.py --only graph`.
"""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from embodied.learning.offload import Offload
from embodied_bench.measured_policy import build, make_inputs
from embodied_bench.settings import BenchPolicy
from policies import Inputs, Policy, cuda_graphs
from policies.conformance import laws
from policies.cuda_graphs import (
    Recording,
    Recordings,
    forget,
    one_by_one,
    put_together,
    replayed,
    replaying,
    taken_apart,
)
from tests.policies.smolvla import cases as smolvla


@dataclass(frozen=True)
class Pair:
    first: Tensor
    second: tuple[Tensor, int]


class Linear(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(2.0))

    @replayed
    def of(self, pair: Pair, *, more: dict[str, Tensor] | None = None) -> dict[str, Tensor]:
        """As it says."""
        return {"sum": self.weight * (pair.first + pair.second[0] * pair.second[1]), **(more or {})}


def pair(size: int = 2, times: int = 3) -> Pair:
    return Pair(torch.ones(size), (torch.ones(size), times))


@dataclass(frozen=True)
class Again:
    """A graph, as far as its callers can tell."""

    run: Callable[[], list[Tensor]]
    returned: list[Tensor]

    def replay(self) -> None:
        for own, new in zip(self.returned, self.run(), strict=True):
            own.copy_(new)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Names of the functions that were recorded."""
    names: list[str] = []

    def record(_: Recordings, function: Any, module: nn.Module, tensors: list[Tensor], shape: Any) -> Recording:
        names.append(function.__name__)
        given = [tensor.clone() for tensor in tensors]

        def run() -> Any:
            return cuda_graphs._called(function, module, given, shape)

        returned, returned_shape = taken_apart(run())
        returned = [tensor.clone() for tensor in returned]
        graph: Any = Again(lambda: taken_apart(run())[0], returned)
        return Recording(graph, given, returned, returned_shape)

    # Only a GPU has graphs: what surrounds them is the real thing, and each recording runs the function again.
    monkeypatch.setattr(Recordings, "_record", record)
    monkeypatch.setattr(cuda_graphs, "_recordable", bool)
    yield names


def test_nested_values_are_put_together_as_they_were() -> None:
    value = ((Pair(torch.ones(2), (torch.zeros(3), 4)), None), {"a": [torch.arange(2)], 3: "text", "c": {}})
    tensors, shape = taken_apart(value)
    assert [tensor.tolist() for tensor in tensors] == [[1, 1], [0, 0, 0], [0, 1]]
    again = put_together([tensor + 1 for tensor in tensors], shape)
    assert again[0][0].first.tolist() == [2, 2] and again[0][0].second[1] == 4 and again[0][1] is None
    assert isinstance(again[1]["a"], list) and again[1]["a"][0].tolist() == [1, 2]
    assert again[1][3] == "text" and again[1]["c"] == {}


def test_a_shape_tells_calls_apart_that_need_recordings_of_their_own() -> None:
    shapes = [taken_apart(value)[1] for value in ((torch.ones(1), None), (None, torch.ones(1)), (torch.ones(1), 2))]
    assert len(set(shapes)) == 3
    assert taken_apart((torch.ones(1), 2))[1] == taken_apart((torch.zeros(5), 2))[1]


@torch.no_grad()
def test_a_replay_reads_new_arguments_and_new_weights_and_returns_tensors_of_its_own(recorded: list[str]) -> None:
    module, given = Linear(), pair()
    with replaying():
        first = module.of(given, more={"x": torch.zeros(1)})
        assert first["sum"].tolist() == [8, 8] and recorded == ["of"]
        second = module.of(Pair(torch.zeros(2), given.second), more={"x": torch.ones(1)})
        module.weight.mul_(10)
        third = module.of(given, more={"x": torch.ones(1)})
    assert (second["sum"].tolist(), second["x"].tolist()) == ([6, 6], [1]) and third["sum"].tolist() == [80, 80]
    assert first["sum"].tolist() == [8, 8] and given.first.tolist() == [1, 1] and recorded == ["of"]


@torch.no_grad()
def test_other_shapes_and_moved_tensors_are_recorded_anew(recorded: list[str]) -> None:
    module = Linear()
    with replaying():
        for given in (pair(), pair(size=3), pair(times=4), pair(), pair(size=3), pair(times=4)):
            module.of(given)
        assert len(recorded) == 3
        module.weight.data = torch.tensor(5.0)
        assert module.of(pair())["sum"].tolist() == [20, 20] and len(recorded) == 4
        forget(nn.Sequential(module))
        module.of(pair())
        assert len(recorded) == 5
        for size in range(1, 40):
            assert module.of(pair(size))["sum"].tolist() == [20] * size
    assert len(recorded) == 4 + cuda_graphs.MOST


@torch.no_grad()
def test_an_offload_frees_recordings(recorded: list[str], tmp_path: Path) -> None:
    module = Linear()
    with replaying():
        module.of(pair())
        assert module in cuda_graphs._RECORDINGS
        leaving = Offload(tmp_path / "spill.safetensors", nn.Sequential(module), None)
        leaving.unload()
        assert module not in cuda_graphs._RECORDINGS
        leaving.load()
        assert module.of(pair())["sum"].tolist() == [8, 8]


@torch.no_grad()
def test_without_memory_for_a_recording_the_function_runs_as_it_is(
    recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    tries = []

    def record(*_: Any) -> Recording:
        tries.append(1)
        raise torch.OutOfMemoryError

    monkeypatch.setattr(Recordings, "_record", record)  # a GPU's memory cannot be filled up here
    module = Linear()
    with replaying():
        assert [module.of(pair())["sum"].tolist() for _ in range(3)] == [[8, 8]] * 3
    assert len(tries) == 1


def test_only_what_is_replaying_is_recorded(recorded: list[str]) -> None:
    module = Linear()
    with torch.no_grad():
        module.of(pair())
        with replaying(), one_by_one():
            with one_by_one(), replaying():
                module.of(pair())
            module.of(pair())
        module.of(pair())
    with replaying():
        assert module.of(pair())["sum"].requires_grad
    assert recorded == []


def test_copies_have_no_recordings_and_what_is_no_tensor_has_to_be_hashable(recorded: list[str]) -> None:
    module = Linear()
    assert Linear.of.__doc__ == "As it says."
    with torch.no_grad(), replaying():
        expected = module.of(pair())["sum"].tolist()
        # A policy is copied for its shards (embodied.learning.parallel); a graph can be neither copied nor pickled.
        for other in (copy.deepcopy(module), pickle.loads(pickle.dumps(module))):
            assert other.of(pair())["sum"].tolist() == expected
        with pytest.raises(TypeError, match="unhashable"):
            module.of(Pair(torch.ones(1), (torch.ones(1), {1})))  # type: ignore[arg-type]
    assert len(recorded) == 3


# --- policies


@pytest.mark.parametrize(
    ("model", "functions"),
    [
        ("openvla-tiny", ["vision_features", "decode"]),
        ("openvla-oft-tiny", ["vision_features", "chunk_states"]),
        ("pi0-tiny", ["_decided"]),
        ("pi05-tiny", ["_decided"]),
    ],
)
def test_replayed_decisions_are_those_of_the_policy_and_learning_is_not_recorded(
    model: str, functions: list[str], recorded: list[str]
) -> None:
    policy = build(BenchPolicy(model=model, random_weights=True, device="cpu"))
    several = [make_inputs(policy, 2, seed, torch.device("cpu")) for seed in (0, 1)]
    check_replayed(policy, several, functions, recorded)


@pytest.mark.parametrize("variant", ["", "image_tokens", "self_attention"])
def test_replayed_decisions_of_smolvla(variant: str, recorded: list[str]) -> None:
    folder = smolvla.GOLDEN / variant
    policy = smolvla.make(checkpoint=str(folder / "checkpoint"), backbone=str(folder / "vlm"))
    check_replayed(policy, [smolvla.inputs_of(smolvla.SPEC, 2, seed) for seed in (0, 1)], ["_decided"], recorded)


def check_replayed(policy: Policy, several: list[Inputs], functions: list[str], recorded: list[str]) -> None:
    noise = torch.randn(2, policy.noise_dim, generator=torch.Generator().manual_seed(0))
    with one_by_one():
        expected = [policy.act(inputs, noise) for inputs in several]
    assert recorded == []
    for inputs, wanted in (*zip(several, expected, strict=True), (several[0], expected[0])):
        found = policy.act(inputs, noise)
        assert all(torch.equal(found.trace[name], wanted.trace[name]) for name in wanted.trace)
        for name in ("chunk", "log_prob", "value"):
            assert torch.equal(getattr(found, name), getattr(wanted, name))
    assert recorded == functions
    with torch.no_grad():
        policy.evaluate(several[0], expected[0].trace)
        policy.value(several[0])
        policy.precompute(several[0])
    assert recorded == functions


@torch.no_grad()
def test_a_decision_without_the_adapter_is_not_one_that_was_recorded_with_it(
    recorded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    policy = build(BenchPolicy(model="openvla-oft-tiny", random_weights=True, device="cpu"), lora_rank=4)
    laws.perturb(policy, 0.1, seed=0)
    inputs, noise = make_inputs(policy, 2, 0, torch.device("cpu")), torch.zeros(2, policy.noise_dim)
    known = policy.act(inputs, noise)

    def replay(_: Again) -> None:
        raise AssertionError("a graph knows nothing of an adapter that is switched off")

    with monkeypatch.context() as patch:  # the test's replay runs Python, which would see the adapter's state
        patch.setattr(Again, "replay", replay)
        with policy.without_adapter():
            bare = policy.act(inputs, noise)
    assert len(recorded) == 2 and not torch.equal(bare.log_prob, known.log_prob)
    assert torch.equal(policy.act(inputs, noise).log_prob, known.log_prob)
