"""Code by its name: `package.module:NAME` in a setting, or the entry point of an installed package.

The caller's own class of error is raised, so that this module stands alone: `policies` has a link to it, since the
packages do not import each other.
"""

from __future__ import annotations

import difflib
import importlib
import os
import platform
import re
import sys
import traceback
from collections.abc import Sequence
from importlib import metadata
from types import ModuleType
from typing import Any


def named(reference: str, error: type[Exception], others: Sequence[str] = ()) -> Any:
    """The attribute NAME of the module in `package.module:NAME`. Raises `error` if one of the two is missing, with the
    nearest names of the module and of `others`, which are allowed in its place."""
    module, attribute = module_of(reference, error), reference.partition(":")[2]
    try:
        return getattr(module, attribute)
    except AttributeError as cause:
        valid = [*(known for known in vars(module) if not known.startswith("_")), *others]
        near = difflib.get_close_matches(attribute, valid, n=3, cutoff=0.5)
        hint = f"; did you mean {' or '.join(near)}?" if near else ""
        where = f"the module {module.__name__} ({module.__file__})"
        raise error(f"{reference}: {where} has no {attribute}{hint}") from cause


def module_of(reference: str, error: type[Exception]) -> ModuleType:
    """The module in `package.module:NAME`. Raises `error` where it cannot be imported.

    The current folder is looked in last: the command `embodied`, unlike `python -m`, does not put it on `sys.path`.
    """
    name, _, attribute = reference.partition(":")
    if not all(part.isidentifier() for part in (*name.split("."), attribute)):
        raise error(f"code is named package.module:NAME, got {reference[:200]!r}")
    if (here := os.getcwd()) not in sys.path:
        sys.path.append(here)
    try:
        return importlib.import_module(name)
    except error:
        raise
    except Exception as cause:  # whatever the module's own code raises is its author's to mend
        raise error(f"{reference} cannot be imported on {platform.node()}: {_why(name, cause)}") from cause


def _why(module: str, cause: Exception) -> str:
    """The reason why the import of a module failed."""
    if isinstance(cause, ModuleNotFoundError) and cause.name is not None:
        if f"{module}.".startswith(f"{cause.name}."):
            return (
                f"there is no module {cause.name} in the current folder ({os.getcwd()}), on PYTHONPATH, or among the "
                "packages that are installed there"
            )
        return f"it needs the Python package {cause.name}, which is not installed there"
    if isinstance(cause, SyntaxError):
        return f"{type(cause).__name__}: {cause}"
    place = traceback.extract_tb(cause.__traceback__)[-1]
    return f"{type(cause).__name__}: {cause} ({place.filename}, line {place.lineno})"


# --- entry points of installed packages


def entry_point(group: str, name: str, error: type[Exception]) -> Any:
    """The object that an installed package offers as `name` in the group; None if no package does.

    Raises `error`, which names the package, if it cannot be imported, or if several packages offer the name.
    """
    found = {entry.value: entry for entry in metadata.entry_points(group=group, name=name)}
    if not found:
        return None
    if len(found) > 1:
        raise error(f"{' and '.join(map(_package, found.values()))} both offer {name!r} in {group}: uninstall one")
    (entry,) = found.values()
    try:
        return named(f"{entry.module}:{entry.attr}", error)
    except error as cause:
        why = f"{cause}{_install(entry, cause)}"
        raise error(f"{_package(entry)} offers {name!r} in {group}, which cannot be used: {why}") from cause


def entry_point_names(group: str) -> list[str]:
    """The names that installed packages offer in the group."""
    return sorted({entry.name for entry in metadata.entry_points(group=group)})


def _install(entry: metadata.EntryPoint, cause: Exception) -> str:
    """The end of a message: the command that installs what is missing, where it is an extra of the entry's package."""
    missing = cause.__cause__.name if isinstance(cause.__cause__, ModuleNotFoundError) else None
    if entry.dist is None or missing is None:
        return ""
    extra = re.compile(rf"{re.escape(missing)}\b.*extra == [\"'](.+?)[\"']")
    found = next(filter(None, map(extra.match, entry.dist.requires or ())), None)
    return f": pip install '{entry.dist.name}[{found[1]}]'" if found else ""


def _package(entry: metadata.EntryPoint) -> str:
    return f"the package {entry.dist.name} {entry.dist.version}" if entry.dist else "an installed package"
