"""The exception of this package, and the end of its messages."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class PlanError(Exception):
    """A mistake of the user: one message that says what was given and what is allowed."""


def nearest(given: str, valid: Iterable[str]) -> str:
    """End of an error message: the nearest valid names, or all of them where none is near."""
    names = sorted(set(valid))
    near = difflib.get_close_matches(given, names, n=3, cutoff=0.5)
    if near:
        return f"; nearest: {', '.join(near)}"
    if not names:
        return "; there is none"
    return f"; allowed: {', '.join(names[:12])}" + (" ..." if len(names) > 12 else "")
