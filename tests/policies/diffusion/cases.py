"""Policies on the golden checkpoint of Diffusion Policy, and on small new networks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file
from torch import Tensor

import policies
from policies import Inputs, PolicySpec
from policies.diffusion.config import checked_config, read_config
from policies.diffusion.network import DiffusionNetwork
from tests.policies.act.drawn import drawn

GOLDEN = Path(__file__).parents[2] / "golden" / "diffusion"
SPEC = PolicySpec(action_dim=7, chunk=4, proprio_dim=8, cameras=("image",), image_size=48)
"""Of the golden checkpoint, of whose seven predicted actions four are executed."""
SEED = 5
"""Of the variants' weights."""
NEW: Mapping[str, Any] = {
    "type": "diffusion", "random_weights": 0, "down_dims": [16, 32], "n_groups": 4, "kernel_size": 3,
    "diffusion_step_embed_dim": 16, "num_train_timesteps": 6, "spatial_softmax_num_keypoints": 4, "backbone_width": 2,
}  # fmt: skip
SMALL: Mapping[str, Any] = {"value_widths": [8]}
TASK = PolicySpec(action_dim=3, chunk=2, proprio_dim=4, cameras=("base", "wrist"), image_size=36)


def golden_weights() -> dict[str, np.ndarray]:
    """The golden checkpoint's tensors, by LeRobot's names."""
    table = json.loads((GOLDEN / "shapes.json").read_text())
    return {name: drawn(name, tuple(shape), table["seed"]) for name, (shape, _) in table["tensors"].items()}


def golden_checkpoint(folder: Path) -> Path:
    """The golden checkpoint with its weights, in `folder`."""
    shutil.copytree(GOLDEN / "checkpoint", folder)
    save_file(golden_weights(), folder / "model.safetensors")
    return folder


def older_checkpoint(folder: Path) -> Path:
    """The golden checkpoint as LeRobot 0.3 would have written it."""
    return as_older(golden_checkpoint(folder))


def as_older(folder: Path) -> Path:
    """The directory without processors: the statistics are among the weights."""
    (state,) = folder.glob("policy_preprocessor_step_*.safetensors")
    statistics, tensors = load_file(state), load_file(folder / "model.safetensors")
    for path in folder.glob("policy_*"):
        path.unlink()
    for key, tensor in statistics.items():
        feature, _, statistic = key.rpartition(".")
        parts = ("normalize_targets", "unnormalize_outputs") if feature == "action" else ("normalize_inputs",)
        if statistic in (("mean", "std") if "image" in feature else ("min", "max")):
            buffer = f"buffer_{feature.replace('.', '_')}.{statistic}"
            tensors |= {f"{part}.{buffer}": tensor.copy() for part in parts}
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    later = ("resize_shape", "crop_ratio", "compile_model", "compile_mode", "gradient_checkpointing")
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if k not in later}))
    return folder


def variant_checkpoint(name: str, folder: Path) -> tuple[Path, PolicySpec]:
    """A directory that `in_lerobot.py` wrote, with its weights, and the task that it was trained for."""
    shutil.copytree(GOLDEN / "variants" / name, folder)
    (folder / "golden.safetensors").unlink()
    config = checked_config(folder, read_config(folder))
    network = DiffusionNetwork(config.sizes)
    tensors = {f"diffusion.{key}": tensor for key, tensor in network.state_dict().items()}
    kept = {key: t.numpy() for key, t in tensors.items() if key.endswith(("pos_grid", "num_batches_tracked"))}
    made = {key: drawn(key, tuple(t.shape), SEED) for key, t in tensors.items() if key not in kept}
    save_file({**made, **kept}, folder / "model.safetensors")
    cameras = tuple(name.rpartition(".")[2] for name in config.cameras)
    sizes = {"action_dim": config.action_dim, "proprio_dim": config.state_dim, "image_size": config.image_size}
    return folder, PolicySpec(chunk=config.n_action_steps, cameras=cameras, **sizes)


def new_checkpoint(folder: Path, **entries: Any) -> Path:
    """A directory of a small new network, with other entries of config.json."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**NEW, **entries}))
    return folder


def make(checkpoint: Path, spec: PolicySpec = SPEC, **options: Any) -> Any:
    """A policy with a small critic. Any: tests look into it."""
    return policies.build("diffusion", spec, seed=1, **{"checkpoint": str(checkpoint), **SMALL, **options})


def noise_of(policy: Any, golden: Mapping[str, Tensor]) -> Tensor:
    """The policy's noise with which it draws what LeRobot drew."""
    steps = golden["step_noise"][: policy.denoising.steps].transpose(0, 1)
    drawn_noise = torch.cat([golden["noise"][:, None], steps], 1).flatten(1)
    return torch.cat([drawn_noise, torch.zeros(len(steps), policy.noise_dim - drawn_noise.shape[1])], 1)


def inputs_of(policy: Any, golden: Mapping[str, Tensor]) -> Inputs:
    """Observations of the golden file, without the axis of the observations where there is one."""
    seen = {name.removeprefix("raw."): tensor for name, tensor in golden.items() if name.startswith("raw.observation")}
    if policy.spec.observations == 1:
        seen = {name: tensor[:, 0] for name, tensor in seen.items()}
    frames = {name.rpartition(".")[2]: tensor for name, tensor in seen.items() if "image" in name}
    return Inputs(proprio=seen["observation.state"], frames=frames)
