"""What LeRobot computes with directories of Diffusion Policy. It runs where LeRobot 0.6.1 is installed:

PYTHON in_lerobot.py variants FOLDER [NAME]   directories of other variants, their inputs and outputs, without weights
PYTHON in_lerobot.py act DIRECTORY IN OUT     the chunk of a directory for the observations and the noise in IN
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

sys.path.append(str(Path(__file__).parents[1] / "act"))

from drawn import drawn  # pyrefly: ignore[missing-import]
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.diffusion.configuration_diffusion import DiffusionConfig
from lerobot.policies.diffusion.modeling_diffusion import DiffusionPolicy
from lerobot.policies.diffusion.processor_diffusion import make_diffusion_pre_post_processors
from lerobot.policies.factory import make_pre_post_processors

SEED = 5
KEPT = ("pos_grid", "num_batches_tracked")
"""Tensors that are no weights."""
SIDE, STATE, ACTION, ROWS = 40, 3, 4, 2
VARIANTS: dict[str, dict[str, Any]] = {
    "ddim": {"noise_scheduler_type": "DDIM", "prediction_type": "sample", "num_inference_steps": 5,
             "use_film_scale_modulation": False, "crop_shape": (31, 36)},
    "ddim_noise": {"noise_scheduler_type": "DDIM", "num_inference_steps": 7, "beta_schedule": "linear",
                   "clip_sample_range": 0.7, "do_mask_loss_for_padding": True, "n_obs_steps": 1},
    "ddpm_sample": {"prediction_type": "sample", "num_inference_steps": 6, "beta_schedule": "scaled_linear",
                    "clip_sample": False, "n_obs_steps": 3, "modes": ("IDENTITY", "MEAN_STD", "MEAN_STD")},
    "two_cameras": {"cameras": ["wrist", "base"], "use_separate_rgb_encoder_per_camera": True,
                    "resize_shape": (44, 37), "crop_ratio": 0.9, "use_group_norm": False},
    "shared": {"cameras": ["wrist", "base"], "vision_backbone": "resnet34", "resize_shape": (36, 32),
               "down_dims": (16, 32, 16), "crop_shape": (20, 20), "modes": ("MEAN_STD", "QUANTILES", "QUANTILE10")},
}  # fmt: skip


def variant(name: str, folder: Path) -> None:
    """Write the variant's directory, and `golden.safetensors` with its inputs and outputs."""
    entries = dict(VARIANTS[name])
    cameras = entries.pop("cameras", ["top"])
    visual, of_state, of_action = (
        NormalizationMode(mode) for mode in entries.pop("modes", ("MEAN_STD", "MIN_MAX", "MIN_MAX"))
    )
    features = {
        f"observation.images.{camera}": PolicyFeature(FeatureType.VISUAL, (3, SIDE, SIDE)) for camera in cameras
    }
    features["observation.state"] = PolicyFeature(FeatureType.STATE, (STATE,))
    config = DiffusionConfig(
        input_features=features,
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION,))},
        normalization_mapping={"VISUAL": visual, "STATE": of_state, "ACTION": of_action},
        **{"horizon": 8, "n_action_steps": 3, "down_dims": (16, 24), "n_groups": 4, "kernel_size": 3,
           "diffusion_step_embed_dim": 12, "num_train_timesteps": 25, "spatial_softmax_num_keypoints": 5,
           "use_group_norm": True, "use_separate_rgb_encoder_per_camera": False, "pretrained_backbone_weights": None,
           "device": "cpu", **entries},
    )  # fmt: skip
    policy = DiffusionPolicy(config)
    policy.load_state_dict(
        {
            n: t
            if n.endswith(("pos_grid", "num_batches_tracked"))
            else torch.from_numpy(drawn(n, tuple(t.shape), SEED))
            for n, t in policy.state_dict().items()
        }
    )
    generator = torch.Generator().manual_seed(SEED)
    sizes = {
        key: (3, 1, 1) if feature.type == FeatureType.VISUAL else feature.shape for key, feature in features.items()
    }
    statistics = {key: numbers(shape, generator) for key, shape in {**sizes, "action": (ACTION,)}.items()}
    for key in ("observation.state", "action"):  # a number that never changes
        for bound in ("max", "q01", "q99", "q10", "q90"):
            statistics[key][bound][0] = statistics[key]["min"][0]
    processors = make_diffusion_pre_post_processors(config, statistics)
    folder.mkdir(parents=True)
    config._save_pretrained(folder)
    for processor in processors:
        processor.save_pretrained(folder)
    seen = config.n_obs_steps
    raw = {f"raw.{key}": torch.randint(0, 256, (ROWS, seen, SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
           for key, feature in features.items() if feature.type == FeatureType.VISUAL}  # fmt: skip
    raw["raw.observation.state"] = torch.randn(ROWS, seen, STATE, generator=generator)
    raw["raw.observation.state"][..., 0] = statistics["observation.state"]["min"][0]
    raw["raw.action"] = torch.randn(ROWS, 8, ACTION, generator=generator)
    raw["raw.action"][..., 0] = statistics["action"]["min"][0]
    raw["action_is_pad"] = torch.arange(8) >= torch.tensor([[8], [5]])
    raw["raw.action"][1, 5:] = raw["raw.action"][1, 4]
    raw["noise"] = torch.randn(ROWS, 8, ACTION, generator=generator)
    save_file({**raw, **computed(policy, processors, raw)}, folder / "golden.safetensors")


def numbers(shape: tuple[int, ...], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Statistics of one feature."""
    low, high = -torch.rand(shape, generator=generator), 1 + torch.rand(shape, generator=generator)
    inner = {"q01": low + 0.01, "q99": high - 0.01, "q10": low + 0.1, "q90": high - 0.1}
    return {"mean": (low + high) / 2, "std": (high - low) / 3, "min": low, "max": high, **inner}


def computed(policy: DiffusionPolicy, processors: Any, raw: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The chunk with its steps' noise, and the loss of imitating the demonstrated one with its noise and times."""
    before, after = processors
    seen = {key.removeprefix("raw."): t for key, t in raw.items() if key.startswith("raw.observation")}
    seen = {key: t.permute(0, 1, 4, 2, 3).float() / 255 if t.dim() == 5 else t for key, t in seen.items()}
    shape = (policy.diffusion.num_inference_steps, *raw["noise"].shape)
    found = {"step_noise": torch.zeros(shape)}
    torch.manual_seed(SEED)
    if policy.config.noise_scheduler_type == "DDPM":  # one draw for each step but the last
        found["step_noise"][:-1] = torch.stack([torch.randn(shape[1:]) for _ in range(shape[0] - 1)])
    torch.manual_seed(SEED)
    policy.eval()
    with torch.no_grad():
        batch = before(dict(seen))  # `predict_action_chunk` of LeRobot 0.4 takes observations from its queues alone
        batch["observation.images"] = torch.stack([batch[key] for key in policy.config.image_features], dim=-4)
        found["chunk"] = after(policy.diffusion.generate_actions(batch, noise=raw["noise"])).contiguous()
    if "raw.action" not in raw:
        return found
    torch.manual_seed(SEED)
    found["train.noise"] = torch.randn(raw["raw.action"].shape)
    found["train.timesteps"] = torch.randint(0, policy.config.num_train_timesteps, (ROWS,))
    torch.manual_seed(SEED)
    loss, _ = policy.forward(before({**seen, "action": raw["raw.action"], "action_is_pad": raw["action_is_pad"]}))
    policy.zero_grad()
    loss.backward()
    found["loss"] = loss.detach()[None]
    encoder = "rgb_encoder.0" if policy.config.use_separate_rgb_encoder_per_camera else "rgb_encoder"
    for name in (
        f"{encoder}.backbone.0.weight",
        "unet.down_modules.0.0.conv1.block.0.weight",
        "unet.final_conv.1.bias",
    ):
        found[f"grad.{name}"] = policy.get_parameter(f"diffusion.{name}").grad.flatten()[:100].clone()
    return found


def act(directory: Path, given: Path, out: Path) -> None:
    policy = DiffusionPolicy.from_pretrained(directory)
    policy.config.device = "cpu"
    processors = make_pre_post_processors(policy.config, pretrained_path=str(directory))
    save_file(computed(policy, processors, load_file(given)), out)


if __name__ == "__main__":
    if sys.argv[1] == "variants":
        for each in sys.argv[3:] or VARIANTS:
            variant(each, Path(sys.argv[2]) / each)
    else:
        act(*map(Path, sys.argv[2:]))
