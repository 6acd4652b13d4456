"""Every policy of the package against the laws, and broken policies that the laws must catch."""

from dataclasses import replace
from typing import Any

import pytest
import torch

import policies
from policies import Action, Inputs, Policy, PolicySpec
from policies.capabilities import Imitates
from policies.conformance import laws
from policies.small.gaussian_mlp import GaussianMLP
from tests.variants import often

STATE = PolicySpec(action_dim=3, chunk=1, state_dim=5)
IMAGE = PolicySpec(action_dim=3, chunk=2, proprio_dim=4, cameras=("base",), image_size=32)
CHOICES = PolicySpec(action_dim=1, chunk=6, state_dim=5, discrete_actions=8)
"""Enough of them that two draws are never the same decision."""
SMALL: dict[str, Any] = {"widths": (32, 32), "critic_widths": (16,)}
CASES: dict[str, tuple[str, PolicySpec, dict[str, Any]]] = {
    "gaussian_mlp": ("gaussian_mlp", STATE, SMALL),
    "gaussian_mlp, chunk of 4": ("gaussian_mlp", replace(STATE, chunk=4), SMALL),
    "gaussian_mlp, bounds": (
        "gaussian_mlp",
        replace(STATE, chunk=2, action_low=(0.0, -2.0, 0.0), action_high=(1000.0, 2.0, 0.001)),
        SMALL,
    ),
    "categorical_mlp, one camera and a state": (
        "categorical_mlp",
        replace(CHOICES, cameras=("base",), image_size=32),
        {**SMALL, "encoder": "cnn", "features": 32},
    ),
    "categorical_mlp": ("categorical_mlp", replace(CHOICES, chunk=1, discrete_actions=10_000), SMALL),
    "categorical_mlp, chunk of 6": ("categorical_mlp", CHOICES, SMALL),
    "flow, state": ("flow", STATE, {**SMALL, "features": 32}),
    "flow, state, two of four actions": (
        "flow",
        replace(STATE, chunk=2, horizon=4),
        {**SMALL, "features": 32, "steps": 3},
    ),
    "flow, state, two of four actions, every step": (
        "flow",
        replace(STATE, chunk=2, horizon=4),
        {**SMALL, "features": 32, "steps": 3, "joint": True},
    ),
    "flow, state, chunk of 4": ("flow", replace(STATE, chunk=4), {**SMALL, "features": 32, "steps": 10}),
    "flow, state, joint": ("flow", STATE, {**SMALL, "features": 32, "joint": True}),
    "flow, one step": ("flow", STATE, {**SMALL, "features": 32, "steps": 1}),
    "flow, one camera": ("flow", IMAGE, {**SMALL, "encoder": "cnn", "features": 32}),
    "flow, one camera, critic on states": (
        "flow",
        replace(IMAGE, state_dim=5),
        {**SMALL, "encoder": "cnn", "features": 32, "critic_reads_state": True},
    ),
    "flow, one camera, and the state is predicted": (
        "flow",
        replace(IMAGE, state_dim=5),
        {**SMALL, "encoder": "cnn", "features": 32, "critic_reads_state": True, "state_loss": 1.0},
    ),
    "flow, one camera and a state, bounds": (
        "flow",
        replace(IMAGE, state_dim=5, action_low=(0.0, -2.0, 0.0), action_high=(1000.0, 2.0, 0.001)),
        {**SMALL, "encoder": "cnn", "features": 32},
    ),
    "flow, two cameras, joint": (
        "flow",
        replace(IMAGE, cameras=("base", "wrist"), proprio_dim=0),
        {**SMALL, "encoder": "cnn", "features": 32, "joint": True},
    ),
}
HISTORY: dict[str, tuple[str, PolicySpec, dict[str, Any]]] = {
    "gaussian_mlp, three observations": ("gaussian_mlp", STATE, {**SMALL, "observations": 3, "distance": 2}),
    "flow, state, two observations": ("flow", STATE, {**SMALL, "features": 32, "observations": 2}),
    "flow, two cameras and a state, three observations": (
        "flow",
        replace(IMAGE, cameras=("base", "wrist"), state_dim=5),
        {**SMALL, "encoder": "cnn", "features": 32, "observations": 3, "distance": 4},
    ),
    "flow, one camera, and the present state is predicted": (
        "flow",
        replace(IMAGE, state_dim=5),
        {**SMALL, "encoder": "cnn", "features": 32, "critic_reads_state": True, "state_loss": 1.0, "observations": 2},
    ),
}
"""Policies that decide on several observations."""
CASES |= HISTORY
OFTEN = (
    "gaussian_mlp, three observations",
    "flow, two cameras and a state, three observations",
    "gaussian_mlp, chunk of 4",
    "categorical_mlp, chunk of 6",
    "flow, state, two of four actions, every step",
    "flow, one camera, and the state is predicted",
)


def trained(kind: str, spec: PolicySpec, architecture: dict[str, Any]) -> Policy:
    """A policy as after some training: statistics observed, no parameter at its initial value."""
    policy = policies.build(kind, spec, seed=0, **architecture)
    policy.observe(laws.random_inputs(policy.spec, 100, seed=5))
    laws.perturb(policy, 0.05, seed=6)
    return policy


@pytest.mark.parametrize("law", laws.LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("case", often(OFTEN, CASES))
def test_policy_obeys(case, law):
    policy = trained(*CASES[case])
    law(policy, laws.random_inputs(policy.spec, 6, seed=7))


@pytest.mark.parametrize("law", laws.IMITATION_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("case", often(OFTEN, CASES))
def test_policy_imitates(case, law):
    policy = trained(*CASES[case])
    law(policy, laws.random_inputs(policy.spec, 6, seed=7))


def test_a_policy_without_weights_cannot_imitate():
    policy = policies.build("random", STATE, seed=0)
    assert not isinstance(policy, Imitates)
    with pytest.raises(AssertionError, match="the policy has no imitate"):
        laws.law_imitation_is_a_loss_for_each_row(policy, laws.random_inputs(STATE, 6, seed=7))


def test_imitation_leaves_the_spread_to_reinforcement():
    policy = trained("gaussian_mlp", STATE, SMALL)
    inputs = laws.random_inputs(STATE, 6, seed=7)
    actions, counted = laws.demonstrations(policy, 6)
    loss = policy.imitate(inputs, actions, counted, laws.random_noise(policy, 6, 1))
    loss.sum().backward()
    assert isinstance(policy, GaussianMLP) and policy.log_std.grad is None
    log_prob = policy.evaluate(inputs, {"action": actions}).log_prob
    assert torch.equal(loss, -log_prob.mean((1, 2)))


def test_an_actor_whose_critic_reads_the_state_acts_without_it():
    policy = trained("flow", replace(IMAGE, state_dim=5), {**SMALL, "encoder": "cnn", "critic_reads_state": True})
    inputs = laws.random_inputs(policy.spec, 6, seed=7)
    noise = laws.random_noise(policy, 6, seed=8)
    with_state, without = policy.act(inputs, noise), policy.act(replace(inputs, state=None), noise)
    assert torch.equal(with_state.chunk, without.chunk) and torch.equal(with_state.log_prob, without.log_prob)
    assert with_state.value.isfinite().all() and without.value.isnan().all()


class BatchNormed(GaussianMLP):
    def _state(self, inputs: Inputs) -> torch.Tensor:
        state = super()._state(inputs)
        return state - state.mean(0)


class OwnDice(GaussianMLP):
    def act(self, inputs: Inputs, noise: torch.Tensor | None) -> Action:
        return super().act(inputs, noise if noise is None else torch.randn_like(noise))


class WrongSpread(GaussianMLP):
    def act(self, inputs: Inputs, noise: torch.Tensor | None) -> Action:
        return super().act(inputs, noise if noise is None else 1.3 * noise)


class StayingBehind(GaussianMLP):
    def _mean(self, state: torch.Tensor) -> torch.Tensor:
        return super()._mean(state) + torch.zeros(self.spec.action_dim)


class PeekingAhead(GaussianMLP):
    def imitate(
        self, inputs: Inputs, actions: torch.Tensor, counted: torch.Tensor, noise: torch.Tensor
    ) -> torch.Tensor:
        return super().imitate(inputs, actions, torch.ones_like(counted), noise)


class StaleScore(GaussianMLP):
    def act(self, inputs: Inputs, noise: torch.Tensor | None) -> Action:
        action = super().act(inputs, noise)
        return replace(action, log_prob=action.log_prob + 1e-3)


@pytest.mark.parametrize(
    ("broken", "law"),
    [
        (BatchNormed, laws.law_rows_are_independent),
        (OwnDice, laws.law_noise_decides),
        (OwnDice, laws.law_global_generators_are_untouched),
        (WrongSpread, laws.law_log_prob_is_the_density_that_act_samples),
        (StaleScore, laws.law_scores_agree),
        (StayingBehind, laws.law_all_is_computed_on_the_policys_device),
        (PeekingAhead, laws.law_uncounted_actions_do_not_matter),
    ],
)
def test_laws_catch_a_broken_policy(broken, law):
    policy = broken(STATE, **SMALL)
    with pytest.raises((AssertionError, RuntimeError), match=r"differs|drew|density|ratio|same device"):
        law(policy, laws.random_inputs(STATE, 6, seed=7))


def test_known_idle_parameters_are_named_exactly():
    policy = trained("flow", STATE, {**SMALL, "features": 32, "critic_trains_encoder": False})
    policy.register_parameter("idle", torch.nn.Parameter(torch.zeros(1)))
    inputs = laws.random_inputs(STATE, 6, seed=7)
    laws.law_gradients_reach_every_parameter(policy, inputs, without={"idle"})
    with pytest.raises(AssertionError, match="idle"):
        laws.law_gradients_reach_every_parameter(policy, inputs)
