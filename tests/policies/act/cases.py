"""Policies on the golden checkpoint of ACT, and on small new networks."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

import policies
from policies import PolicySpec
from policies.act.config import checked_config, read_config
from policies.act.network import ActNetwork
from tests.policies.act.drawn import drawn

GOLDEN = Path(__file__).parents[2] / "golden" / "act"
SPEC = PolicySpec(action_dim=7, chunk=4, proprio_dim=8, cameras=("top",), image_size=64)
"""Of the golden checkpoint, of whose six actions four are executed."""
SEED = 5
"""Of the variants' weights."""
NEW: Mapping[str, Any] = {
    "type": "act", "random_weights": 0, "chunk_size": 6, "dim_model": 32, "n_heads": 2, "dim_feedforward": 48,
    "n_encoder_layers": 2, "n_vae_encoder_layers": 2, "latent_dim": 8, "backbone_width": 4,
}  # fmt: skip
SMALL: Mapping[str, Any] = {"value_widths": [8]}


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
        if statistic in ("mean", "std"):
            buffer = f"buffer_{feature.replace('.', '_')}.{statistic}"
            tensors |= {f"{part}.{buffer}": tensor.copy() for part in parts}
    (folder / "model.safetensors").unlink()
    save_file(tensors, folder / "model.safetensors")
    return folder


def variant_checkpoint(name: str, folder: Path) -> tuple[Path, PolicySpec]:
    """A directory that `in_lerobot.py` wrote, with its weights, and the task that it was trained for."""
    shutil.copytree(GOLDEN / "variants" / name, folder)
    (folder / "golden.safetensors").unlink()
    config = checked_config(folder, read_config(folder))
    with torch.device("meta"):
        tensors = ActNetwork(config.sizes).state_dict()
    names = {f"model.{name}": tuple(tensor.shape) for name, tensor in tensors.items()}
    save_file({name: drawn(name, shape, SEED) for name, shape in names.items()}, folder / "model.safetensors")
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
    return policies.build("act", spec, seed=1, **{"checkpoint": str(checkpoint), **SMALL, **options})
