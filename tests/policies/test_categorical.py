"""`categorical_mlp`: what it draws and scores is the categorical distribution of its odds, and it learns to choose."""

import torch

import policies
from policies import Inputs, Policy, PolicySpec
from policies.conformance.laws import perturb, random_inputs, random_noise

SPEC = PolicySpec(action_dim=1, chunk=2, state_dim=3, discrete_actions=4)


def policy_of(seed: int = 0) -> Policy:
    policy = policies.build("categorical_mlp", SPEC, seed, widths=(16,))
    perturb(policy, 0.3, seed=1)
    return policy


def every_chunk() -> torch.Tensor:
    """[16, 2, 1]: each decision that there is."""
    numbers = torch.arange(4.0)
    return torch.cartesian_prod(numbers, numbers)[..., None]


def test_choices_are_drawn_as_often_as_their_probability_says():
    policy, draws = policy_of(), 20_000
    one = random_inputs(SPEC, 1, seed=2)
    chunk = policy.act(one.rows(torch.zeros(draws, dtype=torch.int64)), random_noise(policy, draws, 3)).chunk
    chunks = every_chunk()
    log_prob = policy.evaluate(one.rows(torch.zeros(16, dtype=torch.int64)), {"action": chunks}).log_prob
    expected = log_prob.sum((1, 2)).exp()
    torch.testing.assert_close(expected.sum(), torch.tensor(1.0))
    assert expected.min() < 0.7 * expected.max(), "all choices alike: nothing is tested"
    found = (chunk[:, None] == chunks).all((2, 3)).float().mean(0)
    allowed = 4.5 * (expected * (1 - expected) / draws).sqrt()
    assert ((found - expected).abs() < allowed).all(), (found, expected)


def test_entropy_is_that_of_the_probabilities():
    policy, one = policy_of(), random_inputs(SPEC, 1, seed=2)
    every = policy.evaluate(one.rows(torch.zeros(4, dtype=torch.int64)), {"action": every_chunk()[[0, 5, 10, 15]]})
    expected = -(every.log_prob.exp() * every.log_prob).sum(0)
    torch.testing.assert_close(every.entropy[0], expected)


def test_the_mode_is_the_likeliest_choice_and_the_ends_of_the_noise_are_choices():
    policy, inputs = policy_of(), random_inputs(SPEC, 6, seed=2)
    mode = policy.act(inputs, None)
    for other in every_chunk():
        scores = policy.evaluate(inputs, {"action": other.expand(6, -1, -1)}).log_prob
        assert (scores <= mode.log_prob + 1e-6).all()
    for z, choice in ((-40.0, 0.0), (40.0, 3.0)):
        assert (policy.act(inputs, torch.full((6, 2), z)).chunk == choice).all()


def test_policy_gradient_finds_the_choice_that_is_rewarded():
    policy, g = policies.build("categorical_mlp", SPEC, 0, widths=(32,)), torch.Generator().manual_seed(2)
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)

    def right(state: torch.Tensor) -> torch.Tensor:
        return (state[:, :1] > 0).float() + 2 * (state[:, 1:2] > 0).float()

    for _ in range(100):
        state = torch.randn(256, 3, generator=g)
        action = policy.act(Inputs(state=state), torch.randn(256, policy.noise_dim, generator=g))
        reward = (action.chunk[..., 0] == right(state)).float()
        scores = policy.evaluate(Inputs(state=state), action.trace)
        loss = -((reward - reward.mean(0)) * scores.log_prob[..., 0]).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    state = torch.randn(500, 3, generator=g)
    assert float((policy.act(Inputs(state=state), None).chunk[..., 0] == right(state)).float().mean()) > 0.9
