"""SmolVLA beside LeRobot itself, installed into a folder of its own: new random policies, and folders that are handed
back to it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import policies
from policies import Inputs
from policies.conformance import laws
from tests.policies.smolvla import beside
from tests.policies.smolvla.cases import GOLDEN, SPEC, TEXTS, edit, make, of_lerobot_03, sampled
from tests.policies.smolvla.test_smolvla_golden import CAMERAS, check_variant, close

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
NARROW = {"hidden_size": 48, "num_attention_heads": 3, "num_key_value_heads": 1, "head_dim": 12}
WIDE = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
VISION = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 24, "num_attention_heads": 2}
EVERYTHING = {"train_expert_only": False, "freeze_vision_encoder": False}
SETTINGS: dict[str, dict[str, Any]] = {
    "joint and cross layers": {"text": WIDE, "config": {"num_vlm_layers": 6, "self_attn_every_n_layers": 3}},
    "cross layers alone": {"text": NARROW, "config": {"num_vlm_layers": 2, "self_attn_every_n_layers": -1}},
    "joint layers alone": {"text": WIDE, "config": {"attention_mode": "self_attn", "pad_language_to": "max_length"}},
    "special tokens": {"text": NARROW, "config": {"add_image_special_tokens": True, "num_vlm_layers": 3}},
    "an empty camera": {"text": NARROW, "config": {"empty_cameras": 2, "num_vlm_layers": 3, "prefix_length": 64}},
    "every weight": {"text": NARROW, "config": {**EVERYTHING, "num_vlm_layers": 3, "expert_width_multiplier": 0.5}},
    "other sizes": {
        "text": {**WIDE, "intermediate_size": 56}, "vision": {"image_size": 96, "patch_size": 8}, "scale_factor": 3,
        "config": {"resize_imgs_with_padding": [52, 50], "chunk_size": 9, "num_steps": 3, "max_state_dim": 11,
                   "max_action_dim": 8, "num_vlm_layers": -1},
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def lerobot(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return beside.install(tmp_path_factory.mktemp("lerobot"))


@pytest.mark.parametrize("name", SETTINGS)
def test_policies_of_lerobot_compute_the_same_here(name: str, lerobot: Path, tmp_path: Path) -> None:
    settings: dict[str, Any] = {**SETTINGS[name], "seed": 31 + len(name)}
    settings["config"] = {"resize_imgs_with_padding": [64, 64], "num_vlm_layers": 4, **settings["config"]}
    settings["vision"] = {**VISION, **settings.get("vision", {})}
    beside.run(lerobot, "make", json.dumps(settings), str(tmp_path / "made"))
    check_variant(tmp_path / "made")


def theirs(policy: Any, lerobot: Path, folder: Path, given: Path = GOLDEN / "image_tokens") -> dict[str, torch.Tensor]:
    """What LeRobot computes with the exported policy for the inputs in `given`."""
    policies.export(policy, folder / "checkpoint")
    edit(folder / "checkpoint" / "config.json", vlm_model_name=str(folder / "checkpoint" / "vlm"))
    path = folder / "checkpoint" / "policy_preprocessor.json"
    path.write_text(path.read_text().replace("tiny/SmolVLM2-tiny-Instruct", str(folder / "checkpoint" / "vlm")))
    inputs = load_file(given / "inputs.safetensors")
    inputs["noise"] = torch.randn(2, policy.sizes.horizon, policy.sizes.action_dim)
    save_file(inputs, folder / "inputs.safetensors")
    beside.run(lerobot, "load", str(folder))
    return inputs | load_file(folder / "theirs.safetensors")


def check_same(policy: Any, found: dict[str, torch.Tensor]) -> None:
    frames = {name: found[f"observation.images.{name}"] for name in CAMERAS}
    inputs = Inputs(proprio=found["observation.state"], frames=frames, instruction=TEXTS)
    chunk = sampled(policy, inputs, found["noise"])[..., :7]
    close(chunk, found["chunk.normalised"])
    close(policy.units.action.unnormalise(chunk), found["chunk"], 5e-5)


EXPORTED: dict[str, dict[str, Any]] = {
    "whole": {"train": ["expert", "projections", "language", "vision"]},
    "with an adapter": {"lora_rank": 2, "lora_parts": ["expert", "projections", "language", "vision"]},
    "special tokens": {
        "checkpoint": str(GOLDEN / "image_tokens/checkpoint"), "backbone": str(GOLDEN / "image_tokens/vlm"),
    },
}  # fmt: skip


@pytest.mark.parametrize("name", EXPORTED)
def test_lerobot_loads_what_is_exported(name: str, lerobot: Path, tmp_path: Path) -> None:
    policy = make(steps=None, **EXPORTED[name])
    laws.perturb(policy, 0.05, seed=3)
    check_same(policy, theirs(policy, lerobot, tmp_path))


def test_lerobot_loads_an_old_folder_that_went_through_here(lerobot: Path, tmp_path: Path) -> None:
    """Its statistics were among its weights, and are in its processors now."""
    old = Path(shutil.copytree(GOLDEN / "checkpoint", tmp_path / "old"))
    of_lerobot_03(old)
    policy = make(checkpoint=str(old), steps=None)
    check_same(policy, theirs(policy, lerobot, tmp_path))


def test_lerobot_loads_units_of_demonstrations(lerobot: Path, tmp_path: Path) -> None:
    policy = make(SPEC, asset="demonstrations", steps=None)
    g = torch.Generator().manual_seed(1)
    policy.adopt_units(3 + 2 * torch.randn(500, 7, generator=g), torch.randn(500, 8, generator=g))
    check_same(policy, theirs(policy, lerobot, tmp_path))
