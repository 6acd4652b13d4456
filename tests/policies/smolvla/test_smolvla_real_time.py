"""Real-time chunking: against LeRobot 0.6.1's chunks (tests/golden/smolvla), and formulas written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from policies import Inputs, PolicyError
from policies.capabilities import LeftOver, Predicts, RealTimeChunks
from policies.denoising import Draws, Field
from policies.flow_vla.real_time import SCHEDULES, Guide, guidance, weights
from policies.units import StoredUnits, identity
from tests.policies.smolvla.cases import GOLDEN, SPEC, TEXTS, inputs_of, make

CAMERAS = ("image", "image2")
DELAY, END, MOST = 2, 4, 5.0
"""What the golden chunks were made with."""


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "golden.safetensors")


def starting_at(policy: Any, noise: Tensor) -> None:
    """Have the policy begin with this noise [B, H, A], and draw no step."""
    x, steps = noise.flatten(1), policy.denoising.steps
    every = torch.zeros(len(x), steps, dtype=torch.bool)
    policy.denoising.draws = lambda _, rows: Draws(x, torch.zeros_like(x)[:, None], every[:, :1].long(), every)


def case(golden: dict[str, Tensor], **options: Any) -> tuple[Any, Inputs, Tensor]:
    """A policy whose units are the network's, its inputs, and the left-over."""
    policy = make(steps=None, rtc_guidance=MOST, **options)
    frames = {name: golden[f"raw.observation.images.{name}"] for name in CAMERAS}
    inputs = Inputs(proprio=golden["raw.observation.state"], frames=frames, instruction=TEXTS)
    seen = policy._observation(inputs)
    policy._observation = lambda _: seen
    policy.units = StoredUnits(identity(8, 7))
    starting_at(policy, golden["noise"])
    return policy, inputs, golden["rtc.left_over"]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_chunks_are_those_of_lerobot(schedule: str, golden: dict[str, Tensor]) -> None:
    policy, inputs, left = case(golden, rtc_schedule=schedule)
    left_over = LeftOver(left[:, :END], torch.ones(2, dtype=torch.bool), DELAY, jacobian=False)
    found = policy.continue_chunk(inputs, None, left_over)
    expected = golden[f"rtc.{schedule.upper()}"]
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=0)
    assert (found - golden["chunk.normalised"]).abs().max() > 1e-2, "it is guided"
    torch.testing.assert_close(weights(schedule, DELAY, END, 6), golden[f"rtc.weights.{schedule.upper()}"])


def test_weights_of_the_paper() -> None:
    """Equation 5, with H = 8, d = 2 and s = 3."""
    horizon, delay, interval = 8, 2, 3
    expected = []
    for i in range(horizon):
        c = (horizon - interval - i) / (horizon - interval - delay + 1)
        between = c * (math.exp(c) - 1) / (math.e - 1)
        expected.append(1.0 if i < delay else between if i < horizon - interval else 0.0)
    torch.testing.assert_close(weights("exp", delay, horizon - interval, horizon), torch.tensor(expected))
    assert weights("zeros", 3, 2, 4).tolist() == [1, 1, 0, 0], "the left-over may be shorter than the delay"


def test_guidance_of_the_paper() -> None:
    """min(b, (1 - tau) / (tau r^2)) with r^2 = (1 - tau)^2 / (tau^2 + (1 - tau)^2) and tau = 1 - t."""
    for t in (0.9, 0.5, 0.1):
        tau = 1 - t
        r2 = (1 - tau) ** 2 / (tau**2 + (1 - tau) ** 2)
        assert guidance(t, 100.0) == pytest.approx((1 - tau) / (tau * r2))
        assert guidance(t, 0.5) == 0.5
    assert guidance(1.0, 5.0) == 5.0


@pytest.mark.parametrize("jacobian", [True, False])
def test_guided_velocity_of_a_linear_field(jacobian: bool) -> None:
    """v(x) = M x, so that the estimate is (1 - t M) x, and its Jacobian 1 - t M."""
    generator = torch.Generator().manual_seed(3)
    m, x, y, w = (torch.randn(shape, generator=generator) for shape in ((4, 4), (2, 4), (2, 4), (2, 4)))
    t, most = 0.4, 2.0
    with torch.no_grad():
        found = Guide(y, w, most, jacobian).guided(lambda at: Field(at @ m.T), x, t)
    whole = torch.eye(4) - t * m
    error = w * (y - x @ whole.T)
    expected = x @ m.T - guidance(t, most) * (error @ whole if jacobian else error)
    torch.testing.assert_close(found.v, expected)
    assert not found.v.requires_grad


@pytest.mark.parametrize("jacobian", [True, False])
def test_a_chunk_agrees_with_what_is_left(jacobian: bool) -> None:
    """Only the rows with a left-over change, most where it is executed already."""
    policy = make(steps=10)
    inputs, noise = inputs_of(SPEC, 3, 5), torch.randn(3, policy.noise_dim, generator=torch.Generator().manual_seed(1))
    plain = policy.predict(inputs, noise)
    torch.testing.assert_close(plain[:, : SPEC.chunk], policy.act(inputs, noise).chunk)
    left = plain[[1, 2, 0]][:, :4]
    there = torch.tensor([True, False, True])
    found = policy.continue_chunk(inputs, noise, LeftOver(left, there, 2, jacobian))
    torch.testing.assert_close(found[1], plain[1])
    units = policy.units.action.normalise
    before, after = ((units(chunk[there, :4]) - units(left[there])).abs() for chunk in (plain, found))
    assert after[:, :2].mean() < 0.5 * before[:, :2].mean()
    assert after[:, 3].mean() > 0.5 * before[:, 3].mean()
    assert not found.requires_grad and all(p.grad is None for p in policy.parameters())


def test_capabilities_and_options() -> None:
    policy = make()
    assert isinstance(policy, RealTimeChunks) and isinstance(policy, Predicts)
    with pytest.raises(PolicyError, match="rtc_schedule must be one of exp, linear, ones, zeros"):
        make(rtc_schedule="cosine")
    with pytest.raises(PolicyError, match="rtc_guidance must be above 0"):
        make(rtc_guidance=0.0)
