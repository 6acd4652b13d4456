"""The units in which a network reads states and gives actions: x' = (x - centre) / scale, number by number.

Statistics of a dataset give them in one of LeRobot's modes, whose names stand for other projects' ways too:

    MEAN_STD                           centre mean, scale std
    MIN_MAX, QUANTILES, QUANTILE10     min and max, q01 and q99, q10 and q90 are at -1 and 1
    IDENTITY                           numbers as they are

In float64, as statistics are. D numbers of a state or an action.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from policies.contract import PolicyError
from policies.errors import shown

Mode = Literal["MEAN_STD", "MIN_MAX", "QUANTILES", "QUANTILE10", "IDENTITY"]
BOUNDS: Mapping[Mode, tuple[str, str]] = {
    "MEAN_STD": ("mean", "std"),
    "MIN_MAX": ("min", "max"),
    "QUANTILES": ("q01", "q99"),
    "QUANTILE10": ("q10", "q90"),
}
"""Statistics that each mode takes."""
DEMONSTRATIONS = "demonstrations"
"""The name of statistics that come from what is learned from."""
DEMONSTRATED_EPS = 1e-6
"""Added to the standard deviations of demonstrations."""
MOVES = 1e-6
"""A number whose deviation is below this has none."""
LEAST = 1e-8
"""Scale, or range, in place of one that is 0."""


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
        centre, scale = (t.repeat(size) if t.dim() == 0 else t for t in (of.centre, of.scale))
        if len(centre) < size:
            raise PolicyError(
                f"{folder}: the statistics are of {len(centre)} numbers, {what} has {size} here: take a checkpoint of "
                f"this robot, or set policy.options.asset to {DEMONSTRATIONS} to learn with those of demonstrations"
            )
        found.append(Units(centre[:size], scale[:size]))
    return RobotUnits(*found)


def all_of(units: RobotUnits, folder: Path, state_dim: int, action_dim: int) -> RobotUnits:
    """Units of the robot's own numbers, where files have no padding. Raises `PolicyError` unless they are as many."""
    for what, of, size in (("the state", units.state, state_dim), ("the action", units.action, action_dim)):
        if of.centre.dim() and size and len(of.centre) != size:
            raise PolicyError(
                f"{folder}: the statistics of {what} are of {len(of.centre)} numbers, the task's has {size}: take a "
                "checkpoint of this robot, choose numbers with policy.options.transforms, or set policy.options.asset "
                f"to {DEMONSTRATIONS}"
            )
    return first_of(units, folder, state_dim, action_dim)


def unchanged() -> Units:
    """Units of numbers that stay as they are, however many there are."""
    return Units(torch.zeros((), dtype=torch.float64), torch.ones((), dtype=torch.float64))


def identity(state_dim: int, action_dim: int) -> RobotUnits:
    """Numbers as they are: until demonstrations say more."""
    sizes = (state_dim, action_dim)
    return RobotUnits(*(Units(torch.zeros(n, dtype=torch.float64), torch.ones(n, dtype=torch.float64)) for n in sizes))


def demonstrated(state: Tensor, actions: Tensor, modes: tuple[Mode, Mode] = ("MEAN_STD", "MEAN_STD")) -> RobotUnits:
    """Units from demonstrations [N, P], [N, D], in the modes of the state and of the actions: MEAN_STD or MIN_MAX. What
    never changes has scale 1."""
    return RobotUnits(_demonstrated(state.double(), modes[0]), _demonstrated(actions.double(), modes[1]))


def _demonstrated(values: Tensor, mode: Mode) -> Units:
    if mode == "MEAN_STD":
        centre = values.mean(0)
        spread = (values - centre).square().mean(0).sqrt()
        return Units(centre, torch.where(spread < MOVES, 1.0, spread + DEMONSTRATED_EPS))
    low, high = values.amin(0), values.amax(0)
    spread = (high - low) / 2
    return Units((low + high) / 2, torch.where(spread < MOVES, 1.0, spread))


def units_of(
    path: Path, raw: Any, mode: Mode, *, std_eps: float = 0.0, range_eps: float = 0.0, least: float = LEAST
) -> Units:
    """The units that the file's statistics `raw` give in the mode. `std_eps` is added to deviations, `range_eps` to
    ranges; `least` takes the place of a scale, or a range, of 0. Raises `PolicyError`."""
    names = BOUNDS[mode]
    found = object_of(path, raw, "the statistics of a state or an action")
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


def statistics_of(units: Units, std_eps: float, range_eps: float) -> dict[str, Tensor]:
    """float64 statistics from which `units_of` makes these units in every mode."""
    centre, scale = units.centre, units.scale
    low, high = centre - scale, centre + scale - range_eps
    pairs = {names: (low, high) for names in BOUNDS.values()} | {BOUNDS["MEAN_STD"]: (centre, scale - std_eps)}
    return {name: t.clone() for names, two in pairs.items() for name, t in zip(names, two, strict=True)}


def object_of(path: Path, found: Any, what: str) -> dict[str, Any]:
    """What the file holds, if it is an object. Raises `PolicyError`."""
    if not isinstance(found, dict):
        raise PolicyError(f"{path}: {what} is {shown(found)} in place of an object")
    return found


def _numbers(path: Path, name: str, values: Any, mode: Mode) -> Tensor:
    """float64 [D], finite."""
    try:
        found = torch.as_tensor(values, dtype=torch.float64).flatten()
    except (OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise PolicyError(
            f"{path} has no {name} of numbers, which {mode} takes: {shown(values)}. Set policy.options.asset to "
            f"{DEMONSTRATIONS} to learn with the statistics of demonstrations"
        ) from error
    if not found.isfinite().all():
        raise PolicyError(f"{path}: {name!r} has numbers that are not finite: {shown(values)}")
    return found
