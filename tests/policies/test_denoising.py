"""Drawn steps and their scores, against RLinf's numbers (tests/golden/rl/flow_noise.safetensors) and each other."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from policies.contract import PolicyError
from policies.denoising import Denoising, Field
from policies.flow_vla.policy import NoiseNet
from policies.layers import gaussian_log_prob

GOLDEN = load_file(Path(__file__).parents[1] / "golden" / "rl" / "flow_noise.safetensors")
N, B, H, A = GOLDEN["noise.v_t"].shape
SIZE = H * A


def noise_net() -> NoiseNet:
    """RLinf's: three linear layers, tanh between and after them."""
    low, high = ((GOLDEN[f"noise.net.logvar_{end}"] / 2).exp().item() for end in ("min", "max"))
    weights = [GOLDEN[f"noise.net.mlp_logvar.moduleList.{i}.linear_1.weight"] for i in range(3)]
    net = NoiseNet(weights[0].shape[1], weights[2].shape[0], (low, high), [len(weight) for weight in weights[:2]])
    linear = [layer for layer in net.net if isinstance(layer, nn.Linear)]
    with torch.no_grad():
        for i, layer in enumerate(linear):
            layer.weight.copy_(weights[i])
            layer.bias.copy_(GOLDEN[f"noise.net.mlp_logvar.moduleList.{i}.linear_1.bias"])
    return net


def field(net: NoiseNet, i: int) -> Field:
    return Field(GOLDEN["noise.v_t"][i].flatten(1), net(GOLDEN["noise.suffix_features"][i]).flatten(1))


@torch.no_grad()
def test_flow_noise_is_rlinfs() -> None:
    net = noise_net()
    noise = torch.cat([GOLDEN["noise.x_0"].flatten(1), GOLDEN["noise.z"].transpose(0, 1).flatten(1)], 1)
    chain = GOLDEN["noise.chain"].flatten(2)
    start = gaussian_log_prob(GOLDEN["noise.x_0"], torch.tensor(0.0), torch.tensor(0.0)).flatten(1)
    for reduction, wanted in (("sum", "noise.logp.textbook64"), ("mean", "noise.logp.rlinf")):
        denoising = Denoising(SIZE, N, 0.5, "learned", reduction)
        x, trace, fields = denoising.run(denoising.draws(noise, B), lambda _, i: field(net, i))
        assert (x - chain[:, -1]).abs().max() < 1e-6
        assert (trace["x"] - chain[:, :-1]).abs().max() < 1e-6 and (trace["x_next"] - chain[:, 1:]).abs().max() < 1e-6
        assert fields.log_std is not None
        std = fields.log_std.exp().transpose(0, 1).reshape(N, B, H, A)
        assert (std - GOLDEN["noise.std"]).abs().max() < 1e-6
        # RLinf counts x^(0), which no weight changes.
        found = denoising.log_prob(trace, fields) + start / denoising.divisor
        assert (found - GOLDEN[wanted].flatten(1)).abs().max() < 1e-4
        entropy = denoising.entropy(fields, found)
        steps = GOLDEN["noise.entropy_steps"][:, 1:].sum(1).flatten(1) / denoising.divisor
        assert (entropy - steps).abs().max() < 1e-5


def linear(x: Tensor, i: int) -> Field:
    """A velocity that depends on x and on the step."""
    return Field(torch.sin(x) * (1 + i))


@pytest.mark.parametrize("scored", ["one", "all", "learned"])
def test_only_what_is_executed_is_scored(scored: str) -> None:
    whole = Denoising(6, 4, 0.5, scored)
    part = Denoising(6, 4, 0.5, scored, executed=[0, 1, 3])
    noise = torch.randn(5, whole.noise_dim, generator=torch.Generator().manual_seed(1))

    def of(x: Tensor, i: int) -> Field:
        return Field(linear(x, i).v, torch.full_like(x, -2.0) if scored == "learned" else None)

    found = [d.run(d.draws(noise, 5), of) for d in (whole, part)]
    assert torch.equal(found[0][0], found[1][0])
    assert found[1][1]["x_next"].shape == (5, 1 if scored == "one" else 4, 3)
    scores = [d.log_prob(trace, fields) for d, (_, trace, fields) in zip((whole, part), found, strict=True)]
    assert torch.equal(scores[0][:, [0, 1, 3]], scores[1])


@pytest.mark.parametrize("executed", [None, [0, 1, 3]])
@pytest.mark.parametrize("scored", ["one", "any", "all", "learned"])
def test_log_probs_are_of_what_is_drawn(scored: str, executed: list[int] | None) -> None:
    """E[p'(a) / p(a)] = 1 for decisions that are drawn under p, and p' of another velocity and deviation."""
    denoising, draws = Denoising(6, 3, 0.5, scored, executed=executed), 20_000
    noise = torch.randn(draws, denoising.noise_dim, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def of(x: Tensor, scale: float) -> Field:
        # A deviation that is learned is small, and its own change counts as the mean's does.
        return Field(scale * torch.sin(x), 0.3 * (scale - 1) * x - 1.5 if scored == "learned" else None)

    _, trace, fields = denoising.run(denoising.draws(noise, draws), lambda x, _: of(x, 1.0))
    log_ratio = (denoising.log_prob(trace, of(trace["x"], 1.2)) - denoising.log_prob(trace, fields)).sum(1)
    assert 0.05 < log_ratio.std() < 1, "the density hardly depends on the velocity"
    ratio = log_ratio.exp()
    assert abs(float(ratio.mean()) - 1) < 4.5 * float(ratio.std()) / draws**0.5


def test_the_mode_is_the_ode_and_is_scored_as_if_it_were_drawn() -> None:
    for scored, count in (("one", 1), ("all", 3), ("learned", 3)):
        denoising = Denoising(4, 3, 0.5, scored)

        def of(x: Tensor, i: int, learned: bool = scored == "learned") -> Field:
            return Field(linear(x, i).v + 1, torch.full_like(x, -2.0) if learned else None)

        x, trace, fields = denoising.run(denoising.draws(None, 2), of)
        expected = torch.zeros(2, 4)
        for i in range(3):
            expected = expected - of(expected, i).v / 3
        assert (x - expected).abs().max() < 1e-6 and trace["step"].tolist() == [list(range(count))] * 2
        assert denoising.log_prob(trace, fields).isfinite().all()


@pytest.mark.parametrize("scored", ["one", "any", "all", "learned"])
def test_less_noise_at_the_start_is_a_smaller_beginning_and_nothing_else(scored: str) -> None:
    whole, less = (Denoising(4, 3, 0.5, scored, start_noise=start) for start in (1.0, 0.25))
    noise = torch.randn(6, whole.noise_dim, generator=torch.Generator().manual_seed(0))
    one, other = whole.draws(noise, 6), less.draws(noise, 6)
    assert whole.noise_dim == less.noise_dim and torch.equal(other.x, one.x / 4)
    for name in ("z", "step", "drawn"):
        assert torch.equal(getattr(one, name), getattr(other, name))


def test_what_cannot_be_scored_is_refused() -> None:
    for arguments, message in (
        ((4, 0, 0.5), "steps >= 1"),
        ((4, 3, 0.0), "noise_level > 0"),
        ((4, 3, 0.5, "one", "sum", None, 1.5), "start_noise <= 1"),
        ((4, 3, 0.5, "two"), "one, any, all, learned"),
        ((4, 3, 0.5, "one", "max"), "sum, mean"),
    ):
        with pytest.raises(PolicyError, match=message):
            Denoising(*arguments)  # type: ignore[arg-type]
    denoising = Denoising(4, 3, 0.5, "all")
    with pytest.raises(PolicyError, match=r"noise must be \[B, 16\]"):
        denoising.draws(torch.zeros(2, 9), 2)
