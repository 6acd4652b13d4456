"""Diffusion Policy against what LeRobot 0.6.1 computes with the same tiny checkpoints (tests/golden/diffusion)."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from policies import Inputs
from policies.diffusion.config import DiffusionConfig
from policies.diffusion.denoising import Denoising, Exploration, make_scheduler
from tests.policies.diffusion.cases import (
    GOLDEN,
    golden_checkpoint,
    inputs_of,
    make,
    noise_of,
    older_checkpoint,
    variant_checkpoint,
)

AS_LEROBOT = {"min_sampling_denoising_std": 0.0}
"""Steps have the scheduler's own deviations."""
VARIANTS = ("ddim", "ddim_noise", "ddpm_sample", "two_cameras", "shared")


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture(scope="module", params=[golden_checkpoint, older_checkpoint], ids=["0.6", "0.3"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make(request.param(tmp_path_factory.mktemp("diffusion") / "checkpoint"), **AS_LEROBOT)


@pytest.fixture
def inputs(policy: Any, golden: dict[str, Tensor]) -> Inputs:
    return inputs_of(policy, golden)


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.detach(), expected, atol=1e-5, rtol=1e-5)


def close_gradient(name: str, found: Tensor, expected: Tensor) -> None:
    error = (found - expected).norm()
    assert error <= 1e-4 * expected.norm() + 1e-8, f"{name}: {error} of {expected.norm()}"


def test_what_the_network_is_shown(policy: Any, golden: dict[str, Tensor], inputs: Inputs) -> None:
    pixels, state = policy._observation(inputs)
    close(pixels[:, :, 0], golden["pre.observation.image"])
    close(state, golden["pre.observation.state"])
    close(policy._normalised(golden["raw.action"], inputs).float(), golden["pre.action"])
    close(policy._condition(inputs), golden["condition"])


def test_chunks(policy: Any, golden: dict[str, Tensor], inputs: Inputs) -> None:
    noise, condition = noise_of(policy, golden), policy._condition(inputs)
    close(policy.network.unet(golden["noise"], torch.full((2,), 3), condition), golden["unet.t3"])
    close(policy._denoised(condition, noise)[0], golden["horizon.normalised"])
    close(policy.act(inputs, noise).chunk, golden["chunk"])
    assert policy.spec.observations == 2 and policy.spec.predicted == 7


def test_loss_and_gradients(policy: Any, golden: dict[str, Tensor], inputs: Inputs) -> None:
    counted = torch.ones(2, 8, dtype=torch.bool)
    each = policy.losses(
        inputs, golden["raw.action"], counted, golden["train.noise"], golden["train.timesteps"], corners=None
    )
    close(each.mean()[None], golden["loss"])
    policy.zero_grad()
    each.mean().backward()
    expected = {name: tensor for name, tensor in golden.items() if name.startswith("grad.")}
    assert len(expected) == 144
    found = {f"grad.diffusion.{name}": p.grad for name, p in policy.network.named_parameters()}
    for name, gradient in expected.items():
        close_gradient(name, found[name], gradient)


@pytest.mark.parametrize("name", VARIANTS)
def test_variants(name: str, tmp_path: Path) -> None:
    """DDIM and DDPM, noise and sample, other schedules, fewer steps; one observation and three; two cameras with one
    encoder or one each; resizing, crops that are not square; batch norms; ResNet-34; every normalisation, and numbers
    that never change; losses with and without what pads an episode's end."""
    folder, spec = variant_checkpoint(name, tmp_path / name)
    golden, policy = load_file(GOLDEN / "variants" / name / "golden.safetensors"), make(folder, spec, **AS_LEROBOT)
    inputs = inputs_of(policy, golden)
    close(policy.act(inputs, noise_of(policy, golden)).chunk, golden["chunk"])
    counted = ~golden["action_is_pad"]
    assert not counted.all()
    actions = torch.where(counted[..., None], golden["raw.action"], torch.nan)
    each = policy.losses(inputs, actions, counted, golden["train.noise"], golden["train.timesteps"], corners=None)
    # A mean over all numbers of a batch, in which longer rows count for more where padding is masked.
    share = counted.sum(1) / counted.sum() if policy.config.do_mask_loss_for_padding else torch.full((2,), 0.5)
    loss = (each * share).sum()
    close(loss[None], golden["loss"])
    loss.backward()
    gradients = {key.removeprefix("grad."): tensor for key, tensor in golden.items() if key.startswith("grad.")}
    assert len(gradients) == 3
    for key, expected in gradients.items():
        close_gradient(key, policy.network.get_parameter(key).grad.flatten()[:100], expected)


@pytest.mark.parametrize("steps", [1, 3, 25])
@pytest.mark.parametrize("prediction", ["epsilon", "sample"])
@pytest.mark.parametrize("sampler", ["DDPM", "DDIM"])
def test_steps_are_those_of_diffusers(sampler: Literal["DDPM", "DDIM"], prediction: str, steps: int) -> None:
    config = DiffusionConfig.model_validate(
        {"type": "diffusion", "num_train_timesteps": 25, "prediction_type": prediction}
    )
    ours = Denoising(config, sampler, steps, Exploration(0, 0.0, 0.1, 0.99))
    theirs = make_scheduler(config, sampler)
    theirs.set_timesteps(steps)
    assert ours.times.tolist() == theirs.timesteps.tolist()
    generator = torch.Generator().manual_seed(1)
    for step, time in enumerate(theirs.timesteps):
        x, predicted = (torch.randn(2, 4, 3, generator=generator) for _ in range(2))
        z = torch.randn(2, 4, 3, generator=torch.Generator().manual_seed(step))
        expected = theirs.step(predicted, time, x, generator=torch.Generator().manual_seed(step)).prev_sample
        close(ours.mean(x, predicted, step) + ours.deviations[step] * z, expected)
        every = torch.full((2,), step)
        close(ours.mean(x, predicted, every), ours.mean(x, predicted, step))
    actions, noise, times = torch.randn(2, 4, 3), torch.randn(2, 4, 3), torch.tensor([0, 24])
    close(ours.noisy(actions, noise, times), theirs.add_noise(actions, noise, times))
