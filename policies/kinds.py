"""The kinds of policies by name, and what can be checked of one before torch is imported."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from policies.errors import PolicyError, nearest, shown
from policies.named_code import entry_point_names

KINDS = {
    "categorical_mlp": "policies.small.categorical_mlp:CategoricalMLP",
    "countdown_solver": "policies.scripted.countdown:CountdownSolver",
    "flow": "policies.small.flow:FlowPolicy",
    "gaussian_mlp": "policies.small.gaussian_mlp:GaussianMLP",
    "pi0": "policies.pi0.policy:Pi0",
    "language": "policies.language.policy:LanguagePolicy",
    "openvla": "policies.openvla.policy:OpenVLA",
    "openvla_oft": "policies.openvla.oft:OpenVLAOFT",
    "random": "policies.scripted.random_actions:RandomActions",
    "remote": "policies.remote.policy:Remote",
    "replay": "policies.scripted.replay:Replay",
    "scripted": "policies.scripted.policy:Scripted",
}
"""Kind to module:class. A module is imported when its kind is asked for."""
WITHOUT_WEIGHTS = frozenset({"countdown_solver", "random", "remote", "replay", "scripted"})
"""Kinds that are evaluated and recorded, and have nothing to train (`Policy.trainable`)."""
ENTRY_POINTS = "embodied_farm.policies"
"""Group in which packages offer policies, name to `module:Class`. A name of `KINDS` cannot be replaced."""


def check_kind(kind: str) -> None:
    """Raise `PolicyError` with the nearest kinds if there is none of this name; `package.module:Class` is any name."""
    if kind in KINDS or ":" in kind or kind in (others := entry_point_names(ENTRY_POINTS)):
        return
    known = [*KINDS, *others]
    near = nearest(kind[:100], known)
    raise PolicyError(f"unknown policy {shown(kind)}{near}; your own is named package.module:Class")


def check_folders(architecture: Mapping[str, Any]) -> None:
    """Raise `PolicyError` where `checkpoint` or `adapter` names a folder that is not there."""
    for name in ("checkpoint", "adapter"):
        folder = architecture.get(name)
        if isinstance(folder, str) and folder and not Path(folder).is_dir():
            raise PolicyError(
                f"policy.options.{name}: {folder} is not a folder here; name one with the files as the policy's own "
                "project lays them out, its weights as safetensors (a name on the Hugging Face Hub goes into "
                "policy.path)"
            )
