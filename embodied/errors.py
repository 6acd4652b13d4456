"""Mistakes that the user can mend, and what their messages show: values, cut, and the nearest valid names."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


class UserError(Exception):
    """A mistake that the user can mend: shown as one message, exit status 2."""


@contextmanager
def one_kind_of_mistake() -> Iterator[None]:
    """Raise the mistakes that the other packages find (`FarmError`, `PolicyError`, `PlanError`), which do not know this
    one, as `UserError` with the same message; the first is its `__cause__`."""
    homes = {"policies.errors": "PolicyError", "schedulers.errors": "PlanError", "sim_farm.contract": "FarmError"}
    try:
        yield
    except Exception as error:
        # Of those packages that are imported: no other can have raised it.
        kinds = tuple(getattr(sys.modules[home], name) for home, name in homes.items() if home in sys.modules)
        if isinstance(error, kinds):
            raise UserError(str(error)) from error
        raise


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, of something else, or cannot be written."""


def unreadable(path: Path, wrong: object) -> CheckpointError:
    """The error for a file or folder of a checkpoint that cannot be used."""
    return CheckpointError(f"{path} cannot be used: {wrong}; use an earlier checkpoint")


class PeerFailed(UserError):
    """A worker could not continue because another worker of its group failed; see that worker's error, if any."""


def shown(value: object, longest: int = 100) -> str:
    """A value in a message, in which it has limited room; a number may have too many digits to be written at all."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= longest else text[:longest] + "..."


def nearest(given: str, valid: list[str]) -> str:
    """The end of an error message: the valid names that `given` may have meant, or all of them."""
    near = difflib.get_close_matches(given, valid, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; valid: {', '.join(valid)}"
