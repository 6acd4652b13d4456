"""openpi's statistics: units from `norm_stats.json`, and units written there.

    z-score     centre mean, scale std + 1e-6
    quantile    centre and scale such that q01 is at -1 and q99 near 1: q99 - q01 + 1e-6 is two units

(openpi/transforms.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from policies.contract import PolicyError
from policies.files import read_json, write_json
from policies.lerobot.statistics import trained_on
from policies.units import BOUNDS, DEMONSTRATIONS, Mode, RobotUnits, object_of, statistics_of, units_of

Normalisation = Literal["z-score", "quantile"]
"""openpi's ways of normalising. The training's configuration has one of them; no file of the checkpoint records it."""
NORMALISATIONS: tuple[Normalisation, ...] = ("z-score", "quantile")
MODES: Mapping[Normalisation, Mode] = {"z-score": "MEAN_STD", "quantile": "QUANTILES"}
OPENPI_EPS = 1e-6
DEMONSTRATED = "demonstrated"
"""The asset's name under which statistics of demonstrations are written."""


def read_openpi(folder: Path, asset: str, quantile: bool) -> RobotUnits:
    """Units from `assets/ASSET/norm_stats.json`, or RLinf's `ASSET/norm_stats.json`; without a name, of the only one.

    Raises `PolicyError` where there is none, more than one, or no numbers.
    """
    path, raw = openpi_statistics(folder, asset)
    mode = MODES["quantile" if quantile else "z-score"]
    eps = {"std_eps": OPENPI_EPS, "range_eps": OPENPI_EPS}
    other = next(way for way in NORMALISATIONS if MODES[way] != mode)
    try:
        return RobotUnits(*(units_of(path, raw.get(key), mode, **eps) for key in ("state", "actions")))
    except PolicyError as error:
        raise PolicyError(f"{error}; policy.options.normalisation: {other} is openpi's other way") from None


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
    return path, object_of(path, read_json(path).get("norm_stats", {}), "norm_stats")


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
    return trained_on(folder)


def write_openpi(folder: Path, units: RobotUnits) -> None:
    """Write the units as the only statistics of the folder; either mode reads these units from them, up to rounding."""
    for path in folder.glob("**/norm_stats.json"):
        path.unlink()
    target = folder / "assets" / DEMONSTRATED / "norm_stats.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    parts = {"state": units.state, "actions": units.action}
    statistics = {key: statistics_of(part, OPENPI_EPS, OPENPI_EPS) for key, part in parts.items()}
    named = {key: {name: tensor.tolist() for name, tensor in found.items()} for key, found in statistics.items()}
    write_json(target, {"norm_stats": named})
