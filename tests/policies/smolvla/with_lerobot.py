# pyrefly: ignore-errors
# ruff: noqa: E402
# LeRobot is not among what the project installs.
"""What LeRobot's own SmolVLA computes: run by its tests in an environment with LeRobot (`beside.py`).

    make SETTINGS FOLDER    a policy with random weights, its folder, and everything that it computes of random inputs
    load FOLDER             what the policy in FOLDER/checkpoint gives for FOLDER/inputs.safetensors

SETTINGS is JSON: `seed`, `text` and `vision` and `scale_factor` of the backbone, `config` of SmolVLA.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from policies.torchvision_operators import import_torchvision

import_torchvision()
import lerobot.policies.smolvla.smolvlm_with_expert as backbone
from lerobot.configs.types import FeatureType, PolicyFeature
from lerobot.policies.factory import make_pre_post_processors
from lerobot.policies.smolvla.configuration_smolvla import SmolVLAConfig
from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy
from lerobot.policies.smolvla.processor_smolvla import make_smolvla_pre_post_processors
from transformers import AutoTokenizer, DynamicCache

TEXTS = ["pick up the black bowl and place it on the plate", "open the drawer"]
VLM = Path(__file__).parents[2] / "golden" / "smolvla" / "vlm"
IMAGES = ("image", "image2")


class Processor:
    """LeRobot asks the hub for pictures' settings too, and reads the tokenizer alone."""

    def __init__(self, tokenizer: Any) -> None:
        self.tokenizer = tokenizer
        tokenizer.fake_image_token_id = tokenizer.convert_tokens_to_ids("<fake_token_around_image>")
        tokenizer.global_image_token_id = tokenizer.convert_tokens_to_ids("<global-img>")

    @classmethod
    def from_pretrained(cls, name: str) -> Processor:
        return cls(AutoTokenizer.from_pretrained(name))


def crop(cache: Any, length: int) -> None:
    """As in the transformers that LeRobot was written for: newer ones take the number of tokens to remove."""
    for layer in cache.layers:
        layer.keys, layer.values = layer.keys[..., :length, :], layer.values[..., :length, :]


backbone.AutoProcessor = Processor
DynamicCache.crop = crop


def random_inputs(config: SmolVLAConfig) -> dict[str, Tensor]:
    pictures = {f"observation.images.{n}": torch.randint(0, 256, (2, 80, 64, 3), dtype=torch.uint8) for n in IMAGES}
    numbers = {"observation.state": torch.randn(2, 8), "action": torch.randn(2, config.chunk_size, 7)}
    drawn = {"noise": torch.randn(2, config.chunk_size, config.max_action_dim), "time": torch.rand(2)}
    absent = torch.zeros(2, config.chunk_size, dtype=torch.bool)
    absent[0, -2:] = True
    return {**pictures, **numbers, **drawn, "action_is_pad": absent}


def computed(policy: Any, before: Any, after: Any, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    """Chunks, losses and gradients."""
    seen = {k: v.permute(0, 3, 1, 2).float() / 255 if "images" in k else v for k, v in inputs.items()}
    batch = before({k: v for k, v in seen.items() if k.startswith("observation") or k == "action"} | {"task": TEXTS})
    policy.eval()
    chunk = policy.predict_action_chunk({k: v for k, v in batch.items() if k != "action"}, noise=inputs["noise"])
    policy.train()
    batch["action_is_pad"] = inputs["action_is_pad"]
    losses, _ = policy.forward(batch, noise=inputs["noise"], time=inputs["time"], reduction="none")
    losses.mean().backward()
    trained = {name: p for name, p in policy.named_parameters() if p.requires_grad}
    gradients = {f"grad.{name}": p.grad for name, p in trained.items() if p.grad is not None}
    found = {"chunk.normalised": chunk, "chunk": after(chunk), "losses": losses.detach(), **gradients}
    return {name: tensor.detach().clone().contiguous() for name, tensor in found.items()}


def make(settings: dict[str, Any], folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)
    vlm = folder / "vlm"
    vlm.mkdir(parents=True)
    for path in VLM.iterdir():
        shutil.copyfile(path, vlm / path.name)
    described = json.loads((vlm / "config.json").read_text())
    described["text_config"] |= settings.get("text", {})
    described["vision_config"] |= settings.get("vision", {})
    described["scale_factor"] = settings.get("scale_factor", 2)
    (vlm / "config.json").write_text(json.dumps(described))
    torch.manual_seed(settings["seed"])
    pictures = {f"observation.images.{name}": PolicyFeature(FeatureType.VISUAL, (3, 80, 64)) for name in IMAGES}
    config = SmolVLAConfig(
        **{"chunk_size": 6, "n_action_steps": 4, "tokenizer_max_length": 24, **settings["config"]},
        vlm_model_name=str(vlm),
        device="cpu",
        input_features={"observation.state": PolicyFeature(FeatureType.STATE, (8,)), **pictures},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (7,))},
    )
    policy = SmolVLAPolicy(config)
    with torch.no_grad():
        for name, parameter in policy.named_parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "lm_expert" in name:  # new weights are so small that no mistake would show
                parameter.mul_(3.0)
    names = ("mean", "std", "min", "max")
    statistics = {
        key: {name: torch.randn(n).abs() + 0.5 if name == "std" else torch.randn(n) for name in names}
        for key, n in (("observation.state", 8), ("action", 7))
    }
    before, after = make_smolvla_pre_post_processors(config, statistics)
    for part in (policy, before, after):
        part.save_pretrained(folder / "checkpoint")
    inputs = random_inputs(config)
    save_file(inputs, folder / "inputs.safetensors")
    save_file(computed(policy, before, after, inputs), folder / "golden.safetensors")


def load(folder: Path) -> None:
    checkpoint = folder / "checkpoint"
    policy = SmolVLAPolicy.from_pretrained(checkpoint, strict=True)
    before, after = make_pre_post_processors(policy.config, pretrained_path=str(checkpoint))
    save_file(computed(policy, before, after, load_file(folder / "inputs.safetensors")), folder / "theirs.safetensors")


if __name__ == "__main__":
    if sys.argv[1] == "make":
        make(json.loads(sys.argv[2]), Path(sys.argv[3]))
    else:
        load(Path(sys.argv[2]))
