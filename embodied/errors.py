"""Mistakes that the user can mend, and the nearest valid names for their messages."""

from __future__ import annotations

import difflib


class UserError(Exception):
    """A mistake that the user can mend: shown as one message, exit status 2."""


class PeerFailed(UserError):
    """A worker could not go on since another one of its group failed: that one's error, if it has one, says more."""


def nearest(given: str, valid: list[str]) -> str:
    """The end of an error message: the valid names that `given` may have meant, or all of them."""
    near = difflib.get_close_matches(given, valid, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; valid: {', '.join(valid)}"
