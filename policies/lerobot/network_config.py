"""config.json of LeRobot's networks that read pictures and the robot's state, and no words: what ACT's and Diffusion
Policy's have in common."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from policies.contract import PolicyError, PolicySpec
from policies.files import CONFIG, read_json, shown
from policies.lerobot.config import check_known_entries
from policies.lerobot.features import IMAGES
from policies.lerobot.processors import ACTION, STATE, Feature, Text
from policies.random_weights import RANDOM_WEIGHTS
from policies.units import Mode

OWN = {RANDOM_WEIGHTS, "backbone_width"}
"""Entries that this project alone has: others' programs refuse them."""
SAVED = {"kind", "spec", "architecture"}
"""Entries of a policy that this project saved, which its reader has checked."""
PASSED = (
    "device", "use_amp", "use_peft", "push_to_hub", "repo_id", "private", "tags", "license", "pretrained_path",
    "pretrained_revision", "pretrained_backbone_weights",
)  # fmt: skip
"""Entries that say how a network was trained, on which machine, or where it was published."""


class NetworkConfig(BaseModel, extra="ignore", frozen=True, strict=True):
    """Entries of every such network."""

    input_features: dict[Text, Feature] = {}
    output_features: dict[Text, Feature] = {}
    normalization_mapping: dict[Text, Mode]
    n_action_steps: int

    @property
    def cameras(self) -> tuple[str, ...]:
        """Names of the pictures that the network reads, in order."""
        return tuple(key for key, feature in self.input_features.items() if feature.type == "VISUAL")

    @property
    def keys(self) -> tuple[str, ...]:
        """Names of all that is normalised."""
        return (*self.cameras, *([STATE] if self.state_dim else []), ACTION)

    def mode_of(self, key: str) -> Mode:
        """Normalisation of a feature."""
        feature = (self.output_features if key == ACTION else self.input_features)[key]
        return self.normalization_mapping.get(feature.type, "IDENTITY")

    @property
    def state_dim(self) -> int:
        """Numbers of the state that it reads."""
        state = self.input_features.get(STATE)
        return state.shape[0] if state is not None and state.type == "STATE" else 0

    @property
    def action_dim(self) -> int:
        return self.output_features[ACTION].shape[0]

    @property
    def image_size(self) -> int:
        """Height and width of the pictures in pixels."""
        return self.input_features[self.cameras[0]].shape[1]


def read_entries(folder: Path, kind: str, name: str) -> dict[str, Any]:
    """The object in a directory's config.json. Raises `PolicyError` for another policy's than the `kind`, which is
    called `name`, and for an adapter's."""
    path = folder / CONFIG
    raw = read_json(path)
    if raw.get("type") != kind:
        raise PolicyError(
            f"{path}: type is {shown(raw.get('type'))}, and LeRobot's directories of {name} have {kind}: name one of "
            "them"
        )
    if raw.get("use_peft"):
        raise PolicyError(f"{path}: use_peft is true, and adapters of {name} are not read: merge it into the weights")
    return raw


def check_entries(
    folder: Path, raw: Mapping[str, Any], config: type[NetworkConfig], *, saved: bool, passed: Sequence[str] = ()
) -> None:
    """Raise `PolicyError` for an entry that is neither of `config` nor without meaning here, unless it is off: false,
    null, 0 or empty. `saved`: the directory is of a policy that this project saved; `passed` are entries that may say
    anything."""
    known = OWN | set(config.model_fields) | (SAVED if saved else set())
    check_known_entries(folder / CONFIG, raw, known, (*PASSED, *passed), {})


def check_features(path: Path, config: NetworkConfig) -> None:
    """Raise `PolicyError` for inputs and outputs that no network here has; `path` is the config.json."""
    for key, feature in config.input_features.items():
        if feature.type == "ENV":
            raise PolicyError(
                f"{path}: input_features has {shown(key)}, a state of the environment, which no simulator here gives "
                "as LeRobot's do: take a policy of pictures and the robot's state"
            )
        if feature.type == "VISUAL" and (len(feature.shape) != 3 or feature.shape[0] != 3 or min(feature.shape) < 1):
            raise PolicyError(f"{path}: {shown(key)} has the shape {feature.shape}, and pictures have [3, H, W]")
    shapes = {tuple(config.input_features[key].shape) for key in config.cameras}
    if len(shapes) != 1 or any(height != width for _, height, width in shapes):
        said = ", ".join(f"{key} {config.input_features[key].shape}" for key in config.cameras) or "none"
        raise PolicyError(
            f"{path}: input_features has the pictures {said[:500]}; the network reads at least one, and pictures here "
            "are square and of one size"
        )
    action = config.output_features.get(ACTION)
    if action is None or action.type != "ACTION" or len(config.output_features) != 1:
        raise PolicyError(f"{path}: output_features has {shown(list(config.output_features))}, and must have {ACTION}")
    vectors = [action, *(config.input_features[STATE] for _ in range(STATE in config.input_features))]
    if any(len(feature.shape) != 1 or feature.shape[0] < 1 for feature in vectors):
        raise PolicyError(
            f"{path}: {STATE} and {ACTION} each have one dimension, got {shown([v.shape for v in vectors])}"
        )


def new_features(spec: PolicySpec) -> dict[str, Any]:
    """`input_features` and `output_features` of a new network, which reads what the task gives."""
    shape = [3, spec.image_size, spec.image_size]
    features = {f"{IMAGES}{camera}": {"type": "VISUAL", "shape": shape} for camera in spec.cameras}
    if spec.proprio_dim:
        features = {STATE: {"type": "STATE", "shape": [spec.proprio_dim]}, **features}
    return {"input_features": features, "output_features": {ACTION: {"type": "ACTION", "shape": [spec.action_dim]}}}


def with_entries(folder: Path, raw: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """config.json of a new network with the entries that the task gives. Raises `PolicyError` for one that differs."""
    for name, value in given.items():
        if raw.get(name, value) != value:
            raise PolicyError(
                f"{folder / CONFIG}: {name} is {shown(raw[name], 300)}, and the task and the policy's settings give "
                f"the new network ({RANDOM_WEIGHTS}) {shown(value, 300)}: take {name} out of the file"
            )
    return {**raw, **given}


def check_task(path: Path, config: NetworkConfig, spec: PolicySpec) -> None:
    """Raise `PolicyError` where the network cannot see or do what the task, after the transforms, has."""
    if len(spec.cameras) != len(config.cameras):
        raise PolicyError(
            f"{path}: the network reads the pictures {', '.join(config.cameras)}, and the task gives "
            f"{', '.join(spec.cameras) or 'none'}: set env.cameras to as many, and have images in policy.reads"
        )
    if spec.image_size != config.image_size:
        raise PolicyError(
            f"{path}: the network was trained with pictures of {config.image_size} pixels, and the task gives "
            f"{spec.image_size}: set env.image_size to {config.image_size}"
        )
    if bool(spec.proprio_dim) != bool(config.state_dim):
        wanted = "reads the robot's state: add" if config.state_dim else "reads no state of the robot: take"
        there = "to" if config.state_dim else "out of"
        raise PolicyError(f"{path}: the network {wanted} 'proprio' {there} policy.reads")
    if (spec.proprio_dim, spec.action_dim) != (config.state_dim, config.action_dim):
        raise PolicyError(
            f"{path}: the network's states and actions have {config.state_dim} and {config.action_dim} numbers, "
            f"the task's {spec.proprio_dim} and {spec.action_dim}: take a checkpoint of this robot, or choose "
            "numbers of the state with policy.options.transforms"
        )
