"""Mistakes of the user about a policy, and what their messages show: values, cut, and the nearest valid names."""

from __future__ import annotations

import difflib


class PolicyError(Exception):
    """A mistake of the user about a policy, with a message that says what to do next."""


def shown(value: object, longest: int = 100) -> str:
    """A value of an outside file, shortened for a message."""
    try:
        text = repr(value)
    except ValueError:
        return "a number of thousands of digits"
    return text if len(text) <= longest else text[:longest] + "..."


def nearest(given: str, valid: list[str]) -> str:
    """The end of an error message: the valid names that `given` may have meant, or all of them."""
    near = difflib.get_close_matches(given, valid, n=3, cutoff=0.5)
    return f"; did you mean {' or '.join(near)}?" if near else f"; valid: {', '.join(sorted(valid))}"
