"""Flow-SDE and the normal density against golden values of the reference and of the published formula."""

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from policies import denoising
from policies.layers import gaussian_entropy, gaussian_log_prob

GOLDEN = load_file(Path(__file__).parent / "golden_flow_sde.safetensors")
STEPS = [3, 4, 10]
LEVELS = [0.5, 0.3]


def golden(steps: int, name: str) -> torch.Tensor:
    return GOLDEN[f"flow.N{steps}.{name}"]


def transition(steps: int, level: float, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Mean [N, B, C, A] and log_std [N, 1, 1, 1] of every step from the golden x and v."""
    x, v = golden(steps, "x_t").to(dtype), golden(steps, "v_t").to(dtype)
    weight_x, weight_v = (w.to(dtype)[:, None, None, None] for w in denoising.mean_weights(steps, level))
    log_std = denoising.stds(steps, level).log().to(dtype)[:, None, None, None]
    return weight_x * x + weight_v * v, log_std


@pytest.mark.parametrize("steps", STEPS)
def test_timesteps_equal_reference(steps):
    t = denoising.timesteps(steps).float()
    torch.testing.assert_close(t, golden(steps, "timesteps"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("steps", STEPS)
def test_float32_steps_equal_reference(steps, level):
    mean, log_std = transition(steps, level, torch.float32)
    log_prob = gaussian_log_prob(golden(steps, f"sde.a{level}.x_next"), mean, log_std)
    std = denoising.stds(steps, level).float()
    torch.testing.assert_close(mean, golden(steps, f"sde.a{level}.mean"), rtol=0, atol=1e-5)
    torch.testing.assert_close(std, golden(steps, f"sde.a{level}.std"), rtol=0, atol=1e-6)
    torch.testing.assert_close(log_prob, golden(steps, f"sde.a{level}.logp"), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("steps", STEPS)
def test_float64_steps_equal_published_formula(steps, level):
    mean, log_std = transition(steps, level, torch.float64)
    log_prob = gaussian_log_prob(golden(steps, f"sde.a{level}.x_next").double(), mean, log_std)
    std = denoising.stds(steps, level)
    for name, value in [("mean", mean), ("std", std), ("logp", log_prob)]:
        textbook = golden(steps, f"sde.a{level}.{name}.textbook64")
        torch.testing.assert_close(value, textbook, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("steps", STEPS)
def test_ode_is_the_sde_without_noise(steps):
    mean, _ = transition(steps, 0.0, torch.float32)
    torch.testing.assert_close(mean, golden(steps, "ode.x_next"), rtol=0, atol=1e-6)


@pytest.mark.parametrize("steps", STEPS)
def test_rows_at_different_steps_equal_reference(steps):
    step = golden(steps, "mixed.idx")
    x, v = golden(steps, "x_t")[0], golden(steps, "v_t")[0]
    weight_x, weight_v = (w.float()[step][:, None, None] for w in denoising.mean_weights(steps, 0.5))
    torch.testing.assert_close(weight_x * x + weight_v * v, golden(steps, "mixed.mean"), rtol=0, atol=1e-5)
    std = denoising.stds(steps, 0.5).float()[step]
    torch.testing.assert_close(std, golden(steps, "mixed.std"), rtol=0, atol=1e-6)


def test_density_equals_torch_distributions():
    g = torch.Generator().manual_seed(0)
    x, mean, log_std = (torch.randn(50, generator=g, dtype=torch.float64) for _ in range(3))
    reference = torch.distributions.Normal(mean, log_std.exp())
    torch.testing.assert_close(gaussian_log_prob(x, mean, log_std), reference.log_prob(x))
    torch.testing.assert_close(gaussian_entropy(log_std), reference.entropy())
