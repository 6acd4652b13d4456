"""Policies on disk: JSON and safetensors, nothing that is executed when it is read.

FOLDER/policy/config.json             kind, spec, architecture; quantised_base, where the base is quantised
FOLDER/policy/model.safetensors       the actor's parameters and all buffers
FOLDER/value_head.safetensors         the critic's parameters

A kind with a community of its own writes FOLDER/policy in that community's layout (`PolicyFormat.write`); kind, spec
and architecture are then further entries of its config.json.
"""

from __future__ import annotations

import json
from collections.abc import Collection
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from policies.contract import Policy, PolicyError, PolicySpec, spec_to_dict
from policies.files import read_json, read_tensors, shown
from policies.policy_kind import PolicyKind, actor_state, check_layouts, on_cpu
from policies.registry import arguments_of, build, nearest, policy_kind

ACTOR = Path("policy")
CONFIG = ACTOR / "config.json"
MODEL = ACTOR / "model.safetensors"
VALUE_HEAD = Path("value_head.safetensors")
QUANTISED = "quantised_base"
"""Entry of config.json: the type in which the frozen base of an adapter is stored in memory."""
SPEC_DEFAULTS = {
    field.name: list(field.default) if isinstance(field.default, tuple) else field.default
    for field in fields(PolicySpec)
    if type(field.default) in (int, tuple)
}
BOUNDS = ("action_low", "action_high")
"""Fields of a spec that are lists of numbers."""


def save(policy: Policy, folder: str | Path) -> None:
    """Write the policy's three files into the folder, which is made if need be; old ones are replaced."""
    folder = Path(folder)
    (folder / CONFIG).parent.mkdir(parents=True, exist_ok=True)
    (folder / CONFIG).unlink(missing_ok=True)
    policy_kind(policy.kind).format.write(policy, folder / ACTOR)
    community = json.loads((folder / CONFIG).read_text()) if (folder / CONFIG).exists() else {}
    (folder / CONFIG).write_text(json.dumps(community | _config(policy), indent=2) + "\n")
    save_file(on_cpu(policy.value_head.state_dict()), folder / VALUE_HEAD)


def load(folder: str | Path, code: Collection[str] = ()) -> Policy:
    """The policy that was saved in the folder, on the CPU, equal to the last bit. Raises `PolicyError`.

    `code`: what the folder, which may come from elsewhere, may name as its kind in the form `package.module:Class`.
    """
    folder = Path(folder)
    config = _read_config(folder / CONFIG)
    if ":" in config["kind"] and config["kind"] not in code:
        kind = shown(config["kind"])
        raise PolicyError(
            f"{folder / CONFIG} names code that would be run: the kind {kind}. If you trust what has this name on this "
            f"machine, allow it: policies.load(folder, code=[{kind}])"
        )
    spec = _spec(config["spec"], folder / CONFIG)
    try:
        kind = policy_kind(config["kind"])
        form = kind.format
        arguments = _architecture(config, kind) | form.restore_arguments(folder / ACTOR)
        if form.is_own:
            # Sizes are outside data: no memory is taken before the tensors are seen to have them.
            with torch.device("meta"):
                empty = build(config["kind"], spec, seed=0, **arguments)
            check_layouts(folder / MODEL, actor_state(empty))
            check_layouts(folder / VALUE_HEAD, empty.value_head.state_dict())
        policy = build(config["kind"], spec, seed=0, base=config.get(QUANTISED), **arguments)
    except PolicyError as error:
        raise PolicyError(f"{folder / CONFIG}: {str(error)[:2000]}") from error  # it may quote a long text of the file
    _fill(policy, folder)
    return policy


def export(policy: Policy, folder: str | Path) -> None:
    """Write the whole policy as its community's own programs load it, adapters merged.

    Raises `PolicyError` for a kind that has no layout but this project's.
    """
    policy_kind(policy.kind).format.export(policy, Path(folder))


def load_into(policy: Policy, folder: str | Path) -> None:
    """Replace the policy's tensors by the folder's, on the policy's device.

    Raises `PolicyError`, and leaves the policy as it was, if the folder is damaged, holds numbers that are not
    finite, or a policy of another kind, spec or architecture; its incidental entries may differ, and an adapter fits a
    base whether it is quantised or not.
    """
    check_into(policy, folder)
    _fill(policy, Path(folder))


def check_into(policy: Policy, folder: str | Path) -> None:
    """Raise `PolicyError` if the folder holds a policy of another kind, spec or architecture; reads no tensor."""
    folder = Path(folder)
    found, expected = _read_config(folder / CONFIG), _config(policy)
    differences = _differences(found, expected, policy_kind(policy.kind))
    if differences:
        raise PolicyError(
            f"{folder} holds another policy than this run's: {'; '.join(differences)}. Set env.task, env.control_mode, "
            "policy.reads and policy.options as it was trained with (its run's config.yaml has them), or name another"
        )


def _config(policy: Policy) -> dict[str, Any]:
    spec = {name: list(v) if isinstance(v, tuple) else v for name, v in spec_to_dict(policy.spec).items()}
    quantised = {} if policy.base is None else {QUANTISED: policy.base}
    return {"kind": policy.kind, "spec": spec, "architecture": policy.architecture(), **quantised}


def _read_config(path: Path) -> dict[str, Any]:
    if not path.exists():
        raise PolicyError(f"no policy here: {path} is missing{_hint(path.parents[1])}")
    config = read_json(path)
    parts = {"kind": str, "spec": dict, "architecture": dict}
    if not all(isinstance(config.get(k), t) for k, t in parts.items()):
        raise PolicyError(f"{path} must hold kind (text), spec and architecture (objects)")
    reserved = {"kind", "spec", "seed", "base"} & config["architecture"].keys()
    if reserved:
        raise PolicyError(f"{path}: architecture has {min(reserved)!r}, which is no argument of a network")
    return config


def _architecture(config: dict[str, Any], kind: PolicyKind) -> dict[str, Any]:
    """The saved options, without those of earlier versions."""
    return {name: value for name, value in config["architecture"].items() if name not in kind.former}


def _hint(folder: Path) -> str:
    if not (folder / CONFIG.name).exists():
        return ""
    return "; a community's checkpoint is read when a policy is built: policies.build(KIND, spec, seed, checkpoint=...)"


def _spec(saved: dict[str, Any], path: Path) -> PolicySpec:
    known = [f.name for f in fields(PolicySpec)]
    for name, value in saved.items():
        if name not in known:
            raise PolicyError(f"{path}: spec has no field {shown(name)}{nearest(name[:100], known)}")
        items = {"cameras": (str,)} | dict.fromkeys(BOUNDS, (int, float))
        listed = isinstance(value, list) and all(type(item) in items.get(name, ()) for item in value)
        if not (listed if name in items else type(value) is int):
            raise PolicyError(f"{path}: spec.{name} cannot be {shown(value)}")
    if "action_dim" not in saved:
        raise PolicyError(f"{path}: spec.action_dim is missing")
    values: dict[str, Any] = {name: tuple(v) if isinstance(v, list) else v for name, v in saved.items()}
    return PolicySpec(**values)


def _differences(found: dict[str, Any], expected: dict[str, Any], kind: PolicyKind) -> list[str]:
    """One phrase for each entry in which the configurations differ.

    What an older version did not write was the argument's default, which is what `load` builds it with too.
    """
    if found["kind"] != expected["kind"]:
        there, here = (f"{config['kind']} for {config['spec']}" for config in (found, expected))
        return [f"it holds a {there}, expected a {here}"]
    defaults = {name: list(v) if isinstance(v, tuple) else v for name, v in arguments_of(kind).items()}
    pairs = {
        "spec": (SPEC_DEFAULTS | found["spec"], expected["spec"]),
        "architecture": (defaults | _architecture(found, kind), defaults | expected["architecture"]),
    }
    differences = [
        f"{part}.{name} is {there.get(name)!r}, expected {here.get(name)!r}"
        for part, (there, here) in pairs.items()
        for name in sorted(there.keys() | here.keys())
        if there.get(name) != here.get(name) and (f"{part}.{name}".removeprefix("architecture.")) not in kind.incidental
    ]
    if differences and kind.scales_to_bounds and expected["spec"]["action_low"] and "action_low" not in found["spec"]:
        differences.append(
            "its actions are in the environment's units, as they were before -1 and 1 meant the bounds: train it "
            "again, or evaluate it with the version that trained it"
        )
    return differences


def _fill(policy: Policy, folder: Path) -> None:
    """Copy everything into the policy, after all of it is known to be whole and to fit."""
    form = policy_kind(policy.kind).format
    actor = form.read(policy, folder / ACTOR)
    check_layouts(folder / VALUE_HEAD, policy.value_head.state_dict())
    critic = read_tensors(folder / VALUE_HEAD)
    tensors = actor | {f"value_head.{name}": tensor for name, tensor in critic.items()}
    # Both readers have checked the names; a frozen base is not among them.
    policy.load_state_dict(tensors, strict=form.is_own)
