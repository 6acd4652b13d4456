"""The registry of policy kinds: a policy by its kind, built from a seed."""

from __future__ import annotations

import difflib
import importlib
import inspect
import math
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import torch

from policies.contract import Policy, PolicyError, PolicySpec
from policies.files import CONFIG, read_json, shown

KINDS = {
    "categorical_mlp": "policies.small.categorical_mlp:CategoricalMLP",
    "flow": "policies.small.flow:FlowPolicy",
    "gaussian_mlp": "policies.small.gaussian_mlp:GaussianMLP",
    "pi0": "policies.pi0.policy:Pi0",
    "openvla": "policies.openvla.policy:OpenVLA",
    "openvla_oft": "policies.openvla.oft:OpenVLAOFT",
    "random": "policies.scripted.random_actions:RandomActions",
    "replay": "policies.scripted.replay:Replay",
    "scripted": "policies.scripted.policy:Scripted",
}
"""Kind to module:class. A module is imported when its kind is asked for."""


LARGEST, LARGEST_IMAGE = 2**16, 4096
"""Limits of the sizes in a spec and of whole numbers in an architecture: a file may hold any number."""


def policy_class(kind: str) -> type[Policy]:
    """The class of `kind`. Raises `PolicyError` with the nearest kinds if there is none."""
    if kind not in KINDS:
        raise PolicyError(f"unknown policy {shown(kind)}{nearest(kind[:100], list(KINDS))}")
    module, name = KINDS[kind].split(":")
    return getattr(importlib.import_module(module), name)


def build(kind: str, spec: PolicySpec, seed: int, **architecture: Any) -> Policy:
    """A new policy of `kind` on the CPU, its weights determined by the seed; global generators are untouched.

    `architecture` are the options of the kind (`Policy.options_type`). Raises `PolicyError` for one that is unknown
    or of another type than its default, so that a configuration file cannot cause another error.
    """
    cls = _checked_class(kind, architecture)
    check_actions(kind, spec)
    if spec.action_dim < 1 or spec.chunk < 1:
        raise PolicyError(f"spec.action_dim and spec.chunk must be at least 1, got {spec.action_dim}, {spec.chunk}")
    for name, size in vars(spec).items():
        largest = LARGEST_IMAGE if name == "image_size" else LARGEST
        if type(size) is int and not 0 <= size <= largest:
            raise PolicyError(f"spec.{name} is of 0 to {largest}, got {shown(size)}")
    if spec.horizon == spec.chunk and not (cls.predicts_more and cls.pretrained):
        spec = replace(spec, horizon=0)  # the same, said once; where a checkpoint has a horizon, 0 is that
    if spec.predicted < spec.chunk or (spec.predicted > spec.chunk and not cls.predicts_more):
        allowed = "of at least that" if cls.predicts_more else f"of {spec.chunk}: {kind} executes all that it predicts"
        raise PolicyError(f"chunks of {spec.chunk} actions need a horizon {allowed}; policy.horizon is {spec.horizon}")
    # The initialisers draw from the CPU's default generator: it is seeded alone (torch.manual_seed would seed
    # every GPU's too) and put back.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        if cls.options_type is not None:
            return cls(spec, cls.options_type(**architecture))
        return cls(spec, **architecture)


def check(kind: str, architecture: Mapping[str, Any]) -> None:
    """Raise `PolicyError` for what `build` would refuse whatever the task: an unknown kind or argument, files that are
    missing, or of another kind. Builds nothing."""
    cls = _checked_class(kind, architecture)
    _check_kind(kind, cls, architecture.get("checkpoint"))
    cls.check_files(architecture)


def check_actions(kind: str, spec: PolicySpec) -> None:
    """Raise `PolicyError` where the task's actions are choices and the kind's are real numbers, or the other way
    round."""
    if policy_class(kind).chooses == bool(spec.discrete_actions):
        return
    if spec.discrete_actions:
        raise PolicyError(
            f"an action of the task is one of {spec.discrete_actions} choices, and {kind} says real numbers: set "
            "policy.kind to categorical_mlp"
        )
    raise PolicyError(
        f"{kind} chooses among discrete actions, and the task's are {spec.action_dim} real numbers: set policy.kind to "
        "gaussian_mlp or flow"
    )


def _check_kind(kind: str, cls: type[Policy], folder: Any) -> None:
    """Raise `PolicyError` where config.json of a checkpoint directory says that it is of another kind."""
    path = Path(folder if isinstance(folder, str) else "") / CONFIG
    if not path.is_file() or cls.reads(config := read_json(path)):
        return
    others = [name for name in KINDS if policy_class(name).reads(config)]
    if others:
        raise PolicyError(
            f"{path} is of {' or '.join(others)}, and policy.kind is {kind}: set policy.kind to {others[0]}, or name "
            f"another checkpoint"
        )
    said = config.get("type", config.get("model_type"))
    if said is not None:
        raise PolicyError(f"{path} is of {shown(said)}, and checkpoints are read of: pi0, pi05, openvla")


def _checked_class(kind: str, architecture: Mapping[str, Any]) -> type[Policy]:
    cls = policy_class(kind)
    known = arguments_of(cls)
    for name, value in architecture.items():
        if name not in known:
            raise PolicyError(f"{kind} has no architecture argument {shown(name)}{nearest(name[:100], list(known))}")
        if not _fits(value, known[name]):
            raise PolicyError(f"{kind}'s {name} is of the kind of {known[name]!r}, got {shown(value)}")
    return cls


def arguments_of(cls: type[Policy]) -> dict[str, Any]:
    """The options of the class with their defaults: `options_type`'s fields, else the constructor's keywords."""
    if cls.options_type is not None:
        return {field.name: field.default for field in fields(cls.options_type)}
    parameters = inspect.signature(cls).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def _fits(value: Any, default: Any) -> bool:
    """True if the value is of the default's type, and a number of a size that can be; a list passes for a tuple, whose
    items fit the default's, and a whole number for a real."""
    if default is None:
        return True
    accepted = {float: (float, int), tuple: (list, tuple)}.get(type(default), (type(default),))
    if type(value) not in accepted:
        return False
    if isinstance(value, (list, tuple)):
        return all(_fits(item, default[0]) for item in value) if default else True
    if type(value) is int:
        return abs(value) <= LARGEST
    return math.isfinite(value) if type(value) is float else True


def nearest(given: str, valid: list[str]) -> str:
    """The end of an error message: the valid names that `given` may have meant, or all of them."""
    near = difflib.get_close_matches(given, valid, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; valid: {', '.join(sorted(valid))}"
