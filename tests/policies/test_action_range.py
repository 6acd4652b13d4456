"""The range of actions: what -1 and 1 of a network are in the environment, and checkpoints from before that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import policies
from policies import Inputs, Policy, PolicyError, PolicySpec
from policies.checkpoint import CONFIG, load_into, save
from policies.conformance.laws import random_inputs, random_noise

PLAIN = PolicySpec(action_dim=2, chunk=3, state_dim=5)
RANGED = replace(PLAIN, action_low=(0.0, -0.5), action_high=(1000.0, 0.001))
LOW, HIGH = torch.tensor([0.0, -0.5]), torch.tensor([1000.0, 0.001])
KINDS: dict[str, dict[str, Any]] = {
    "gaussian_mlp": {"widths": [8]},
    "flow": {"widths": [8], "critic_widths": [8], "features": 8},
    "random": {},
}


def pair(kind: str) -> tuple[Policy, Policy]:
    """Two policies of the same weights, the second with bounds."""
    plain, ranged = (policies.build(kind, spec, seed=0, **KINDS[kind]) for spec in (PLAIN, RANGED))
    return plain, ranged


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", [False, True], ids=["sampled", "mode"])
def test_what_is_said_means_its_share_of_the_range(kind: str, mode: bool) -> None:
    plain, ranged = pair(kind)
    inputs = random_inputs(PLAIN, 6, seed=1)
    noise = None if mode else random_noise(plain, 6, 2)
    one, two = plain.act(inputs, noise), ranged.act(inputs, noise)
    torch.testing.assert_close(two.chunk, LOW + (one.chunk + 1) / 2 * (HIGH - LOW))
    assert torch.equal(one.log_prob, two.log_prob)
    assert torch.equal(plain.evaluate(inputs, one.trace).log_prob, ranged.evaluate(inputs, two.trace).log_prob)


@pytest.mark.parametrize("kind", ["gaussian_mlp", "flow"])
def test_demonstrations_are_in_the_units_of_the_environment(kind: str) -> None:
    plain, ranged = pair(kind)
    inputs, said = random_inputs(PLAIN, 6, seed=1), torch.rand(6, 3, 2) * 2 - 1
    counted, noise = torch.ones(6, 3, dtype=torch.bool), random_noise(plain, 6, 2)
    shown = LOW + (said + 1) / 2 * (HIGH - LOW)
    torch.testing.assert_close(
        ranged.imitate(inputs, shown, counted, noise), plain.imitate(inputs, said, counted, noise), rtol=1e-4, atol=1e-4
    )


def test_bounds_of_minus_one_and_one_change_no_bit() -> None:
    policy = policies.build("gaussian_mlp", PLAIN, seed=0, widths=[8])
    action = policy.act(Inputs(state=torch.randn(4, 5)), random_noise(policy, 4, 3))
    assert action.chunk is action.trace["action"]


def test_a_checkpoint_keeps_its_bounds(tmp_path: Path) -> None:
    policy = policies.build("gaussian_mlp", RANGED, seed=0, widths=[8])
    save(policy, tmp_path)
    again, inputs = policies.load(tmp_path), random_inputs(RANGED, 4, seed=1)
    assert again.spec == RANGED and torch.equal(again.act(inputs, None).chunk, policy.act(inputs, None).chunk)


def test_a_checkpoint_from_before_acts_as_it_did_or_is_refused(tmp_path: Path) -> None:
    """It names no bounds: its network speaks in the environment's units."""
    old, new = pair("gaussian_mlp")
    save(old, tmp_path)
    config = json.loads((tmp_path / CONFIG).read_text())
    for name in ("action_low", "action_high"):
        del config["spec"][name]
    (tmp_path / CONFIG).write_text(json.dumps(config))
    inputs = random_inputs(PLAIN, 4, seed=1)
    assert torch.equal(policies.load(tmp_path).act(inputs, None).chunk, old.act(inputs, None).chunk)
    load_into(policies.build("gaussian_mlp", PLAIN, seed=1, widths=[8]), tmp_path)
    with pytest.raises(PolicyError, match=r"spec.action_low is \[\], expected \[0.0, -0.5\].*train it again"):
        load_into(new, tmp_path)


@pytest.mark.parametrize(
    ("low", "high"), [((0.0,), (1.0,)), ((0.0, 1.0), (1.0, 1.0)), ((0.0, 0.0), (1.0, float("inf"))), ((), (1.0, 1.0))]
)
def test_bounds_that_are_none_are_refused(low: tuple[float, ...], high: tuple[float, ...]) -> None:
    with pytest.raises(PolicyError, match="2 finite numbers each"):
        policies.build("gaussian_mlp", replace(PLAIN, action_low=low, action_high=high), seed=0, widths=[8])
