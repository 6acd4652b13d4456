"""What LeRobot computes with directories of ACT. It runs where LeRobot 0.6.1 is installed:

PYTHON in_lerobot.py variants FOLDER          directories of other variants, their inputs and outputs, without weights
PYTHON in_lerobot.py act DIRECTORY IN OUT     the chunk of a directory for the observations in IN, and the loss
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
from drawn import drawn  # pyrefly: ignore[missing-import]
from lerobot.configs.types import FeatureType, NormalizationMode, PolicyFeature
from lerobot.policies.act.configuration_act import ACTConfig
from lerobot.policies.act.modeling_act import ACTPolicy, ACTTemporalEnsembler
from lerobot.policies.act.processor_act import make_act_pre_post_processors
from lerobot.policies.factory import make_pre_post_processors
from safetensors.torch import load_file, save_file

SEED = 5
SIDE, STATE, ACTION, ROWS = 40, 3, 4, 2
VARIANTS: dict[str, dict[str, Any]] = {
    "norms_first": {
        "pre_norm": True, "feedforward_activation": "gelu", "n_decoder_layers": 2, "cameras": ["wrist", "base"],
    },
    "no_vae_no_state": {"use_vae": False, "state": False, "modes": ("IDENTITY", "MEAN_STD", "MIN_MAX")},
    "ranges": {"vision_backbone": "resnet34", "modes": ("MIN_MAX", "MIN_MAX", "MIN_MAX"), "n_encoder_layers": 1},
    "quantiles": {"modes": ("MEAN_STD", "QUANTILES", "QUANTILE10"), "n_action_steps": 1},
}  # fmt: skip


def variant(name: str, folder: Path) -> None:
    """Write the variant's directory, and `golden.safetensors` with its inputs and outputs."""
    entries = dict(VARIANTS[name])
    cameras, state = entries.pop("cameras", ["top"]), entries.pop("state", True)
    visual, of_state, of_action = (NormalizationMode(mode) for mode in entries.pop("modes", ["MEAN_STD"] * 3))
    features = {
        f"observation.images.{camera}": PolicyFeature(FeatureType.VISUAL, (3, SIDE, SIDE)) for camera in cameras
    }
    if state:
        features["observation.state"] = PolicyFeature(FeatureType.STATE, (STATE,))
    config = ACTConfig(
        input_features=features,
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION,))},
        normalization_mapping={"VISUAL": visual, "STATE": of_state, "ACTION": of_action},
        **{"chunk_size": 5, "n_action_steps": 3, "dim_model": 24, "n_heads": 3, "dim_feedforward": 20, "latent_dim": 6,
           "n_encoder_layers": 2, "n_vae_encoder_layers": 1, "dropout": 0.0, "pretrained_backbone_weights": None,
           "device": "cpu", **entries},
    )  # fmt: skip
    policy = ACTPolicy(config)
    policy.load_state_dict(
        {n: torch.from_numpy(drawn(n, tuple(t.shape), SEED)) for n, t in policy.state_dict().items()}
    )
    generator = torch.Generator().manual_seed(SEED)
    sizes = {
        key: (3, 1, 1) if feature.type == FeatureType.VISUAL else feature.shape for key, feature in features.items()
    }
    statistics = {key: numbers(shape, generator) for key, shape in {**sizes, "action": (ACTION,)}.items()}
    for key in statistics.keys() - set(config.image_features):  # a number that never changes
        for bound in ("max", "q01", "q99", "q10", "q90"):
            statistics[key][bound][0] = statistics[key]["min"][0]
    processors = make_act_pre_post_processors(config, statistics)
    folder.mkdir(parents=True)
    config._save_pretrained(folder)
    for processor in processors:
        processor.save_pretrained(folder)
    raw = {f"raw.{key}": torch.randint(0, 256, (ROWS, SIDE, SIDE, 3), generator=generator, dtype=torch.uint8)
           for key, feature in features.items() if feature.type == FeatureType.VISUAL}  # fmt: skip
    if state:
        raw["raw.observation.state"] = torch.randn(ROWS, STATE, generator=generator)
        raw["raw.observation.state"][:, 0] = statistics["observation.state"]["min"][0]
    raw["raw.action"] = torch.randn(ROWS, 5, ACTION, generator=generator)
    raw["raw.action"][..., 0] = statistics["action"]["min"][0]
    raw["action_is_pad"] = torch.arange(5) >= torch.tensor([[5], [2]])
    save_file({**raw, **computed(policy, processors, raw)}, folder / "golden.safetensors")


def numbers(shape: tuple[int, ...], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Statistics of one feature."""
    low, high = -torch.rand(shape, generator=generator), 1 + torch.rand(shape, generator=generator)
    inner = {"q01": low + 0.01, "q99": high - 0.01, "q10": low + 0.1, "q90": high - 0.1}
    return {"mean": (low + high) / 2, "std": (high - low) / 3, "min": low, "max": high, **inner}


def computed(policy: ACTPolicy, processors: Any, raw: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The chunk, and the loss of imitating the demonstrated one with its latent's noise."""
    before, after = processors
    seen = {key.removeprefix("raw."): t for key, t in raw.items() if key.startswith("raw.observation")}
    seen = {key: t.permute(0, 3, 1, 2).float() / 255 if t.dim() == 4 else t for key, t in seen.items()}
    # `forward` reads the device of a state, whether the network has one or not.
    seen.setdefault("observation.state", torch.zeros(ROWS, 1))
    with torch.no_grad():
        found = {"chunk": after(policy.predict_action_chunk(before(dict(seen))))}
    if "raw.action" not in raw:
        return found
    policy.train()
    if policy.config.use_vae:
        torch.manual_seed(SEED)
        found["latent_noise"] = torch.randn(ROWS, policy.config.latent_dim)
    torch.manual_seed(SEED)
    loss, parts = policy.forward(before({**seen, "action": raw["raw.action"], "action_is_pad": raw["action_is_pad"]}))
    policy.zero_grad()
    loss.backward()
    found |= {"loss": loss.detach()[None], **{name: torch.tensor([value]) for name, value in parts.items()}}
    for name in ("encoder.layers.0.linear1.weight", "decoder_pos_embed.weight", "backbone.conv1.weight"):
        found[f"grad.{name}"] = policy.get_parameter(f"model.{name}").grad.flatten()[:100].clone()
    return found


def act(directory: Path, given: Path, out: Path) -> None:
    policy = ACTPolicy.from_pretrained(directory)
    policy.config.device = "cpu"
    processors = make_pre_post_processors(policy.config, pretrained_path=str(directory))
    save_file(computed(policy, processors, load_file(given)), out)


def ensembles(path: Path) -> None:
    """Chunks [T, 5, A] of one decision after another, and the actions [T, A] that LeRobot's ensembler makes of them."""
    chunks = torch.randn(12, 1, 5, ACTION, generator=torch.Generator().manual_seed(SEED))
    found = {"chunks": chunks[:, 0]}
    for coefficient in (0.01, 0.0, -0.5):
        ensembler = ACTTemporalEnsembler(coefficient, 5)
        found[f"actions.{coefficient}"] = torch.cat([ensembler.update(chunk) for chunk in chunks.clone()])
    save_file(found, path)


if __name__ == "__main__":
    if sys.argv[1] == "variants":
        Path(sys.argv[2]).mkdir()
        ensembles(Path(sys.argv[2]) / "ensembles.safetensors")
        for each in VARIANTS:
            variant(each, Path(sys.argv[2]) / each)
    else:
        act(*map(Path, sys.argv[2:]))
