"""`embodied import`: recordings and checkpoints of other projects, converted to ours."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import tyro

from embodied.config import RuntimeConfig
from embodied.demonstrations.sources import recognised
from embodied.errors import UserError
from sim_farm.contract import Gripper, Orientation

EVERY = ("source", "out", "json")
"""Options that every format takes."""


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
    tolerance: float | None = None
    """Largest deviation of a position (m) or joint (rad) from the recording; an episode beyond it is left out. None:
    the format's own."""
    fps: int | None = None
    """Steps per second of an RLDS dataset, which does not say it; None: that of the published datasets whose rate is
    known (LIBERO, Bridge, RT-1's fractal, DROID)."""
    action: tuple[str, ...] = ()
    """Features of an RLDS dataset's steps that are joined, in this order, to the action; none: `action`."""
    runtime: RuntimeConfig = RuntimeConfig()
    json: Path | None = None
    """Write the result to this file."""


def run(args: Arguments) -> dict[str, Any]:
    known = recognised(args.source)
    for field in fields(args):
        if field.name not in (*EVERY, *known.options) and getattr(args, field.name) != field.default:
            raise UserError(
                f"--{field.name.replace('_', '-')} is not for {args.source}, which is in the format {known.name}; what "
                f"can be given is: {', '.join('--' + name.replace('_', '-') for name in known.options)}"
            )
    return importlib.import_module(known.importer).import_source(args)
