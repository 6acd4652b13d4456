"""Settings of a run as others can use them: what differs from the defaults, without this machine's folders."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from embodied.config.schema import Config

PLACE = re.compile(r"/|~[\w.-]*(/|$)|\.\.(/|$)|file:")
"""Beginnings of the path of a folder of this machine: `/`, `~`, `~user`, `..`, `file:`."""


def training_of(config: Config) -> dict[str, Any]:
    """The settings of the training that are not the defaults, with names in place of this machine's folders, and
    without what names its hosts and devices: `runtime`, `plan`, `farm.nodes`."""
    found = {name: value for name, value in differing(config).items() if name not in ("name", "runtime", "plan")}
    farm = {name: value for name, value in found.pop("farm", {}).items() if name != "nodes"}
    return without_places(found | ({"farm": farm} if farm else {}))


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
    """Plain data in which the path of a folder of this machine is its last part, and a checkpoint the name of its
    run."""
    if isinstance(value, dict):
        return {name: without_places(item) for name, item in value.items()}
    if isinstance(value, list):
        return [without_places(item) for item in value]
    if not isinstance(value, str) or not PLACE.match(value):
        return value
    path = Path(value.removeprefix("file:"))
    return path.parents[1].name if path.parent.name == "checkpoints" else path.name
