"""SmolVLA against what LeRobot 0.6.1 computes with the same tiny checkpoints (tests/golden/smolvla).

`checkpoint` has joint and cross layers, and prompts that are filled up to the batch's longest; `image_tokens` has
special tokens around images and an empty camera; in `self_attention` all layers are joint, prompts are filled up to one
length, pictures are resized to another size than positions were learned for, and every weight is trained.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from policies import Inputs
from policies.flow_vla.network import Observation
from policies.layers import counted_mean
from policies.smolvla.inputs import Prompts, pixel_values
from policies.smolvla.network import own_name
from tests.policies.smolvla.cases import GOLDEN, TEXTS, make, sampled

CAMERAS = ("image", "image2")
VARIANTS = ("image_tokens", "self_attention")
EVERYTHING = ["expert", "projections", "language", "vision"]


def close(found: Tensor, expected: Tensor, atol: float = 1e-5) -> None:
    torch.testing.assert_close(found.to(expected.dtype), expected, atol=atol, rtol=0)


def check_gradients(policy: Any, golden: dict[str, Tensor]) -> None:
    """Each of LeRobot's gradients is the policy's, and the policy has no others."""
    parameters = dict(policy.network.named_parameters())
    expected = {own_name(name.removeprefix("grad.")): t for name, t in golden.items() if name.startswith("grad.")}
    assert expected
    for name, gradient in expected.items():
        found = parameters[name].grad
        assert found is not None, name
        assert (found - gradient).norm() <= 1e-4 * gradient.norm() + 1e-9, name


@pytest.fixture(scope="module")
def golden() -> dict[str, Tensor]:
    return load_file(GOLDEN / "golden.safetensors")


@pytest.fixture(scope="module")
def inputs(golden: dict[str, Tensor]) -> Inputs:
    frames = {name: golden[f"raw.observation.images.{name}"] for name in CAMERAS}
    return Inputs(proprio=golden["raw.observation.state"], frames=frames, instruction=TEXTS)


def observation(policy: Any, golden: dict[str, Tensor], inputs: Inputs, length: int) -> Observation:
    """With prompts that are filled up to `length`."""
    tokens, counted = Prompts(GOLDEN / "vlm", length, policy.sizes.vocab_size).batch(TEXTS)
    pixels = torch.stack([policy.pixels(inputs.frames[name]) for name in CAMERAS], 1)
    present = torch.ones(2, 2, dtype=torch.bool)
    return Observation(pixels, present, tokens, counted, policy._state(inputs))


def test_preprocessing(golden: dict[str, Tensor], inputs: Inputs) -> None:
    policy = make()
    tokens, counted = policy.prompts.batch(TEXTS)
    length = golden["pre.observation.language.tokens"].shape[1]
    assert torch.equal(tokens[:, :length], golden["pre.observation.language.tokens"])
    assert torch.equal(counted[:, :length], golden["pre.observation.language.attention_mask"])
    assert not counted[:, length:].any() and counted.shape[1] == 24
    close(policy._state(inputs)[:, :8], golden["pre.observation.state"], 1e-6)
    close(policy._normalised(golden["raw.action"], inputs)[..., :7], golden["pre.action"], 1e-6)


def test_pictures_are_filled_up_at_the_left_and_at_the_top() -> None:
    frames = torch.full((1, 80, 64, 3), 255, dtype=torch.uint8)
    found = pixel_values(frames, (64, 64))  # 64 rows of 51 columns
    assert found.shape == (1, 3, 64, 64)
    assert bool((found[..., :13] == -1).all()) and bool((found[..., 13:] > 0.9999).all())
    wide = pixel_values(frames.transpose(1, 2), (64, 64))
    assert bool((wide[:, :, :13] == -1).all()) and bool((wide[:, :, 13:] > 0.9999).all())
    assert torch.equal(pixel_values(frames, (64, 80)), torch.ones(1, 3, 80, 64)), "it fits as it is"


def test_prefix(golden: dict[str, Tensor], inputs: Inputs) -> None:
    policy = make()
    seen = observation(policy, golden, inputs, golden["pre.observation.language.tokens"].shape[1])
    with torch.no_grad():
        x, present = policy.network.embed_prefix(seen)
        state = policy.network.state_proj(seen.state)[:, None]
    close(torch.cat([x, state], 1), golden["prefix.embeddings"])
    assert torch.equal(present, golden["prefix.pad_mask"][:, :-1])


@pytest.mark.parametrize("length", [12, 24], ids=["longest", "max_length"])
def test_chunks_in_both_padding_modes(length: int, golden: dict[str, Tensor], inputs: Inputs) -> None:
    policy = make(steps=None)
    seen = observation(policy, golden, inputs, length)
    policy._observation = lambda _: seen
    found = sampled(policy, inputs, golden["noise"])[..., :7]
    close(found, golden["chunk.normalised"])
    close(policy.units.action.unnormalise(found), golden["chunk"])


@pytest.mark.parametrize("padding", ["longest", "max_length"])
def test_loss_and_gradients(padding: str, golden: dict[str, Tensor], inputs: Inputs) -> None:
    policy = make()
    seen = observation(policy, golden, inputs, 12 if padding == "longest" else 24)
    wanted, noise, t = policy._normalised(golden["raw.action"], inputs), golden["noise"], golden["time"]
    at = t[:, None, None]
    velocity = policy.network.joint_velocity(seen, at * noise + (1 - at) * wanted, t)
    losses = (velocity - (noise - wanted)).square()[..., :7].mean((1, 2))
    close(losses, golden["loss.per_sample"])
    losses.mean().backward()
    check_gradients(policy, golden)
    trained = sum(p.numel() for p in policy.network.parameters() if p.requires_grad)
    whole = sum(p.numel() for p in policy.network.parameters()) + sum(t.numel() for t in policy.network.unused.values())
    assert [trained, whole] == golden["trainable"].tolist()


@pytest.mark.parametrize("variant", VARIANTS)
def test_variants(variant: str) -> None:
    """Chunks, losses of actions of which some lie beyond the episode, and gradients."""
    check_variant(GOLDEN / variant)


def check_variant(folder: Path) -> None:
    given, expected = (load_file(folder / name) for name in ("inputs.safetensors", "golden.safetensors"))
    raw = json.loads((folder / "checkpoint" / "config.json").read_text())
    policy = make(
        checkpoint=str(folder / "checkpoint"),
        backbone=str(folder / "vlm"),
        steps=None,
        train=["expert", "projections"] if raw["train_expert_only"] else EVERYTHING,
    )
    frames = {name: given[f"observation.images.{name}"] for name in CAMERAS}
    inputs = Inputs(proprio=given["observation.state"], frames=frames, instruction=TEXTS)
    found = sampled(policy, inputs, given["noise"])[..., :7]
    close(found, expected["chunk.normalised"])
    close(policy.units.action.unnormalise(found), expected["chunk"], 2e-5)
    wanted, noise, t = policy._normalised(given["action"], inputs), given["noise"], given["time"]
    at = t[:, None, None]
    velocity = policy.network.joint_velocity(policy._observation(inputs), at * noise + (1 - at) * wanted, t)
    losses = counted_mean((velocity - (noise - wanted)).square()[..., :7], ~given["action_is_pad"])
    close(losses, expected["losses"])
    losses.mean().backward()
    check_gradients(policy, expected)
    names = {own_name(name.removeprefix("grad.")) for name in expected if name.startswith("grad.")}
    assert {name for name, p in policy.network.named_parameters() if p.grad is not None} == names
