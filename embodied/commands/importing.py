"""`embodied import`: recordings and checkpoints of other projects, converted to ours."""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

from embodied.config import RuntimeConfig
from embodied.demonstrations.sources import recognised
from sim_farm.contract import Gripper, Orientation


@dataclass(frozen=True)
class Observations:
    """What the imported dataset shows, and its conventions, as in `env` of a configuration."""

    cameras: int | tuple[str, ...] = 1
    """How many of the task's cameras are drawn, or their names."""
    image_size: int = 256
    """Height and width of a frame in pixels."""
    orientation: Orientation = "upright"
    """Of frames: `upright`; `stock`, as the simulator returns them; `rotated`, that turned by 180 degrees."""
    gripper: Gripper = "simulator"
    """The last action element in the dataset: the `simulator`'s own, its sign (`binary`), or 1 opens and 0 closes
    (`inverted`)."""


@dataclass(frozen=True)
class Arguments:
    """Convert a recording of another project to a dataset in LeRobot's layout. Recordings of simulators are replayed:
    the recorded actions are executed from the recorded first state, success and states are compared with the
    recording, and frames are drawn anew."""

    source: tyro.conf.Positional[Path]
    """File or folder to convert; its format is found from its contents."""
    out: Path = tyro.MISSING
    """Folder to write; there must be none of that name."""
    task: str | None = None
    """`<simulator>/<task>` that the recording is of, where the source does not say it or its name here is another."""
    env: Observations = Observations()
    episodes: tuple[str, ...] = ()
    """Episodes of the source by number or range, for example `0:20 25`; none: all."""
    drop_idle: bool = False
    """Leave out the actions that do nothing: all elements but the gripper's have a norm below 1e-4, and the gripper's
    equals that of the action before (OpenVLA's filter). The others are executed without them."""
    only_successes: bool = False
    """Leave out the episodes that do not end solved."""
    tolerance: float = 0.01
    """Largest deviation of a position (m), joint (rad) or orientation (element of the quaternion) from the recording,
    in any step; an episode beyond it is left out."""
    runtime: RuntimeConfig = RuntimeConfig()
    json: Path | None = None
    """Write the result to this file."""


def run(args: Arguments) -> dict[str, Any]:
    importer = importlib.import_module(recognised(args.source).importer)
    return importer.import_source(args)
