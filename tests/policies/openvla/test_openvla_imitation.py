"""Learning from demonstrations: actions become the tokens that would have said them."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

import policies
from policies import Inputs, PolicySpec
from policies.conformance import laws
from policies.openvla.action_tokens import action_of, token_of
from policies.openvla.config import BINS
from tests.policies.openvla.cases import (
    CHUNK,
    INSTRUCTIONS,
    OFT,
    ONE_ACTION,
    OPENVLA,
    error,
    golden,
    gripper_of,
    make,
    random_inputs,
)
from tests.variants import often

GOLDEN = golden(OPENVLA)
LORA = {"lora_rank": 4, "lora_parts": ["language", "projector", "vision"]}
REGRESSION: dict[str, Any] = {"unnorm_key": "toy_long", "head": "l1", "proprio": False}
CASES: dict[str, tuple[str, PolicySpec, dict[str, Any]]] = {
    "openvla": ("openvla", ONE_ACTION, {}),
    "openvla, adapter": ("openvla", ONE_ACTION, LORA),
    "oft": ("openvla_oft", CHUNK, {"temperature": 1.6}),
    "oft, regression": ("openvla_oft", replace(CHUNK, chunk=4, image_size=28), REGRESSION),
}
LEARNING = laws.law_imitation_brings_the_mode_to_the_demonstrations


@pytest.fixture
def policy(case, tiny) -> Any:
    kind, spec, options = CASES[case]
    return make(kind, spec, OFT / "checkpoint" if options is REGRESSION else tiny, **options)


def bin_centres(policy: Any, tokens: torch.Tensor) -> torch.Tensor:
    return policy.in_units(action_of(tokens, policy.model.config.action_vocab), None)


@pytest.mark.slow
@pytest.mark.parametrize("law", laws.IMITATION_LAWS, ids=lambda law: law.__name__)
@pytest.mark.parametrize("case", often(("oft, regression",), CASES))
def test_policy_obeys(policy, law):
    if law is LEARNING:
        law = partial(law, steps=60, lr=1e-2, tolerance=0.2 if policy.noise_dim == 0 else 0.05)
    law(policy, random_inputs(policy.spec, 6, seed=7))


@pytest.mark.parametrize("gripper", ["raw", "libero", "maniskill"])
@pytest.mark.parametrize(("kind", "spec"), [("openvla", ONE_ACTION), ("openvla_oft", CHUNK)])
def test_an_action_is_demonstrated_by_the_token_that_says_it(tiny, kind, spec, gripper):
    """Of every dimension with a unit and every token but the last, which says the same as the last but one."""
    policy = make(kind, spec, tiny, transforms=gripper_of(gripper))
    vocab, first = policy.model.config.action_vocab, policy.model.config.first_action_token
    tokens = torch.arange(first + 1, vocab)[:, None].expand(-1, policy.noise_dim)
    actions = bin_centres(policy, tokens)
    again = token_of(policy.normalised(actions, torch.ones(actions.shape[:2], dtype=torch.bool), None), vocab)
    target = tokens.view(again.shape)
    assert torch.equal(again[..., :-1], target[..., :-1])
    if gripper != "raw":  # 1 or 0, open or closed
        target = torch.where(action_of(target, vocab) > 0.5, first, vocab - BINS // 2)
    assert torch.equal(again[..., -1], target[..., -1])


def test_actions_beyond_the_percentiles_are_clipped_and_constant_ones_are_zero(tiny):
    policy = make("openvla", ONE_ACTION, tiny)
    policy.statistics.high[1] = policy.statistics.low[1]
    far = torch.tensor([[[9.0, 9.0, -9.0, 9.0, 9.0, 9.0, 0.25]]])
    normalised = policy.normalised(far, torch.ones(1, 1, dtype=torch.bool), None).flatten().tolist()
    assert normalised == [1, 0, -1, 1, 1, 1, 0.25]


def test_the_loss_is_the_references():
    """Cross entropy among the whole vocabulary, from the logits that the reference computed."""
    tokens = GOLDEN["given.action_tokens"]
    options = {"checkpoint": str(OPENVLA / "checkpoint"), "unnorm_key": "toy_bridge"}
    policy: Any = policies.build("openvla", PolicySpec(7, cameras=("base",)), 0, **options)
    counted = torch.ones(2, 1, dtype=torch.bool)
    # Only an action at the upper end is the last token's: its bin's centre is that of the last but one.
    actions = policy.in_units(torch.where(tokens == 256, 1.5, action_of(tokens, 512)), None)
    assert torch.equal(token_of(policy.normalised(actions, counted, None), 512).flatten(1), tokens)
    expected = -GOLDEN["given.logits"].log_softmax(-1).gather(-1, tokens[..., None]).squeeze(-1).mean(1)
    for row in (0, 1):  # the pictures are of two sizes
        inputs = Inputs(frames={"base": GOLDEN[f"image.{row}.rgb"][None]}, instruction=INSTRUCTIONS[row : row + 1])
        loss = policy.imitate(inputs, actions[row : row + 1], counted[:1], torch.zeros(1, 7))
        assert error(loss[0], expected[row]) <= 1e-4


@pytest.mark.parametrize("case", ["openvla", "oft"])
def test_one_pass_and_no_logits_but_those_of_the_actions(policy):
    seen: dict[str, list[tuple[int, ...]]] = {"lm_head": [], "model": []}
    for name, calls in seen.items():
        module = getattr(policy.model.language_model, name)
        module.register_forward_hook(lambda _, args, out, calls=calls: calls.append(out[0].shape))
    actions, counted = laws.demonstrations(policy, 3)
    inputs = random_inputs(policy.spec, 3, seed=1)
    policy.imitate(inputs, actions, counted, laws.random_noise(policy, 3, 1)).sum().backward()
    assert len(seen["model"]) == 1 and seen["lm_head"] == [(policy.noise_dim, 576)]
    grad = policy.model.language_model.lm_head.weight.grad
    assert (grad.abs().sum(1) > 0).all(), "words are not made less likely than actions"


@pytest.mark.parametrize("case", ["oft, regression"])
def test_regression_learns_the_mean_absolute_error(policy):
    inputs = random_inputs(policy.spec, 3, seed=1)
    actions, counted = laws.demonstrations(policy, 3)
    counted = counted & (torch.arange(4) < 2)
    loss = policy.imitate(inputs, actions, counted, torch.zeros(3, 0))
    s = policy.statistics
    target = torch.where(s.mask, (2 * (actions - s.low) / (s.high - s.low) - 1).clamp(-1, 1), actions.double())
    wrong = (policy.action_head(policy.states(inputs)) - target).abs()
    assert error(loss, wrong[:, :2].mean((1, 2))) <= 1e-6
