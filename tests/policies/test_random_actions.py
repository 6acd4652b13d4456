"""The policy without parameters."""

import pytest
import torch

import policies
from policies import Inputs, PolicySpec
from policies.conformance import laws

SPEC = PolicySpec(action_dim=3, chunk=2, state_dim=5)
WITH_PARAMETERS = (
    laws.law_gradients_reach_every_parameter,
    laws.law_log_prob_is_the_density_that_act_samples,
)


@pytest.mark.parametrize("law", [law for law in laws.LAWS if law not in WITH_PARAMETERS])
def test_random_obeys(law):
    law(policies.build("random", SPEC, seed=0), laws.random_inputs(SPEC, 6, seed=7))


def test_every_action_is_as_likely_as_any_other():
    policy = policies.build("random", SPEC, seed=0)
    action = policy.act(Inputs(), laws.random_noise(policy, 20_000, 1))
    shares = torch.histc(action.chunk, bins=10, min=-1, max=1) / action.chunk.numel()
    assert torch.allclose(shares, torch.full((10,), 0.1), atol=0.005)
    assert torch.allclose(action.log_prob.exp(), torch.tensor(0.5))
    assert not list(policy.parameters())
