"""What no trained weight enters is computed once: the towers do not run where their features are given."""

from typing import Any

import pytest
import torch
from torch import Tensor

from policies import PolicySpec
from policies.conformance import laws
from policies.openvla.config import TOWERS
from tests.policies.openvla.cases import CHUNK, OFT, ONE_ACTION, error, make, random_inputs

KINDS: dict[str, tuple[str, PolicySpec]] = {"openvla": ("openvla", ONE_ACTION), "oft": ("openvla_oft", CHUNK)}
TRAINED = {"language and projector": (["language", "projector"], 48), "language": (["language"], 32)}
"""Trained parts, and the width of what is kept: the towers' together, or the language model's."""


def runs(policy: Any) -> list[str]:
    """Filled with a name whenever a tower or the projector runs."""
    seen: list[str] = []
    parts = [(name, getattr(policy.model.vision_backbone, name).blocks[0]) for name in TOWERS]
    for name, module in [*parts, ("projector", policy.model.projector)]:
        module.register_forward_hook(lambda *_, name=name: seen.append(name))
    return seen


def compare(policy: Any, features: dict[str, Tensor], rows: int) -> None:
    """With the features `evaluate` says what it says without, and gives the same gradients."""
    inputs = random_inputs(policy.spec, rows, seed=3)
    action = policy.act(inputs, laws.random_noise(policy, rows, seed=4))

    def evaluated(trace: dict[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        policy.zero_grad()
        found = {name: tensor for name, tensor in vars(policy.evaluate(inputs, trace)).items() if tensor is not None}
        torch.stack([tensor.sum() for tensor in found.values()]).sum().backward()
        return found, {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}

    (plain, gradients), (found, others) = evaluated(action.trace), evaluated({**action.trace, **features})
    assert all(error(found[name], tensor) <= 1e-6 for name, tensor in plain.items())
    assert gradients.keys() == others.keys()
    assert all(error(others[name], gradient) <= 1e-5 for name, gradient in gradients.items())


@pytest.mark.parametrize("parts", TRAINED)
@pytest.mark.parametrize("kind", KINDS)
def test_features_stand_for_the_towers(tiny, kind, parts):
    (name, spec), (lora_parts, width) = KINDS[kind], TRAINED[parts]
    policy = make(name, spec, tiny, lora_rank=3, lora_parts=lora_parts)
    inputs = random_inputs(spec, 5, seed=3)
    found = policy.precompute(inputs)
    assert found.keys() == {"features"} and not found["features"].requires_grad
    assert found["features"].shape == (5, 4 * len(spec.cameras), width)
    compare(policy, found, rows=5)


@pytest.mark.parametrize("parts", TRAINED)
def test_features_mean_the_same_while_gradients_are_switched_off(tiny, parts):
    """As in a critic's warm-up, in which the rest of the policy is not trained."""
    policy = make("openvla", ONE_ACTION, tiny, lora_rank=3, lora_parts=TRAINED[parts][0])
    inputs = random_inputs(ONE_ACTION, 5, seed=3)
    action, found = policy.act(inputs, laws.random_noise(policy, 5, seed=4)), policy.precompute(inputs)
    for parameter in policy.parameters():
        parameter.requires_grad_(False)
    evaluated = policy.evaluate(inputs, {**action.trace, **found})
    assert error(evaluated.log_prob, action.log_prob) <= 1e-5
    assert policy.precompute(inputs)["features"].equal(found["features"])


@pytest.mark.parametrize("kind", KINDS)
def test_towers_do_not_run_again(tiny, kind):
    name, spec = KINDS[kind]
    policy = make(name, spec, tiny, lora_rank=3)
    inputs = random_inputs(spec, 5, seed=3)
    action = policy.act(inputs, laws.random_noise(policy, 5, seed=4))
    seen = runs(policy)
    found = policy.precompute(inputs)
    assert sorted(seen) == sorted(TOWERS)
    seen.clear()
    policy.evaluate(inputs, {**action.trace, **found})
    assert seen == ["projector"]
    seen.clear()
    policy.evaluate(inputs, action.trace)
    assert sorted(seen) == sorted([*TOWERS, "projector"])


def test_a_frozen_projector_does_not_run_again_either(tiny):
    policy = make("openvla", ONE_ACTION, tiny, lora_rank=3, lora_parts=["language"])
    inputs = random_inputs(ONE_ACTION, 3, seed=3)
    action = policy.act(inputs, None)
    found = policy.precompute(inputs)
    seen = runs(policy)
    policy.evaluate(inputs, {**action.trace, **found})
    assert seen == []


@pytest.mark.parametrize(
    "options", [{}, {"lora_rank": 3, "lora_parts": ["language", "vision"]}], ids=["every weight", "vision adapter"]
)
def test_trained_towers_have_no_features_to_keep(tiny, options):
    policy = make("openvla", ONE_ACTION, tiny, **options)
    assert policy.precompute(random_inputs(ONE_ACTION, 3, seed=3)) == {}


def test_rows_of_features_are_the_rows_of_the_inputs(tiny):
    policy = make("openvla_oft", CHUNK, tiny, lora_rank=3)
    inputs = random_inputs(CHUNK, 5, seed=3)
    index = torch.tensor([3, 1])
    every, some = (policy.precompute(rows)["features"] for rows in (inputs, inputs.rows(index)))
    assert error(every[index], some) <= 1e-6


def test_proprioception_is_no_part_of_the_features():
    spec = PolicySpec(action_dim=7, chunk=4, cameras=("base",), proprio_dim=8)
    options = {"unnorm_key": "toy_long", "head": "tokens", "proprio": True}
    policy = make("openvla_oft", spec, OFT / "checkpoint", lora_rank=2, **options)
    compare(policy, policy.precompute(random_inputs(spec, 3, seed=3)), rows=3)


def test_features_are_of_the_models_dtype(tiny):
    policy = make("openvla", ONE_ACTION, tiny, lora_rank=3, dtype="bfloat16")
    assert policy.precompute(random_inputs(ONE_ACTION, 2, seed=3))["features"].dtype == torch.bfloat16
