"""Configurations in files: those in `configs/`, a user's own, and what a run saves in its folder.

Unknown keys are refused with the nearest valid one.
"""

from __future__ import annotations

import itertools
import textwrap
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo

from embodied.config.schema import HERE, SEEDS, Config, explained, refuse_code
from embodied.errors import UserError, nearest, shown
from embodied.files import read_yaml, write_whole, yaml_text

CONFIGS = HERE / "configs"
REMOVED: dict[str, Any] = {
    "advantage.normalise": "task",
    "advantage.reward_kl": 0.0,
    "env.randomise_levels": "1-5",
    "eval.every_episodes": 50,
    "eval.levels": "1-5",
    "farm.pin": True,
    "loss.contrast_drift": 1e-4,
    "loss.contrast_scale": 1.0,
    "loss.dual_clip": None,
    "loss.engine_kl_max": 0.1,
    "loss.engine_weight_max": 2.0,
    "loss.entropy_target": None,
    "loss.reference_kl_target": None,
    "loss.weight": "decision",
    "optim.lr_kl": None,
    "optim.non_finite_limit": 3,
    "optim.threads": 0,
    "plan.any_hardware": False,
    "reward.threshold": None,
    "rollout.curriculum": 0.0,
    "rollout.task_curriculum": 0.0,
    "runtime.trace": True,
}
"""Former settings, which folders of earlier runs still name, with the values that they had by default."""
NEVER_LEARNED = ("farm.pin", "optim.threads", "plan.any_hardware", "runtime.trace", "eval.every_episodes")
"""Those of them that decided nothing of what a policy learns: any value is ignored."""


def shipped_configs() -> dict[str, str]:
    """The configurations of the project by name, with the first sentence of the comment that each begins with."""
    found = {}
    for path in sorted(CONFIGS.glob("*.yaml")):
        lines = itertools.takewhile(lambda line: line.startswith("#"), path.read_text().splitlines())
        sentence = " ".join(line.lstrip("# ") for line in lines).partition(". ")[0]
        found[path.stem] = textwrap.shorten(sentence, 110, placeholder=" ...")
    return found


def load_config(reference: str, code: Collection[str] = ()) -> Config:
    """Load the configuration called `reference` from `configs/`, or from the YAML file of that path. A file that a run
    saved in its folder may name only the allowed `code`. Raises `UserError`."""
    path = Path(reference)
    if path.suffix not in (".yaml", ".yml"):
        path = CONFIGS / f"{reference}.yaml"
    if not path.is_file():
        known = sorted(p.stem for p in CONFIGS.glob("*.yaml"))
        raise UserError(f"no configuration {reference!r}{nearest(reference, known)}")
    if path.name == "config.yaml" and (path.parent / "checkpoints").is_dir():
        saved = saved_config(path)
        refuse_code(saved, path, code)
        return saved
    return parse_config(_mapping(path), str(path))


def parse_config(data: dict[str, Any], source: str) -> Config:
    """A configuration from plain data. Raises `UserError`, which names unknown keys, with the nearest valid one, and
    wrong values."""
    try:
        return Config.model_validate(data)
    except ValidationError as error:
        raise UserError(f"{source}: {explained(error, list(all_settings()))}") from error


def checked(config: Config, source: str) -> Config:
    """The configuration of sections that were put together unchecked. Raises as `parse_config` does."""
    return parse_config(config.model_dump(warnings=False), source)


def with_settings(config: Config, settings: Mapping[str, Any], source: str) -> Config:
    """The configuration with other values of settings, by their keys as on the command line (`optim.policy_lr`).

    Raises `UserError`, which names `source`, for an unknown key, with the nearest valid one, and for a wrong value.
    """
    data = config.model_dump(mode="json")
    for key, value in settings.items():
        *sections, last = key.split(".")
        place = data
        for section in sections:
            place = place.get(section)
            if not isinstance(place, dict):
                raise UserError(f"{source}: unknown key {key!r}{nearest(key, list(all_settings()))}")
        place[last] = value
    return parse_config(data, source)


def save_config(config: Config, path: Path) -> None:
    """Write the resolved configuration: every key, so that a later default cannot change what the run was."""
    write_whole(path, yaml_text(config.model_dump(mode="json")))


def saved_config(path: Path) -> Config:
    """The configuration that `save_config` wrote to the file, without the former settings of `former_settings`, and
    with those that have another key now under that.

    Raises `UserError`."""
    data = _mapping(path)
    try:
        _rename_former(data)
    except ValueError as error:
        raise UserError(f"{path}: {error}") from None
    for section, name in _former(data, path).values():
        section.pop(name)
    return parse_config(data, str(path))


def former_settings(path: Path) -> list[str]:
    """Keys of former settings that the file still has, and without which the run is the same. Raises `UserError` for a
    value with which it would be another run."""
    return list(_former(_mapping(path), path))


def _former(data: Mapping[str, Any], path: Path) -> dict[str, tuple[dict[str, Any], str]]:
    """The section and the name in it of each former setting, by its key. Raises as `former_settings` does."""
    found = {}
    for key, default in REMOVED.items():
        *sections, last = key.split(".")
        places = {key: _section(data, sections)}
        if sections == ["env"]:
            places |= {f"extra_tasks[{i}].{last}": task for i, task in enumerate(_extra_tasks(data))}
        for place, section in places.items():
            if last not in section:
                continue
            if section[last] != default and key not in NEVER_LEARNED:
                raise UserError(
                    f"{path}: {place} is {shown(section[last])}, and there is no such setting any more (its default, "
                    f"{shown(default)}, is what every run does): use the version that wrote the file, or take the line "
                    "out of it, and the run continues without"
                )
            found[place] = section, last
    return found


def _rename_former(data: dict[str, Any]) -> None:
    """Give settings of earlier versions their present keys. Raises `ValueError` for two of them that are one now."""
    env, optim, policy = (_section(data, [name]) for name in ("env", "optim", "policy"))
    tasks = (env, *_extra_tasks(data))
    for task in tasks:
        tokenizer = task.pop("tokenizer", None)
        if tokenizer is not None:  # a further task's options are in place of all of env's
            task["options"] = {**_section(task if "options" in task else env, ["options"]), "tokenizer": tokenizer}
    if optim.pop("anneal", False):
        optim["lr_schedule"] = "linear"
    if (checkpoint := policy.pop("path", None)) is not None:
        policy["options"] = {**_section(policy, ["options"]), "checkpoint": checkpoint}
    _rename_recompute(policy, optim)
    _join(data, "stop_at", {name: data.pop(name, None) for name in ("stop_at_success", "stop_at_return")})
    reward, advantage = _section(data, ["reward"]), _section(data, ["advantage"])
    _join(reward, "model", {name: reward.pop(name, None) for name in ("function", "classifier")})
    masked = "masked" if advantage.pop("mask_truncated", False) else None
    _join(advantage, "overlong", {"mask_truncated": masked, "overlong_margin": advantage.pop("overlong_margin", None)})
    for task in tasks:
        if seeds := task.pop("start_seeds", 0):
            states = task.get("init_states") or None
            _join(task, "init_states", {"init_states": states, "start_seeds": f"{SEEDS}{seeds}"})
    plan = _section(data, ["plan"])
    if (file := plan.pop("file", None)) is not None:
        plan["mode"] = file
    sft, reads = _section(data, ["sft"]), policy.get("reads")
    if sft.pop("only_successes", False):
        entries = sft.get("episodes") or ["all"]
        sft["episodes"] = ["solved" if entry == "all" else f"solved:{entry}" for entry in entries]
    present = "decisions" if reads == ["instruction"] else "steps"
    if sft.pop("rows", present) != present:
        raise ValueError(
            f"there is no setting sft.rows any more, and a policy that reads {shown(reads)} learns from {present}: use "
            "the version that wrote the file"
        )
    evaluation = _section(data, ["eval"])
    if isinstance(axes := evaluation.get("axes", []), list) and isinstance(evaluation.get("event"), list):
        evaluation["axes"] = [*axes, *evaluation.pop("event")]
    if evaluation.pop("prompt", None) == "published" and evaluation.get("protocol") in ("libero-plus", "libero-pro"):
        evaluation["protocol"] += "-published"


def _rename_recompute(policy: dict[str, Any], optim: dict[str, Any]) -> None:
    """Read `policy.options.gradient_checkpointing` as `optim.recompute`, for kinds that had the former. A kind that is
    named by its module may have an option of this name, and is not imported."""
    options, kind = _section(policy, ["options"]), str(policy.get("kind"))
    if "gradient_checkpointing" not in options or ":" in kind:
        return
    from policies.registry import policy_kind  # an import of seconds, which other files do not wait for

    if "gradient_checkpointing" in policy_kind(kind).former and options.pop("gradient_checkpointing"):
        optim["recompute"] = True


def _join(section: dict[str, Any], key: str, former: Mapping[str, Any]) -> None:
    """Set the key to the one value that the `former` settings have. Raises `ValueError` where several have one."""
    given = {name: value for name, value in former.items() if value is not None}
    if len(given) > 1:
        names = " and ".join(f"{name} {shown(value)}" for name, value in given.items())
        raise ValueError(f"{names} are one setting now, {key}: take one of them out of the file")
    if given:
        (section[key],) = given.values()


def _extra_tasks(data: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Settings of the further tasks, which replace those of `env`."""
    tasks = data.get("extra_tasks")
    return [task for task in tasks if isinstance(task, dict)] if isinstance(tasks, list) else []


def _section(data: Any, names: Sequence[str]) -> dict[str, Any]:
    """The mapping in `data` below these names; empty where there is none."""
    for name in names:
        data = data.get(name) if isinstance(data, dict) else None
    return data if isinstance(data, dict) else {}


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
