"""The kinds of policies by name, and what can be checked of one before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policies.errors import PolicyError, nearest, shown
from policies.named_code import entry_point_names

KINDS = {
    "act": "policies.act.kind:ACT",
    "categorical_mlp": "policies.small.categorical_mlp:CATEGORICAL_MLP",
    "diffusion": "policies.diffusion.kind:DIFFUSION",
    "flow": "policies.small.flow:FLOW",
    "gaussian_mlp": "policies.small.gaussian_mlp:GAUSSIAN_MLP",
    "pi0": "policies.pi0.kind:PI0",
    "smolvla": "policies.smolvla.kind:SMOLVLA",
    "openvla": "policies.openvla.kinds:OPENVLA",
    "openvla_oft": "policies.openvla.kinds:OPENVLA_OFT",
    "random": "policies.scripted.random_actions:RANDOM",
    "remote": "policies.remote.policy:REMOTE",
    "replay": "policies.scripted.replay:REPLAY",
    "scripted": "policies.scripted.policy:SCRIPTED",
}
"""Name of a kind to the module:NAME of its `PolicyKind`, which is imported when the kind is used."""
WITHOUT_WEIGHTS = frozenset({"random", "remote", "replay", "scripted"})
"""Kinds of this package that have nothing to train, known without an import; `PolicyKind.trainable` says it of any."""
ENTRY_POINTS = "embodied_farm.policies"
"""Group in which packages offer policies: a name to `module:NAME` of a `Policy` class or a `PolicyKind`. A name of
`KINDS` cannot be replaced."""


def kind_names() -> list[str]:
    """The names of the kinds: ours, and those that installed packages offer."""
    return [*KINDS, *(name for name in entry_point_names(ENTRY_POINTS) if name not in KINDS)]


def check_kind(kind: str) -> None:
    """Raise `PolicyError` with the nearest kinds if there is none of this name; `package.module:Class` is any name."""
    if kind in KINDS or ":" in kind or kind in (known := kind_names()):
        return
    near = nearest(kind[:100], known)
    raise PolicyError(f"unknown policy {shown(kind)}{near}; your own is named package.module:Class")


def check_folders(architecture: Mapping[str, Any]) -> None:
    """Raise `PolicyError` if `checkpoint` or `adapter` names a missing folder."""
    for name in ("checkpoint", "adapter"):
        folder = architecture.get(name)
        if isinstance(folder, str) and folder and not Path(folder).is_dir():
            raise PolicyError(
                f"policy.options.{name}: {folder} is not a folder here; name one with the files as the policy's own "
                "project lays them out, its weights as safetensors"
            )
