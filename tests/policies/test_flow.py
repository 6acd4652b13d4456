"""What is particular to the flow policy: its start, its stochastic step, its textbook density, its inputs."""

import math
from dataclasses import replace

import pytest
import torch

import policies
from policies import Inputs, PolicyError, PolicySpec
from policies.conformance.laws import perturb, random_inputs, random_noise
from policies.small.flow import FlowPolicy, time_embedding

STATE = PolicySpec(action_dim=3, chunk=2, state_dim=5)
IMAGE = PolicySpec(action_dim=3, proprio_dim=4, cameras=("base", "wrist"), image_size=32)


def build(spec: PolicySpec = STATE, **architecture) -> FlowPolicy:
    small = {"features": 32, "widths": (32, 32), "critic_widths": (16,)}
    policy = policies.build("flow", spec, seed=0, **small, **architecture)
    assert isinstance(policy, FlowPolicy)
    return policy


@pytest.mark.parametrize("steps", [1, 4, 10])
@pytest.mark.parametrize("start_std", [0.1, 0.3, 1.0])
@torch.no_grad()
def test_ode_takes_noise_to_centre_plus_scaled_noise(steps, start_std):
    policy = build(steps=steps, start_std=start_std)
    last = policy.velocity.rest[-1]
    assert isinstance(last, torch.nn.Linear)
    last.weight.zero_()
    last.bias.copy_(torch.linspace(-1, 1, 6))
    context = policy.velocity.context(torch.zeros(7, 32), torch.arange(steps))
    noise = random_noise(policy, 7, 0)[:, :6]
    x = noise
    for i in range(steps):
        x = x - policy.velocity(x, context[:, i], i) / steps
    torch.testing.assert_close(x, last.bias + start_std * noise, rtol=0, atol=1e-5)


def test_untrained_policy_explores_around_zero():
    policy = build()
    action = policy.act(random_inputs(STATE, 2000, 1), random_noise(policy, 2000, 2))
    assert policy.act(random_inputs(STATE, 20, 1), None).chunk.abs().max() < 0.1
    assert 0.2 < action.chunk.std() < 0.5
    assert action.chunk.mean().abs() < 0.02


def test_each_step_is_drawn_equally_often_by_its_own_number():
    policy = build(steps=4)
    noise = random_noise(policy, 4000, 3)
    step = policy.act(random_inputs(STATE, 4000, 1), noise).trace["step"]
    quartile = torch.bucketize(noise[:, -1:].contiguous(), torch.tensor([-0.6744898, 0.0, 0.6744898]))
    assert torch.equal(step, quartile)
    # 4 standard deviations of a binomial count
    assert (step.flatten().bincount(minlength=4) - 1000).abs().max() < 4 * math.sqrt(4000 * 0.25 * 0.75)


@pytest.mark.parametrize("extreme", [-40.0, 40.0])
def test_extreme_noise_draws_an_existing_step(extreme):
    policy = build(steps=3)
    noise = torch.full((2, policy.noise_dim), extreme)
    step = policy.act(random_inputs(STATE, 2, 1), noise).trace["step"]
    assert step.tolist() == [[2 if extreme > 0 else 0]] * 2


@pytest.mark.parametrize("joint", [False, True])
def test_log_prob_equals_textbook_density_in_float64(joint):
    """arXiv 2510.25889: mean x - d [v + s^2 / (2t) (x + (1-t) v)], std s sqrt(d), from the policy's own v."""
    policy = build(joint=joint, steps=4, noise_level=0.5)
    perturb(policy, 0.1, 1)
    inputs = random_inputs(STATE, 50, 1)
    action = policy.act(inputs, random_noise(policy, 50, 2))
    x, x_next, step = action.trace["x"], action.trace["x_next"], action.trace["step"]
    with torch.no_grad():
        context = policy.velocity.context(policy.encoder(inputs), step)
        v = policy.velocity(x, context, step).double()
    x, x_next, delta = x.double(), x_next.double(), 0.25
    t = 1 - step.double()[..., None] / 4
    sigma = 0.5 * torch.sqrt(t / torch.where(t == 1, 0.25, 1 - t))
    mean = x - delta * (v + sigma**2 / (2 * t) * (x + (1 - t) * v))
    textbook = torch.distributions.Normal(mean, sigma * math.sqrt(delta)).log_prob(x_next)
    expected = textbook.sum(1).view(50, 2, 3)
    torch.testing.assert_close(action.log_prob.double(), expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_all_steps_but_the_scored_one_are_ode_steps():
    policy = build(steps=4)
    perturb(policy, 0.1, 1)
    inputs, noise = random_inputs(STATE, 40, 1), random_noise(policy, 40, 2)
    action = policy.act(inputs, noise)
    step = action.trace["step"]
    assert set(step.flatten().tolist()) == {0, 1, 2, 3}
    context = policy.velocity.context(policy.encoder(inputs), torch.arange(4))
    x = noise[:, :6]
    for i in range(4):
        torch.testing.assert_close(action.trace["x"][:, 0].where(step == i, x), x)
        x = (x - policy.velocity(x, context[:, i], i) / 4).where(step != i, action.trace["x_next"][:, 0])
    torch.testing.assert_close(action.chunk.flatten(1), x)


def test_joint_trace_is_the_whole_chain():
    policy = build(joint=True, steps=3)
    noise = random_noise(policy, 40, 2)
    action = policy.act(random_inputs(STATE, 40, 1), noise)
    x, x_next = action.trace["x"], action.trace["x_next"]
    assert torch.equal(x[:, 0], noise[:, :6])
    assert torch.equal(x[:, 1:], x_next[:, :-1])
    assert torch.equal(x_next[:, -1], action.chunk.flatten(1))


@pytest.mark.parametrize("trains", [True, False])
def test_value_loss_reaches_the_encoder_only_if_requested(trains):
    policy = build(critic_trains_encoder=trains)
    inputs = random_inputs(STATE, 8, 1)
    trace = policy.act(inputs, random_noise(policy, 8, 2)).trace
    policy.evaluate(inputs, trace).value.sum().backward()
    assert any(p.grad is not None and p.grad.any() for p in policy.encoder.parameters()) == trains


def test_time_embedding_tells_close_times_apart():
    embedded = time_embedding(torch.tensor([0.5, 0.5 + 1e-4], dtype=torch.float64), 32)
    assert embedded.dtype == torch.float64 and embedded.abs().max() <= 1
    assert (embedded[0] - embedded[1]).abs().max() > 0.05


def test_cameras_are_read_by_name_in_the_order_of_the_spec():
    policy = build(IMAGE, encoder="cnn")
    inputs = random_inputs(IMAGE, 4, 1)
    turned = replace(inputs, frames={name: inputs.frames[name] for name in reversed(IMAGE.cameras)})
    assert torch.equal(policy.act(inputs, None).chunk, policy.act(turned, None).chunk)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"frames": {}}, "reads the camera 'base', the inputs have: none"),
        ({"proprio": None}, r"reads proprio \[B, 4\], the inputs have nothing"),
        ({"proprio": torch.zeros(4, 3)}, r"reads proprio \[B, 4\], the inputs have \[4, 3\]"),
        (
            {"frames": {"base": torch.zeros(4, 64, 64, 3, dtype=torch.uint8)}},
            r"must be uint8 \[B, 32, 32, 3\], got uint8 \[4, 64, 64, 3\]",
        ),
        ({"frames": {"base": torch.zeros(4, 32, 32, 3)}}, r"got float32 \[4, 32, 32, 3\]"),
    ],
)
def test_wrong_inputs_are_named(change, message):
    policy = build(IMAGE, encoder="cnn")
    with pytest.raises(PolicyError, match=message):
        policy.act(replace(random_inputs(IMAGE, 4, 1), **change), None)


def test_wrong_noise_is_refused():
    policy = build()
    with pytest.raises(PolicyError, match=r"noise must be \[B, 13\].*got \[4, 12\]"):
        policy.act(Inputs(state=torch.zeros(4, 5)), torch.zeros(4, 12))


@pytest.mark.parametrize(
    ("spec", "architecture", "message"),
    [
        (STATE, {"encoder": "vit"}, "one of state, cnn, got 'vit'"),
        (STATE, {"encoder": "cnn"}, "at least one camera"),
        (IMAGE, {}, "spec.state_dim of at least 1"),
        (replace(IMAGE, image_size=2), {"encoder": "cnn"}, "images of 2 pixels are too small"),
        (STATE, {"steps": 0}, "steps >= 1"),
        (STATE, {"noise_level": 0.0}, "noise_level > 0"),
        (STATE, {"start_std": 0.0}, "start_std <= 1"),
    ],
)
def test_impossible_architectures_are_refused(spec, architecture, message):
    with pytest.raises(PolicyError, match=message):
        build(spec, **architecture)


def test_imitation_is_conditional_flow_matching():
    """x = t noise + (1 - t) actions, of which the velocity is noise - actions (arXiv 2210.02747): t = 1 is the noise,
    where the integration begins."""
    policy, inputs, noise = build(), random_inputs(STATE, 5, seed=1), random_noise(build(), 5, 2)
    actions, begin = torch.randn(5, 2, 3, generator=torch.Generator().manual_seed(3)), noise[:, :6]
    calls = []
    policy.velocity.register_forward_hook(lambda _, arguments, result: calls.append((arguments[0], result)))
    loss = policy.imitate(inputs, actions, torch.ones(5, 2, dtype=torch.bool), noise)
    ((x, v),) = calls
    t = policy.denoising.times[policy.denoising.step_of(noise)]
    assert len(t.unique()) > 1
    torch.testing.assert_close(x.flatten(1), t * begin + (1 - t) * actions.flatten(1))
    torch.testing.assert_close(loss, (v.flatten(1) - (begin - actions.flatten(1))).square().mean(1))
