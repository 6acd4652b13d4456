"""A LeRobot directory beside the task: cameras by name, numbers by count."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from policies.contract import PolicyError
from policies.files import CONFIG, checked, shown
from policies.lerobot.processors import ACTION, PRE, STATE, Feature, Processors


class Described(Protocol):
    """Inputs and outputs of a network, as its directory declares them."""

    @property
    def described(self) -> Path:
        """Folder of config.json and processors."""
        ...

    @property
    def config(self) -> Mapping[str, Any]:
        """Its config.json."""
        ...

    @property
    def processors(self) -> Processors | None:
        """None: before LeRobot 0.4, or another project's."""
        ...


IMAGES, EMPTY = "observation.images.", "observation.images.empty_camera_"


def check_numbers(source: Described, action_dim: int, proprio_dim: int) -> None:
    """Raise `PolicyError` unless the checkpoint's actions and states have the task's sizes.

    Base checkpoints give the sizes with padding, which fit any robot.
    """
    wanted = (("output_features", ACTION, action_dim, "max_action_dim"),
              ("input_features", STATE, proprio_dim, "max_state_dim"))  # fmt: skip
    for part, key, here, most in wanted:
        feature = _features(source, part).get(key)
        if feature is None or not here:
            continue
        said, filled = feature.shape, source.config.get(most, 32)
        if said not in ([here], [filled]):
            raise PolicyError(
                f"{source.described / CONFIG}: {part} has {key} of {said}, and the task's has {here} numbers: take a "
                "checkpoint of this robot, or choose numbers with policy.options.transforms"
            )


def ordered_cameras(source: Described, cameras: tuple[str, ...]) -> tuple[str, ...]:
    """The task's cameras in the order in which the checkpoint reads its own. Cameras of other names are in the task's
    order: the first is the checkpoint's first.

    Raises `PolicyError` where the checkpoint has fewer, or knows some of the names and not the others.
    """
    said = _features(source, "input_features")
    known = [key for key, feature in said.items() if feature.type == "VISUAL" and not key.startswith(EMPTY)]
    if not known:
        return cameras
    if len(cameras) > len(known):
        raise PolicyError(
            f"{source.described / CONFIG}: the checkpoint reads {len(known)} cameras ({', '.join(known)}), the task "
            f"gives {', '.join(cameras)}: set env.cameras to as many"
        )
    found = {camera: _name(source, camera, known) for camera in cameras}
    if not any(found.values()):
        return cameras
    lost = [camera for camera, key in found.items() if key is None]
    if lost:
        named = ", ".join(f"{camera} is {key}" for camera, key in found.items() if key is not None)
        raise PolicyError(
            f"{source.described / PRE}: the checkpoint knows the camera {named}, and has none for {lost[0]!r}: it "
            f"reads {', '.join(known)}. Name all of them in rename_map, or none"
        )
    if len(set(found.values())) < len(cameras):
        raise PolicyError(
            f"{source.described / PRE}: two of the task's cameras are one of the checkpoint's: "
            + ", ".join(f"{camera} is {key}" for camera, key in found.items())
        )
    return tuple(sorted(cameras, key=lambda camera: known.index(str(found[camera]))))


def _name(source: Described, camera: str, known: list[str]) -> str | None:
    """The checkpoint's name of a camera. Raises `PolicyError` where it is renamed to one that is not read."""
    for key in (f"{IMAGES}{camera}", f"observation.{camera}", camera):
        new = key if source.processors is None else source.processors.renamed(key)
        if new in known:
            return new
        if new != key:
            raise PolicyError(
                f"{source.described / PRE}: rename_map makes {shown(new)} of the camera {camera!r}, which the "
                f"checkpoint does not read: input_features in {CONFIG} has {', '.join(known)}"
            )
    return None


def _features(source: Described, part: str) -> dict[str, Feature]:
    """config.json's `input_features` or `output_features`, in their order."""
    path, said = source.described / CONFIG, source.config.get(part) or {}
    if not isinstance(said, dict) or not all(isinstance(each, dict) for each in said.values()):
        raise PolicyError(f"{path}: {part} is {shown(said)} in place of features by name")
    found = {key: checked(path, Feature, each) for key, each in said.items()}
    for key, feature in found.items():
        if feature.type == "VISUAL" and (len(feature.shape) != 3 or feature.shape[0] != 3 or 0 in feature.shape):
            raise PolicyError(f"{path}: {part} has {shown(key)} of {feature.shape}, and pictures have [3, H, W]")
    return found
