"""The folder of a run's policy as it is pushed: the community's layout, card, configurations, record.

An adapter goes up alone where a program loads it alone and others can have its base; else it is merged.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import policies
from embodied.commands.export import version, write_policy
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.files import read_json, yaml_text
from embodied.hub import Name
from embodied.run.folder import METRICS, whole_checkpoint
from embodied.run.saved_settings import CONFIG, recorded_settings
from embodied_hub import results
from embodied_hub.policy_card import card
from embodied_hub.record import CARD, FOLDER, TRAINING, USE, Record
from policies.contract import Policy
from policies.files import ADAPTER_CONFIG
from policies.policy_kind import LoadedBy
from policies.registry import policy_kind

BASE_NAME = "base_model_name_or_path"
"""PEFT's entry for the base of an adapter."""
NEW_ADAPTER = "lora_"
"""How options of a new adapter begin."""
OF_THE_FOLDER = ("adapter", "any_base", "backbone")
"""Options whose place an exported folder takes."""
LEARNED_UNITS = ("asset", "demonstrations")
"""The option by which units are learned from demonstrations: an exported folder has them as its own."""


@dataclass(frozen=True)
class Pushed:
    """A policy that is pushed."""

    run_dir: Path
    checkpoint: Path
    config: Config
    policy: Policy
    name: Name
    is_adapter: bool
    loaded: LoadedBy

    @property
    def base(self) -> str | None:
        """The base as others have it: a repository, or a folder of this project (`assets/...`)."""
        named = self.config.policy.options.get("checkpoint")
        known = Name.parse(self.config.policy.hub_name or "")
        if known is not None:
            return known.repository
        return named if isinstance(named, str) and named.startswith("assets/") else None


def identity_of(run_dir: Path) -> str:
    """sha256 that tells the run from others: of its first row of metrics, whose times no other run has, or else of its
    configuration. It stays the same when the run is resumed."""
    for name in (METRICS, CONFIG):
        path = run_dir / name
        data = path.read_bytes().partition(b"\n")[0] if name == METRICS and path.is_file() else b""
        if name == CONFIG:
            data = path.read_bytes()
        if data:
            return hashlib.sha256(data).hexdigest()
    raise UserError(f"{run_dir / CONFIG} is empty: bring it back")


def write(run_dir: Path, checkpoint: Path | None, name: Name, licence: str | None, folder: Path) -> Pushed:
    """Write everything that goes up into the new folder. Raises `UserError`, or `PolicyError` for a policy that has no
    community's layout."""
    found = whole_checkpoint(run_dir, checkpoint)
    assert found is not None
    config, policy = recorded_settings(run_dir), policies.load(found)
    form = policy_kind(policy.kind).format
    pushed = Pushed(run_dir, found, config, policy, name, False, LoadedBy())
    if (found / "policy" / ADAPTER_CONFIG).exists() and pushed.base is not None:
        form.write(policy, folder)
        loaded = form.loaded_by(folder)
        if loaded.program:
            pushed = Pushed(run_dir, found, config, policy, name, True, loaded)
            _name_base(folder / ADAPTER_CONFIG, pushed.base)
        else:
            shutil.rmtree(folder)
            folder.mkdir()
    if not pushed.is_adapter:
        write_policy(policy, found, folder)
        pushed = Pushed(run_dir, found, config, policy, name, False, form.loaded_by(folder))
    (folder / FOLDER).mkdir()
    (folder / USE).write_text(yaml_text(use_of(pushed)))
    (folder / TRAINING).write_text(yaml_text(training_of(config)))
    evaluations = results.of_checkpoint(run_dir, found)
    beginnings = results.of_beginnings(run_dir, {one.sha256 for one in evaluations})
    (folder / CARD).write_text(card(pushed, evaluations, beginnings, licence))
    kind = "adapter" if pushed.is_adapter else "policy"
    Record(kind, run_dir.resolve().name, identity_of(run_dir), version(), found.name, policy.kind).written(folder)
    return pushed


def use_of(pushed: Pushed) -> dict[str, Any]:
    """The configuration that evaluates the pushed policy: task, what it reads, its options but for those of the
    training."""
    policy = pushed.config.policy
    options = {
        name: value
        for name, value in policy.options.items()
        if not name.startswith(NEW_ADAPTER) and name not in OF_THE_FOLDER and (name, value) != LEARNED_UNITS
    }
    here = pushed.name.repository
    options |= {"checkpoint": pushed.base, "adapter": here} if pushed.is_adapter else {"checkpoint": here}
    settings = differing(pushed.config)
    said = settings.get("policy", {})
    names = ("kind", "reads", "chunk", "horizon", *(("base",) if pushed.is_adapter else ()))
    kept = {name: said[name] for name in names if name in said}
    rest = {name: settings[name] for name in ("seed", "env", "extra_tasks", "eval") if name in settings}
    return without_places({**rest, "policy": {**kept, "options": options}})


def training_of(config: Config) -> dict[str, Any]:
    """The settings of the training that are not the defaults, with names in place of this machine's folders."""
    return without_places({name: value for name, value in differing(config).items() if name != "name"})


def differing(config: Config) -> dict[str, Any]:
    """The settings that are not the defaults, as nested plain data; options as a whole."""
    found: dict[str, Any] = _differing(config.model_dump(mode="json"), Config().model_dump(mode="json"))
    return found


def _differing(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in settings.items():
        default = defaults.get(name)
        if isinstance(value, dict) and isinstance(default, dict) and name != "options":
            value = _differing(value, default)
            default = {}
        if value != default:
            found[name] = value
    return found


def without_places(value: Any) -> Any:
    """Plain data in which an absolute path is its last part, and a checkpoint the name of its run."""
    if isinstance(value, dict):
        return {name: without_places(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_places(item) for item in value]
    if not isinstance(value, str) or not value.startswith("/"):
        return value
    path = Path(value)
    return path.parents[1].name if path.parent.name == "checkpoints" else path.name


def _name_base(path: Path, base: str | None) -> None:
    """Let PEFT's configuration name the base as others have it, and not its folder on this machine."""
    path.write_text(json.dumps({**read_json(path), BASE_NAME: base}, indent=2) + "\n")
