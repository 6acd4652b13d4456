"""Whole numbers named by ranges: `0-24,30`."""

from __future__ import annotations

import re
from collections.abc import Sequence

LARGEST = 99_999
"""The largest number that a range may name."""


def parse(text: str) -> tuple[int, ...]:
    """The numbers that `0-24,30` names, in its order. Raises `ValueError` for another text, and for a number twice."""
    numbers: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*([0-9]{1,9})\s*(?:-\s*([0-9]{1,9})\s*)?", part, re.ASCII)
        if found is None:
            raise ValueError(f"{text[:100]!r} is no list of ranges such as 0-24,30")
        first, last = int(found[1]), int(found[2] or found[1])
        if last < first:
            raise ValueError(f"the range {part.strip()} goes down: write {last}-{first}")
        if last > LARGEST:
            raise ValueError(f"the range {part.strip()} names numbers beyond {LARGEST}")
        numbers += range(first, last + 1)
    if len(set(numbers)) < len(numbers):
        twice = next(number for number in numbers if numbers.count(number) > 1)
        raise ValueError(f"{text[:100]} names {twice} twice")
    return tuple(numbers)


def shown(numbers: Sequence[int]) -> str:
    """`0 to 24, 30`: three consecutive numbers or more as a range."""
    parts: list[str] = []
    place = 0
    while place < len(numbers):
        end = place
        while end + 1 < len(numbers) and numbers[end + 1] == numbers[end] + 1:
            end += 1
        run = numbers[place : end + 1]
        parts += [f"{run[0]} to {run[-1]}"] if len(run) > 2 else [str(number) for number in run]
        place = end + 1
    return ", ".join(parts)
