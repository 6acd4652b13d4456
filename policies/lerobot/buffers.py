"""Statistics of LeRobot's checkpoints before 0.4: buffers among the weights, in place of processors.

normalize_inputs.buffer_observation_state.mean, .std       also min and max
unnormalize_outputs.buffer_action.mean, .std               the same numbers as normalize_targets.buffer_action's
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, get_args

from policies.contract import PolicyError
from policies.files import CONFIG, Shards, shown
from policies.lerobot.processors import ACTION, STATE, FeatureType
from policies.units import DEMONSTRATIONS, LEAST, Mode, RobotUnits, Units, unchanged, units_of

BUFFERS = re.compile(r"(model\.)?(un)?normalize_(inputs|targets|outputs)\.")
"""Beginning of their names."""


def read_buffers(shards: Shards, config: Mapping[str, Any]) -> RobotUnits:
    """Units from the buffers, in the modes of config.json's `normalization_mapping`. Raises `PolicyError` where they
    are missing, as in a base checkpoint."""
    modes = read_modes(shards.folder, config)
    state = buffer_units(shards, modes.get("STATE", "IDENTITY"), STATE)
    return RobotUnits(state, buffer_units(shards, modes.get("ACTION", "IDENTITY"), ACTION))


def read_modes(folder: Path, config: Mapping[str, Any]) -> Mapping[FeatureType, Mode]:
    """Modes by kind of feature in config.json. Raises `PolicyError` for what is none, and for normalised pictures."""
    modes = config.get("normalization_mapping") or {}
    path, kinds, known = folder / CONFIG, get_args(FeatureType), get_args(Mode)
    if not isinstance(modes, dict) or not all(kind in kinds and mode in known for kind, mode in modes.items()):
        raise PolicyError(
            f"{path}: normalization_mapping is {shown(modes)}, and gives kinds ({', '.join(kinds)}) their modes "
            f"({', '.join(known)})"
        )
    if modes.get("VISUAL", "IDENTITY") != "IDENTITY":
        raise PolicyError(
            f"{path}: pictures are normalised by {modes['VISUAL']}, which is not applied here: set VISUAL to IDENTITY "
            "if they were trained in 0..1"
        )
    return modes


def buffer_units(shards: Shards, mode: Mode, key: str) -> Units:
    """Units of a feature by its buffers. Raises `PolicyError` where they are missing, unless its mode is IDENTITY."""
    if mode == "IDENTITY":
        return unchanged()
    part = "unnormalize_outputs" if key == ACTION else "normalize_inputs"
    prefix = f"{part}.buffer_{key.replace('.', '_')}."
    path = shards.folder
    names = {name.removeprefix("model.").removeprefix(prefix): name for name in shards.files if prefix in name}
    way = (
        f"Set policy.options.asset to {DEMONSTRATIONS} to learn with those of demonstrations"
        if key in (STATE, ACTION)
        else f"Set VISUAL to IDENTITY in {CONFIG}'s normalization_mapping if pictures were trained in 0..1"
    )
    if not names:
        raise PolicyError(
            f"{path} has no statistics of {key}, which config.json normalises by {mode}: neither processors nor "
            f"buffers {prefix}... among its weights. {way}"
        )
    found = {name: shards.tensor(stored) for name, stored in names.items()}
    for name, tensor in found.items():
        if not tensor.isfinite().all():
            raise PolicyError(
                f"{path}: {names[name]!r} has numbers that are not finite, as statistics have that were never filled. "
                f"{way}"
            )
    eps = 0.0 if key == ACTION else LEAST
    return units_of(path, found, mode, std_eps=eps, range_eps=eps)
