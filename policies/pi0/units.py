"""The units in which the network reads states and says actions: x' = (x - centre) / scale, number by number.

    openpi, pi0      centre mean, scale std + 1e-6
    openpi, pi0.5    centre and scale such that q01 is at -1 and q99 near 1: q99 - q01 + 1e-6 is two units
    LeRobot          MEAN_STD: std + 1e-8; QUANTILES: q99 - q01, or 1e-8 where that is 0, is two units; IDENTITY

(openpi/transforms.py, lerobot/processor/normalize_processor.py). In float64, as statistics are. D numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from policies.contract import PolicyError
from policies.files import one_file, read_json, read_tensors, shown, write_json, write_tensors

Mode = Literal["z-score", "quantile", "identity"]
MODES: Mapping[str, Mode] = {"MEAN_STD": "z-score", "QUANTILES": "quantile", "IDENTITY": "identity"}
"""LeRobot's names."""
OPENPI_EPS, LEROBOT_EPS = 1e-6, 1e-8
NORMALIZERS = {"pre": "normalizer_processor", "post": "unnormalizer_processor"}
"""LeRobot's steps that hold statistics, by processor."""
DEMONSTRATIONS = "demonstrations"
"""The name of statistics that come from what is learned from."""
DEMONSTRATED = "demonstrated"
"""The asset's name under which those are written."""
MOVES = 1e-6
"""A number whose deviation is below this has none."""


@dataclass(frozen=True)
class Units:
    """Of a state or an action."""

    centre: Tensor
    """[D] float64."""
    scale: Tensor
    """[D] float64, none of them 0."""

    def normalise(self, x: Tensor) -> Tensor:
        """[.., D] to float64."""
        return (x.double() - self.centre) / self.scale

    def unnormalise(self, x: Tensor) -> Tensor:
        """[.., D] to float64: the inverse."""
        return x.double() * self.scale + self.centre


@dataclass(frozen=True)
class RobotUnits:
    """Of a robot's state and actions."""

    state: Units
    action: Units


class StoredUnits(nn.Module):
    """A robot's units as buffers: they are saved with the policy, and go with it to its device."""

    def __init__(self, units: RobotUnits) -> None:
        super().__init__()
        for name, tensor in _named(units).items():
            self.register_buffer(name, tensor)

    @property
    def state(self) -> Units:
        return Units(self.get_buffer("state_centre"), self.get_buffer("state_scale"))

    @property
    def action(self) -> Units:
        return Units(self.get_buffer("action_centre"), self.get_buffer("action_scale"))

    def fill(self, units: RobotUnits) -> None:
        """Have these from now on."""
        for name, tensor in _named(units).items():
            self.get_buffer(name).copy_(tensor)


def _named(units: RobotUnits) -> dict[str, Tensor]:
    return {
        f"{which}_{name}": getattr(getattr(units, which), name)
        for which in ("state", "action")
        for name in ("centre", "scale")
    }


def first_of(units: RobotUnits, state_dim: int, action_dim: int) -> RobotUnits:
    """Of the robot's own numbers: files may have more, of what fills them up. Raises `PolicyError` for fewer."""
    found = []
    for what, of, size in (("proprioception", units.state, state_dim), ("an action", units.action, action_dim)):
        if len(of.centre) < size:
            raise PolicyError(f"the checkpoint's statistics are of {len(of.centre)} numbers, {what} has {size} here")
        found.append(Units(of.centre[:size], of.scale[:size]))
    return RobotUnits(*found)


def identity(state_dim: int, action_dim: int) -> RobotUnits:
    """Numbers as they are: until demonstrations say more."""
    sizes = (state_dim, action_dim)
    return RobotUnits(*(Units(torch.zeros(n, dtype=torch.float64), torch.ones(n, dtype=torch.float64)) for n in sizes))


def demonstrated(state: Tensor, actions: Tensor) -> RobotUnits:
    """Of demonstrations [N, P] and [N, D]: their means and standard deviations. What never changes has scale 1."""
    found = []
    for values in (state, actions):
        centre = values.double().mean(0)
        spread = (values.double() - centre).square().mean(0).sqrt()
        found.append(Units(centre, torch.where(spread < MOVES, 1.0, spread + OPENPI_EPS)))
    return RobotUnits(*found)


def read_openpi(folder: Path, asset: str, quantile: bool) -> RobotUnits:
    """From `assets/ASSET/norm_stats.json`, or `ASSET/norm_stats.json` as RLinf has it; without a name, of the only one.

    Raises `PolicyError` where there is none, more than one, or no numbers.
    """
    found = sorted(path.parent for path in folder.glob("**/norm_stats.json"))
    if asset:
        found = [path for path in (folder / "assets" / asset, folder / asset) if (path / "norm_stats.json").is_file()]
    if len(found) != 1:
        named = ", ".join(str(path.relative_to(folder)) for path in found) or "none"
        raise PolicyError(f"{folder}: norm_stats.json of {asset or 'one asset'} is wanted, found: {named}")
    path = found[0] / "norm_stats.json"
    raw = _object(path, read_json(path).get("norm_stats", {}), "norm_stats")
    mode: Mode = "quantile" if quantile else "z-score"
    return RobotUnits(*(_units(path, raw.get(key), mode, OPENPI_EPS, OPENPI_EPS) for key in ("state", "actions")))


def dataset_of(folder: Path) -> str | None:
    """Name of the dataset whose statistics a checkpoint has: openpi's only asset, or `dataset.repo_id` of LeRobot's
    train_config.json. None where neither says one, or where they are of what the policy has learned from."""
    found = list(folder.glob("**/norm_stats.json"))
    if len(found) == 1:
        asset = found[0].parent.relative_to(folder).as_posix().removeprefix("assets/")
        return None if asset in (".", DEMONSTRATED) else asset
    path = folder / "train_config.json"
    dataset = read_json(path).get("dataset") if path.is_file() else None
    repository = dataset.get("repo_id") if isinstance(dataset, dict) else None
    return repository if isinstance(repository, str) and repository else None


def write_openpi(folder: Path, units: RobotUnits) -> None:
    """As the only statistics of the folder, of which either mode makes these units but for rounding."""
    for path in folder.glob("**/norm_stats.json"):
        path.unlink()
    target = folder / "assets" / DEMONSTRATED / "norm_stats.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    parts = {"state": units.state, "actions": units.action}
    statistics = {key: _statistics(part, OPENPI_EPS, OPENPI_EPS) for key, part in parts.items()}
    named = {key: {name: tensor.tolist() for name, tensor in found.items()} for key, found in statistics.items()}
    write_json(target, {"norm_stats": named})


def write_lerobot(folder: Path, units: RobotUnits) -> None:
    """Into the processors' state, in place of what it has of states and actions."""
    parts = {"observation.state": units.state, "action": units.action}
    new = {f"{k}.{n}": t for k, part in parts.items() for n, t in _statistics(part, LEROBOT_EPS, 0.0).items()}
    for which, name in NORMALIZERS.items():
        _say_mode(folder / f"policy_{which}processor.json", name)
        path = one_file(folder, f"policy_{which}processor_step_*_{name}.safetensors")
        others = {n: t for n, t in read_tensors(path).items() if n.rpartition(".")[0] not in parts}
        write_tensors(path, others | new)


def _say_mode(path: Path, name: str) -> None:
    """Have a processor that takes numbers as they are normalise them by mean and deviation."""
    raw = read_json(path)
    for step in _steps(path, raw):
        norm_map = _norm_map(path, step)
        for kind in ("STATE", "ACTION"):
            if step.get("registry_name") == name and norm_map.get(kind) == "IDENTITY":
                norm_map[kind] = "MEAN_STD"
    write_json(path, raw)


def _object(path: Path, found: Any, what: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise PolicyError(f"{path}: {what} is {shown(found)} in place of an object")
    return found


def _steps(path: Path, raw: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Of one of LeRobot's processors."""
    steps = raw.get("steps", [])
    if not isinstance(steps, list):
        raise PolicyError(f"{path}: steps is {shown(steps)} in place of a list")
    return [_object(path, step, "a step") for step in steps]


def _norm_map(path: Path, step: Mapping[str, Any]) -> dict[str, Any]:
    config = _object(path, step.get("config", {}), "a step's config")
    return _object(path, config.get("norm_map", {}), "norm_map")


def _statistics(units: Units, std_eps: float, range_eps: float) -> dict[str, Tensor]:
    """float64 mean, std, q01 and q99: what `_units` reads."""
    centre, scale = units.centre, units.scale
    first = centre - scale
    return {"mean": centre, "std": scale - std_eps, "q01": first, "q99": first + 2 * scale - range_eps}


def read_lerobot(folder: Path) -> RobotUnits:
    """From the processors' state, in the modes that they name. Raises `PolicyError` for what they do not say."""
    found = []
    for (which, name), key in zip(NORMALIZERS.items(), ("observation.state", "action"), strict=True):
        path = folder / f"policy_{which}processor.json"
        step = next((s for s in _steps(path, read_json(path)) if s.get("registry_name") == name), None)
        if step is None:
            raise PolicyError(f"{path} has no step {name}")
        kind = "STATE" if which == "pre" else "ACTION"
        said = _norm_map(path, step).get(kind)
        mode = MODES.get(said) if isinstance(said, str) else None
        if mode is None:
            raise PolicyError(f"{path}: norm_map.{kind} is none of {', '.join(MODES)}")
        tensors = read_tensors(one_file(folder, f"policy_{which}processor_step_*_{name}.safetensors"))
        statistics = {n.removeprefix(f"{key}."): t for n, t in tensors.items() if n.startswith(f"{key}.")}
        found.append(_units(path, statistics, mode, LEROBOT_EPS, 0.0))
    return RobotUnits(*found)


def _units(path: Path, raw: Any, mode: Mode, std_eps: float, range_eps: float) -> Units:
    names = ("mean", "std") if mode != "quantile" else ("q01", "q99")
    found = _object(path, raw, "the statistics of a state or an action")
    first, second = (_numbers(path, name, found.get(name), mode) for name in names)
    if first.shape != second.shape:
        raise PolicyError(f"{path}: {' and '.join(names)} must be as many, got {len(first)} and {len(second)} numbers")
    if mode == "identity":
        return Units(torch.zeros_like(first), torch.ones_like(first))
    if mode == "z-score":
        units = Units(first, second + std_eps)
    else:
        width = second - first + range_eps
        width = torch.where(width == 0, LEROBOT_EPS, width)
        units = Units(first + width / 2, width / 2)
    if not (units.scale > 0).all() or not torch.cat([units.centre, units.scale]).float().isfinite().all():
        raise PolicyError(
            f"{path}: {' and '.join(names)} give no unit: {shown(first.tolist())}, {shown(second.tolist())}"
        )
    return units


def _numbers(path: Path, name: str, values: Any, mode: Mode) -> Tensor:
    """float64 [D], finite."""
    try:
        found = torch.as_tensor(values, dtype=torch.float64).flatten()
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise PolicyError(f"{path} has no {name} of numbers, which {mode} takes: {shown(values)}") from error
    if not found.isfinite().all():
        raise PolicyError(f"{path}: {name!r} has numbers that are not finite: {shown(values)}")
    return found
