"""The statistics of LeRobot's processors: units from them, and units written into them.

    MEAN_STD                           std + eps for a state; std, or eps where that is 0, for an action (which is
                                       multiplied by std)
    QUANTILES, QUANTILE10, MIN_MAX     the range, or eps where that is 0, is two units

(lerobot/processor/normalize_processor.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from policies.contract import PolicyError
from policies.files import CONFIG, read_json, read_tensors, write_json, write_tensors
from policies.lerobot.processors import (
    ACTION,
    POST,
    PRE,
    STATE,
    Normaliser,
    Processors,
    Step,
    check_modes,
    read_processors,
)
from policies.units import DEMONSTRATIONS, RobotUnits, Units, statistics_of, unchanged, units_of


def trained_on(folder: Path) -> str | None:
    """Name of the dataset that a LeRobot folder was trained on (`dataset.repo_id` of its train_config.json), if it says
    one."""
    path = folder / "train_config.json"
    dataset = read_json(path).get("dataset") if path.is_file() else None
    repository = dataset.get("repo_id") if isinstance(dataset, dict) else None
    return repository if isinstance(repository, str) and repository else None


def read_lerobot(folder: Path) -> RobotUnits:
    """Units from the processors' states, in the modes that they name. Raises `PolicyError` for what they do not say."""
    raw = read_json(folder / CONFIG)
    processors = read_processors(folder, raw)
    check_modes(processors, raw)
    check_pictures(processors, raw)
    before = processors.needed(PRE, "normalizer_processor", Normaliser)
    after = processors.needed(POST, "unnormalizer_processor", Normaliser)
    found = RobotUnits(feature_units(*before, STATE), feature_units(*after, ACTION))
    check_same_action(before, after)
    return found


def check_same_action(before: tuple[Step, Normaliser], after: tuple[Step, Normaliser]) -> None:
    """Raise `PolicyError` unless actions are unnormalised by the statistics that normalise them."""
    action, learned = feature_units(*after, ACTION), feature_units(*before, ACTION)
    for one, other in ((action.centre, learned.centre), (action.scale, learned.scale)):
        if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-4, atol=1e-6):
            raise PolicyError(
                f"{before[0]} and {after[0]} have different statistics of {ACTION}: what the policy learned would "
                "not be what it executes; take both files from one training"
            )


def write_lerobot(folder: Path, units: RobotUnits) -> None:
    """Write the units into the processors' state, in place of its statistics of states and actions; any mode reads
    these units from them. A processor without normalisation then uses mean and deviation, as config.json says."""
    path = folder / CONFIG
    config = read_json(path)
    processors = read_processors(folder, config)
    parts = {STATE: units.state, ACTION: units.action}
    before, after = ((PRE, "normalizer_processor"), (POST, "unnormalizer_processor"))
    learned = processors.needed(*before, Normaliser)[1]
    modes = {kind: learned.norm_map.get(kind, "IDENTITY") for kind in ("STATE", "ACTION")}
    modes = {kind: "MEAN_STD" if mode == "IDENTITY" else mode for kind, mode in modes.items()}
    for file, name in (before, after):
        step, said = processors.needed(file, name, Normaliser)
        new = {
            f"{key}.{statistic}": tensor
            for key, part in parts.items()
            for statistic, tensor in statistics_of(part, said.eps if key == STATE else 0.0, 0.0).items()
        }
        others = {} if step.state_file is None else read_tensors(step.state_file)
        others = {n: t for n, t in others.items() if n.rpartition(".")[0] not in parts}
        raw = read_json(folder / file)
        entry = raw["steps"][step.place]
        entry["state_file"] = f"{Path(file).stem}_step_{step.place}_{name}.safetensors"
        write_tensors(folder / entry["state_file"], others | new)
        entry["config"] = _normalising(entry.get("config") or {}, modes, units, file == PRE)
        write_json(folder / file, raw)
    if config.get("normalization_mapping"):
        config["normalization_mapping"] |= modes
        write_json(path, config)


def _normalising(config: Mapping[str, Any], modes: Mapping[str, str], units: RobotUnits, reads: bool) -> dict[str, Any]:
    """A normaliser's parameters with these modes; one that `reads` observations normalises the state, too."""
    found = {**config, "norm_map": {**config.get("norm_map", {}), **modes}}
    if reads:
        state = {"type": "STATE", "shape": [len(units.state.centre)]}
        found["features"] = {STATE: state} | config.get("features", {})
        if config.get("normalize_observation_keys") is not None:
            found["normalize_observation_keys"] = sorted({*config["normalize_observation_keys"], STATE})
    return found


def check_pictures(processors: Processors, raw: Mapping[str, Any]) -> None:
    """Raise `PolicyError` where pictures are normalised, which no policy that calls this does; `raw` is config.json."""
    check_modes(processors, raw, ("VISUAL",))
    step, said = processors.needed(PRE, "normalizer_processor", Normaliser)
    pictures = {key: said.mode_of(key) for key, feature in said.features.items() if feature.type == "VISUAL"}
    changed = {key: mode for key, mode in pictures.items() if mode != "IDENTITY"}
    if not changed or step.state_file is None:  # LeRobot leaves what has no statistics as it is
        return
    known = {name.rpartition(".")[0] for name in read_tensors(step.state_file)}
    for key, mode in changed.items():
        if key in known:
            raise PolicyError(
                f"{step}: pictures of {key} are normalised by {mode}, which is not applied here: set VISUAL "
                "to IDENTITY in both processors and config.json if the policy was trained with pictures in 0..1"
            )


def feature_units(step: Step, said: Normaliser, key: str) -> Units:
    """Units of a feature, as the step normalises it. A picture without statistics stays as it is, as LeRobot has it.
    Raises `PolicyError` for a state or an action without statistics, unless its mode is IDENTITY."""
    mode = said.mode_of(key)
    if mode == "IDENTITY":
        return unchanged()
    path = step.path if step.state_file is None else step.state_file
    tensors = {} if step.state_file is None else read_tensors(step.state_file)
    statistics = {n.removeprefix(f"{key}."): t for n, t in tensors.items() if n.rpartition(".")[0] == key}
    if not statistics and key not in (STATE, ACTION):
        return unchanged()
    if not statistics:
        raise PolicyError(
            f"{path} has no statistics of {key}, which {step} normalises by {mode}: a base checkpoint has none until "
            f"it is trained. Set policy.options.asset to {DEMONSTRATIONS} to learn with those of demonstrations"
        )
    return units_of(path, statistics, mode, std_eps=0.0 if key == ACTION else said.eps, least=said.eps)
