"""From an untrained policy, plain policy gradient finds what is rewarded: scores, noise and start agree."""

import pytest
import torch

import policies
from policies import Inputs, Policy, PolicySpec

SPEC = PolicySpec(action_dim=2, chunk=1, state_dim=3)


def rewards(state: torch.Tensor, chunk: torch.Tensor) -> torch.Tensor:
    """[B]: minus the squared distance to a target that the state determines."""
    return -(chunk[:, 0] - 0.8 * state[:, :2].tanh()).square().mean(-1)


def improve(policy: Policy, iterations: int, seed: int) -> None:
    """REINFORCE on a task of one decision; advantages are normalised over the batch."""
    g = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.Adam(policy.parameters(), lr=3e-3)
    for _ in range(iterations):
        state = torch.randn(256, 3, generator=g)
        inputs = Inputs(state=state)
        action = policy.act(inputs, torch.randn(256, policy.noise_dim, generator=g))
        reward = rewards(state, action.chunk)
        advantage = (reward - reward.mean()) / reward.std()
        loss = -(advantage * policy.evaluate(inputs, action.trace).log_prob.sum((1, 2))).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("kind", "architecture"),
    [
        ("gaussian_mlp", {}),
        ("flow", {"features": 64}),
        ("flow", {"features": 64, "joint": True}),
    ],
)
def test_policy_gradient_raises_the_reward(kind, architecture):
    policy = policies.build(kind, SPEC, seed=0, widths=(64, 64), critic_widths=(8,), **architecture)
    state = torch.randn(500, 3, generator=torch.Generator().manual_seed(1))

    def reward_of_mode() -> float:
        return float(rewards(state, policy.act(Inputs(state=state), None).chunk).mean())

    before = reward_of_mode()
    improve(policy, iterations=150, seed=2)
    assert reward_of_mode() > 0.25 * before, f"mean reward from {before:.3f} to {reward_of_mode():.3f} only"
