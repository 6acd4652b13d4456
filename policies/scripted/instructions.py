"""The script that an instruction means."""

from __future__ import annotations

from collections.abc import Collection

from policies.contract import PolicyError
from policies.registry import nearest


def meant(instruction: str, known: Collection[str], remedy: str = "") -> str:
    """The one of the `known` instructions that the text is, or that stands in it among other words (of several the
    longest), whatever the case. Raises `PolicyError` with the nearest, and the `remedy`, if there is none."""
    text = instruction.strip().lower()
    if text in known:
        return text
    within = sorted((one for one in known if one in text), key=len)
    if not within:
        raise PolicyError(f"no script for {instruction!r}{nearest(text, list(known))}{remedy}")
    return within[-1]
