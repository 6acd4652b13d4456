"""The registry of policy kinds: a policy by its kind, built from a seed.

A policy that is not one of ours is named by its module (`my_package.my_policy:MyPolicy`), or by the entry point of an
installed package. It is imported in each process that asks for it.
"""

from __future__ import annotations

import importlib
import inspect
import math
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import torch

from policies.contract import Policy, PolicySpec
from policies.errors import PolicyError, nearest, shown
from policies.files import CONFIG, read_json
from policies.kinds import ENTRY_POINTS, KINDS, check_kind
from policies.named_code import entry_point, named

LARGEST, LARGEST_IMAGE, LARGEST_VOCABULARY = 2**16, 4096, 2**20
"""Limits of the sizes in a spec and of whole numbers in an architecture: a file may hold any number."""


REQUIRED = ("act", "evaluate", "value", "architecture")
"""Methods that every policy defines."""


def policy_class(kind: str) -> type[Policy]:
    """The class of `kind`: one of `KINDS`, `package.module:Class`, or an installed package's. Raises `PolicyError` with
    the nearest kinds if there is none, and for what is no policy."""
    check_kind(kind)
    if ":" in kind:
        return _checked_policy(named(kind, PolicyError), kind)
    if kind in KINDS:
        module, name = KINDS[kind].split(":")
        return getattr(importlib.import_module(module), name)
    return _checked_policy(entry_point(ENTRY_POINTS, kind, PolicyError), f"the entry point {kind!r}")


def _checked_policy(found: Any, name: str) -> type[Policy]:
    if not isinstance(found, type):
        raise PolicyError(f"{name} is a {type(found).__name__}, not a class derived from policies.Policy")
    missing = [method for method in REQUIRED if getattr(found, method, None) in (None, getattr(Policy, method))]
    derived = issubclass(found, Policy)
    if missing or not derived:
        wrong = [] if derived else ["is not derived from policies.Policy"]
        wrong += [f"lacks the methods {', '.join(missing)}"] if missing else []
        raise PolicyError(f"{name} is no policy: it {' and '.join(wrong)} (policies/contract.py says what they do)")
    return found


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
        largest = {"image_size": LARGEST_IMAGE, "discrete_actions": LARGEST_VOCABULARY}.get(name, LARGEST)
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
            policy = cls(spec, cls.options_type(**architecture))
        else:
            policy = cls(spec, **architecture)
    policy.kind = kind  # the name by which a checkpoint's reader finds the class again
    return policy


def check(kind: str, architecture: Mapping[str, Any]) -> None:
    """Raise `PolicyError` for what `build` would refuse whatever the task: an unknown kind or argument, files that are
    missing, or of another kind. Builds nothing."""
    cls = _checked_class(kind, architecture)
    if cls.options_type is not None:
        cls.options_type(**architecture)  # raises for a value that an option does not take
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
        f"{kind} chooses among discrete actions, and the task's are real numbers: set policy.kind to gaussian_mlp or "
        "flow"
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
        raise PolicyError(
            f"{path} is of {shown(said)}, and checkpoints are read of: pi0, pi05, openvla, and language models whose "
            "architectures end in ForCausalLM"
        )


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


def types_of(cls: type[Policy]) -> dict[str, Any]:
    """The options of the class with the types that it declares; `Any` where it declares none, or none that is known."""
    hints: dict[str, Any] = {}
    with suppress(NameError):  # a class of your own may name what only a type checker imports
        hints = get_type_hints(cls.options_type or cls.__init__)
    return {name: hints.get(name, Any) for name in arguments_of(cls)}


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
