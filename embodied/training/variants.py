"""One configuration as several: a seed each, or a setting's values. They run one after the other."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from embodied.config.files import all_settings, parse_config
from embodied.config.schema import Config
from embodied.errors import UserError, nearest
from embodied.files import parse_yaml


def variants(config: Config, source: str, seeds: Sequence[int], sweep: Sequence[str]) -> list[Config]:
    """The configuration with each combination of the sweep's values and the seeds, each under a name of its own.

    `sweep` has entries `optim.policy_lr=1e-4,3e-4`. Raises `UserError` for a key that there is not, a value that it
    cannot take, or what is named twice.
    """
    choices = [_choices(entry) for entry in sweep]
    if len({key for key, _ in choices}) < len(choices) or len(set(seeds)) < len(seeds):
        raise UserError("each setting of --sweep, and each of --seeds, is named once")
    found = []
    for values in itertools.product(*(values for _, values in choices)):
        for seed in seeds or (config.seed,):
            chosen = dict(zip((key for key, _ in choices), values, strict=True))
            found.append(_changed(config, source, chosen, seed))
    if len({variant.name for variant in found}) < len(found):
        raise UserError("--sweep: two values of a setting are the same, or come to the same name of a run")
    return found


def _choices(entry: str) -> tuple[str, list[Any]]:
    key, equals, values = entry.partition("=")
    key = key.strip().lstrip("-").replace("-", "_")
    if not equals or not values:
        raise UserError(f"--sweep takes KEY=VALUE,VALUE (optim.policy_lr=1e-4,3e-4), got {entry!r}")
    if key not in all_settings():
        raise UserError(f"--sweep: unknown key {key!r}{nearest(key, list(all_settings()))}")
    if key in ("seed", "name"):
        raise UserError(f"--sweep does not take {key}: --seeds 1 2 3 does, and names follow")
    try:
        return key, parse_yaml(f"[{values}]", "what was given")
    except UserError as error:
        raise UserError(f"--sweep: {values!r} are no values with commas between: {error}") from error


def with_settings(config: Config, settings: Mapping[str, Any], source: str) -> Config:
    """The configuration with other values of the keys `optim.policy_lr` and the like. Raises `UserError`, which names
    `source`."""
    data = config.model_dump(mode="json")
    for key, value in settings.items():
        *sections, last = key.split(".")
        place = data
        for section in sections:
            place = place[section]
        place[last] = value
    return parse_config(data, source)


def _changed(config: Config, source: str, chosen: dict[str, Any], seed: int) -> Config:
    parts = [config.name or Path(source).stem]
    # A name is a folder's: no slash, no space.
    parts += [re.sub(r"[^\w.+-]+", "_", f"{key.rpartition('.')[2]}{value}") for key, value in chosen.items()]
    return with_settings(config, {**chosen, "seed": seed, "name": "-".join((*parts, f"seed{seed}"))}, "--sweep")
