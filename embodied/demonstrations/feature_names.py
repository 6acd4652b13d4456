"""Names of features: what other projects' datasets call what a policy reads and does, and the mapping that fits.

    sft:
      features: {image: observation.images.front, state: observation.state, actions: action}

A mapping has the dataset's key first and ours second. Ours are those of LeRobot's layout, with the simulator's names of
cameras: `observation.images.CAMERA`, `observation.state`, `observation.environment_state`, `action`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import yaml

from embodied.demonstrations import layout
from embodied.demonstrations.layout import Feature
from embodied.demonstrations.reader import Dataset
from embodied.errors import UserError, nearest, shown
from sim_farm.contract import Orientation

OURS = (layout.PROPRIO, layout.STATE, layout.ACTION, layout.REWARD, layout.SUCCESS, layout.DONE)
"""What a feature may be called, beside cameras."""
WRIST = re.compile(r"wrist|hand|image_?2|gripper|eye", re.IGNORECASE)
"""What the names of cameras at a hand have in them."""


@dataclass(frozen=True)
class Shipped:
    """A layout that other projects' tools write."""

    about: str
    names: Mapping[str, str]
    """Our names by theirs. Keys that a dataset does not have are passed over: variants of a tool name cameras
    differently."""
    written_fps: float | None = None
    """Frames per second that the tool writes whatever the recording's rate was."""
    control_hz: float | None = None
    """Rate of the recordings, in env steps per second."""
    orientation: Orientation | None = None
    """Orientation of the frames, as env.orientation has it; None: not always the same."""


_AGENT, _HAND = layout.IMAGES + "agentview", layout.IMAGES + "robot0_eye_in_hand"
SHIPPED: Mapping[str, Shipped] = {
    # Source: meta/info.json of HuggingFaceVLA/libero; robomimic2lerobot and libero2lerobot of any4lerobot, which say
    # wrist_image.
    "lerobot-libero": Shipped(
        "LIBERO as LeRobot and its converters have it",
        {
            "observation.images.image": _AGENT,
            "observation.images.image2": _HAND,
            "observation.images.wrist_image": _HAND,
        },
        written_fps=10,
        control_hz=20,
        orientation="rotated",
    ),
    # Source: examples/libero/convert_libero_data_to_lerobot.py of Physical-Intelligence/openpi.
    "openpi-libero": Shipped(
        "LIBERO as openpi has it",
        {"image": _AGENT, "wrist_image": _HAND, "state": layout.PROPRIO, "actions": layout.ACTION},
        written_fps=10,
        control_hz=20,
        orientation="rotated",
    ),
    # Source: mani_skill/trajectory/convert_to_lerobot.py of haosulab/ManiSkill (which names cameras as the simulator
    # does, and writes 30 unless --fps is given); converters modelled after openpi's have the short keys.
    "maniskill": Shipped(
        "ManiSkill's convert_to_lerobot, and converters after openpi's",
        {
            "image": layout.IMAGES + "base_camera",
            "wrist_image": layout.IMAGES + "hand_camera",
            "state": layout.PROPRIO,
            "actions": layout.ACTION,
        },
        written_fps=30,
        control_hz=20,
    ),
}
"""Shipped mappings by their names in `sft.features`."""


def renames(entry: str | Mapping[str, str], features: Mapping[str, Feature], where: str) -> dict[str, str]:
    """The renaming of a dataset's features that an entry of `sft.features` means: our names by the dataset's keys.

    `where` names the dataset in messages. Raises `UserError` for an unknown name, for a key that the dataset does not
    have, and for a name that is none of ours or would be there twice.
    """
    if isinstance(entry, str):
        if entry not in SHIPPED:
            raise UserError(
                f"sft.features: {shown(entry)} is no shipped mapping{nearest(entry, list(SHIPPED))}; a mapping is "
                "written as '{image: observation.images.front}'"
            )
        names = {key: ours for key, ours in SHIPPED[entry].names.items() if key in features}
        cameras = {ours for ours in SHIPPED[entry].names.values() if ours.startswith(layout.IMAGES)}
        if not names and not cameras & set(features):  # else the tool has named them as we do
            raise UserError(
                f"sft.features {entry}: {where} has none of its keys ({', '.join(SHIPPED[entry].names)}); it has: "
                f"{_listed(features)}"
            )
        entry = names
    for key, ours in entry.items():
        if not is_ours(ours):
            turned = (
                f"; the dataset's key comes first: '{{{ours}: {key}}}'" if ours in features and is_ours(key) else ""
            )
            raise UserError(
                f"sft.features: {shown(ours)} is no name of ours: they are {layout.IMAGES}CAMERA, {', '.join(OURS[:3])}"
                f"{turned}"
            )
        if key not in features:
            raise UserError(f"sft.features: {where} has no {shown(key)}{nearest(key, list(features))}")
    kept = [name for name in features if name not in entry]
    for ours in entry.values():
        if [*entry.values(), *kept].count(ours) > 1:
            raise UserError(
                f"sft.features: {where} would have {ours} twice: name one feature so, and the other something else"
            )
    return dict(entry)


def is_ours(name: str) -> bool:
    """Whether a feature may be called so."""
    return name in OURS or (name.startswith(layout.IMAGES) and len(name) > len(layout.IMAGES))


@dataclass(frozen=True)
class Needed:
    """A feature that a run reads or learns, by our name."""

    name: str
    size: int
    """Numbers of a vector; 0: a camera."""


def fitting(features: Mapping[str, Feature], needed: Sequence[Needed]) -> str | dict[str, str] | None:
    """The entry of `sft.features` that gives a dataset what it lacks of `needed`; None where none suggests itself.

    Cameras are paired wrist with wrist, then in the dataset's order; vectors by size and by what their names end in.
    """
    wanted = [need for need in needed if need.name not in features]
    free = {key: feature for key, feature in features.items() if key not in {need.name for need in needed}}
    for name, shipped in SHIPPED.items():
        names = {key: ours for key, ours in shipped.names.items() if key in free}
        if wanted and {need.name for need in wanted} <= set(names.values()):
            return name
    found: dict[str, str] = {}
    cameras = [key for key, feature in free.items() if feature.is_camera]
    asked = [need.name for need in wanted if not need.size]
    for wrist in (True, False):
        ours = [name for name in asked if bool(WRIST.search(name.removeprefix(layout.IMAGES))) == wrist]
        theirs = [key for key in cameras if bool(WRIST.search(key.removeprefix(layout.IMAGES))) == wrist]
        found |= dict(zip(theirs, ours, strict=False))
    rest = [key for key in cameras if key not in found]
    found |= dict(zip(rest, [name for name in asked if name not in found.values()], strict=False))
    for need in wanted:
        if need.size:
            word = "action" if need.name == layout.ACTION else "state"
            fits = [k for k, f in free.items() if word in k.lower() and f.shape == (need.size,) and k not in found]
            fits.sort(key=lambda key: (not key.lower().rstrip("s").endswith(word), len(key)))
            found |= {fits[0]: need.name} if fits else {}
    return found if len(found) == len(wanted) else None


def check_features(dataset: Dataset, needed: Sequence[Needed], by: str) -> None:
    """Raise `UserError` for a dataset that lacks a feature; it shows the mapping that would fit. `by` needs them."""
    short = {name.removeprefix(layout.IMAGES) for name in dataset.cameras}
    missing = [
        need
        for need in needed
        if need.name not in dataset.features and (need.size or need.name.removeprefix(layout.IMAGES) not in short)
    ]
    if not missing:
        return
    names = ", ".join(need.name for need in missing)
    fits = fitting(dataset.features, needed)
    way = (
        f"if these are they: {option(fits)}"
        if fits is not None
        else f"name those that are they: {option({'KEY': missing[0].name})}"
        + (
            ""
            if missing[0].name == layout.ACTION
            else ", or let the policy read something else (policy.reads, env.cameras)"
        )
    )
    raise UserError(f"{dataset.folder} has no {names}, which {by} needs; it has {_listed(dataset.features)}; {way}")


def option(entry: str | Mapping[str, str]) -> str:
    """An entry of `sft.features` as the command line takes it."""
    text = entry if isinstance(entry, str) else f"'{yaml.safe_dump(dict(entry), default_flow_style=True, width=10**6)}'"
    return f"--sft.features {text.replace(chr(10), '')}"


def _listed(features: Mapping[str, Feature]) -> str:
    listed = [f"{name} {list(f.shape)}" for name, f in features.items() if name not in layout.BOOKKEEPING]
    return ", ".join(listed) or "nothing"
