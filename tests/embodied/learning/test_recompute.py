"""Activations that the backward pass computes again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import policies
from embodied.errors import UserError
from embodied.learning.recompute import recompute
from policies import PolicySpec
from policies.conformance import laws
from tests.policies.test_quantised import CASES, build, inputs_of, pi05
from tests.variants import often

__all__ = ["pi05"]


SHARE = {"pi0": 0.6, "pi05": 0.6, "smolvla": 0.9}
"""Part that is kept: of flow policies also what attention reads, which is between blocks; of SmolVLA few layers are
adapted, and nothing is kept of the others anyway."""


def gradients(policy: Any, name: str) -> dict[str, Tensor]:
    action = policy.act(inputs_of(name), laws.random_noise(policy, 4, seed=1))
    evaluation = policy.evaluate(inputs_of(name), action.trace)
    (evaluation.log_prob.sum() + evaluation.value.sum()).backward()
    return {name: p.grad for name, p in policy.named_parameters() if p.grad is not None}


def kept_bytes(policy: Any, name: str) -> int:
    """Bytes that a forward pass holds for the backward pass."""
    found: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    actions, counted = laws.demonstrations(policy, 4)
    own = {p.untyped_storage().data_ptr() for p in policy.parameters()}
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        policy.imitate(inputs_of(name), actions, counted, laws.random_noise(policy, 4, seed=1))
    return sum(size for pointer, size in found.items() if pointer not in own)


@pytest.mark.parametrize("base", often(("nf4",), (None, "nf4")))
@pytest.mark.parametrize("name", CASES)
def test_gradients_are_the_same_and_less_is_kept(name: str, base: str | None) -> None:
    plain, again = build(name, base), build(name, base)
    recompute(again)
    expected, found = gradients(plain, name), gradients(again, name)
    assert found.keys() == expected.keys()
    for key, tensor in expected.items():
        assert torch.equal(tensor, found[key]), key
    assert kept_bytes(again, name) < SHARE.get(name, 0.5) * kept_bytes(plain, name)


def test_a_policy_without_blocks_is_refused() -> None:
    policy = policies.build("gaussian_mlp", PolicySpec(action_dim=2, state_dim=3), 0)
    with pytest.raises(UserError, match="gaussian_mlp names no blocks"):
        recompute(policy)
