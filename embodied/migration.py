"""Migration of configurations that earlier versions wrote to today's keys.

A run's saved configuration is brought up to date when it is read. What a person writes with an old key is refused with
the new key, so that each setting has one name.
"""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from typing import Any

from embodied.errors import UserError, shown

VERSION = 3
"""Of the keys. It is saved with each configuration; those of version 1 were saved without. Version 2 said in options of
their own what a policy's `transforms` are now."""

RENAMED = {
    "ppo.decisions": "rollout.decisions",
    "ppo.gamma": "advantage.gamma",
    "ppo.lam": "advantage.lam",
    "ppo.credit": "advantage.credit",
    "ppo.bootstrap": "advantage.bootstrap",
    "ppo.normalise_advantages": "advantage.normalise",
    "ppo.clip": "loss.clip",
    "ppo.clip_high": "loss.clip_high",
    "ppo.dual_clip": "loss.dual_clip",
    "ppo.ratio_unit": "loss.ratio_unit",
    "ppo.value_clip": "loss.value_clip",
    "ppo.value_coef": "loss.value_coef",
    "ppo.entropy_coef": "loss.entropy_coef",
    "ppo.target_kl": "optim.target_kl",
    "group.size": "rollout.episode_group",
    "group.waves": "rollout.episodes_per_env",
    "group.max_waves": "rollout.max_episodes_per_env",
    "group.outcome": "advantage.outcome",
    "group.scale": "advantage.scale",
    "group.keep_rates": "advantage.keep_rates",
    "group.weight": "loss.weight",
    "learner.epochs": "optim.epochs",
    "learner.minibatch": "optim.minibatch",
    "learner.micro_batch": "optim.micro_batch",
    "learner.policy_lr": "optim.policy_lr",
    "learner.value_lr": "optim.value_lr",
    "learner.anneal": "optim.anneal",
    "learner.adam_eps": "optim.adam_eps",
    "learner.max_grad_norm": "optim.max_grad_norm",
    "learner.non_finite_limit": "optim.non_finite_limit",
    "learner.threads": "optim.threads",
    "farm.stages": "farm.groups",
    "also": "extra_tasks",
}
"""Keys of version 1, and what each is called now."""

_VALUES: dict[str, dict[Any, Any]] = {"ppo.normalise_advantages": {True: "task", False: "none"}}
"""Values of version 1 that are said otherwise now."""

OLD_SECTIONS = ("ppo", "group", "learner")
"""Sections of version 1 that are no more."""


def migrate(data: Mapping[str, Any]) -> dict[str, Any]:
    """A saved configuration in today's keys and version; keys that no version knew stay as they are.

    Raises `UserError` if a later version saved it.
    """
    check_version(data.get("version", 1))
    found = {key: dict(value) if isinstance(value, Mapping) else value for key, value in data.items()}
    if found.get("version", 1) == 1:
        for old, new in RENAMED.items():
            _move(found, old, new)
        for name in OLD_SECTIONS:
            if found.get(name) == {}:
                del found[name]
    return found | {"version": VERSION}


def check_version(version: Any) -> None:
    """Raise `UserError` for a version of the keys that this program does not know."""
    if version not in range(1, VERSION + 1):
        raise UserError(
            f"version {shown(version)} of the configuration is not known here, only 1 to {VERSION}; a newer one "
            "takes a newer version of this program"
        )


def renamed(key: str, value: Any = None) -> str | None:
    """What a key of version 1, or a section and what is given in it, is called now; None for keys of today."""
    if key in RENAMED:
        said = ", ".join(f"{str(old).lower()} -> {new}" for old, new in _VALUES.get(key, {}).items())
        return f"{key} is {RENAMED[key]} now" + (f" ({said})" if said else "")
    section, _, name = key.partition(".")
    if section not in OLD_SECTIONS:
        return None
    if name:
        value = {name: value}
    moved = dict.fromkeys(new.partition(".")[0] for old, new in RENAMED.items() if old.startswith(f"{section}."))
    *others, last = moved
    places = f"{', '.join(others)} and {last}" if others else last
    given = ", ".join(_arrow(f"{section}.{part}") for part in value) if isinstance(value, Mapping) else ""
    return f"{section}: its keys are in {places} now" + (f": {given}" if given else "")


def _arrow(key: str) -> str:
    """What `key` is called now, or what the key of version 1 is called that it is most like."""
    if key in RENAMED:
        return f"{key} -> {RENAMED[key]}"
    near = difflib.get_close_matches(key, RENAMED, n=1)
    return f"{key} -> {RENAMED[near[0]]}?" if near else f"no {key}"


def _move(data: dict[str, Any], old: str, new: str) -> None:
    """Take the value of the key `old`, if it is there, to `new`."""
    section, _, name = old.rpartition(".")
    source = data.get(section) if section else data
    if not isinstance(source, dict) or name not in source:
        return
    value = source.pop(name)
    section, _, name = new.rpartition(".")
    target = data.setdefault(section, {}) if section else data
    if isinstance(target, dict):  # else the configuration's own check says what it should be
        target[name] = next((new for said, new in _VALUES.get(old, {}).items() if said == value), value)
