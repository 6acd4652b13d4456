"""Configurations in files: those in `configs/`, a user's own, and what a run saves in its folder.

Unknown keys are refused with the nearest valid one, those of earlier versions with today's.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from embodied import migration
from embodied.config.schema import HERE, Config, refuse_code
from embodied.errors import UserError, nearest, shown
from embodied.files import read_yaml, write_whole

CONFIGS = HERE / "configs"
MOST_PROBLEMS = 5
"""That one message names."""


def shipped_configs() -> dict[str, str]:
    """The configurations of the project by name, with the first sentence of the comment that each begins with."""
    found = {}
    for path in sorted(CONFIGS.glob("*.yaml")):
        lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
        sentence = " ".join(line.lstrip("# ") for line in lines).partition(". ")[0]
        found[path.stem] = textwrap.shorten(sentence, 110, placeholder=" ...")
    return found


def load_config(reference: str, code: Collection[str] = ()) -> Config:
    """The configuration called `reference` in `configs/`, or in the YAML file of that path, which may be what a run
    saved in its folder: that one may name only the `code` that is allowed here. Raises `UserError`."""
    path = Path(reference)
    if path.suffix not in (".yaml", ".yml"):
        path = CONFIGS / f"{reference}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in CONFIGS.glob("*.yaml"))
        raise UserError(f"no configuration {reference!r}{nearest(reference, known)}")
    if path.name == "config.yaml" and (path.parent / "checkpoints").is_dir():
        saved = saved_config(path)
        refuse_code(saved.named_code, path, code)
        return saved
    return parse_config(_mapping(path), str(path))


def parse_config(data: dict[str, Any], source: str) -> Config:
    """A configuration from plain data in today's keys.

    Raises `UserError`, which names unknown keys, with the nearest valid one or what they are called now, and wrong
    values.
    """
    try:
        if "version" in data:
            migration.check_version(data["version"])
        return Config.model_validate({key: value for key, value in data.items() if key != "version"})
    except UserError as error:
        raise UserError(f"{source}: {error}") from error
    except ValidationError as error:
        raise UserError(f"{source}: {_explained(error)}") from error


def save_config(config: Config, path: Path) -> None:
    """The resolved configuration: every key, so that a later default cannot change what the run was, and which version
    of the keys they are."""
    data = {"version": migration.VERSION, **config.model_dump(mode="json")}
    write_whole(path, yaml.safe_dump(data, sort_keys=False))


def saved_config(path: Path) -> Config:
    """What `save_config` wrote to the file, now or in an earlier version. Raises `UserError`."""
    data = _mapping(path)
    try:
        data = migration.migrate(data)
    except UserError as error:
        raise UserError(f"{path}: {error}") from error
    return parse_config(data, str(path))


def all_settings() -> dict[str, FieldInfo]:
    """Every setting by its key as it is written on the command line: `loss.clip`."""
    found: dict[str, FieldInfo] = {}

    def walk(model: type[BaseModel], prefix: str) -> None:
        for name, field in model.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, BaseModel):
                walk(kind, f"{prefix}{name}.")
            else:
                found[f"{prefix}{name}"] = field

    walk(Config, "")
    return found


def _mapping(path: Path) -> dict[str, Any]:
    data = read_yaml(path) or {}
    if not isinstance(data, dict):
        raise UserError(f"{path} must hold keys and values, not {type(data).__name__}")
    return data


def _explained(error: ValidationError) -> str:
    """What is wrong; of very many things the first."""
    every = error.errors(include_url=False)
    more = f"; and {len(every) - MOST_PROBLEMS} more" if len(every) > MOST_PROBLEMS else ""
    return "; ".join(_explain(item) for item in every[:MOST_PROBLEMS]) + more


def _explain(item: Any) -> str:
    key = ".".join(str(part) for part in item["loc"])
    if item["type"] == "extra_forbidden":
        known = migration.renamed(key, item["input"])
        return known or f"unknown key {shown(key)}{nearest(key[:100], list(all_settings()))}"
    return f"{key[:100]}: {item['msg'][:300]} (got {shown(item['input'])})"
