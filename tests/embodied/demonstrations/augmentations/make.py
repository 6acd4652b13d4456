"""Writes reference.npz: pictures changed by the published code itself, with random numbers that the tests draw again.

    pip install tensorflow-cpu torch torchvision
    python make.py FOLDER

FOLDER holds preprocessing_pytorch.py of openpi (15a9616a, src/openpi/models_pytorch) and transforms.py of LeRobot
(7427f318, src/lerobot/transforms). dlimp's random_resized_crop is TensorFlow's crop_and_resize.
"""

from __future__ import annotations

import importlib
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf
import torch

SEEDS = range(4)


def openpi(reference: Any, picture: np.ndarray, camera: str, draw: np.random.Generator) -> np.ndarray:
    """openpi draws whole numbers by randint, and all others from 0..1 by rand."""
    whole, parts = [], []
    if camera == "base":
        whole = [int(draw.integers(0, side - int(0.95 * side), endpoint=True)) for side in picture.shape[:2]]
        parts = [(draw.uniform(-5, 5) + 5) / 10]
    parts += [(draw.uniform(0.7, 1.3) - 0.7) / 0.6, (draw.uniform(0.6, 1.4) - 0.6) / 0.8, draw.uniform(0.5, 1.5) - 0.5]
    torch.randint = lambda *_, **__: torch.tensor([whole.pop(0)])
    torch.rand = lambda *_, **__: torch.tensor([parts.pop(0)], dtype=torch.float32)
    seen = types.SimpleNamespace(
        images={camera: torch.from_numpy(picture)[None].float() / 127.5 - 1},
        image_masks={}, state=torch.zeros(1, 1), tokenized_prompt=None, tokenized_prompt_mask=None,
        token_ar_mask=None, token_loss_mask=None,
    )  # fmt: skip
    found = reference.preprocess_observation_pytorch(
        seen, train=True, image_keys=(camera,), image_resolution=picture.shape[:2]
    )
    return found.images[camera][0].numpy() / 2 + 0.5


def oft(picture: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    side = float(np.sqrt(0.9))
    top, left = (draw.uniform(0, 1 - side) for _ in range(2))
    values = tf.cast(picture, tf.float32)[None] / 255
    values = tf.image.crop_and_resize(values, [[top, left, top + side, left + side]], [0], picture.shape[:2])[0]
    values = tf.clip_by_value(tf.image.adjust_brightness(values, draw.uniform(-0.2, 0.2)), 0, 1)
    values = tf.clip_by_value(tf.image.adjust_contrast(values, draw.uniform(0.8, 1.2)), 0, 1)
    values = tf.clip_by_value(tf.image.adjust_saturation(values, draw.uniform(0.8, 1.2)), 0, 1)
    return tf.clip_by_value(tf.image.adjust_hue(values, draw.uniform(-0.05, 0.05)), 0, 1).numpy()


def lerobot(reference: Any, picture: np.ndarray, draw: np.random.Generator) -> np.ndarray:
    names = list(enumerate(reference.ImageTransformsConfig().tfs.items()))
    values = torch.from_numpy(picture).permute(2, 0, 1).float() / 255
    for number in sorted(draw.choice(6, 3, replace=False).tolist()):
        _, (name, config) = names[number]
        change = reference.make_transform_from_config(config)
        if name == "affine":
            limits = [
                share * side for share, side in zip(config.kwargs["translate"], picture.shape[1::-1], strict=True)
            ]
            shift = [round(draw.uniform(-most, most)) for most in limits]
            angle = draw.uniform(*config.kwargs["degrees"])
            given = {"angle": angle, "translate": shift, "scale": 1.0, "shear": (0.0, 0.0)}
        else:
            factor = draw.uniform(*config.kwargs[name])
            jitter = {f"{each}_factor": None for each in ("brightness", "contrast", "saturation", "hue")}
            order = {"fn_idx": torch.tensor([["brightness", "contrast", "saturation", "hue", "sharpness"].index(name)])}
            given = {**jitter, **order, f"{name}_factor": factor}
        values = change.transform(values, given)
    return values.permute(1, 2, 0).numpy()


def main() -> None:
    sys.path.insert(0, sys.argv[1])
    shared: Any = types.ModuleType("openpi.shared")
    shared.image_tools = types.ModuleType("openpi.shared.image_tools")
    sys.modules |= {"openpi": types.ModuleType("openpi"), "openpi.shared": shared}
    pi, transforms = (importlib.import_module(name) for name in ("preprocessing_pytorch", "transforms"))
    coarse = np.random.default_rng(0).integers(0, 256, (4, 4, 3)).astype(np.float32)
    picture = tf.image.resize(coarse, (32, 32)).numpy().round().clip(0, 255).astype(np.uint8)
    picture[:2, :4] = [[[0, 0, 0], [255, 255, 255], [255, 0, 0], [7, 7, 7]], [[10, 200, 30]] * 4]
    found = {"picture": picture}
    for seed in SEEDS:
        found[f"oft_{seed}"] = oft(picture, np.random.default_rng(seed))
        found[f"lerobot_{seed}"] = lerobot(transforms, picture, np.random.default_rng(seed))
        for camera in ("base", "wrist"):
            found[f"openpi_{camera}_{seed}"] = openpi(pi, picture, camera, np.random.default_rng(seed))
    whole = {
        name: each if each.dtype == np.uint8 else (255 * each).round().astype(np.uint8) for name, each in found.items()
    }
    np.savez_compressed(Path(__file__).with_name("reference.npz"), **whole)


if __name__ == "__main__":
    main()
