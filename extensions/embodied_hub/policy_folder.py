"""The folder of a run's policy as it is pushed: the community's layout, card, configurations, record.

An adapter goes up alone where a program loads it alone and others can have its base; else it is merged.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import policies
from embodied.commands.export import version, write_policy
from embodied.config.schema import Config
from embodied.errors import UserError
from embodied.files import read_json, yaml_text
from embodied.hub import Name
from embodied.run.folder import METRICS, whole_checkpoint
from embodied.run.saved_settings import CONFIG, recorded_settings, run_of_checkpoint
from embodied_hub import results
from embodied_hub.policy_card import card
from embodied_hub.record import CARD, FOLDER, TRAINING, USE, Record
from embodied_hub.settings import differing, training_of, without_places
from policies.contract import Policy
from policies.files import ADAPTER_CONFIG
from policies.policy_kind import LoadedBy
from policies.registry import policy_kind

BASE_NAME = "base_model_name_or_path"
"""PEFT's entry for the base of an adapter."""
NEW_ADAPTER = "lora_"
"""Beginning of the names of the options that make a new adapter."""
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
    is_adapter: bool = False
    loaded: LoadedBy = LoadedBy()

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
    rows = run_dir / METRICS
    first = rows.read_bytes().partition(b"\n")[0] if rows.is_file() else b""
    return hashlib.sha256(first or (run_dir / CONFIG).read_bytes()).hexdigest()


def write(run_dir: Path, checkpoint: Path | None, name: Name, licence: str | None, folder: Path) -> Pushed:
    """Write everything that goes up into the new folder. Raises `UserError`, or `PolicyError` for a policy that has no
    community's layout."""
    found = whole_checkpoint(run_dir, checkpoint)
    assert found is not None
    owner = run_of_checkpoint(found) if checkpoint is not None else None
    if owner is not None and owner != run_dir.resolve():
        raise UserError(
            f"--checkpoint {checkpoint} belongs to the run {owner.name} ({owner}), and not to {run_dir}: push that "
            "run, or name a checkpoint of this one"
        )
    config, policy = recorded_settings(run_dir), policies.load(found)
    form = policy_kind(policy.kind).format
    pushed = Pushed(run_dir, found, config, policy, name)
    if (found / "policy" / ADAPTER_CONFIG).exists() and pushed.base is not None:
        form.write(policy, folder)
        loaded = form.loaded_by(folder)
        if loaded.program:
            pushed = replace(pushed, is_adapter=True, loaded=loaded)
            _name_base(folder / ADAPTER_CONFIG, pushed.base)
        else:
            shutil.rmtree(folder)
            folder.mkdir()
    if not pushed.is_adapter:
        write_policy(policy, found, folder)
        pushed = replace(pushed, loaded=form.loaded_by(folder))
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
    base = {"checkpoint": policy.hub_name or pushed.base, "adapter": here}
    options |= base if pushed.is_adapter else {"checkpoint": here}
    settings = differing(pushed.config)
    said = settings.get("policy", {})
    names = ("kind", "reads", "chunk", "horizon", *(("base",) if pushed.is_adapter else ()))
    kept = {name: said[name] for name in names if name in said}
    rest = {name: settings[name] for name in ("seed", "env", "extra_tasks", "eval") if name in settings}
    return without_places({**rest, "policy": {**kept, "options": options}})


def _name_base(path: Path, base: str | None) -> None:
    """Let PEFT's configuration name the base as others have it, and not its folder on this machine."""
    path.write_text(json.dumps({**read_json(path), BASE_NAME: base}, indent=2) + "\n")
