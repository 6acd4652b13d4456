"""Formats of others that `embodied import` converts, each recognised by what its files hold, not by their names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
import numpy.typing as npt
import tyro

from embodied.config.schema import RuntimeConfig, indices_of
from embodied.errors import UserError
from sim_farm.contract import Gripper, Orientation

REPLAYED = ("task", "env", "episodes", "drop_idle", "only_successes", "tolerance", "drift", "runtime")
"""Options of a recording that is replayed in the farm."""
IDLE_NORM = 1e-4
"""An action whose elements but the gripper's have a smaller norm moves nothing."""


@dataclass(frozen=True)
class Observations:
    """Observations of the imported dataset, and its conventions, as in `env` of a configuration."""

    cameras: int | tuple[str, ...] = 1
    """Number of the task's cameras that are drawn, or their names."""
    image_size: int = 256
    """Height and width of a frame in pixels."""
    orientation: Orientation = "upright"
    """Orientation of frames: `upright`; `stock`, as the simulator returns them; `rotated`, that turned by 180
    degrees."""
    gripper: Gripper = "simulator"
    """The last action element in the dataset: the `simulator`'s own, its sign (`binary`), or 1 opens and 0 closes
    (`inverted`)."""


@dataclass(frozen=True)
class ImportRequest:
    """Convert a recording of another project to a dataset in LeRobot's layout, or the shards that a training left to a
    Hugging Face directory. Recordings of simulators are replayed: the recorded actions are executed from the recorded
    first state, success and states are compared with the recording, and frames are drawn anew."""

    source: tyro.conf.Positional[Path]
    """File or folder to convert; its format is found from its contents."""
    out: Path = tyro.MISSING
    """Folder to write. It must not exist yet."""
    task: str | None = None
    """`<simulator>/<task>` that the recording is of, where the source does not say it or its name here is another."""
    env: Observations = Observations()
    episodes: tuple[str, ...] = ()
    """Episodes of the source by number and range (`0-19,25`), or by the name of one of its selections; none: all."""
    drop_idle: bool = False
    """Leave out the actions that do nothing: all elements but the gripper's have a norm below 1e-4, and the gripper's
    equals that of the action before (OpenVLA's filter). The others are executed without them."""
    only_successes: bool = False
    """Leave out episodes that end unsolved."""
    tolerance: float | None = None
    """Largest deviation of a position (m) or joint (rad) from the recording, after any env step. None: the format's
    default. A recording from another processor, whose kernels round differently, may drift farther in contacts."""
    drift: Literal["leave-out", "correct"] = "leave-out"
    """Treatment of an episode beyond the tolerance. `leave-out` drops it. `correct` replaces each state beyond the
    tolerance by the recorded one, from which the next action continues (not with drop-idle)."""
    fps: int | None = None
    """Steps per second of an RLDS dataset, which does not record it. None: the known rate, for published datasets
    (LIBERO, Bridge, RT-1's fractal, DROID)."""
    action: tuple[str, ...] = ()
    """Features of an RLDS dataset's steps that are joined, in this order, to the action; none: `action`."""
    base: str | None = None
    """Checkpoint that a training began from, whose shards are converted: a Hugging Face directory, or its Hugging
    Face name. None: the folder `huggingface` beside the shards."""
    runtime: RuntimeConfig = RuntimeConfig()
    quiet: bool = False
    """Print only results and warnings."""
    json: Path | None = None
    """Write the result to this file."""


@dataclass(frozen=True)
class Format:
    """A format of datasets or checkpoints that is not ours."""

    name: str
    """Name in messages, with the program that writes it."""
    recognises: Callable[[Path], bool]
    """True for a path that holds this format. Reads little, raises nothing, whatever lies there."""
    importer: str
    """Module of this package with the function `import_source(request)`, which takes an `ImportRequest` and returns the
    result as plain data. It is imported when a source of this format is imported."""
    options: tuple[str, ...] = REPLAYED
    """Fields of the `ImportRequest` that the importer takes, beside `source`, `out` and `json`."""
    is_dataset: bool = True
    """False for checkpoints."""


def _hdf5(kind: str) -> Callable[[Path], bool]:
    def recognises(path: Path) -> bool:
        module = importlib.import_module("embodied_importers.hdf5")
        return module.kind_of(path) == kind

    return recognises


def _rlds(path: Path) -> bool:
    return importlib.import_module("embodied_importers.rlds").recognises(path)


def _shards(path: Path) -> bool:
    return importlib.import_module("embodied_importers.sharded").recognises(path)


FORMATS = (
    Format("ManiSkill's trajectories (.h5 with its .json)", _hdf5("maniskill"), "hdf5_importer"),
    Format("LIBERO's demonstrations (.hdf5)", _hdf5("libero"), "hdf5_importer"),
    Format("robomimic's demonstrations of LIBERO tasks (.hdf5)", _hdf5("robomimic"), "hdf5_importer"),
    Format(
        "RLDS (a folder with dataset_info.json and features.json)",
        _rlds,
        "rlds_importer",
        ("episodes", "drop_idle", "only_successes", "fps", "action"),
    ),
    Format(
        "weights of RLinf (full_weights.pt) or verl (model_world_size_N_rank_R.pt)",
        _shards,
        "shards_importer",
        ("base",),
        is_dataset=False,
    ),
)
"""Tried in this order."""


def format_of(path: Path) -> Format | None:
    """The format of what lies at `path`, None where it is none of `FORMATS`. Raises nothing."""
    return next((known for known in FORMATS if known.recognises(path)), None)


def convertible(path: Path) -> str | None:
    """The recordings' format at `path`, with the command that converts them to a dataset; None for other files."""
    known, out = format_of(path), path.with_suffix("") if path.is_file() else path
    if known is None or not known.is_dataset:
        return None
    return f"{known.name}, which is converted first: embodied import {path} --out {out}-imported"


def moving(actions: npt.NDArray[np.float32]) -> npt.NDArray[np.bool_]:
    """Actions [n, A] that are kept, bool [n]; False at idle ones, by the filter with which OpenVLA's LIBERO datasets
    were made (its `regenerate_libero_dataset.py`). The gripper's element is compared with that of the last action that
    was kept."""
    keep = np.ones(len(actions), np.bool_)
    before: np.float32 | None = None
    for step, action in enumerate(actions):
        still = np.linalg.norm(action[:-1]) < IDLE_NORM
        keep[step] = not (still and (before is None or action[-1] == before))
        if keep[step]:
            before = action[-1]
    return keep


def numbered(text: str, count: int) -> tuple[int, ...]:
    """Episodes of a source with `count` of them that ranges such as `0-19,25` name. Raises `UserError`."""
    try:
        numbers = indices_of(text)
    except ValueError as error:
        raise UserError(f"--episodes: {error}") from None
    if max(numbers) >= count:
        raise UserError(f"--episodes {text[:100]}: the source has the episodes 0 to {count - 1}")
    return numbers


def recognised(path: Path) -> Format:
    """The format of what lies at `path`. Raises `UserError` that says what was found and what is accepted."""
    found = format_of(path)
    if found is None:
        accepted = "; ".join(known.name for known in FORMATS)
        raise UserError(f"{path} cannot be imported: it is {_seen(path)}. Accepted are: {accepted}")
    return found


def _seen(path: Path) -> str:
    """Description of what lies at `path`."""
    if not path.exists():
        return "not there"
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        return f"a folder with {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}" if names else "an empty folder"
    with path.open("rb") as file:
        head = file.read(8)
    return "an HDF5 file of another layout" if head == b"\x89HDF\r\n\x1a\n" else f"a file that begins with {head!r}"
