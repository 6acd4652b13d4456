"""The registry of policy kinds: a kind by its name, and a policy of it built from a seed.

A kind that is not one of ours is named by its module (`my_package.my_policy:MyPolicy`), or by the entry point of an
installed package; the name is that of a class derived from `Policy`, or of a `PolicyKind`. It is imported in each
process that uses it.
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

from policies.capabilities import Quantises, check_names
from policies.contract import Policy, PolicySpec
from policies.errors import PolicyError, nearest, shown
from policies.files import ADAPTER_CONFIG, CONFIG, read_json
from policies.kinds import ENTRY_POINTS, KINDS, check_kind, kind_names
from policies.named_code import entry_point, named
from policies.policy_kind import PolicyKind
from policies.quantised import HANG_ONE, check_base, no_adapter

LARGEST, LARGEST_IMAGE, LARGEST_VOCABULARY = 2**16, 4096, 2**20
"""Limits of the sizes in a spec and of whole numbers in an architecture: a file may hold any number."""
LARGEST_HISTORY = 64
"""Most observations of a decision, and largest distance of two."""


REQUIRED = ("act", "evaluate", "value", "architecture")
"""Methods that every policy defines."""


def policy_kind(name: str) -> PolicyKind:
    """The kind of this name: one of `KINDS`, `package.module:NAME`, or an installed package's.

    Raises `PolicyError`, with the nearest names, if there is none, and for what is no policy.
    """
    check_kind(name)
    if ":" in name:
        return _checked_kind(named(name, PolicyError), name)
    if name in KINDS:
        module, constant = KINDS[name].split(":")
        return _checked_kind(getattr(importlib.import_module(module), constant), name)
    return _checked_kind(entry_point(ENTRY_POINTS, name, PolicyError), f"the entry point {name!r}")


def _checked_kind(found: Any, name: str) -> PolicyKind:
    kind = found if isinstance(found, PolicyKind) else PolicyKind(found)
    cls = kind.policy
    if not isinstance(cls, type):
        raise PolicyError(
            f"{name} is a {type(cls).__name__}, not a class derived from policies.Policy, nor a policies.PolicyKind"
        )
    missing = [method for method in REQUIRED if getattr(cls, method, None) in (None, getattr(Policy, method))]
    derived = issubclass(cls, Policy)
    if missing or not derived:
        wrong = [] if derived else ["is not derived from policies.Policy"]
        wrong += [f"lacks the methods {', '.join(missing)}"] if missing else []
        raise PolicyError(f"{name} is no policy: it {' and '.join(wrong)} (policies/contract.py says what they do)")
    return kind


def build(kind: str, spec: PolicySpec, seed: int, base: Any = None, **architecture: Any) -> Policy:
    """A new policy of `kind` on the CPU, its weights determined by the seed; global generators are untouched.

    `base`: type of the frozen matrices under an adapter, `nf4` or `int8` (`policies.quantised`); None: that of the
    policy. `architecture` are the options of the kind (`PolicyKind.options`). Raises `PolicyError` for one that is
    unknown or of another type than its default, so that a configuration file cannot cause another error.
    """
    found = _with_options(kind, architecture)
    check_actions(kind, spec)
    if spec.action_dim < 1 or spec.chunk < 1:
        raise PolicyError(f"spec.action_dim and spec.chunk must be at least 1, got {spec.action_dim}, {spec.chunk}")
    spec = _with_observations(kind, spec, observations_of(kind, architecture))
    for name, size in vars(spec).items():
        largest = {"image_size": LARGEST_IMAGE, "discrete_actions": LARGEST_VOCABULARY}.get(name, LARGEST)
        if type(size) is int and not 0 <= size <= largest:
            raise PolicyError(f"spec.{name} is of 0 to {largest}, got {shown(size)}")
    if spec.horizon == spec.chunk and not (found.predicts_more and found.pretrained):
        spec = replace(spec, horizon=0)  # the same, said once; where a checkpoint has a horizon, 0 is that
    if spec.predicted < spec.chunk or (spec.predicted > spec.chunk and not found.predicts_more):
        allowed = (
            "of at least that" if found.predicts_more else f"of {spec.chunk}: {kind} executes all that it predicts"
        )
        raise PolicyError(f"chunks of {spec.chunk} actions need a horizon {allowed}; policy.horizon is {spec.horizon}")
    # The initialisers draw from the CPU's default generator: it is seeded alone (torch.manual_seed would seed
    # every GPU's too) and put back.
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        make: Any = found.policy_for(architecture)
        policy: Policy = make(spec, found.options(**architecture)) if found.options else make(spec, **architecture)
    policy.kind = kind  # the name by which a checkpoint's reader finds the class again
    if (policy.spec.observations, policy.spec.distance) != (spec.observations, spec.distance):
        raise PolicyError(
            f"the policy {kind} has a spec of {policy.spec.observations} observations at a distance of "
            f"{policy.spec.distance}, and its format says {spec.observations} at {spec.distance}: give its PolicyKind "
            "a PolicyFormat whose `observations` says what the policy reads"
        )
    check_names(policy)
    if base is not None:
        if not isinstance(policy, Quantises):
            raise PolicyError(f"{no_adapter(kind, base)}: none can hang on it. Leave policy.base out")
        policy.quantise_base(base)
        policy.base = base
    return policy


def observations_of(kind: str, architecture: Mapping[str, Any]) -> tuple[int, int]:
    """Number of observations that a decision of a policy with these options is made on, and env steps from each to the
    next. Raises `PolicyError` for options that the kind does not take, and for numbers that no policy has."""
    count, distance = _with_options(kind, architecture).format.observations(architecture)
    if not 1 <= count <= LARGEST_HISTORY or not 1 <= distance <= LARGEST_HISTORY:
        raise PolicyError(f"{kind} has observations {count} and distance {distance}: each is of 1 to {LARGEST_HISTORY}")
    return count, distance


def _with_observations(kind: str, spec: PolicySpec, own: tuple[int, int]) -> PolicySpec:
    """The spec with the policy's own number of observations and their distance. Raises `PolicyError` for a spec of
    another policy's."""
    given = (spec.observations, spec.distance)
    if given not in ((1, 1), own):
        raise PolicyError(
            f"{kind} decides on {own[0]} observations at a distance of {own[1]} env steps, and the spec has {given[0]} "
            f"at {given[1]}: leave them out of the spec, or build a policy of that history"
        )
    return replace(spec, observations=own[0], distance=own[1])


def check(kind: str, architecture: Mapping[str, Any], base: str | None = None) -> None:
    """Raise `PolicyError` for what `build` would refuse whatever the task: an unknown kind or argument, files that are
    missing, or of another kind, a number of observations that no policy has, a quantised base without an adapter.
    Builds nothing."""
    found = _with_options(kind, architecture)
    if base is not None:
        _check_base(kind, found, architecture, base)
    if found.options is not None:
        found.options(**architecture)  # raises for a value that an option does not take
    _check_kind(kind, found, architecture.get("checkpoint"))
    found.format.check_files(architecture)
    observations_of(kind, architecture)


def _check_base(kind: str, found: PolicyKind, architecture: Mapping[str, Any], base: str) -> None:
    """Raise `PolicyError` where a base cannot be quantised, as far as options and installed packages tell."""
    check_base(base)
    if not issubclass(found.policy_for(architecture), Quantises):
        raise PolicyError(f"{no_adapter(kind, base)}: none can hang on it. Leave policy.base out")
    saved = Path(str(architecture.get("checkpoint", ""))) / ADAPTER_CONFIG
    if not (architecture.get("lora_rank") or architecture.get("adapter") or saved.is_file()):
        raise PolicyError(f"{no_adapter(kind, base)}: {HANG_ONE}")


def check_actions(kind: str, spec: PolicySpec) -> None:
    """Raise `PolicyError` where the task's actions are choices and the kind's are real numbers, or the other way
    round."""
    if policy_kind(kind).chooses == bool(spec.discrete_actions):
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


def _check_kind(kind: str, found: PolicyKind, folder: Any) -> None:
    """Raise `PolicyError` where config.json of a checkpoint directory says that it is of another kind."""
    path = Path(folder if isinstance(folder, str) else "") / CONFIG
    if not path.is_file() or found.format.reads(config := read_json(path)):
        return
    others = kinds_that_read(config)
    if others:
        raise PolicyError(
            f"{path} is of {' or '.join(others)}, and policy.kind is {kind}: set policy.kind to {others[0]}, or name "
            f"another checkpoint"
        )
    said = config.get("type", config.get("model_type"))
    if said is not None:
        raise PolicyError(
            f"{path} is of {shown(said)}, which no kind of policies reads; the kinds are: {', '.join(kind_names())}"
        )


def kinds_that_read(config: Mapping[str, Any]) -> list[str]:
    """The kinds that a checkpoint directory with this config.json is made of; a package's that cannot be imported is
    left out."""
    found = list[str]()
    for name in kind_names():
        with suppress(PolicyError):
            found += [name] if policy_kind(name).format.reads(config) else []
    return found


def _with_options(kind: str, architecture: Mapping[str, Any]) -> PolicyKind:
    """The kind. Raises `PolicyError` for options that it does not have, or of another type."""
    found = policy_kind(kind)
    known = arguments_of(found)
    for name, value in architecture.items():
        if name in found.former:
            raise PolicyError(f"there is no policy.options.{name} any more: set {found.former[name]} in its place")
        if name not in known:
            raise PolicyError(f"{kind} has no architecture argument {shown(name)}{nearest(name[:100], list(known))}")
        if not _fits(value, known[name]):
            raise PolicyError(f"{kind}'s {name} is of the kind of {known[name]!r}, got {shown(value)}")
    return found


def arguments_of(kind: PolicyKind) -> dict[str, Any]:
    """The options of the kind with their defaults: fields of `PolicyKind.options`, else the constructor's keywords."""
    if kind.options is not None:
        return {field.name: field.default for field in fields(kind.options)}
    parameters = inspect.signature(kind.policy).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def types_of(kind: PolicyKind) -> dict[str, Any]:
    """The options of the kind with the types that it declares; `Any` where it declares none, or none that is known."""
    hints: dict[str, Any] = {}
    with suppress(NameError):  # a class of your own may name what only a type checker imports
        hints = get_type_hints(kind.options or kind.policy.__init__)
    return {name: hints.get(name, Any) for name in arguments_of(kind)}


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
