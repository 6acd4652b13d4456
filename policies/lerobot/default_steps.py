"""LeRobot's default processors: rename, batch, device, normalise; unnormalise, device. Policies that read no words have
no others (lerobot/processor/factory.py, make_default_pre_post_processors).

Units of a feature are those of `policies.units`; the state and the pictures are observations, the action is none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from policies.contract import PolicyError
from policies.files import write_json, write_tensors
from policies.lerobot.processors import (
    ACTION,
    POST,
    PRE,
    Normaliser,
    Processors,
    check_modes,
    read_processors,
)
from policies.lerobot.statistics import check_same_action, feature_units
from policies.units import BOUNDS, LEAST, Mode, Units, statistics_of

DEFAULT = {
    "rename_observations_processor", "to_batch_processor", "device_processor", "normalizer_processor",
    "unnormalizer_processor", "observation_processor", "image_crop_resize_processor",
}  # fmt: skip
"""Names of the steps; those of a gym environment's observations, which change nothing here, with them."""


def read_default(folder: Path, raw: Mapping[str, Any]) -> Processors:
    """The processors of a directory whose config.json is `raw`. Raises `PolicyError` for a step that is no default."""
    found = read_processors(folder, raw)
    for steps in found.steps.values():
        for step in steps:
            if step.name not in DEFAULT and not step.name.startswith("to_batch_processor"):
                raise PolicyError(
                    f"{step} is of another policy: {raw.get('type')} has the steps {', '.join(sorted(DEFAULT))}; take "
                    "the processors that were saved with it"
                )
    check_modes(found, raw)
    return found


def default_units(processors: Processors, keys: Sequence[str]) -> dict[str, Units]:
    """Units of these observations, or of the action (`feature_units`). Raises `PolicyError`."""
    before = processors.needed(PRE, "normalizer_processor", Normaliser)
    after = processors.needed(POST, "unnormalizer_processor", Normaliser)
    if ACTION in keys:
        check_same_action(before, after)
    return {key: feature_units(*(after if key == ACTION else before), key) for key in keys}


def _stored(units: Units, mode: Mode, std_eps: float) -> dict[str, Tensor]:
    """The mode's two statistics. A number without a deviation, or a range, has none: LeRobot puts eps in its place."""
    first, second = BOUNDS[mode]
    found = statistics_of(units, std_eps, 0.0)
    if mode == "MEAN_STD":
        constant = torch.zeros_like(found[second])
        return {first: found[first], second: torch.where(units.scale <= LEAST, constant, found[second])}
    return {first: found[first], second: torch.where(2 * units.scale <= LEAST, found[first], found[second])}


def write_default(
    folder: Path, config: Mapping[str, Any], units: Mapping[str, Units], rename_map: Mapping[str, str]
) -> None:
    """Write both processors of a directory with this config.json, with the statistics that give these units."""
    features = {**config["input_features"], **config["output_features"]}
    modes: Mapping[str, Mode] = config["normalization_mapping"]
    device = {"registry_name": "device_processor", "config": {"device": "cpu", "float_dtype": None}}

    def normalising(name: str, place: int, file: str, known: Mapping[str, Any]) -> dict[str, Any]:
        stored = f"{Path(file).stem}_step_{place}_{name}.safetensors"
        tensors = {}
        for key in known.keys() & units.keys():
            feature = known[key]
            mode = modes.get(feature["type"], "IDENTITY")
            if mode == "IDENTITY":
                continue
            shape = (-1, 1, 1) if feature["type"] == "VISUAL" else (-1,)
            for statistic, tensor in _stored(units[key], mode, 0.0 if key == ACTION else LEAST).items():
                tensors[f"{key}.{statistic}"] = tensor.float().reshape(shape).clone()
        write_tensors(folder / stored, tensors)
        said = {"eps": LEAST, "features": dict(known), "norm_map": dict(modes)}
        return {"registry_name": name, "config": said, "state_file": stored}

    renaming = {"registry_name": "rename_observations_processor", "config": {"rename_map": dict(rename_map)}}
    batching = {"registry_name": "to_batch_processor", "config": {}}
    steps = {
        PRE: [renaming, batching, device, normalising("normalizer_processor", 3, PRE, features)],
        POST: [normalising("unnormalizer_processor", 0, POST, config["output_features"]), device],
    }
    for file, entries in steps.items():
        write_json(folder / file, {"name": Path(file).stem, "steps": entries})
