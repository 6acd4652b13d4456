"""The units in which the network reads states and says actions: x' = (x - centre) / scale, number by number.

    openpi, z-score     centre mean, scale std + 1e-6
    openpi, quantile    centre and scale such that q01 is at -1 and q99 near 1: q99 - q01 + 1e-6 is two units
    LeRobot, MEAN_STD   std + eps for a state; std, or eps where that is 0, for an action (which is multiplied by std)
    LeRobot, QUANTILES, QUANTILE10, MIN_MAX    q01 and q99, q10 and q90, min and max are at -1 and 1; their distance,
                                               or eps where that is 0, is two units
    LeRobot, IDENTITY   numbers as they are

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
from policies.files import CONFIG, read_json, read_tensors, shown, write_json, write_tensors
from policies.pi0.processors import ACTION, POST, PRE, STATE, Mode, Normaliser, Step, check_modes, read_processors

Normalisation = Literal["z-score", "quantile"]
"""openpi's ways of normalising. The training's configuration has one of them; no file of the checkpoint records it."""
NORMALISATIONS: tuple[Normalisation, ...] = ("z-score", "quantile")
BOUNDS: Mapping[Mode, tuple[str, str]] = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
"""Statistics that each of LeRobot's modes takes."""
MODES: Mapping[Normalisation, Mode] = {"z-score": "MEAN_STD", "quantile": "QUANTILES"}
OPENPI_EPS, LEROBOT_EPS = 1e-6, 1e-8
DEMONSTRATIONS = "demonstrations"
"""The name of statistics that come from what is learned from."""
DEMONSTRATED = "demonstrated"
"""The asset's name under which those are written."""
MOVES = 1e-6
"""A number whose deviation is below this has none."""


@dataclass(frozen=True)
class Units:
    """Units of a state or an action."""

    centre: Tensor
    """[D] float64, or [] where it is the same for any D."""
    scale: Tensor
    """[D] or [] float64, none of them 0."""

    @property
    def ends(self) -> tuple[Tensor, Tensor]:
        """The numbers that become -1 and 1."""
        return self.centre - self.scale, self.centre + self.scale

    def normalise(self, x: Tensor) -> Tensor:
        """[.., D] to float64."""
        return (x.double() - self.centre) / self.scale

    def unnormalise(self, x: Tensor) -> Tensor:
        """[.., D] to float64: the inverse."""
        return x.double() * self.scale + self.centre


@dataclass(frozen=True)
class RobotUnits:
    """Units of a robot's state and actions."""

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


def first_of(units: RobotUnits, folder: Path, state_dim: int, action_dim: int) -> RobotUnits:
    """Units of the robot's own numbers: files may have more, for padding. Raises `PolicyError` for fewer."""
    found = []
    for what, of, size in (("proprioception", units.state, state_dim), ("an action", units.action, action_dim)):
        centre, scale = (t.expand(size) if t.dim() == 0 else t for t in (of.centre, of.scale))
        if len(centre) < size:
            raise PolicyError(
                f"{folder}: the statistics are of {len(centre)} numbers, {what} has {size} here: take a checkpoint of "
                f"this robot, or set policy.options.asset to {DEMONSTRATIONS} to learn with those of demonstrations"
            )
        found.append(Units(centre[:size], scale[:size]))
    return RobotUnits(*found)


def identity(state_dim: int, action_dim: int) -> RobotUnits:
    """Numbers as they are: until demonstrations say more."""
    sizes = (state_dim, action_dim)
    return RobotUnits(*(Units(torch.zeros(n, dtype=torch.float64), torch.ones(n, dtype=torch.float64)) for n in sizes))


def demonstrated(state: Tensor, actions: Tensor) -> RobotUnits:
    """Units from demonstrations [N, P], [N, D]: their means and standard deviations. What never changes has scale 1."""
    found = []
    for values in (state, actions):
        centre = values.double().mean(0)
        spread = (values.double() - centre).square().mean(0).sqrt()
        found.append(Units(centre, torch.where(spread < MOVES, 1.0, spread + OPENPI_EPS)))
    return RobotUnits(*found)


def read_openpi(folder: Path, asset: str, quantile: bool) -> RobotUnits:
    """Units from `assets/ASSET/norm_stats.json`, or RLinf's `ASSET/norm_stats.json`; without a name, of the only one.

    Raises `PolicyError` where there is none, more than one, or no numbers.
    """
    path, raw = openpi_statistics(folder, asset)
    mode = MODES["quantile" if quantile else "z-score"]
    return RobotUnits(*(_units(path, raw.get(key), mode, OPENPI_EPS, OPENPI_EPS) for key in ("state", "actions")))


def openpi_statistics(folder: Path, asset: str) -> tuple[Path, dict[str, Any]]:
    """The file, and what it has of `state` and `actions`. Raises `PolicyError`."""
    found = sorted(path.parent for path in folder.glob("**/norm_stats.json"))
    if asset:
        found = [path for path in (folder / "assets" / asset, folder / asset) if (path / "norm_stats.json").is_file()]
    if len(found) != 1:
        named = ", ".join(str(path.relative_to(folder)) for path in found) or "none"
        there = ", ".join(sorted(str(path.parent.relative_to(folder)) for path in folder.glob("**/norm_stats.json")))
        more = f"; policy.options.asset names one: {there}" if there else ""
        more += f"; policy.options.asset: {DEMONSTRATIONS} takes the statistics of what is learned from"
        raise PolicyError(f"{folder}: norm_stats.json of {asset or 'one asset'} is wanted, found: {named}{more}")
    path = found[0] / "norm_stats.json"
    return path, _object(path, read_json(path).get("norm_stats", {}), "norm_stats")


def normalisations(statistics: Mapping[str, Any]) -> list[Normalisation]:
    """openpi's ways of normalising for which the file has all numbers."""
    parts = [part for part in (statistics.get("state"), statistics.get("actions")) if isinstance(part, dict)]
    needed = {way: BOUNDS[MODES[way]] for way in NORMALISATIONS}
    return [way for way, names in needed.items() if all(part.get(n) is not None for part in parts for n in names)]


def openpi_default(adaptive: bool) -> Normalisation:
    """openpi's default: quantiles for pi0.5, z-scores for pi0."""
    return "quantile" if adaptive else "z-score"


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
    """Write the units as the only statistics of the folder; either mode reads these units from them, up to rounding."""
    for path in folder.glob("**/norm_stats.json"):
        path.unlink()
    target = folder / "assets" / DEMONSTRATED / "norm_stats.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    parts = {"state": units.state, "actions": units.action}
    statistics = {key: _statistics(part, OPENPI_EPS, OPENPI_EPS) for key, part in parts.items()}
    named = {key: {name: tensor.tolist() for name, tensor in found.items()} for key, found in statistics.items()}
    write_json(target, {"norm_stats": named})


def write_lerobot(folder: Path, units: RobotUnits) -> None:
    """Write the units into the processors' state, in place of its statistics of states and actions; any mode reads
    these units from them. A processor without normalisation then uses mean and deviation, as config.json says."""
    path = folder / CONFIG
    config = read_json(path)
    processors = read_processors(folder, config)
    parts = {STATE: units.state, ACTION: units.action}
    before, after = ((PRE, "normalizer_processor"), (POST, "unnormalizer_processor"))
    learned = processors.needed(*before, Normaliser)[1]
    modes = {kind: learned.norm_map.get(kind, "IDENTITY") for kind in ("STATE", "ACTION")}
    modes = {kind: "MEAN_STD" if mode == "IDENTITY" else mode for kind, mode in modes.items()}
    for file, name in (before, after):
        step, said = processors.needed(file, name, Normaliser)
        new = {
            f"{key}.{statistic}": tensor
            for key, part in parts.items()
            for statistic, tensor in _statistics(part, said.eps if key == STATE else 0.0, 0.0).items()
        }
        others = {} if step.state_file is None else read_tensors(step.state_file)
        others = {n: t for n, t in others.items() if n.rpartition(".")[0] not in parts}
        raw = read_json(folder / file)
        entry = raw["steps"][step.place]
        entry["state_file"] = f"{Path(file).stem}_step_{step.place}_{name}.safetensors"
        write_tensors(folder / entry["state_file"], others | new)
        entry["config"] = _normalising(entry.get("config") or {}, modes, units, file == PRE)
        write_json(folder / file, raw)
    if config.get("normalization_mapping"):
        config["normalization_mapping"] |= modes
        write_json(path, config)


def _normalising(config: Mapping[str, Any], modes: Mapping[str, str], units: RobotUnits, reads: bool) -> dict[str, Any]:
    """A normaliser's parameters with these modes; one that `reads` observations normalises the state, too."""
    found = {**config, "norm_map": {**config.get("norm_map", {}), **modes}}
    if reads:
        state = {"type": "STATE", "shape": [len(units.state.centre)]}
        found["features"] = {STATE: state} | config.get("features", {})
        if config.get("normalize_observation_keys") is not None:
            found["normalize_observation_keys"] = sorted({*config["normalize_observation_keys"], STATE})
    return found


def _object(path: Path, found: Any, what: str) -> dict[str, Any]:
    if not isinstance(found, dict):
        raise PolicyError(f"{path}: {what} is {shown(found)} in place of an object")
    return found


def _statistics(units: Units, std_eps: float, range_eps: float) -> dict[str, Tensor]:
    """float64 statistics from which `_units` makes these units in every mode."""
    centre, scale = units.centre, units.scale
    low, high = centre - scale, centre + scale - range_eps
    pairs = {names: (low, high) for names in BOUNDS.values()} | {BOUNDS["MEAN_STD"]: (centre, scale - std_eps)}
    return {name: t.clone() for names, two in pairs.items() for name, t in zip(names, two, strict=True)}


def read_lerobot(folder: Path) -> RobotUnits:
    """Units from the processors' states, in the modes that they name. Raises `PolicyError` for what they do not say."""
    raw = read_json(folder / CONFIG)
    processors = read_processors(folder, raw)
    check_modes(processors, raw)
    before = processors.needed(PRE, "normalizer_processor", Normaliser)
    after = processors.needed(POST, "unnormalizer_processor", Normaliser)
    _check_pictures(*before)
    state, action = _lerobot_units(*before, STATE), _lerobot_units(*after, ACTION)
    learned = _lerobot_units(*before, ACTION)
    for one, other in ((action.centre, learned.centre), (action.scale, learned.scale)):
        if one.shape != other.shape or not torch.allclose(one, other, rtol=1e-4, atol=1e-6):
            raise PolicyError(
                f"{before[0]} and {after[0]} have different statistics of {ACTION}: what is learned would be other "
                "actions than those that are said; take both files from one training"
            )
    return RobotUnits(state, action)


def _check_pictures(step: Step, said: Normaliser) -> None:
    pictures = {key: said.mode_of(key) for key, feature in said.features.items() if feature.type == "VISUAL"}
    changed = {key: mode for key, mode in pictures.items() if mode != "IDENTITY"}
    if not changed or step.state_file is None:  # LeRobot leaves what has no statistics as it is
        return
    known = {name.rpartition(".")[0] for name in read_tensors(step.state_file)}
    for key, mode in changed.items():
        if key in known:
            raise PolicyError(
                f"{step}: pictures of {key} are normalised by {mode}, which is not applied here: VISUAL is IDENTITY in "
                "every published pi0; set it so in both processors and config.json if pictures were trained in 0..1"
            )


def _lerobot_units(step: Step, said: Normaliser, key: str) -> Units:
    """Units of a feature, as the step normalises it."""
    mode = said.mode_of(key)
    if mode == "IDENTITY":
        return Units(torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64))
    path = step.path if step.state_file is None else step.state_file
    tensors = {} if step.state_file is None else read_tensors(step.state_file)
    statistics = {n.removeprefix(f"{key}."): t for n, t in tensors.items() if n.rpartition(".")[0] == key}
    if not statistics:
        raise PolicyError(
            f"{path} has no statistics of {key}, which {step} normalises by {mode}: a base checkpoint has none until "
            f"it is trained. Set policy.options.asset to {DEMONSTRATIONS} to learn with those of demonstrations"
        )
    return _units(path, statistics, mode, said.eps if key == STATE else 0.0, 0.0, said.eps)


def _units(path: Path, raw: Any, mode: Mode, std_eps: float, range_eps: float, least: float = LEROBOT_EPS) -> Units:
    """`std_eps` and `range_eps` are added; `least` is what takes the place of a scale, or a range, of 0."""
    names = BOUNDS[mode]
    found = _object(path, raw, "the statistics of a state or an action")
    first, second = (_numbers(path, name, found.get(name), mode) for name in names)
    if first.shape != second.shape:
        raise PolicyError(f"{path}: {' and '.join(names)} must be as many, got {len(first)} and {len(second)} numbers")
    if mode == "MEAN_STD":
        scale = second + std_eps
        units = Units(first, torch.where(scale == 0, least, scale))
    else:
        width = second - first + range_eps
        width = torch.where(width == 0, least, width)
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
        raise PolicyError(
            f"{path} has no {name} of numbers, which {mode} takes: {shown(values)}. policy.options.normalisation names "
            f"another way of openpi's files; policy.options.asset: {DEMONSTRATIONS} takes the statistics of what is "
            "learned from"
        ) from error
    if not found.isfinite().all():
        raise PolicyError(f"{path}: {name!r} has numbers that are not finite: {shown(values)}")
    return found
