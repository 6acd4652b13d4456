"""ACT against what LeRobot 0.6.1 computes with the same tiny checkpoint (tests/golden/act)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from policies import Inputs
from policies.resnet import FrozenBatchNorm, ResNet
from policies.torchvision_operators import import_torchvision
from tests.policies.act.cases import GOLDEN, golden_checkpoint, make, older_checkpoint, variant_checkpoint


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture(scope="module", params=[golden_checkpoint, older_checkpoint], ids=["0.6", "0.3"])
def policy(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return make(request.param(tmp_path_factory.mktemp("act") / "checkpoint"))


@pytest.fixture
def inputs(golden: dict[str, Tensor]) -> Inputs:
    return Inputs(proprio=golden["raw.observation.state"], frames={"top": golden["raw.observation.images.top"]})


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.detach(), expected, atol=1e-5, rtol=1e-5)


def test_what_the_network_is_shown(policy: Any, golden: dict[str, Tensor], inputs: Inputs) -> None:
    seen = policy._observation(inputs)
    close(seen.pixels[:, 0], golden["pre.observation.images.top"])
    close(seen.state, golden["pre.observation.state"])
    close(policy._normalised(golden["raw.action"], inputs).float(), golden["pre.action"])


def test_chunks(policy: Any, golden: dict[str, Tensor], inputs: Inputs) -> None:
    close(policy.network.decode(policy._encoded(policy._observation(inputs))), golden["chunk.normalised"])
    chunk = policy.act(inputs, None).chunk
    close(chunk, golden["chunk"][:, :4])
    close(torch.cat([chunk, chunk[:, :1]], 1), golden["selected"])  # the fifth action is the next chunk's first


def test_loss_and_gradients(policy: Any, golden: dict[str, Tensor], inputs: Inputs) -> None:
    """LeRobot's loss is a mean over all counted numbers of a batch: its rows are weighed by their length."""
    counted = ~golden["action_is_pad"]
    assert not counted.all(), "nothing is padded: nothing is shown"
    noise = torch.cat([torch.zeros(2, policy.executed), golden["latent_noise"]], 1)
    distance, divergence = policy.losses(inputs, golden["raw.action"], counted, noise)
    share = counted.sum(1) / counted.sum()
    close((distance * share).sum()[None], golden["loss.l1_loss"])
    close(divergence.mean()[None], golden["loss.kld_loss"])
    loss = (distance * share).sum() + 10 * divergence.mean()
    close(loss[None], golden["loss"])
    each = policy.imitate(inputs, golden["raw.action"], counted, noise)
    close(each, (distance + 10 * divergence).detach())
    policy.zero_grad()
    loss.backward()
    found = {f"grad.model.{name}": p.grad for name, p in policy.network.named_parameters()}
    expected = {name: tensor for name, tensor in golden.items() if name.startswith("grad.")}
    assert len(expected) == 84
    for name, gradient in expected.items():
        error = (found[name] - gradient).norm()
        assert error <= 1e-4 * gradient.norm() + 1e-8, f"{name}: {error} of {gradient.norm()}"


@pytest.mark.parametrize("name", ["norms_first", "no_vae_no_state", "ranges", "quantiles"])
def test_variants(name: str, tmp_path: Path) -> None:
    """Norms first, gelu, two decoder layers, two cameras; no state; every normalisation, and numbers that never change;
    ResNet-34."""
    folder, spec = variant_checkpoint(name, tmp_path / name)
    golden, policy = load_file(GOLDEN / "variants" / name / "golden.safetensors"), make(folder, spec)
    frames = {camera: golden[f"raw.observation.images.{camera}"] for camera in spec.cameras}
    inputs = Inputs(proprio=golden.get("raw.observation.state"), frames=frames)
    close(policy.act(inputs, None).chunk, golden["chunk"][:, : spec.chunk])
    latent = golden.get("latent_noise", torch.zeros(2, policy.noise_dim - policy.executed))
    counted, noise = ~golden["action_is_pad"], torch.cat([torch.zeros(2, policy.executed), latent], 1)
    distance, divergence = policy.losses(inputs, golden["raw.action"], counted, noise)
    loss = (distance * counted.sum(1) / counted.sum()).sum() + 10 * divergence.mean()
    close(loss[None], golden["loss"])
    loss.backward()
    gradients = {key.removeprefix("grad."): tensor for key, tensor in golden.items() if key.startswith("grad.")}
    assert len(gradients) == 3
    for key, expected in gradients.items():
        found = policy.network.get_parameter(key).grad.flatten()[:100]
        assert (found - expected).norm() <= 1e-4 * expected.norm(), key


@pytest.mark.parametrize("name", ["resnet18", "resnet34"])
def test_the_backbone_is_torchvisions(name: str) -> None:
    import_torchvision()
    import torchvision

    theirs = getattr(torchvision.models, name)(norm_layer=torchvision.ops.misc.FrozenBatchNorm2d)
    ours, generator = ResNet(name, 64), torch.Generator().manual_seed(1)
    for module in theirs.modules():
        if type(module).__name__ == "FrozenBatchNorm2d":
            for buffer in module.buffers():
                buffer.add_(0.1 * torch.rand(buffer.shape, generator=generator))
    state = {key: tensor for key, tensor in theirs.state_dict().items() if not key.startswith("fc.")}
    ours.load_state_dict(state)
    assert any(isinstance(module, FrozenBatchNorm) for module in ours.modules())
    pixels, seen = torch.randn(2, 3, 70, 50, generator=generator), {}
    theirs.layer4.register_forward_hook(lambda module, given, found: seen.update(found=found))
    theirs(pixels)
    torch.testing.assert_close(ours(pixels), seen["found"], atol=1e-5, rtol=1e-5)
