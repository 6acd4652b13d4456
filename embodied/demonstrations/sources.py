"""Formats of others that `embodied import` converts, each recognised by what its files hold, not by their names."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from embodied.errors import UserError

REPLAYED = ("task", "env", "episodes", "drop_idle", "only_successes", "tolerance", "runtime")
"""Options of a recording that is replayed in the farm."""


@dataclass(frozen=True)
class Format:
    """A format of datasets or checkpoints that is not ours."""

    name: str
    """Name in messages, with the program that writes it."""
    recognises: Callable[[Path], bool]
    """True for a path that holds this format. Reads little, raises nothing, whatever lies there."""
    importer: str
    """Module with the function `import_source(args)`, which takes the verb's `Arguments` and returns its result as
    plain data. It is imported when a source of this format is imported."""
    options: tuple[str, ...] = REPLAYED
    """Names of the `Arguments` that the importer takes, beside `source`, `out` and `json`."""


def _hdf5(kind: str) -> Callable[[Path], bool]:
    def recognises(path: Path) -> bool:
        module = importlib.import_module("embodied.demonstrations.recordings")
        return module.kind_of(path) == kind

    return recognises


def _rlds(path: Path) -> bool:
    return importlib.import_module("embodied.demonstrations.rlds").recognises(path)


FORMATS = (
    Format("ManiSkill's trajectories (.h5 with its .json)", _hdf5("maniskill"), "embodied.demonstrations.importer"),
    Format("LIBERO's demonstrations (.hdf5)", _hdf5("libero"), "embodied.demonstrations.importer"),
    Format("robomimic's demonstrations of LIBERO tasks (.hdf5)", _hdf5("robomimic"),
           "embodied.demonstrations.importer"),
    Format("RLDS (a folder with dataset_info.json and features.json)", _rlds, "embodied.demonstrations.rlds_importer",
           ("episodes", "drop_idle", "only_successes", "fps", "action")),
)
"""Tried in this order."""


def format_of(path: Path) -> Format | None:
    """The format of what lies at `path`, None where it is none of `FORMATS`. Raises nothing."""
    return next((known for known in FORMATS if known.recognises(path)), None)


def import_command(path: Path) -> str | None:
    """The command that converts what lies at `path` to a dataset, None where it is none of `FORMATS`."""
    return f"embodied import {path} --out {path.with_suffix('')}-imported" if format_of(path) else None


def recognised(path: Path) -> Format:
    """The format of what lies at `path`. Raises `UserError` that says what was found and what is accepted."""
    found = format_of(path)
    if found is None:
        accepted = "; ".join(known.name for known in FORMATS)
        raise UserError(f"{path} cannot be imported: it is {_seen(path)}. Accepted are: {accepted}")
    return found


def _seen(path: Path) -> str:
    """What lies at `path`, in words."""
    if not path.exists():
        return "not there"
    if path.is_dir():
        names = sorted(entry.name for entry in path.iterdir())
        return f"a folder with {', '.join(names[:5])}{' ...' if len(names) > 5 else ''}" if names else "an empty folder"
    with path.open("rb") as file:
        head = file.read(8)
    return "an HDF5 file of another layout" if head == b"\x89HDF\r\n\x1a\n" else f"a file that begins with {head!r}"
